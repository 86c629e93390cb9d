"""The digest of the store's messages, by which two engines find out whether they understand each other."""

from __future__ import annotations

import hashlib

import msgspec

from .messages import FromStore, ToStore


def message_digest() -> str:
    """Return a digest of the fields of all messages. It differs between versions whose messages differ."""
    fields = repr(msgspec.inspect.multi_type_info([ToStore, FromStore]))
    return hashlib.sha256(fields.encode()).hexdigest()[:16]
