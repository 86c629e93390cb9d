"""Attention over the paged KV cache, with several backends behind one small interface."""

from ..batch import AttentionBatch
from .interface import (
    AttentionBackend,
    AttentionLayer,
    AttentionSpec,
    CapturableAttention,
    DeviceBatch,
    IndexQueries,
    PagedAttention,
)
from .registry import attention_backend

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionLayer",
    "AttentionSpec",
    "CapturableAttention",
    "DeviceBatch",
    "IndexQueries",
    "PagedAttention",
    "attention_backend",
]
