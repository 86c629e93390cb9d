"""Convert the tokenizer of a model that has only a model of SentencePiece.

It is `tokenizer.model`, `spiece.model` of T5, `spm_char.model` of SpeechT5 or `sentencepiece.bpe.model` of SeamlessM4T.

The tokenizers in `tokenizer.model` are like that of Llama 2. A GGUF file of the model would have the same tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from ....protocol.errors import CheckpointError
from .gguf import TokenType, convert
from .sentencepiece import SPACE, Piece, SentencePieceModel, normalizers, read_sentencepiece
from .settings import Settings, settings_files

_MODEL, _T5_MODEL = "tokenizer.model", "spiece.model"
_CHARACTERS_MODEL = "spm_char.model"
_SEAMLESS_MODEL, _SEAMLESS = "sentencepiece.bpe.model", "SeamlessM4TTokenizer"
_NUM_EXTRA: Final = {"T5Tokenizer": 100, "MT5Tokenizer": 0}
"""The classes of tokenizers in `spiece.model`, and the numbers of tokens that stand for parts that a text lacks."""

_CLASSES: Final = (
    "",
    "BaichuanTokenizer",
    "CodeLlamaTokenizer",
    "GemmaTokenizer",
    "InternLM2Tokenizer",
    "InternLM3Tokenizer",
    "InternLMTokenizer",
    "LLaMATokenizer",
    "LlamaTokenizer",
    "MistralTokenizer",
    "OrionTokenizer",
    "SpeechT5Tokenizer",
    "YiTokenizer",
)
"""The classes of tokenizers that put the first token before a text and differ only in their vocabularies."""

_LEGACY: Final = {"LlamaTokenizer": False, "CodeLlamaTokenizer": True}
"""The classes that transformers itself has, and the defaults of their field `legacy`."""


def tokenizer_model_files(directory: Path) -> list[Path]:
    """Return the files of a tokenizer in this format; none if the directory has no such tokenizer."""
    paths = [
        path
        for name in (_MODEL, _T5_MODEL, _CHARACTERS_MODEL)
        if (path := directory / name).is_file()
    ]
    if not paths and (seamless := directory / _SEAMLESS_MODEL).is_file():
        # Other models have a model of SentencePiece with the same name.
        paths = [seamless] if Settings(directory).tokenizer_class == _SEAMLESS else []
    return [paths[0], *settings_files(directory)] if paths else []


def convert_tokenizer_model(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json.

    Raises:
        CheckpointError: A file is damaged, or its class is not supported.
    """
    path, settings = tokenizer_model_files(directory)[0], Settings(directory)
    is_t5, kind = path.name == _T5_MODEL, settings.tokenizer_class
    is_seamless = path.name == _SEAMLESS_MODEL
    ends_texts = is_t5 or path.name == _CHARACTERS_MODEL
    if kind not in (_NUM_EXTRA if is_t5 else _CLASSES) and not is_seamless:
        raise CheckpointError(
            path,
            f"{path.name} is not read for the tokenizer_class {kind!r}; supported are "
            f"{', '.join(filter(None, _NUM_EXTRA if is_t5 else _CLASSES))}; convert the tokenizer to tokenizer.json",
        )
    model = read_sentencepiece(path)
    if is_seamless:
        model = _with_seamless_ids(model)
    tokens = [piece.text for piece in model.pieces]
    types = [piece.type for piece in model.pieces]
    scores = [piece.score for piece in model.pieces]
    names = {name: tokens[id_] for name, id_ in model.special_ids.items()}
    named = settings.named(**names)
    added = settings.added
    if is_t5:
        count = settings.fields.integer("extra_ids", _NUM_EXTRA[kind], minimum=0, maximum=1000)
        last = len(tokens) + count - 1
        added = {last - i: f"<extra_id_{i}>" for i in range(count)} | added
    for id_, token in sorted(added.items()):
        if id_ > len(tokens):
            raise CheckpointError(path, f"no file has the tokens {len(tokens)} to {id_ - 1}")
        is_special = is_t5 or token in {*settings.special, *named.values()}
        type_ = TokenType.CONTROL if is_special else TokenType.USER_DEFINED
        tokens[id_ : id_ + 1], types[id_ : id_ + 1] = [token], [type_]
        scores[id_ : id_ + 1] = [0.0]
    metadata: dict[str, Any] = {
        "model": "t5" if model.is_unigram else "llama",
        "tokens": tokens,
        "scores": np.array(scores),
        "token_type": np.array(types),
        "unknown_token_id": model.special_ids.get("unk", 0),
        "add_space_prefix": model.adds_space,
        "remove_extra_whitespaces": model.removes_spaces,
        "add_bos_token": settings.fields.boolean(
            "add_bos_token", "bos_token" in named and not ends_texts and not is_seamless
        ),
        "add_eos_token": settings.fields.boolean("add_eos_token", ends_texts),
    }
    for name in ("bos", "eos"):
        if (text := named.get(f"{name}_token")) in tokens:
            metadata[f"{name}_token_id"] = tokens.index(text)
    if model.charsmap:
        metadata["precompiled_charsmap"] = np.frombuffer(model.charsmap, np.uint8)
    tokenizer, _ = convert(path, {f"tokenizer.ggml.{name}": x for name, x in metadata.items()})
    tokenizer["added_tokens"] = settings.with_flags(tokenizer["added_tokens"])
    if model.is_unigram:
        return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings.content(named)}
    before = normalizers(model.charsmap or None, model.removes_spaces)
    tokenizer["normalizer"]["normalizers"][:0] = before
    if model.adds_space and not model.removes_spaces and (scheme := _prepend_scheme(settings)):
        tokenizer["normalizer"]["normalizers"] = before
        tokenizer["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": SPACE,
            "prepend_scheme": scheme,
            "split": False,
        }
        if scheme == "never":
            steps = tokenizer["decoder"]["decoders"]
            tokenizer["decoder"]["decoders"] = [x for x in steps if x["type"] != "Strip"]
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings.content(named)}


def _with_seamless_ids(model: SentencePieceModel) -> SentencePieceModel:
    """Return the model with the ids of SeamlessM4T, which begin with the token of padding."""
    special_ids = {"pad": 0, "unk": 1, "bos": 2, "eos": 3}
    texts = "<pad>", "<unk>", "<s>", "</s>"
    types = TokenType.CONTROL, TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL
    first = [Piece(text, 0.0, type_) for text, type_ in zip(texts, types, strict=True)]
    # The model itself has all of them but padding.
    pieces = [*first, *model.pieces[3:]]
    return msgspec.structs.replace(model, pieces=pieces, special_ids=special_ids)


def _prepend_scheme(settings: Settings) -> str | None:
    """Return where a space is put before parts of a text that do not begin with one; None for SentencePiece's rule.

    Transformers' own classes put it before the whole text only, and not after each special token, unless they are
    `legacy`. SentencePiece puts it before all parts, also of those that begin with a space.
    """
    kind = settings.tokenizer_class
    if kind in _LEGACY and not settings.fields.boolean("add_prefix_space", True):
        return "never"
    if not settings.fields.boolean("legacy", _LEGACY.get(kind, True)):
        return "first"
    return "always" if kind in _LEGACY else None
