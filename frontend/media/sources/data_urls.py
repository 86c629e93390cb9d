"""Decode data URLs, which contain a file in the URL itself."""

from __future__ import annotations

import base64
import binascii
from typing import Final
from urllib.parse import unquote

from ....protocol.errors import ParameterError
from ...http.shown_values import echo

_SCHEME: Final = "data:"


def is_data_url(url: str) -> bool:
    """Return whether a URL contains the file itself."""
    return url[: len(_SCHEME)].lower() == _SCHEME


def read_data_url(url: str, where: str) -> bytes:
    """Return the content of the file in a data URL (RFC 2397).

    Args:
        url: The URL.
        where: The name of the field in errors.

    Raises:
        ParameterError: The URL is not a data URL, is not in base64, or is invalid.
    """
    if not is_data_url(url):
        raise ParameterError(
            where,
            'must be a data URL such as "data:image/png;base64,…", because this server downloads nothing '
            "without --allowed-media-domains; "
            f"got {echo(url[:64])}",
        )
    header, comma, content = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise ParameterError(where, "must be a base64 data URL: data:image/png;base64,…")
    # As in all URLs, characters may be written as their codes.
    return read_base64(unquote(content) if "%" in content else content, where)


def read_base64(text: str, where: str) -> bytes:
    """Return the bytes of a text in base64, which may contain white space, but no other characters.

    Raises:
        ParameterError: The text is not valid base64.
    """
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ParameterError(where, f"is not valid base64: {error}") from None
