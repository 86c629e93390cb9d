"""Attention over the paged KV cache, with several backends behind one small interface."""

from ..batch import AttentionBatch
from .interface import (
    AttentionBackend,
    AttentionLayer,
    AttentionSpec,
    CapturableAttention,
    DeviceAttention,
    DeviceBatch,
    IndexQueries,
    PagedAttention,
    as_backend,
)
from .registry import attention_backend

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionLayer",
    "AttentionSpec",
    "CapturableAttention",
    "DeviceAttention",
    "DeviceBatch",
    "IndexQueries",
    "PagedAttention",
    "as_backend",
    "attention_backend",
]
