"""Convert the tokenizer of a model that has only a model of SentencePiece, `tokenizer.model`.

Such models are those whose tokenizer is like that of Llama 2. A GGUF file of the model would have the same tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from ....protocol.errors import CheckpointError
from .gguf import TokenType, convert
from .sentencepiece import SPACE, normalizers, read_sentencepiece
from .settings import Settings, settings_files

_MODEL: Final = "tokenizer.model"
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
    "YiTokenizer",
)
"""The classes of tokenizers that put the first token before a text and differ only in their vocabularies."""


def tokenizer_model_files(directory: Path) -> list[Path]:
    """Return the files of a tokenizer in this format; none if the directory has no such tokenizer."""
    path = directory / _MODEL
    return [path, *settings_files(directory)] if path.is_file() else []


def convert_tokenizer_model(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json.

    Raises:
        CheckpointError: A file is damaged, or the tokenizer is not like that of Llama 2.
    """
    path, settings = directory / _MODEL, Settings(directory)
    if settings.tokenizer_class not in _CLASSES:
        raise CheckpointError(
            path,
            f"{_MODEL} is not read for the tokenizer_class {settings.tokenizer_class!r}; supported are "
            f"{', '.join(filter(None, _CLASSES))}; convert the tokenizer to tokenizer.json",
        )
    model = read_sentencepiece(path)
    tokens = [piece.text for piece in model.pieces]
    types = [piece.type for piece in model.pieces]
    scores = [piece.score for piece in model.pieces]
    names = {name: tokens[id_] for name, id_ in model.special_ids.items()}
    named = settings.named(**names)
    for id_, token in sorted(settings.added.items()):
        if id_ > len(tokens):
            raise CheckpointError(path, f"no file has the tokens {len(tokens)} to {id_ - 1}")
        is_special = token in settings.special or token in named.values()
        kind = TokenType.CONTROL if is_special else TokenType.USER_DEFINED
        tokens[id_ : id_ + 1], types[id_ : id_ + 1] = [token], [kind]
        scores[id_ : id_ + 1] = [0.0]
    metadata: dict[str, Any] = {
        "model": "t5" if model.is_unigram else "llama",
        "tokens": tokens,
        "scores": np.array(scores),
        "token_type": np.array(types),
        "unknown_token_id": model.special_ids.get("unk", 0),
        "add_space_prefix": model.adds_space,
        "remove_extra_whitespaces": model.removes_spaces,
        "add_bos_token": settings.fields.boolean("add_bos_token", "bos_token" in named),
        "add_eos_token": settings.fields.boolean("add_eos_token", False),
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
    adds_often = model.removes_spaces or settings.fields.boolean("legacy", True)
    if model.adds_space and not adds_often:
        # The space is put before the whole text only, and not after each special token, too.
        tokenizer["normalizer"]["normalizers"] = before
        tokenizer["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": SPACE,
            "prepend_scheme": "first",
            "split": False,
        }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings.content(named)}
