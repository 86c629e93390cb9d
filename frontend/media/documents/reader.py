"""Read documents of requests without blocking the event loop."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ...client.executor import ThreadExecutor
from ..decoding.limits import MAX_PROCESSES
from ..sources.data_urls import read_base64

if TYPE_CHECKING:
    from ..decoding.processes import MediaProcesses


class DocumentReader:
    """Extracts the text of PDF documents in decoder processes, which start with the first document."""

    def __init__(self, executor: ThreadExecutor) -> None:
        self._processes: MediaProcesses | None = None
        self._lock = threading.Lock()
        self._executor = executor.create_separate(MAX_PROCESSES)

    def close(self) -> None:
        """Stop the processes and threads."""
        if self._processes is not None:
            self._processes.close()
        self._executor.close()

    async def read(self, content: str, where: str, max_characters: int) -> str:
        """Return the text of a PDF document in base64.

        Raises:
            ParameterError: The document cannot be read, or has more than `max_characters` characters.
        """
        return await self._executor.in_thread(self._read, content, where, max_characters)

    def _read(self, content: str, where: str, max_characters: int) -> str:
        return self._start_processes().read_document(
            read_base64(content, where), where, max_characters
        )

    def _start_processes(self) -> MediaProcesses:
        with self._lock:
            if self._processes is None:
                # Most servers read no documents, and the modules that decode media take long to import.
                from ..decoding.processes import MediaProcesses

                self._processes = MediaProcesses()
            return self._processes
