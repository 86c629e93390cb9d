"""Read documents of requests without blocking the event loop."""

from __future__ import annotations

import base64
import binascii

from ....protocol.errors import ParameterError
from ...client.executor import ThreadExecutor
from ..decoding.processes import MAX_PROCESSES, MediaProcesses


class DocumentReader:
    """Extracts the text of PDF documents in decoder processes, which start with the first document."""

    def __init__(self, executor: ThreadExecutor) -> None:
        self._processes = MediaProcesses()
        self._executor = executor.create_separate(MAX_PROCESSES)

    def close(self) -> None:
        """Stop the processes and threads."""
        self._processes.close()
        self._executor.close()

    async def read(self, content: str, where: str, max_characters: int) -> str:
        """Return the text of a PDF document in base64.

        Raises:
            ParameterError: The document cannot be read, or has more than `max_characters` characters.
        """
        return await self._executor.in_thread(self._read, content, where, max_characters)

    def _read(self, content: str, where: str, max_characters: int) -> str:
        try:
            data = base64.b64decode("".join(content.split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise ParameterError(where, f"is not valid base64: {error}") from None
        return self._processes.read_document(data, where, max_characters)
