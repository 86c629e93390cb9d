"""Tiny tokenizers of Marian models: two SentencePiece models and a vocabulary."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3


def sentencepiece_file(
    scores: Mapping[str, float], kind: int = 1, *, removes_spaces: bool = True
) -> bytes:
    """Return a model that puts a space before texts, of the kind 1 (unigram), 2 (BPE) or 4 (characters)."""
    pieces = [("<unk>", 0.0, _UNKNOWN), ("<s>", 0.0, _CONTROL), ("</s>", 0.0, _CONTROL)]
    pieces += [(piece, score, _NORMAL) for piece, score in scores.items()]
    data = b"".join(
        _bytes(
            1, _bytes(1, piece.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, type_)
        )
        for piece, score, type_ in pieces
    )
    return (
        data
        + _bytes(2, _number(3, kind))
        + _bytes(3, _bytes(1, b"identity") + _number(4, removes_spaces))
    )


def _bytes(number: int, payload: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(payload)) + payload


def _number(number: int, value: int) -> bytes:
    return bytes([number << 3]) + _varint(value)


def _varint(value: int) -> bytes:
    head = [128 | value >> shift & 127 for shift in range(0, value.bit_length() - 7, 7)]
    return bytes([*head, value >> 7 * len(head)])


def write_marian_tokenizer(
    directory: Path,
    source: Mapping[str, float],
    target: Mapping[str, float],
    tokens: Sequence[str],
    target_tokens: Sequence[str] = (),
) -> None:
    """Write a tokenizer with the scores of pieces of two languages, and one or two vocabularies."""
    (directory / "source.spm").write_bytes(sentencepiece_file(source))
    (directory / "target.spm").write_bytes(sentencepiece_file(target))
    config: dict[str, Any] = {"separate_vocabs": bool(target_tokens), "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, names in (("vocab.json", tokens), ("target_vocab.json", target_tokens)):
        if names:
            (directory / name).write_text(json.dumps({x: i for i, x in enumerate(names)}))
