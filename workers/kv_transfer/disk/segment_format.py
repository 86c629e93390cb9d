"""The format of segments, which are files to which records of blocks are appended.

A segment begins with a header. Each record consists of a header of fixed size, which contains the block's key, and the
block's bytes. When no more records fit, all record headers are written again after the last record, followed by a
trailer, so that a reader does not have to read the whole file. Checksums cover everything, because a file may be
truncated or damaged anywhere. All integers are little-endian.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

HEADER_BYTES: Final = 64
"""Size in bytes of a segment's header, of a record's header and of the trailer."""

MAX_KEY_BYTES: Final = 33
"""Maximum size of a key in bytes: a digest, and the number of a KV-cache group."""

_FORMAT: Final = 1
_FILE: Final = Struct("<8sIQ32s8xI")
_RECORD: Final = Struct("<4sBIQ33s10xI")
_TRAILER: Final = Struct("<8sIQI36xI")
_FILE_MAGIC: Final = b"ENGKVSEG"
_RECORD_MAGIC: Final = b"KVBL"
_TRAILER_MAGIC: Final = b"ENGKVEND"


class Record(NamedTuple):
    """A block in a segment: its key, the checksum of its bytes, and their offset in the file."""

    key: bytes
    checksum: int
    offset: int


class SegmentFormat:
    """Encodes and decodes the segments of one fingerprint, whose blocks all have `block_bytes` bytes."""

    def __init__(self, fingerprint: bytes, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.record_bytes = HEADER_BYTES + block_bytes
        self._seed = crc32(fingerprint)
        self.header = self._seal(_FILE.pack(_FILE_MAGIC, _FORMAT, block_bytes, fingerprint, 0))

    def count_records(self, segment_bytes: int) -> int:
        """Return how many records fit into a segment of at most `segment_bytes` bytes, together with the trailer."""
        return (segment_bytes - 2 * HEADER_BYTES) // (self.record_bytes + HEADER_BYTES)

    def size_of(self, num_records: int) -> int:
        """Return the size of a segment with this number of records, in bytes."""
        return 2 * HEADER_BYTES + num_records * (self.record_bytes + HEADER_BYTES)

    def offset_of(self, index: int) -> int:
        """Return the offset of record number `index` in a segment."""
        return HEADER_BYTES + index * self.record_bytes

    def checksum(self, key: bytes, parts: Iterable[memoryview | bytes]) -> int:
        """Return the checksum of a block's bytes, combined with its key."""
        value = crc32(key, self._seed)
        for part in parts:
            value = crc32(part, value)
        return value

    def record_header(self, key: bytes, checksum: int, index: int) -> bytes:
        """Return the header of record number `index`."""
        padded = key.ljust(MAX_KEY_BYTES, b"\0")
        return self._seal(_RECORD.pack(_RECORD_MAGIC, len(key), checksum, index, padded, 0))

    def trailer(self, headers: Sequence[bytes]) -> bytes:
        """Return the bytes after the last record: the headers of all records, and the trailer."""
        index = b"".join(headers)
        end = _TRAILER.pack(_TRAILER_MAGIC, len(headers), len(index), crc32(index, self._seed), 0)
        return index + self._seal(end)

    def read_records(self, fd: int) -> list[Record] | None:
        """Return the intact records of a segment, or None if it belongs to another fingerprint.

        The bytes of the blocks are not read.

        Raises:
            OSError: The file cannot be read.
        """
        if os.pread(fd, HEADER_BYTES, 0) != self.header:
            return None
        size = os.fstat(fd).st_size
        listed = self._read_trailer(fd, size)
        return list(self.scan_records(fd, size, 0)) if listed is None else listed

    def scan_records(self, fd: int, size: int, first: int) -> Iterator[Record]:
        """Yield records from number `first` on, up to the first one that is not intact."""
        index = first
        while (offset := self.offset_of(index)) + self.record_bytes <= size:
            record = self._decode_record(os.pread(fd, HEADER_BYTES, offset), index)
            if record is None:
                return
            yield record
            index += 1

    def is_intact(self, fd: int, record: Record) -> bool:
        """Return whether the bytes of a block match its checksum."""
        data = os.pread(fd, self.block_bytes, record.offset)
        return (
            len(data) == self.block_bytes and self.checksum(record.key, (data,)) == record.checksum
        )

    def _read_trailer(self, fd: int, size: int) -> list[Record] | None:
        """Return the records that the trailer lists, or None if there is no intact trailer."""
        start = size - HEADER_BYTES
        if start < HEADER_BYTES:
            return None
        end = os.pread(fd, HEADER_BYTES, start)
        if not self._is_sealed(end):
            return None
        magic, count, num_bytes, checksum, _ = _TRAILER.unpack(end)
        offset = start - num_bytes
        if magic != _TRAILER_MAGIC or num_bytes != count * HEADER_BYTES or offset < HEADER_BYTES:
            return None
        index = os.pread(fd, num_bytes, offset)
        if len(index) != num_bytes or crc32(index, self._seed) != checksum:
            return None
        records = [
            self._decode_record(index[start : start + HEADER_BYTES], number)
            for number, start in enumerate(range(0, num_bytes, HEADER_BYTES))
        ]
        if self.offset_of(count) > offset:
            return None
        return [record for record in records if record is not None]

    def _decode_record(self, header: bytes, index: int) -> Record | None:
        if not self._is_sealed(header):
            return None
        magic, length, checksum, number, key, _ = _RECORD.unpack(header)
        if magic != _RECORD_MAGIC or number != index or not 0 < length <= MAX_KEY_BYTES:
            return None
        return Record(key[:length], checksum, self.offset_of(index) + HEADER_BYTES)

    def _seal(self, header: bytes) -> bytes:
        body = header[:-4]
        return body + crc32(body, self._seed).to_bytes(4, "little")

    def _is_sealed(self, header: bytes) -> bool:
        return len(header) == HEADER_BYTES and self._seal(header) == header
