"""Chooses the attention backend at start."""

from typing import Literal, TypeAlias

import torch

from ...protocol.errors import ConfigError
from .interface import AttentionBackend
from .torch_paged import TorchPagedAttention

BackendName: TypeAlias = Literal["torch_paged", "triton_paged", "triton_batch_invariant"]


def attention_backend(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    name: BackendName | None = None,
) -> AttentionBackend:
    """Return the backend `name` for these layers, or the device's best.

    Raises `ConfigError` if Triton, which it needs, is not there.
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


def _backend_class(name: BackendName) -> type[AttentionBackend]:
    if name == "torch_paged":
        return TorchPagedAttention
    try:
        from .batch_invariant import BatchInvariantAttention
        from .triton_paged import TritonPagedAttention
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the attention backend {name} needs {error.name}: pip install 'engine[cuda]'"
        ) from error
    triton = {
        "triton_paged": TritonPagedAttention,
        "triton_batch_invariant": BatchInvariantAttention,
    }
    return triton[name]
