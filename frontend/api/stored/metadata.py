"""The metadata that clients attach to objects."""

from __future__ import annotations

from typing import Final

from ...http.errors import APIError, bad_request

MAX_METADATA: Final = 16
"""Maximum number of pairs in `metadata`."""
MAX_METADATA_KEY: Final = 64
MAX_METADATA_VALUE: Final = 512


def verify_metadata(metadata: dict[str, str] | None) -> None:
    """Raise APIError 400 for metadata that is too large."""
    if len(metadata or ()) > MAX_METADATA:
        raise bad_request(
            "metadata",
            f"must have at most {MAX_METADATA} pairs, got {len(metadata or ())}",
        )
    for key, value in (metadata or {}).items():
        if len(key) > MAX_METADATA_KEY:
            raise APIError(
                400,
                f"keys of metadata must have at most {MAX_METADATA_KEY} characters, got {len(key)}",
                param="metadata",
            )
        if len(value) > MAX_METADATA_VALUE:
            raise APIError(
                400,
                f"values of metadata must have at most {MAX_METADATA_VALUE} characters, got {len(value)}",
                param="metadata",
            )
