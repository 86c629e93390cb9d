"""Read the files at the URLs that a server may read."""

from __future__ import annotations

from typing import Any

from ....protocol.config import FrontendConfig
from ...client.executor import ThreadExecutor
from .data_urls import is_data_url, read_data_url
from .downloads import Downloader
from .local_files import LocalFiles, is_file_url


class MediaUrls:
    """Reads the files at URLs: of data URLs, and of the hosts and the directory that the configuration allows."""

    def __init__(self, config: FrontendConfig, executor: ThreadExecutor) -> None:
        self._downloader: Downloader | None = None
        if config.allowed_media_domains:
            self._downloader = Downloader(config.allowed_media_domains)
        self._files: LocalFiles | None = None
        if config.allowed_local_media_path is not None:
            self._files = LocalFiles(config.allowed_local_media_path)
        # A slow host or file system must not delay files that have arrived already.
        self._executor = executor.create_separate()

    def close(self) -> None:
        """Stop the threads."""
        self._executor.close()

    async def fetch(self, source: Any, where: str) -> Any:
        """Return the file at a URL that contains no file; any other `source` unchanged.

        Raises:
            ParameterError: The file cannot be read; `where` names the field.
        """
        if not isinstance(source, str) or is_data_url(source):
            return source
        if is_file_url(source) and self._files is not None:
            return await self._executor.in_thread(self._files.read, source, where)
        if self._downloader is not None:
            return await self._executor.in_thread(self._downloader.download, source, where)
        return source

    async def read(self, url: str, where: str) -> bytes:
        """Return the file at a URL.

        Raises:
            ParameterError: The file cannot be read; `where` names the field.
        """
        found = await self.fetch(url, where)
        if isinstance(found, bytes):
            return found
        return await self._executor.in_thread(read_data_url, url, where)
