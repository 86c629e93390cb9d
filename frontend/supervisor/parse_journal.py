"""A journal of the request bodies that a frontend is parsing, which the supervisor reads after a crash.

A frontend parses untrusted input, and a parser that overflows its stack ends the process without a message. The journal
is a small file in shared memory with the digest of each body that is being parsed. When a frontend crashes, the
supervisor reads the journal, and every frontend then rejects the body that caused the crash.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections import deque
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

DIGEST_BYTES: Final = 16

REMEMBERED_S: Final = 300.0
"""Seconds for which a body is rejected."""
MAX_POISON_BODIES: Final = 256
"""Maximum digests that are kept."""

_NUM_SLOTS: Final = 16
"""Number of slots; must exceed the number of parser threads."""

_NONE: Final = bytes(DIGEST_BYTES)


def journal_path(run_dir: str | Path, process: str) -> Path:
    """Return the path of the journal of a process."""
    return Path(run_dir) / f"{process.replace(' ', '')}.parsing"


class ParseJournal:
    """The journal of this process. Threads may use it at the same time.

    If the file system is full, nobody can read it, and a body that crashes the process is not found.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._slots = _map(path)
        except OSError as error:
            logger.warning("the bodies of requests cannot be recorded: %s", error)
            self._slots = mmap.mmap(-1, _NUM_SLOTS * DIGEST_BYTES)
        self._free = deque(range(_NUM_SLOTS))

    def begin_parsing(self, digest: bytes) -> int | None:
        """Record that a parser runs on this body. Return the slot, to be passed to `end_parsing`."""
        try:
            slot = self._free.pop()
        except IndexError:
            return None
        start = slot * DIGEST_BYTES
        self._slots[start : start + DIGEST_BYTES] = digest
        return slot

    def end_parsing(self, slot: int | None) -> None:
        """Record that the parser in this slot has finished."""
        if slot is not None:
            start = slot * DIGEST_BYTES
            self._slots[start : start + DIGEST_BYTES] = _NONE
            self._free.append(slot)


def _map(path: Path) -> mmap.mmap:
    """Return the empty file at `path` as memory. Raise OSError if it cannot be created."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # Without space for it, a later write to the memory would end the process.
        os.pwrite(descriptor, bytes(_NUM_SLOTS * DIGEST_BYTES), 0)
        return mmap.mmap(descriptor, _NUM_SLOTS * DIGEST_BYTES)
    finally:
        os.close(descriptor)


def read_journal(path: Path) -> set[bytes]:
    """Return the digests that a process left in its journal, and clear the journal.

    The file remains, because a full file system would have no room for the next one.
    """
    try:
        with path.open("r+b") as file:
            data = file.read()
            file.seek(0)
            file.write(bytes(len(data)))
    except OSError:
        return set()
    slots = {data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)}
    return slots - {_NONE}


class PoisonBodies:
    """Digests of request bodies that crashed frontends. Frontends reject these bodies for `REMEMBERED_S` seconds.

    A body is rejected after one crash if no other parser was running. If several parsers were running, or the cause of
    the exit is uncertain, a body is rejected after two crashes.
    """

    def __init__(self) -> None:
        self._suspected_at: dict[bytes, float] = {}
        self._blamed_at: dict[bytes, float] = {}

    def record_crash(self, digests: set[bytes], *, has_crashed: bool) -> None:
        """Record that a frontend exited while these bodies were being parsed.

        Args:
            digests: The digests of the bodies.
            has_crashed: True if the frontend crashed, so that a parser may be the cause.
        """
        now = time.monotonic()
        for digest in digests:
            if (has_crashed and len(digests) == 1) or digest in self._suspected_at:
                self._blamed_at[digest] = now
            self._suspected_at[digest] = now
        self._remove_expired(now)

    def restore(self, digests: list[bytes]) -> None:
        """Reject bodies that an earlier supervisor has rejected."""
        self._blamed_at = dict.fromkeys(digests, time.monotonic())

    def digests(self) -> list[bytes]:
        """Return the digests of the bodies to reject."""
        self._remove_expired(time.monotonic())
        return list(self._blamed_at)

    def _remove_expired(self, now: float) -> None:
        for known in (self._suspected_at, self._blamed_at):
            for digest in list(known):
                if known[digest] < now - REMEMBERED_S or len(known) > MAX_POISON_BODIES:
                    del known[digest]
