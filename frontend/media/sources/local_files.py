"""Read images and audio from a directory that the operator allows."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from ....protocol.errors import ParameterError
from ...http.shown_values import echo
from .downloads import MAX_BYTES

_SCHEME: Final = "file:"


def is_file_url(url: str) -> bool:
    """Return whether a URL names a file of the server's machine."""
    return url[: len(_SCHEME)].lower() == _SCHEME


class LocalFiles:
    """Reads the files in one directory and its subdirectories. Symbolic links out of it are not followed.

    Args:
        directory: The directory.
    """

    def __init__(self, directory: str) -> None:
        self._root = Path(directory).resolve()

    def read(self, url: str, where: str) -> bytes:
        """Return the content of the file at a URL such as file:///directory/name (RFC 8089).

        Raises:
            ParameterError: The file is not in the directory, or cannot be read; `where` names the field.
        """
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path)).resolve()
        except (OSError, ValueError):
            raise ParameterError(where, f"is not a valid URL: {echo(url)}") from None
        if parts.netloc not in ("", "localhost") or not path.is_relative_to(self._root):
            raise ParameterError(
                where,
                f"must name a file in the directory of --allowed-local-media-path, got {echo(url)}",
            )
        try:
            # Opening a pipe must not wait for its writer.
            number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(number, "rb") as file:
                found = os.fstat(number)
                if not stat.S_ISREG(found.st_mode):
                    raise ParameterError(where, f"does not name a regular file: {echo(url)}")
                if found.st_size > MAX_BYTES:
                    raise ParameterError(where, f"has more than {MAX_BYTES} bytes")
                return file.read(MAX_BYTES)
        except OSError as error:
            raise ParameterError(where, f"cannot be read: {error.strerror}") from None
