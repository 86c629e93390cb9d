"""The request bodies of OpenAI's Files and Batches, and of stored chats."""

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


class UploadRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/uploads`: the file whose parts will follow."""

    bytes: Int | None = None
    filename: str | None = None
    # Has no effect, because the types of files are not checked.
    mime_type: str | None = None
    purpose: str | None = None
    expires_after: dict[str, Any] | None = None


class UploadPartForm(msgspec.Struct):
    """The fields other than `data` in the form of `POST /v1/uploads/{id}/parts`: none."""


class UploadCompletionRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/uploads/{id}/complete`: the parts in their order, and the MD5 digest of the file."""

    part_ids: list[str] | None = None
    md5: str | None = None


class BatchRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/batches`."""

    input_file_id: str | None = None
    endpoint: str | None = None
    completion_window: str | None = None
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None


class MetadataRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/chat/completions/{id}`."""

    metadata: dict[str, str] | None = None
