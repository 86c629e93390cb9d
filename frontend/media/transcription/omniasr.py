"""The languages of OmniASR, which are tokens: ISO 639-3 codes with the script."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_TOKEN: Final = re.compile(r"<\|lang:([a-z0-9_]+)\|>")

_SCRIPTS: Final = {
    "latn": "af afr, az aze, br bre, bs bos, ca cat, cs ces, cy cym, da dan, de deu, en eng, es spa, et ekk, eu eus, "
    "fi fin, fo fao, fr fra, gl glg, ha hau, hr hrv, ht hat, hu hun, id ind, is isl, it ita, la lat, lb ltz, ln lin, "
    "lt lit, lv lav, mg mlg, mi mri, ms zsm, mt mlt, nl nld, nn nno, no nob, oc oci, pl pol, pt por, ro ron, sk slk, "
    "sl slv, sn sna, so som, sq als, su sun, sv swe, sw swh, tk tuk, tl tgl, tr tur, uz uzb, vi vie, yo yor",
    "cyrl": "ba bak, be bel, bg bul, kk kaz, mk mkd, mn mon, ru rus, sr srp, tg tgk, tt tat, uk ukr",
    "arab": "ar arb, fa fas, ps pus, sd snd, ur urd",
    "deva": "hi hin, mr mar, ne nep",
    "beng": "as asm, bn ben",
    "hebr": "he heb, yi ydd",
    "armn": "hy hye",
    "ethi": "am amh",
    "geor": "ka kat",
    "grek": "el ell",
    "gujr": "gu guj",
    "guru": "pa pan",
    "hang": "ko kor",
    "hans": "zh cmn",
    "jpan": "ja jpn",
    "khmr": "km khm",
    "knda": "kn kan",
    "laoo": "lo lao",
    "mlym": "ml mal",
    "mymr": "my mya",
    "sinh": "si sin",
    "taml": "ta tam",
    "telu": "te tel",
    "thai": "th tha",
    "tibt": "bo bod",
}
"""The script of each language with a code of two letters, after which its code of three letters follows."""


def omniasr_languages(tokenizer: Path) -> dict[str, str]:
    """Return the codes of languages that requests may have -> those of the model's tokens.

    Args:
        tokenizer: The directory of the tokenizer.json, which may have the tokens in any of its lists.
    """
    file = tokenizer / "tokenizer.json"
    found = _TOKEN.findall(file.read_text(encoding="utf-8")) if file.is_file() else []
    codes = {code: code for code in sorted({*found} - {"auto"})}
    short = (
        (pair.split(), script) for script, listed in _SCRIPTS.items() for pair in listed.split(", ")
    )
    aliases = {code: f"{long}_{script}" for (code, long), script in short}
    return codes | {code: own for code, own in aliases.items() if own in codes}
