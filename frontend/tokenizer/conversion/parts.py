"""The parts of a tokenizer.json that several formats share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..token_bytes import BYTE_OF_CHAR

HEAD: Final[dict[str, Any]] = {"version": "1.0", "truncation": None, "padding": None}
"""The first fields of every tokenizer.json. Texts are neither cut nor padded."""

_CHAR_OF_BYTE: Final = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def added_token(index: int, content: str, *, special: bool, rstrip: bool = False) -> dict[str, Any]:
    """Return a token that is recognized in a text before any other processing."""
    return {
        "id": index,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": rstrip,
        "normalized": False,
        "special": special,
    }


def surround(
    tokens: Sequence[str],
    before: Sequence[str],
    after: Sequence[str],
    between: Sequence[str] | None = None,
) -> dict[str, Any] | None:
    """Return the post-processor that puts some of the `tokens` before and after each text; None without any.

    `between` replaces those before a second text.
    """
    if not before and not after:
        return None
    ids = {token: tokens.index(token) for token in (*before, *after)}

    def special(token: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": 0}}

    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    start, end = [special(token) for token in before], [special(token) for token in after]
    second_start = start if between is None else [special(token) for token in between]
    return {
        "type": "TemplateProcessing",
        "single": [*start, first, *end],
        "pair": [*start, first, *end, *second_start, second, *end],
        "special_tokens": {
            token: {"id": token, "ids": [i], "tokens": [token]} for token, i in ids.items()
        },
    }


def enclose(tokens: Sequence[str], first: str, last: str) -> dict[str, Any]:
    """Return the post-processor that puts tokens around a text, and the last one after a second text as well."""
    start, end, second_end = (
        {"SpecialToken": {"id": token, "type_id": i}}
        for token, i in ((first, 0), (last, 0), (last, 1))
    )
    one, two = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [start, one, end],
        "pair": [start, one, end, two, second_end],
        "special_tokens": {
            token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
            for token in (first, last)
        },
    }


def byte_level(
    patterns: Sequence[str], model: dict[str, Any], *, nfc: bool = False
) -> dict[str, Any]:
    """Return the parts for a model over bytes, whose words match the regular expressions `patterns`."""
    splits = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in patterns
    ]
    bytes_of_words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, bytes_of_words | {"use_regex": False}],
        },
        "decoder": bytes_of_words | {"use_regex": True},
        "model": model,
    }


def word_pieces(
    vocabulary: Mapping[str, int], *, lowercase: bool, unk_token: str = "[UNK]"
) -> dict[str, Any]:
    """Return the parts for the word pieces of BERT."""
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unk_token,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocabulary,
        },
    }


def bpe(
    tokens: Sequence[str],
    merges: Sequence[str],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    """Return a model of byte-pair encoding. With `ignore_merges`, a word that is a token is never split."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": merges,
    }


def byte_texts(tokens: Sequence[bytes]) -> list[str]:
    """Return the texts of a byte-level vocabulary, which have one character for each byte."""
    return ["".join(map(_CHAR_OF_BYTE.__getitem__, token)) for token in tokens]


def merges_of(texts: Sequence[str]) -> list[str]:
    """Return every split of a token into two tokens, in the order of the tokens.

    That is the order in which adjacent tokens are joined.
    """
    known = set(texts)
    ranks = {text: rank for rank, text in enumerate(texts)}
    merges = []
    for text in texts:
        halves = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        pairs = [pair for pair in halves if pair[0] in known and pair[1] in known]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [f"{left} {right}" for left, right in pairs]
    return merges
