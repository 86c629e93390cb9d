"""Convert the tokenizer of PLaMo 2 and 3, which divides a text into the tokens with the largest sum of scores.

That is a unigram model over the text as it is. Characters that no token has become bytes, at a high price. Of equal
sums, PLaMo takes the one with the longest first token, and the tokenizers library that with the longest last token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from ....protocol.errors import CheckpointError
from .parts import HEAD, added_token, surround
from .settings import Settings, settings_files

_VOCABULARY: Final = "tokenizer.jsonl"
_MARKER: Final = r"<\|plamo:[^|\s]{0,64}\|>"
_IS_MARKER: Final = re.compile(_MARKER)
_LOWEST: Final = -990.0
"""The score of tokens that texts do not contain.

The score of an unknown character is -1000: that of the tokenizers library is 10 below the lowest of all tokens.
"""
_SPECIAL: Final = ("CONTROL", "UNKNOWN")
Row: TypeAlias = tuple[str, float, str]
"""A token, its score, and its type: NORMAL, BYTE, CONTROL, UNKNOWN or UNUSED."""


def plamo_files(directory: Path) -> list[Path]:
    """Return the files of a tokenizer in this format; none if the directory has no such tokenizer."""
    path = directory / _VOCABULARY
    return [path, *settings_files(directory)] if path.is_file() else []


def convert_plamo(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json.

    Raises:
        CheckpointError: The vocabulary is damaged.
    """
    path, settings = directory / _VOCABULARY, Settings(directory)
    rows = _read_vocabulary(path)
    tokens = [token for token, _, _ in rows]
    named = settings.named(
        **{name: f"<|plamo:{name}|>" for name in ("bos", "eos", "pad", "unk")},
    )
    if missing := [text for text in named.values() if text not in tokens]:
        raise CheckpointError(path, f"there is no token {missing[0]!r}")
    fields = settings.fields
    patterns = []
    if fields.get(name := "break_around_repeated_chars_threshold") is not None:
        patterns.append(f"(.)\\1{{{fields.integer(name, minimum=2) - 1},}}")
    if fields.get(name := "break_around_consecutive_spaces_threshold") is not None:
        patterns.append(f" {{{fields.integer(name)},}}")
    before, after = (
        [named[f"{name}_token"]] if fields.boolean(f"add_{name}_token", False) else []
        for name in ("bos", "eos")
    )
    special = {*settings.special, *named.values()}
    tokenizer = {
        **HEAD,
        "added_tokens": [
            added_token(index, token, special=True)
            for index, (token, _, kind) in enumerate(rows)
            if kind in _SPECIAL or token in special
        ],
        "post_processor": surround(tokens, before, after),
        **plamo_parts(rows, patterns),
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings.content(named)}


def is_marker(token: str) -> bool:
    """Return whether a token has the form of PLaMo's control tokens, even if its type does not say so."""
    return _IS_MARKER.fullmatch(token) is not None


def plamo_parts(rows: Sequence[Row], patterns: Sequence[str] = ()) -> dict[str, Any]:
    """Return the parts of tokenizer.json.

    Args:
        rows: The tokens in the order of their ids.
        patterns: Regular expressions of parts of a text that no token crosses the bounds of.
    """
    # The score of bytes keeps texts such as "<0x41>" from becoming bytes.
    vocabulary = [
        (token, max(score, _LOWEST) if kind in ("NORMAL", "CONTROL") else _LOWEST)
        for token, score, kind in rows
    ]
    unknown = next((i for i, (_, _, kind) in enumerate(rows) if kind == "UNKNOWN"), 0)
    vocabulary[unknown] = vocabulary[unknown][0], _LOWEST
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split | {"pattern": {"Regex": x}} for x in (_MARKER, *patterns)],
        },
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": vocabulary,
            "byte_fallback": True,
        },
    }


def _read_vocabulary(path: Path) -> list[Row]:
    """Return the tokens of a file, each line of which is a list that begins with a token, its score and its type.

    Raises:
        CheckpointError: The file is damaged.
    """
    rows: list[Row] = []
    try:
        for line in path.read_bytes().split(b"\n"):
            if line.strip():
                token, score, *others = msgspec.json.decode(line, type=list[Any])
                kind = str(others[0]) if others else "NORMAL"
                kind = "CONTROL" if kind == "NORMAL" and is_marker(token) else kind
                rows.append((str(token), float(score), kind))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(path, f"not a vocabulary of PLaMo: {error}") from error
    known = {token for token, _, kind in rows if kind == "BYTE"}
    if missing := [byte for byte in range(256) if f"<0x{byte:02X}>" not in known]:
        raise CheckpointError(path, f"its vocabulary has no token for the byte {missing[0]}")
    return rows
