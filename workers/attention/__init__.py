"""Attention over the paged KV cache, behind one small interface."""

from .interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionSpec,
    CapturableAttention,
    DeviceBatch,
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
    "PagedAttention",
    "attention_backend",
]
