"""Chooses the attention backend at start."""

import torch

from ...protocol.errors import ConfigError
from .interface import AttentionBackend
from .torch_paged import TorchPagedAttention

NAMES = ("torch_paged", "triton_paged", "triton_batch_invariant")


def attention_backend(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    name: str | None = None,
) -> AttentionBackend:
    """Return the backend `name` for these layers, or the device's best.

    Raises `ConfigError` for an unknown name, or one that cannot be had.
    """
    name = name or ("triton_paged" if device.type == "cuda" else "torch_paged")
    return _backend_class(name)(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )


def _backend_class(name: str) -> type[AttentionBackend]:
    if name == "torch_paged":
        return TorchPagedAttention
    if name not in NAMES:
        raise ConfigError(
            f"the attention backend {name!r} does not exist; choose {', '.join(NAMES)}"
        )
    try:
        from .batch_invariant import BatchInvariantAttention
        from .triton_paged import TritonPagedAttention
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the attention backend {name} needs {error.name}: pip install 'engine[cuda]'"
        ) from error
    return TritonPagedAttention if name == "triton_paged" else BatchInvariantAttention
