"""A digest of the store's message types, by which two engines determine whether their versions are compatible."""

from __future__ import annotations

import hashlib

import msgspec

from .messages import FromStore, ToStore


def message_digest() -> str:
    """Return a digest of the fields of all messages, which differs between versions with different messages."""
    fields = repr(msgspec.inspect.multi_type_info([ToStore, FromStore]))
    return hashlib.sha256(fields.encode()).hexdigest()[:16]
