"""Client secrets: keys for some minutes, which a web page gets in place of an API key (OpenAI's Realtime API).

A secret is signed with the API key of the client that created it, so every process of the server can check it without
storing it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import struct
from typing import Final

PREFIX: Final = b"ek_"
_HASH: Final = "sha256"
_SIZE: Final = 32
_EXPIRY: Final = struct.Struct("<Q")


def write_secret(key: bytes, expires_at: int, content: bytes) -> str:
    """Return a secret.

    Args:
        key: The digest of the API key.
        expires_at: The time from which the secret is invalid, in seconds since the epoch.
        content: The content of the secret, which its owner can read.
    """
    data = _EXPIRY.pack(expires_at) + content
    signed = base64.urlsafe_b64encode(hmac.digest(key, data, _HASH) + data)
    return (PREFIX + signed.rstrip(b"=")).decode()


def is_valid_secret(secret: bytes, key: bytes, now: float) -> bool:
    """Return whether a secret was signed with the digest of an API key and has not expired at the time `now`."""
    signature, data = _split(secret)
    if len(data) < _EXPIRY.size or not hmac.compare_digest(
        signature, hmac.digest(key, data, _HASH)
    ):
        return False
    expires_at: int = _EXPIRY.unpack_from(data)[0]
    return now < expires_at


def read_content(secret: bytes) -> bytes:
    """Return the content of a secret that is valid, or b"" for any other key."""
    return _split(secret)[1][_EXPIRY.size :]


def _split(secret: bytes) -> tuple[bytes, bytes]:
    """Return the signature of a secret and the data after it."""
    encoded = secret.removeprefix(PREFIX)
    if len(encoded) == len(secret):
        return b"", b""
    try:
        signed = base64.b64decode(encoded + b"=" * (-len(encoded) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b"", b""
    return signed[:_SIZE], signed[_SIZE:]
