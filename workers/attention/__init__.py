"""Attention over the paged KV cache, behind one small interface."""

from .interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    CapturableAttention,
    DeviceBatch,
    PagedAttention,
)
from .registry import attention_backend

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionLayer",
    "CapturableAttention",
    "DeviceBatch",
    "PagedAttention",
    "attention_backend",
]
