"""Chooses the attention backend at start."""

import torch

from ...protocol.errors import ConfigError
from .interface import AttentionBackend
from .torch_paged import TorchPagedAttention

_BACKENDS: dict[str, type[AttentionBackend]] = {"torch_paged": TorchPagedAttention}


def attention_backend(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    name: str = "torch_paged",
) -> AttentionBackend:
    """Return the backend `name` for these layers. Raises `ConfigError` for an unknown name."""
    if name not in _BACKENDS:
        raise ConfigError(
            f"the attention backend {name!r} does not exist; choose {', '.join(_BACKENDS)}"
        )
    return _BACKENDS[name](
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
