"""The pipe that ties the life of every process of an engine to one process."""

from __future__ import annotations

import os


class Lifeline:
    """A pipe whose reading end is the standard input of every process of an engine.

    Nothing is ever written to it. However the process with the writing end exits, the others read the end of the file,
    and exit. `fd` is the reading end.
    """

    def __init__(self) -> None:
        self.fd, self._writing_fd = os.pipe()

    def leave_to_parent(self) -> None:
        """Close the writing end in this forked process."""
        os.close(self._writing_fd)
        self._writing_fd = -1

    def close(self) -> None:
        """Close both ends in this process."""
        os.close(self.fd)
        if self._writing_fd >= 0:
            os.close(self._writing_fd)
