"""Write the event log to a file, and read it back.

A file is zlib-compressed msgpack of one `Dump`, readable only by its owner. It contains no text, prompt or output (see
`redaction`).
"""

from __future__ import annotations

import os
import stat
import tempfile
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from ... import __version__
from ...protocol.errors import EngineError
from .events import Event
from .log import EventLog
from .recorder import RecordedScheduler, Setup
from .redaction import Pseudonyms, redact_config, redact_events, redact_kv_transfer, redact_snapshot
from .snapshot import Snapshot, SnapshotError, describe

VERSION: Final = 9
"""Version of the format of `Dump`."""

SUFFIX: Final = ".engine-events"
MAX_FILES: Final = 10
"""Number of files that are kept per core and directory; the oldest are deleted."""

MAX_DUMP_BYTES: Final = 1 << 30
"""Maximum uncompressed size, in bytes, of a file that is read."""


class DumpError(EngineError):
    """Raised for a file that cannot be written, or that is not a valid dump."""


class DumpSegment(msgspec.Struct, array_like=True):
    """A `Segment` as stored in a file. It can be replayed on its own if `is_whole`."""

    snapshot: Snapshot | None
    is_whole: bool
    initial_hash: bytes
    events: list[Event]


class Header(msgspec.Struct, array_like=True):
    """The first fields of a `Dump`, which are the same in every version."""

    format: str
    version: int


class Dump(msgspec.Struct, array_like=True):
    """The content of a dump file.

    `wall_time` (seconds since 1970) is the moment of `now` (seconds on the clock of the events). `problem` says why
    later states could not be captured; it is empty if they could.
    """

    format: str
    version: int
    engine_version: str
    reason: str
    wall_time: float
    now: float
    setup: Setup
    segments: list[DumpSegment]
    problem: str = ""


def write_dump(
    scheduler: RecordedScheduler, directory: str, *, reason: str, wall_time: float, now: float
) -> Path:
    """Write the scheduler's log into a new file in `directory` and return its path.

    Raises:
        DumpError: The file cannot be written, or the default directory is not private.
    """
    setup = scheduler.setup
    dump = make_dump(scheduler.log, setup, reason=reason, wall_time=wall_time, now=now)
    prefix = f"core{setup.core_index}-"
    moment = datetime.fromtimestamp(wall_time, UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    path = Path(directory) / f"{prefix}{moment}-{os.getpid()}-{reason}{SUFFIX}"
    try:
        _prepare(directory)
        _write(path, zlib.compress(msgspec.msgpack.encode(dump), 1))
        _prune(directory, prefix)
    except OSError as error:
        raise DumpError(f"cannot write {path}: {error.strerror}; see --dump-dir") from error
    return path


def make_dump(log: EventLog, setup: Setup, *, reason: str, wall_time: float, now: float) -> Dump:
    """Return the log as a `Dump` without user content."""
    log.flush()
    pseudonyms = Pseudonyms()
    setup = msgspec.structs.replace(
        setup,
        config=redact_config(setup.config, pseudonyms),
        cache_config=msgspec.structs.replace(
            setup.cache_config, disk_path=None, encoder_disk_path=None
        ),
        kv_transfer=setup.kv_transfer and redact_kv_transfer(setup.kv_transfer),
    )
    problem = log.problem
    segments = []
    for segment in log.segments:
        snapshot, is_whole = None, segment.is_whole
        if segment.start is not None:
            try:
                snapshot = redact_snapshot(describe(segment.start), pseudonyms)
            except SnapshotError as error:
                problem, is_whole = str(error), False
        events = redact_events(segment.events, pseudonyms)
        segments.append(DumpSegment(snapshot, is_whole, segment.initial_hash, events))
    return Dump(
        "engine events",
        VERSION,
        __version__,
        reason,
        wall_time,
        now,
        setup,
        segments,
        problem,
    )


def read_dump(path: str | Path, scheduler_cls: str | None = None) -> Dump:
    """Read a dump from a file.

    The caller names the scheduler class, because a file must not decide what is imported.

    Raises:
        DumpError: The file is invalid, or replaying it needs another scheduler class than `scheduler_cls`.
    """
    dump = _read_dump(path)
    needed = dump.setup.config.scheduler_cls
    if needed != scheduler_cls:
        if needed is None:
            raise DumpError(f"{path} was recorded without --scheduler-cls; remove the flag")
        raise DumpError(
            f"{path} was recorded with a custom scheduler class; pass --scheduler-cls {needed} if you trust "
            "it"
        )
    return dump


def _read_dump(path: str | Path) -> Dump:
    try:
        decompressor = zlib.decompressobj()
        data = decompressor.decompress(Path(path).read_bytes(), MAX_DUMP_BYTES)
        if decompressor.unconsumed_tail:
            raise DumpError(f"{path} is larger than {MAX_DUMP_BYTES} bytes")
        header = msgspec.msgpack.decode(data, type=Header)
        if (header.format, header.version) != ("engine events", VERSION):
            raise DumpError(
                f"{path} has version {header.version} of the {header.format} format; this engine "
                f"({__version__}) reads version {VERSION}; use the engine version that wrote it"
            )
        return msgspec.msgpack.decode(data, type=Dump)
    except OSError as error:
        raise DumpError(f"cannot read {path}: {error.strerror}") from error
    except (zlib.error, msgspec.DecodeError) as error:
        raise DumpError(f"{path} is not an event dump: {error}") from error


def default_directory() -> str:
    """Return this user's dump directory below the temporary directory."""
    return os.path.join(tempfile.gettempdir(), f"engine-dumps-{os.geteuid()}")


def _prepare(directory: str) -> None:
    """Create the directory if it is missing. Raises DumpError if the default directory is accessible to other users."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    if directory == default_directory():
        status = os.lstat(directory)
        if (
            not stat.S_ISDIR(status.st_mode)
            or status.st_uid != os.geteuid()
            or stat.S_IMODE(status.st_mode) & 0o077
        ):
            raise DumpError(f"{directory} is not a private directory of this user; use --dump-dir")


def _write(path: Path, data: bytes) -> None:
    """Write to a temporary name, then rename, so that a file under the final name is always complete."""
    unfinished = path.with_suffix(".unfinished")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(unfinished, flags, 0o600), "wb") as file:
        file.write(data)
    os.replace(unfinished, path)


def _prune(directory: str, prefix: str) -> None:
    files = sorted(Path(directory).glob(f"{prefix}*{SUFFIX}"))
    for old in files[:-MAX_FILES]:
        old.unlink(missing_ok=True)
