"""Triton attention that sums a token's values in the same order in a prompt and in decoding (`--batch-invariant`)."""

from typing import ClassVar

from ...protocol.errors import ConfigError
from .interface import AttentionSpec
from .kernels.tiles import batch_invariant_tile
from .triton_paged import TritonPagedAttention


class BatchInvariantAttention(TritonPagedAttention):
    """Attention that uses the prompt kernel for every request. A single query is a tile, and keys are never split.

    Raises:
        ConfigError: The model has latent attention, or `TritonPagedAttention` does not support it.
    """

    fewest_tiled_queries: ClassVar[int] = 1

    def __init__(self, spec: AttentionSpec) -> None:
        if spec.latent_rank:
            raise ConfigError(
                "latent attention is not supported with --batch-invariant; remove the flag"
            )
        super().__init__(spec)
        self.prefill_tile = batch_invariant_tile(
            self.head_dim, self.num_heads // self.num_kv_heads, self.dtype
        )
