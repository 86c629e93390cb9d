"""Convert the `tokenizer.ggml.*` metadata of a GGUF file to tokenizer.json and tokenizer_config.json."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from os import PathLike
from typing import Any, Final

import numpy as np

from ....protocol.checkpoint.gguf_config.fields import GGUFFields
from ....protocol.errors import CheckpointError
from .parts import HEAD, added_token, bpe, byte_level, enclose, surround, word_pieces
from .plamo import plamo_parts
from .pretokenizers import PRE_TOKENIZERS, PreTokenizer
from .sentencepiece import SPACE, unigram_parts
from .world import CHAT_TEMPLATE, check_bytes, longest_match, unescape

logger = logging.getLogger(__name__)

_TEMPLATES: Final = {"rwkv-world": CHAT_TEMPLATE}
"""Chat templates that files name instead of containing them."""


class TokenType(IntEnum):
    """The token types in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    path: str | PathLike[str]
    metadata: Mapping[str, Any]
    tokens: list[str]
    types: list[int]

    @property
    def fields(self) -> GGUFFields:
        return GGUFFields(self.metadata, self.path, "tokenizer.ggml.")

    def get(self, key: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def flag(self, key: str, default: bool) -> bool:
        return self.fields.boolean(key, default)

    def strings(self, key: str) -> list[str]:
        values = self.get(key)
        if not isinstance(values, list):
            raise CheckpointError(
                self.path, f"there is no tokenizer.ggml.{key}; convert the model again"
            )
        return values

    def numbers(self, key: str) -> list[Any]:
        """Return an array with one number per token."""
        values = self.get(key)
        if not isinstance(values, np.ndarray):
            raise CheckpointError(
                self.path, f"there is no tokenizer.ggml.{key}; convert the model again"
            )
        if len(values) != len(self.tokens):
            raise CheckpointError(
                self.path,
                f"tokenizer.ggml.{key} has {len(values)} values for {len(self.tokens)} tokens",
            )
        return list(values.tolist())

    def special(self, key: str, default: int | None = None) -> str | None:
        """Return the token with the ID in `tokenizer.ggml.<key>_token_id`."""
        index = next(iter(self.fields.token_ids(f"{key}_token_id")), default)
        return self.tokens[index] if index is not None and 0 <= index < len(self.tokens) else None


_LIKE_ROBERTA: Final = ("jina-v1-en", "jina-v2-code", "roberta-bpe")
"""Values of `tokenizer.ggml.pre` of tokenizers that separate two texts by two tokens."""
_NOT_BYTE_LEVEL = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")
"""Values of `tokenizer.ggml.pre` of tokenizers with the model `gpt2` that merge characters instead of bytes."""


def convert(
    path: str | PathLike[str], metadata: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json for the metadata of the GGUF file `path`.

    Raises:
        CheckpointError: Metadata is missing or of an unsupported kind.
    """
    vocabulary = _read(path, metadata)
    match kind := vocabulary.fields.text("model", ""):
        case "gpt2":
            if vocabulary.fields.text("pre", "") in _NOT_BYTE_LEVEL:
                merges = vocabulary.strings("merges")
                parts, add_bos, add_eos = _sentencepiece(vocabulary, merges), False, False
            else:
                parts, add_bos, add_eos = _byte_level(vocabulary)
            bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
        case "llama":
            parts, add_bos, add_eos = _sentencepiece(vocabulary), True, False
            bos, eos = vocabulary.special("bos", 1), vocabulary.special("eos", 2)
        case "bert":
            parts, add_bos, add_eos = _word_pieces(vocabulary), True, True
            bos = vocabulary.special("cls") or vocabulary.special("bos")
            eos = vocabulary.special("seperator") or vocabulary.special("eos")
        case "gemma4":
            merges = vocabulary.strings("merges")
            parts, add_bos, add_eos = _sentencepiece(vocabulary, merges), True, False
            bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
        case "t5":
            parts, add_bos, add_eos = _unigram(vocabulary), False, True
            bos, eos = vocabulary.special("bos"), vocabulary.special("eos", 1)
        case "rwkv":
            parts, add_bos, add_eos = _longest_match(vocabulary), False, False
            bos, eos = vocabulary.special("bos", 0), vocabulary.special("eos", 0)
        case "plamo2":
            parts, add_bos, add_eos = _scored(vocabulary), False, False
            bos, eos = vocabulary.special("bos", 1), vocabulary.special("eos", 2)
        case "":
            raise CheckpointError(path, "it contains no tokenizer (no tokenizer.ggml.model)")
        case _:
            raise CheckpointError(
                path,
                f"its tokenizer has the type {kind!r}; supported types are bert, gemma4, gpt2, llama, plamo2, rwkv and t5",
            )
    add_bos = vocabulary.flag("add_bos_token", add_bos)
    add_eos = vocabulary.flag("add_eos_token", add_eos)
    if (add_bos and bos is None) or (add_eos and eos is None):
        raise CheckpointError(path, "it adds a bos or eos token to prompts but does not say which")
    before = [bos] if add_bos and bos else []
    after = [eos] if add_eos and eos else []
    tokenizer = {
        **HEAD,
        "added_tokens": _added_tokens(vocabulary),
        "post_processor": _post_processor(vocabulary, before, after),
        **parts,
    }
    config = {
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": vocabulary.special("padding"),
        "chat_template": _chat_templates(GGUFFields(metadata, path, "tokenizer.")),
    }
    return tokenizer, {key: value for key, value in config.items() if value is not None}


def _read(path: str | PathLike[str], metadata: Mapping[str, Any]) -> _Vocabulary:
    vocabulary = _Vocabulary(path, metadata, [], [])
    if vocabulary.get("model") is None:
        return vocabulary
    # An empty token would match everywhere, so it is renamed; its ID stays in use.
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(vocabulary.strings("tokens"))]
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(
            path, "tokenizer.ggml.tokens contains a token twice; convert the model again"
        )
    typed = _Vocabulary(path, metadata, tokens, [int(TokenType.NORMAL)] * len(tokens))
    if typed.get("token_type") is None:
        return typed
    return replace(typed, types=typed.numbers("token_type"))


def _post_processor(
    vocabulary: _Vocabulary, before: list[str], after: list[str]
) -> dict[str, Any] | None:
    """Return the post-processor, by which encoders also join two texts: like those of BERT, or like RoBERTa's."""
    fields, tokens = vocabulary.fields, vocabulary.tokens
    model, pre = fields.text("model", ""), fields.text("pre", "")
    if before and after and (model == "bert" or after == ["[SEP]"]):
        return enclose(tokens, *before, *after)
    has_separator = bool(before and after) and (model == "t5" or pre in _LIKE_ROBERTA)
    if not vocabulary.flag("add_sep_token", has_separator):
        return surround(tokens, before, after)
    separator = vocabulary.special("seperator")
    return surround(tokens, before, after, after if separator is None else [separator])


def _byte_level(vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool, bool]:
    pre_tokenizer = _pre_tokenizer(vocabulary)
    model = bpe(
        vocabulary.tokens,
        vocabulary.strings("merges"),
        ignore_merges=pre_tokenizer.ignore_merges,
    )
    parts = byte_level(pre_tokenizer.patterns, model, nfc=pre_tokenizer.nfc)
    return parts, pre_tokenizer.add_bos, False


def _longest_match(vocabulary: _Vocabulary) -> dict[str, Any]:
    typed = enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
    tokens = {i: unescape(token) for i, (token, kind) in typed if kind == TokenType.NORMAL}
    check_bytes(vocabulary.path, tokens.values())
    added = {i: token for i, token in enumerate(vocabulary.tokens) if i not in tokens}
    return longest_match(tokens, added)


def _scored(vocabulary: _Vocabulary) -> dict[str, Any]:
    scores, kinds = vocabulary.numbers("scores"), (TokenType(x).name for x in vocabulary.types)
    return plamo_parts(list(zip(vocabulary.tokens, scores, kinds, strict=True)))


def _pre_tokenizer(vocabulary: _Vocabulary) -> PreTokenizer:
    name = vocabulary.fields.text("pre", "")
    if not name:
        logger.warning(
            "%s does not name the word-splitting rules of its tokenizer (no "
            "tokenizer.ggml.pre). The default may tokenize differently than the model "
            "expects; convert the model again.",
            vocabulary.path,
        )
        name = "default"
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise CheckpointError(
            vocabulary.path,
            f"tokenizer.ggml.pre {name!r} is not supported; serve the Hugging Face directory of "
            "the model instead",
        ) from None


def _sentencepiece(vocabulary: _Vocabulary, merges: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the parts of tokenizer.json for SentencePiece.

    With `merges`, texts are left as they are. Without, the merges follow from the scores, and a space is put before
    texts.
    """
    to_space: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    from_space: dict[str, Any] = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    normalizers, decoders = [to_space], [from_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if vocabulary.flag("add_space_prefix", merges is None):
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": bpe(
            vocabulary.tokens,
            _merges_of_scores(vocabulary) if merges is None else merges,
            unk_token=vocabulary.special("unknown", 0),
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in vocabulary.types,
        ),
    }


def _merges_of_scores(vocabulary: _Vocabulary) -> list[str]:
    """Return the merges that reproduce the ranking of SentencePiece's scores.

    SentencePiece joins the adjacent pair whose concatenation has the best score. So every split of a token into two
    tokens is a merge, ordered by the score of the token.
    """
    scores = vocabulary.numbers("scores")
    tokens = [
        (token, score)
        for token, score, kind in zip(vocabulary.tokens, scores, vocabulary.types, strict=True)
        if kind == TokenType.NORMAL and " " not in token  # The normalizer replaces all spaces.
    ]
    normal = {token for token, _ in tokens}
    tokens.sort(key=lambda pair: -pair[1])
    return [
        f"{left} {right}"
        for token, _ in tokens
        for cut in range(1, len(token))
        if (left := token[:cut]) in normal and (right := token[cut:]) in normal
    ]


def _word_pieces(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Return the parts of tokenizer.json for BERT.

    A GGUF file marks pieces at the starts of words; BERT marks the other pieces.
    """
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    pieces = {}
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        starts = token.startswith(SPACE) and token != SPACE
        piece = token.removeprefix(SPACE) if starts else f"##{token}"
        pieces[token if kind in special else piece] = i
    # The file does not contain whether texts are lowercased.
    is_cased = any(piece != piece.lower() and not piece.startswith("[") for piece in pieces)
    unknown = vocabulary.special("unknown") or "[UNK]"
    return word_pieces(pieces, lowercase=not is_cased, unk_token=unknown)


def _unigram(vocabulary: _Vocabulary) -> dict[str, Any]:
    charsmap = vocabulary.get("precompiled_charsmap")
    if charsmap is not None and not isinstance(charsmap, np.ndarray):
        raise vocabulary.fields.wrong("precompiled_charsmap", "an array of bytes", charsmap)
    return unigram_parts(
        list(zip(vocabulary.tokens, vocabulary.numbers("scores"), strict=True)),
        vocabulary.fields.integer("unknown_token_id", 2, minimum=0),
        charsmap=None if charsmap is None else charsmap.tobytes(),
        adds_space=vocabulary.flag("add_space_prefix", True),
        removes_spaces=vocabulary.flag("remove_extra_whitespaces", False),
        has_bytes=TokenType.BYTE in vocabulary.types,
    )


def _added_tokens(vocabulary: _Vocabulary) -> list[dict[str, Any]]:
    """Return the tokens that are recognized in a text before any other processing."""
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    # Phi-3's markers strip the whitespace after them, but GGUF has no field for that.
    strips_right = (
        vocabulary.metadata.get("general.architecture") == "phi3"
        and vocabulary.get("model") == "llama"
    )
    return [
        added_token(
            i,
            token,
            special=kind in special,
            rstrip=strips_right and token not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in special or kind == TokenType.USER_DEFINED
    ]


def _chat_templates(fields: GGUFFields) -> list[dict[str, str]] | None:
    keys = {"default": "chat_template"}
    keys |= {name: f"chat_template.{name}" for name in fields.texts("chat_templates")}
    return [
        {"name": name, "template": _TEMPLATES.get(text := fields.text(key), text)}
        for name, key in keys.items()
        if fields.get(key) is not None
    ] or None
