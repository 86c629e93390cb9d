"""The request bodies of stored objects."""

from __future__ import annotations

import msgspec


class MetadataRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/chat/completions/{id}`."""

    metadata: dict[str, str] | None = None
