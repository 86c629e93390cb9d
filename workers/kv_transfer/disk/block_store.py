"""The blocks of one fingerprint on disk: appended to segments, found by their keys, and deleted by whole segments."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from .buffers import read_into, write_all
from .directory import (
    OPEN_SUFFIX,
    SEALED_SUFFIX,
    SegmentFile,
    SharedDirectory,
    list_segments,
    try_lock,
)
from .segment_format import HEADER_BYTES, Record, SegmentFormat

MAX_SEGMENT_BYTES: Final = 1 << 30
SEGMENTS_PER_DIRECTORY: Final = 64
"""Minimum number of segments in a full directory. A segment is deleted as a whole, so it must be a small part."""

MAX_OPEN_FILES: Final = 64


class _Place(NamedTuple):
    segment: _Segment
    record: Record


class _Segment:
    """A segment in the index: its number, and the keys that were found in it."""

    def __init__(self, number: int, path: str) -> None:
        self.number = number
        self.path = path
        self.num_records = 0
        self.keys: set[bytes] = set()
        self.is_used = False


class Changes(NamedTuple):
    """The keys of blocks that became readable since a given time, and of blocks that are no longer readable."""

    added: list[bytes]
    removed: list[bytes]


class BlockStore:
    """A content-addressed store of blocks of equal size, in a directory that several processes share.

    Only the process that holds the directory's lock appends. The others read, and one of them takes over when the
    writer has exited. `read` may be called by any thread, all other methods by one.

    Args:
        directory: The directory, which limits the total size.
        fingerprint: 32 bytes; blocks with other fingerprints are not found.
        block_bytes: Size of each block in bytes.

    Raises:
        OSError: The directory cannot be used.
        ValueError: The limit is smaller than a segment of one block.
    """

    def __init__(self, directory: SharedDirectory, fingerprint: bytes, block_bytes: int) -> None:
        self._format = SegmentFormat(fingerprint, block_bytes)
        self._directory = directory
        self.path = directory.fingerprint_directory(fingerprint)
        most = min(MAX_SEGMENT_BYTES, directory.limit_bytes // SEGMENTS_PER_DIRECTORY)
        self._records_per_segment = max(1, self._format.count_records(most))
        self._segment_bytes = self._format.size_of(self._records_per_segment)
        if self._segment_bytes > directory.limit_bytes:
            raise ValueError(
                f"{directory.limit_bytes} bytes are too few for a segment with one block, which has "
                f"{self._segment_bytes} bytes"
            )
        self._mutex = threading.Lock()
        self._places: dict[bytes, _Place] = {}
        self._changed: dict[bytes, bool] = {}
        """Changes since the last report: True for each key that was added, False for each that was removed."""
        self._segments: dict[int, _Segment] = {}
        self._files: OrderedDict[int, int] = OrderedDict()
        """File descriptors by segment number, least recently used first."""
        self._in_use: dict[int, int] = {}
        """Number of threads that are reading from each descriptor."""
        self._writer_lock: int | None = None
        self._tail: _Segment | None = None
        self._tail_fd = -1
        self._tail_headers: list[bytes] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def look_up(self, keys: Sequence[bytes]) -> bytes:
        """Return a byte for each key: 1 if the block is stored, else 0."""
        return bytes(key in self for key in keys)

    def __len__(self) -> int:
        return len(self._places)

    def keys(self) -> list[bytes]:
        """Return the keys of all blocks."""
        with self._mutex:
            return list(self._places)

    @property
    def has_changes(self) -> bool:
        """True if `take_changes` has something to return."""
        return bool(self._changed)

    def take_changes(self) -> Changes:
        """Return the changes since the last call."""
        with self._mutex:
            changed, self._changed = self._changed, {}
        added = [key for key, is_added in changed.items() if is_added]
        return Changes(added, [key for key, is_added in changed.items() if not is_added])

    # Reading

    def read(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Read a block into writable buffers with a total of `block_bytes` bytes.

        Returns:
            True if the block was read. Otherwise the buffers' content is undefined, and the block is removed from the
                index.

        Raises:
            OSError: The file exists but cannot be read.
        """
        return self.read_blocks([key], [parts])[0]

    def read_blocks(
        self, keys: Sequence[bytes], parts: Sequence[Sequence[memoryview]]
    ) -> list[bool]:
        """Read several blocks like `read`. Those that follow each other on disk are read together."""
        with self._mutex:
            places = [self._places.get(key) for key in keys]
        are_read: list[bool] = []
        while (start := len(are_read)) < len(keys):
            run = [place for place in places[start : start + 1] if place is not None]
            if not run:
                are_read.append(False)
                continue
            for place in places[start + 1 :]:
                if place is None or not self._follows(run[-1], place):
                    break
                run.append(place)
            are_read += self._read_run(run, parts[start : start + len(run)])
        return are_read

    def _follows(self, place: _Place, other: _Place) -> bool:
        end = place.record.offset + self._format.record_bytes
        return other.segment is place.segment and other.record.offset == end

    def _read_run(self, run: Sequence[_Place], parts: Sequence[Sequence[memoryview]]) -> list[bool]:
        """Read blocks that follow each other in a segment."""
        segment = run[0].segment
        header = memoryview(bytearray(HEADER_BYTES))
        buffers = [*parts[0]]
        for each in parts[1:]:
            buffers += (header, *each)
        try:
            with self._reading(segment) as fd:
                is_whole = read_into(fd, buffers, run[0].record.offset)
        except FileNotFoundError:
            # Another process has deleted the segment to make room.
            self._remove_segments([segment])
            return [False] * len(run)
        if not is_whole and len(run) > 1:
            # The file ends within one of them.
            singly = zip(run, parts, strict=True)
            return [self._read_run([place], [own])[0] for place, own in singly]
        are_read = []
        for (_, record), own in zip(run, parts, strict=True):
            is_intact = is_whole and self._format.checksum(record.key, own) == record.checksum
            if is_intact:
                segment.is_used = True
            else:
                self._forget(record.key)
            are_read.append(is_intact)
        return are_read

    @contextlib.contextmanager
    def _reading(self, segment: _Segment) -> Iterator[int]:
        """Open a segment for reading, or use the descriptor that is already open."""
        with self._mutex:
            fd = self._use_file(segment.number, None)
        if fd is None:
            # The disk may hang, so the lock is not held.
            opened = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
            with self._mutex:
                fd = self._use_file(segment.number, opened)
        assert fd is not None
        try:
            yield fd
        finally:
            with self._mutex:
                self._in_use[fd] -= 1

    def _use_file(self, number: int, opened: int | None) -> int | None:
        """Count a use of a segment's descriptor, and return it: the one that is open already, else `opened`."""
        fd = self._files.get(number, opened)
        if fd is None:
            return None
        if opened is not None and opened != fd:
            os.close(opened)
        self._files[number] = fd
        self._files.move_to_end(number)
        self._in_use[fd] = self._in_use.get(fd, 0) + 1
        self._close_files(MAX_OPEN_FILES)
        return fd

    def _close_files(self, most: int) -> None:
        """Close the least recently used descriptors beyond `most`, except those in use."""
        idle = [number for number, fd in self._files.items() if not self._in_use.get(fd)]
        for number in idle[: max(0, len(self._files) - most)]:
            self._close_file(number)

    def _close_file(self, number: int) -> None:
        fd = self._files.pop(number, None)
        if fd is not None:
            self._in_use.pop(fd, None)
            os.close(fd)

    def _forget(self, key: bytes) -> None:
        with self._mutex:
            place = self._places.pop(key, None)
            if place is not None:
                place.segment.keys.discard(key)
                self._changed[key] = False

    def _remove_segments(self, segments: Iterable[_Segment]) -> None:
        """Remove segments that no longer exist, and their blocks, from the index."""
        with self._mutex:
            for segment in segments:
                if self._segments.get(segment.number) is not segment:
                    continue
                del self._segments[segment.number]
                for key in segment.keys:
                    del self._places[key]
                    self._changed[key] = False
                fd = self._files.get(segment.number)
                if fd is not None and not self._in_use.get(fd):
                    self._close_file(segment.number)

    # The index

    def refresh(self) -> None:
        """Find segments and records that other processes have added or deleted.

        The first call reads the whole index. If no process is the writer, this one becomes it.

        Raises:
            OSError: The directory cannot be read.
        """
        self._become_writer()
        found = {_number(file.path): file for file in list_segments(self.path)}
        gone = [
            segment
            for number, segment in list(self._segments.items())
            if number not in found and segment is not self._tail
        ]
        self._remove_segments(gone)
        for number, file in sorted(found.items()):
            segment = self._segments.get(number)
            if segment is self._tail and segment is not None:
                continue
            if segment is None or not segment.path.endswith(SEALED_SUFFIX):
                self._read_index(file)
        self._record_use()

    def _read_index(self, file: SegmentFile) -> None:
        """Add the records of a segment that are not in the index yet."""
        number = _number(file.path)
        segment = self._segments.get(number) or _Segment(number, file.path)
        try:
            fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            if segment.num_records:
                size = os.fstat(fd).st_size
                records = list(self._format.scan_records(fd, size, segment.num_records))
            else:
                records = self._format.read_records(fd) or []
        finally:
            os.close(fd)
        segment.path = file.path
        self._add_records(segment, records)

    def _add_records(self, segment: _Segment, records: Sequence[Record]) -> None:
        with self._mutex:
            self._segments[segment.number] = segment
            segment.num_records += len(records)
            for record in records:
                # A block is stored again if it was damaged, so the latest record counts.
                if (earlier := self._places.get(record.key)) is None:
                    self._changed[record.key] = True
                else:
                    earlier.segment.keys.discard(record.key)
                segment.keys.add(record.key)
                self._places[record.key] = _Place(segment, record)

    def _record_use(self) -> None:
        """Set the modification time of each segment that was read since the last call to now."""
        for segment in list(self._segments.values()):
            if segment.is_used:
                segment.is_used = False
                with contextlib.suppress(OSError):
                    os.utime(segment.path)

    # Writing

    def append(self, key: bytes, data: memoryview) -> bool:
        """Append a block. Return False if this process is not the writer, or there is no room.

        Raises:
            OSError: The disk is full or failing. Do not append to the store anymore.
        """
        if key in self._places:
            return True
        if self._tail is not None and len(self._tail_headers) == self._records_per_segment:
            self._seal_tail()
        if self._tail is None and not self._begin_segment():
            return False
        assert self._tail is not None
        index = len(self._tail_headers)
        checksum = self._format.checksum(key, (data,))
        header = self._format.record_header(key, checksum, index)
        offset = self._format.offset_of(index)
        write_all(self._tail_fd, (header, data), offset)
        self._tail_headers.append(header)
        self._add_records(self._tail, [Record(key, checksum, offset + HEADER_BYTES)])
        return True

    def remove(self, keys: Iterable[bytes]) -> None:
        """Destroy blocks whose content may be wrong, so that no process finds them anymore.

        Raises:
            OSError: A file cannot be written to.
        """
        for key in keys:
            with self._mutex:
                place = self._places.get(key)
            if place is None:
                continue
            self._forget(key)
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(place.segment.path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    self._destroy(fd, place.record)
                finally:
                    os.close(fd)

    def _destroy(self, fd: int, record: Record) -> None:
        """Change the bytes of a block so that they do not match its checksum."""
        num_bytes = min(HEADER_BYTES, self._format.block_bytes)
        os.pwrite(fd, bytes(num_bytes), record.offset)
        if self._format.is_intact(fd, record):
            # The block began with zeros, so write something else.
            os.pwrite(fd, b"\xff" * num_bytes, record.offset)

    def clear(self) -> None:
        """Delete all segments of this fingerprint, except what another process is writing.

        Raises:
            OSError: A file cannot be deleted.
        """
        if self._tail is not None:
            self._seal_tail()
        for file in list_segments(self.path):
            if file.is_sealed:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.path)
        self._remove_segments(list(self._segments.values()))

    def close(self) -> None:
        """Seal the segment that is being written, and close all files. Raise OSError if the disk is full or failing."""
        try:
            if self._tail is not None:
                self._seal_tail()
            self._record_use()
        finally:
            with self._mutex:
                self._close_files(0)
            if self._writer_lock is not None:
                os.close(self._writer_lock)
                self._writer_lock = None

    def _become_writer(self) -> None:
        """Take over from a writer that has exited, and seal the segment that it was writing."""
        if self._writer_lock is not None:
            return
        self._writer_lock = try_lock(self.path / "lock")
        if self._writer_lock is None:
            return
        for file in list_segments(self.path):
            if not file.is_sealed:
                # Another process may delete it to make room.
                with contextlib.suppress(FileNotFoundError):
                    self._seal_abandoned(file.path)
        with self._directory.making_room(0):
            pass

    def _seal_abandoned(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            records = self._format.read_records(fd)
            # The last block may have been written only in part.
            if records and not self._format.is_intact(fd, records[-1]):
                records.pop()
            if not records:
                os.unlink(path)
                return
            headers = [
                os.pread(fd, HEADER_BYTES, record.offset - HEADER_BYTES) for record in records
            ]
            self._write_trailer(fd, headers)
        finally:
            os.close(fd)
        os.rename(path, _sealed(path))

    def _begin_segment(self) -> bool:
        """Create a segment to append to, with all its space. Return False if there is no room for it."""
        if self._writer_lock is None:
            return False
        with self._directory.making_room(self._segment_bytes) as has_room:
            self.refresh()
            if not has_room:
                return False
            # Never reuse a number, because the indexes of other processes may contain it.
            number = max(time.time_ns(), 1 + max(self._segments, default=0))
            path = str(self.path / f"{number:016x}{OPEN_SUFFIX}")
            fd = try_lock(Path(path))
            if fd is None:
                return False
            try:
                os.posix_fallocate(fd, 0, self._segment_bytes)
                write_all(fd, (self._format.header,), 0)
            except OSError:
                os.close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise
        self._tail, self._tail_fd, self._tail_headers = _Segment(number, path), fd, []
        with self._mutex:
            self._segments[number] = self._tail
        return True

    def _seal_tail(self) -> None:
        assert self._tail is not None
        segment, fd = self._tail, self._tail_fd
        self._tail = None
        try:
            if not self._tail_headers:
                os.unlink(segment.path)
                self._remove_segments([segment])
                return
            self._write_trailer(fd, self._tail_headers)
            path = _sealed(segment.path)
            os.rename(segment.path, path)
            segment.path = path
        finally:
            os.close(fd)

    def _write_trailer(self, fd: int, headers: Sequence[bytes]) -> None:
        end = self._format.offset_of(len(headers))
        # Shorten the file first, because nothing of a longer file may follow the trailer.
        os.ftruncate(fd, end)
        write_all(fd, (self._format.trailer(headers),), end)


def _number(path: str) -> int:
    """Return the number in the name of a segment; -1 if it has none."""
    with contextlib.suppress(ValueError):
        return int(os.path.basename(path).partition(".")[0], 16)
    return -1


def _sealed(path: str) -> str:
    return path.removesuffix(OPEN_SUFFIX) + SEALED_SUFFIX
