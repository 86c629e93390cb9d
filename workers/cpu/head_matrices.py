"""Read a layer's matrices that exist once per query head, for native code."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ..layers.spec import ModelSpec
from ..layers.specs.latent import LatentSpec
from ..models.latent.attention import has_split_expansions, read_expansions, skip_other_heads
from .abi import structs
from .packing import PackedWeight, common_kind
from .weights import NativeWeightReader


class HeadMatrices:
    """The matrices of this rank's query heads, all of which multiply activations of the same format.

    It keeps the matrices alive whose `address` is passed to native code.

    Raises:
        NotSupportedNatively: The matrices multiply activations of different formats.
    """

    def __init__(self, matrices: Sequence[PackedWeight]) -> None:
        self.activation_kind = common_kind("a layer's heads", matrices)
        self._matrices = matrices
        self._array = (structs.PackedWeight * len(matrices))(*matrices)

    @property
    def address(self) -> int:
        """The address of the array of matrices."""
        return ctypes.addressof(self._array)


def read_head_matrices(
    spec: ModelSpec, latent: LatentSpec, weights: NativeWeightReader, prefix: str, heads: range
) -> tuple[HeadMatrices, HeadMatrices]:
    """Return two sets of matrices: from plain queries to latent queries, and from latent vectors to values."""
    if has_split_expansions(weights, prefix):
        keys = [
            weights.packed(f"{prefix}k_b_proj.{head}.weight", latent.kv_rank, latent.plain_dim)
            for head in heads
        ]
        values = [
            weights.packed(f"{prefix}v_b_proj.{head}.weight", latent.value_dim, latent.kv_rank)
            for head in heads
        ]
        skip_other_heads(spec, weights, prefix, heads)
    else:
        keys_HPC, values_HVC = read_expansions(spec, latent, weights, prefix, heads)
        name = f"{prefix}kv_b_proj.weight"
        keys = [weights.pack_tensor(name, keys_PC.T) for keys_PC in keys_HPC]
        values = [weights.pack_tensor(name, values_VC) for values_VC in values_HVC]
    return HeadMatrices(keys), HeadMatrices(values)
