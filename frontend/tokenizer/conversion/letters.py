"""Convert the tokenizer of a wav2vec 2.0 or a similar model, which has a vocabulary of letters: `vocab.json` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from ....protocol.errors import CheckpointError
from .parts import HEAD, added_token, bpe
from .settings import Settings, settings_files

_VOCABULARY: Final = "vocab.json"
_CLASS: Final = "Wav2Vec2CTCTokenizer"
_KINDS: Final = frozenset(
    {
        *("data2vec-audio", "hubert", "unispeech", "unispeech-sat"),
        *("wav2vec2", "wav2vec2-conformer"),
    }
)
"""Model types whose tokenizer has this class if no file names it."""

_NAMED: Final = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}


def letters_files(directory: Path) -> list[Path]:
    """Return the files of a tokenizer in this format; none if the directory has no such tokenizer."""
    path = directory / _VOCABULARY
    if not path.is_file():
        return []
    settings = Settings(directory)
    if settings.tokenizer_class != _CLASS and (
        settings.tokenizer_class or settings.model_type not in _KINDS
    ):
        return []
    return [path, *settings_files(directory)]


def convert_letters(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json.

    Raises:
        CheckpointError: The file is damaged, or has vocabularies of languages, but not that of `target_lang`.
    """
    path, settings = directory / _VOCABULARY, Settings(directory)
    fields, named = settings.fields, settings.named(**_NAMED)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, int | dict[str, int]])
        ids = msgspec.convert(found.get(fields.text("target_lang", ""), found), dict[str, int])
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"not a vocabulary of letters: {error}") from error
    special = {*named.values(), *settings.special}
    if fields.boolean("do_lower_case", False):
        ids = {token if token in special else token.lower(): id_ for token, id_ in ids.items()}
    added = {token: id_ for id_, token in settings.added.items()} | {
        token: id_ for token, id_ in ids.items() if token in special
    }
    unknown = named["unk_token"]
    gap = fields.text("word_delimiter_token", "|")
    space = {"content": fields.text("replace_word_delimiter_char", " ")}
    tokenizer = {
        **HEAD,
        "added_tokens": settings.with_flags(
            [
                added_token(id_, token, special=token in special)
                for token, id_ in sorted(added.items(), key=lambda pair: pair[1])
            ]
        ),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": gap},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": gap}, **space},
                {"type": "Fuse"},
            ],
        },
        "model": bpe([], [], unk_token=unknown if unknown in ids else None) | {"vocab": ids},
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings.content(named)}
