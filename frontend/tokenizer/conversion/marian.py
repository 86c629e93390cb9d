"""Convert the tokenizer of a Marian model, which consists of two SentencePiece models and a vocabulary.

That of Speech2Text has one of each.

The pieces of a text are those of the SentencePiece model of its language, but their ids are those of the vocabulary.
Characters that this model lacks become pieces of the other language if it has them, else unknown tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.files import SOURCE_TOKENIZER
from ....protocol.errors import CheckpointError
from .parts import HEAD, added_token
from .sentencepiece import read_sentencepiece, unigram_parts
from .settings import Settings, settings_files

MARIAN_FILES: Final = ("source.spm", "target.spm", "vocab.json")
_SPEECH_FILES: Final = ("sentencepiece.bpe.model", "vocab.json")
_TARGET_VOCABULARY: Final = "target_vocab.json"
_OTHER_LANGUAGE_SCORE: Final = -1e6
"""The score of pieces that the SentencePiece model lacks. They are only used for characters that are unknown to it."""


def marian_files(directory: Path) -> list[Path]:
    """Return the files of a Marian tokenizer; none if the directory has no such tokenizer."""
    found = [directory / name for name in MARIAN_FILES]
    if not all(path.is_file() for path in found):
        return []
    other = [directory / name for name in (_TARGET_VOCABULARY, "tokenizer_config.json")]
    return [*found, *(path for path in other if path.is_file())]


def speech_pieces_files(directory: Path) -> list[Path]:
    """Return the files of the tokenizer of a Speech2Text; none if the directory has no such tokenizer."""
    found = [directory / name for name in _SPEECH_FILES]
    if not all(path.is_file() for path in found):
        return []
    settings = Settings(directory)
    is_speech = settings.tokenizer_class == "Speech2TextTokenizer" or (
        not settings.tokenizer_class and settings.model_type == "speech_to_text"
    )
    return [*found, *settings_files(directory)] if is_speech else []


def convert_speech_pieces(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json.

    Raises:
        CheckpointError: A file is damaged, or texts are in upper case or of several languages.
    """
    settings = Settings(directory)
    for name, needed in (("do_upper_case", False), ("lang_codes", None)):
        settings.fields.require(name, needed)
    named = settings.named(bos="<s>", eos="</s>", pad="<pad>", unk="<unk>")
    model, vocabulary = (directory / name for name in _SPEECH_FILES)
    tokenizer = _tokenizer(model, vocabulary, named)
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings.content(named)}


def convert_marian(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of the files for the tokenizer of answers and for that of sources.

    Raises:
        CheckpointError: A file is damaged, or the vocabulary lacks a token that is needed.
    """
    config = ConfigFields.read_if_present(directory / "tokenizer_config.json")
    named = {
        f"{name}_token": config.text(f"{name}_token", default)
        for name, default in (("eos", "</s>"), ("pad", "<pad>"), ("unk", "<unk>"))
    }
    target = directory / _TARGET_VOCABULARY
    if not config.boolean("separate_vocabs", False):
        target = directory / "vocab.json"
    files = {
        "tokenizer.json": (directory / "target.spm", target),
        SOURCE_TOKENIZER: (directory / "source.spm", directory / "vocab.json"),
    }
    converted = {name: _tokenizer(*paths, named) for name, paths in files.items()}
    return converted | {"tokenizer_config.json": named}


def _tokenizer(model_path: Path, vocabulary_path: Path, named: dict[str, str]) -> dict[str, Any]:
    model = read_sentencepiece(model_path)
    if not model.is_unigram:
        raise CheckpointError(model_path, "not a unigram model of SentencePiece, which is needed")
    scores = model.scores
    tokens = _read_vocabulary(vocabulary_path)
    ids = {token: i for i, token in enumerate(tokens)}
    for token in named.values():
        if token not in ids:
            raise CheckpointError(vocabulary_path, f"there is no token {token!r}")
    codes = [token for token in tokens if token.startswith(">>") and token.endswith("<<")]
    special = set(named.values())
    added = [
        added_token(ids[token], token, special=token in special)
        for token in sorted(special | set(codes), key=ids.__getitem__)
    ]
    eos = named["eos_token"]
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    end = {"SpecialToken": {"id": eos, "type_id": 0}}
    return {
        **HEAD,
        "added_tokens": added,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, end],
            "pair": [first, second, end],
            "special_tokens": {eos: {"id": eos, "ids": [ids[eos]], "tokens": [eos]}},
        },
        **unigram_parts(
            [(token, scores.get(token, _OTHER_LANGUAGE_SCORE)) for token in tokens],
            ids[named["unk_token"]],
            charsmap=model.charsmap or None,
            adds_space=model.adds_space,
            removes_spaces=model.removes_spaces,
        ),
    }


def _read_vocabulary(path: Path) -> list[str]:
    """Return the tokens in the order of their ids."""
    try:
        ids = msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(path, f"not a vocabulary ({error})") from error
    tokens = sorted(ids, key=ids.__getitem__)
    if [ids[token] for token in tokens] != list(range(len(tokens))):
        raise CheckpointError(path, "the ids of its tokens are not consecutive")
    return tokens
