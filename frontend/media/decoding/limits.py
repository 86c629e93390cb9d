"""Limits on the time and memory that decoding a file may take."""

from __future__ import annotations

import signal
from typing import Final

import msgspec

MAX_PROCESSES: Final = 4
"""Maximum number of files that are decoded at the same time (except long audio clips), and of idle processes."""


class DecoderLimits(msgspec.Struct, frozen=True):
    """Limits on an image, a video or a part of an audio clip.

    Attributes:
        cpu_s: The maximum processor time in seconds.
        wall_s: The seconds after which a process that makes no progress is killed.
        memory_bytes: The maximum memory of a process, in addition to its loaded libraries.
    """

    cpu_s: float = 20.0
    wall_s: float = 60.0
    memory_bytes: int = 2 << 30

    def describe_exit(self, signum: int | None) -> str:
        """Return the error message for a file whose process ended by this signal, or for an unknown reason."""
        match signum:
            case signal.SIGPROF:
                return f"takes more than {self.cpu_s:g} s of processor time to decode; send a smaller file"
            case signal.SIGALRM:
                return f"takes more than {self.wall_s:g} s to decode; send a smaller file"
            case signal.SIGKILL:
                return "cannot be decoded: its process was killed, perhaps because memory is short; send a smaller file"
            case None | 0 | signal.SIGSTOP | signal.SIGTERM:
                return "cannot be decoded: its process was lost; send another file"
            case _:
                name = signal.Signals(signum).name
                return f"cannot be decoded: it crashes the decoder ({name}); send another file"

    @property
    def memory_problem(self) -> str:
        """The error message for a file that takes too much memory."""
        mib = self.memory_bytes >> 20
        return f"needs more than {mib} MiB of memory to decode; send a smaller file"
