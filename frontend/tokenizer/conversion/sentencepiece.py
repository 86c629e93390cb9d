"""Read SentencePiece's model files, and express unigram models as parts of tokenizer.json."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ....protocol.errors import CheckpointError

SPACE: Final = "▁"
_UNIGRAM, _BPE, _CHARACTERS = 1, 2, 4
_SPECIAL_IDS: Final = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, 2**64 - 1)}
"""The numbers of the fields with the ids of special tokens, and the defaults of the ids."""

_NORMAL: Final = 1
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
"""The types of fields in Protocol Buffers."""


class Piece(NamedTuple):
    """A token, its score, and its type, which has the numbers of `TokenType`."""

    text: str
    score: float
    type: int


class SentencePieceModel(msgspec.Struct, frozen=True):
    """A model: its tokens in the order of their ids, the ids of special tokens, and how texts are normalized.

    Attributes:
        pieces: The tokens.
        is_unigram: True for a unigram model, False for byte-pair encoding.
        special_ids: The ids of the tokens "unk", "bos", "eos" and "pad", if the model has them.
        charsmap: SentencePiece's compiled normalization of characters; empty for none.
        adds_space: True if a space is put before a text.
        removes_spaces: True if spaces at the ends of a text, and repeated ones, are removed.
    """

    pieces: list[Piece]
    is_unigram: bool
    special_ids: dict[str, int]
    charsmap: bytes
    adds_space: bool
    removes_spaces: bool

    @property
    def scores(self) -> dict[str, float]:
        """The score of each piece of ordinary text."""
        return {piece.text: piece.score for piece in self.pieces if piece.type == _NORMAL}


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Return the model in a file, which is a message of Protocol Buffers.

    Raises:
        CheckpointError: The file is missing or damaged, or the model splits texts into words or characters.
    """
    pieces: list[Piece] = []
    kind, charsmap, flags, ids = _UNIGRAM, b"", {3: 1, 4: 1}, _SPECIAL_IDS
    try:
        for number, message in _fields(path.read_bytes()):
            if number == 1:
                piece = dict(_fields(message))
                (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
                pieces.append(Piece(piece.get(1, b"").decode(), score, piece.get(3, _NORMAL)))
            elif number == 2:
                trainer = dict(_fields(message))
                kind = trainer.get(3, _UNIGRAM)
                ids = {name: (i, trainer.get(i, id_)) for name, (i, id_) in ids.items()}
            elif number == 3:
                normalizer = dict(_fields(message))
                charsmap = normalizer.get(2, b"")
                flags |= {i: normalizer[i] for i in flags if i in normalizer}
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(path, "not a model of SentencePiece") from error
    # A model of characters is a BPE model without merges.
    if kind not in (_UNIGRAM, _BPE, _CHARACTERS) or not pieces:
        raise CheckpointError(
            path, "not a unigram, BPE or character model of SentencePiece, which is needed"
        )
    # An absent token has the id -1, which is stored as a large number.
    special_ids = {name: id_ for name, (_, id_) in ids.items() if id_ < len(pieces)}
    return SentencePieceModel(
        pieces, kind == _UNIGRAM, special_ids, charsmap, bool(flags[3]), bool(flags[4])
    )


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


def normalizers(charsmap: bytes | None, removes_spaces: bool) -> list[dict[str, Any]]:
    """Return the parts of tokenizer.json that change texts before they are split; see `unigram_parts`."""
    found: list[dict[str, Any]] = []
    if charsmap is not None:
        encoded = base64.b64encode(charsmap).decode()
        found.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    if removes_spaces:
        found += [
            {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ]
    return found


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
    decoders = [{"type": "ByteFallback"}, {"type": "Fuse"}, metaspace | {"split": True}]
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers(charsmap, removes_spaces)},
        "pre_tokenizer": metaspace | {"split": True},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "Unigram",
            "unk_id": unk_id,
            "vocab": vocabulary,
            "byte_fallback": has_bytes,
        },
    }
