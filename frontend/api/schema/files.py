"""The request bodies of OpenAI's Files and Batches."""

from __future__ import annotations

from typing import Any

import msgspec

from . import Int


class FileRequest(msgspec.Struct, kw_only=True):
    """The fields other than `file` in the form of `POST /v1/files`."""

    purpose: str | None = None
    # The lifetime of the file in Anthropic's API.
    expires_in_seconds: Int | None = None
    expires_anchor: str | None = msgspec.field(name="expires_after[anchor]", default=None)
    expires_seconds: Int | None = msgspec.field(name="expires_after[seconds]", default=None)


class BatchRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/batches`."""

    input_file_id: str | None = None
    endpoint: str | None = None
    completion_window: str | None = None
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None
