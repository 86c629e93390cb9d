"""Read SentencePiece's model files, and express its unigram models as parts of tokenizer.json."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ....protocol.errors import CheckpointError

SPACE: Final = "▁"
_UNIGRAM: Final = 1
_NORMAL: Final = 1
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
"""The types of fields in Protocol Buffers."""


class SentencePieceModel(msgspec.Struct, frozen=True):
    """A unigram model: the score of each piece of ordinary text, and how texts are normalized."""

    scores: dict[str, float]
    charsmap: bytes
    adds_space: bool
    removes_spaces: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Return the model in a file, which is a message of Protocol Buffers.

    Raises:
        CheckpointError: The file is missing or damaged, or the model is not a unigram model.
    """
    scores: dict[str, float] = {}
    kind, charsmap, flags = _UNIGRAM, b"", {3: 1, 4: 1}
    try:
        for number, message in _fields(path.read_bytes()):
            if number == 1:
                piece = dict(_fields(message))
                if piece.get(3, _NORMAL) == _NORMAL:
                    (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
                    scores[piece.get(1, b"").decode()] = score
            elif number == 2:
                kind = dict(_fields(message)).get(3, _UNIGRAM)
            elif number == 3:
                normalizer = dict(_fields(message))
                charsmap = normalizer.get(2, b"")
                flags |= {i: normalizer[i] for i in flags if i in normalizer}
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(path, "not a model of SentencePiece") from error
    if kind != _UNIGRAM or not scores:
        raise CheckpointError(path, "not a unigram model of SentencePiece, which is needed")
    return SentencePieceModel(scores, charsmap, bool(flags[3]), bool(flags[4]))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message: its number, and an integer or bytes."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(data):
        key = varint()
        if (kind := key & 7) == _VARINT:
            yield key >> 3, varint()
            continue
        size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(kind)
        if kind == _BYTES:
            size = varint()
        if size is None or position + size > len(data):
            raise ValueError("a field of an unknown type, or a field that is cut off")
        yield key >> 3, data[position : position + size]
        position += size


def unigram_parts(
    vocabulary: Sequence[tuple[str, float]],
    unk_id: int,
    *,
    charsmap: bytes | None,
    adds_space: bool,
    removes_spaces: bool,
    has_bytes: bool = False,
) -> dict[str, Any]:
    """Return the parts of tokenizer.json for a unigram model.

    Args:
        vocabulary: The tokens and their scores.
        unk_id: The number of the token for unknown text.
        charsmap: SentencePiece's compiled normalization of characters.
        adds_space: True if a space is put before a text.
        removes_spaces: True if spaces at the ends of a text, and repeated ones, are removed.
        has_bytes: True if there are tokens for the bytes of unknown text.
    """
    prepend = "always" if adds_space else "never"
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": prepend}
    normalizers: list[dict[str, Any]] = []
    if charsmap is not None:
        encoded = base64.b64encode(charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    if removes_spaces:
        normalizers += [
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ]
    decoders = [{"type": "ByteFallback"}, {"type": "Fuse"}, metaspace | {"split": True}]
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": metaspace | {"split": True},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "Unigram",
            "unk_id": unk_id,
            "vocab": vocabulary,
            "byte_fallback": has_bytes,
        },
    }
