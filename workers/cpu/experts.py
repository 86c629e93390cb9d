"""A layer's mixture of experts, read from a checkpoint for native code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..layers.spec import ExpertsSpec, ModelSpec
from ..parallel.shard import ModelShard
from ..parallel.tensor_parallel import TensorParallel
from . import library
from .library import NotSupportedNatively
from .weights import ActivationKind, NativeWeightReader, PackedWeight, intermediate_shares

_SCORING = {"softmax": 0, "sigmoid": 1, "sparse mixer": 2}
_NUM_BEST = {"best": 1, "best two": 2}

Floats = NDArray[np.float32]


class NativeExperts(library.ExpertLayer):
    """The router's parameters and the experts of this rank; native code takes its address.

    Keeps the matrices and vectors that it points to alive. The ranks have a share of the elements of every expert, or
    with expert parallelism whole experts.
    """

    def __init__(
        self,
        spec: ModelSpec,
        experts: ExpertsSpec,
        weights: NativeWeightReader,
        prefix: str,
        shard: ModelShard,
    ) -> None:
        _check(experts)
        placement = shard.placement(experts)
        size, outer_size = experts.intermediate_size, experts.latent_size or spec.hidden_size
        if outer_size > spec.hidden_size:
            raise NotSupportedNatively(
                f"experts of {outer_size} elements, more than the hidden size {spec.hidden_size}, are not supported "
                "natively, only in torch"
            )
        parallel = TensorParallel() if shard.has_whole_experts else shard.tensor_parallel
        shares = intermediate_shares(size, parallel)
        names = ["gate_proj", "up_proj"] if spec.has_gate else ["up_proj"]
        matrices: list[list[PackedWeight]] = [[], [], []]
        biases: list[list[Floats]] = [[], [], []]
        for expert in placement.experts:
            name = f"{prefix}experts.{expert}."
            count = len(names)
            rows = weights.rows(name, names, [size] * count, [shares[parallel.rank]] * count)
            down = weights.packed_columns(
                f"{name}down_proj.weight", outer_size, size, shares, parallel.rank
            )
            for kind, matrix in zip(
                matrices, weights.packed_together(rows, outer_size), strict=False
            ):
                kind.append(matrix)
            matrices[2].append(down)
            if experts.has_biases:
                for each, of_kind in zip(rows, biases, strict=False):
                    of_kind.append(weights.vector(f"{each.name}.bias", each.total, each.part))
                biases[-1].append(weights.vector(f"{name}down_proj.bias", outer_size))
        weights.skip([f"{prefix}experts.{expert}." for expert in placement.elsewhere])
        # One rank of those that share an expert adds its bias.
        if not placement.adds_bias:
            biases[-1] = []
        self._vectors = [np.concatenate(of_kind) if of_kind else None for of_kind in biases]
        correction = None
        if experts.has_correction_bias:
            name = f"{prefix}gate.e_score_correction_bias"
            correction = weights.read_elements(name, experts.num_experts).numpy()
        scales = None
        if experts.has_expert_scales:
            name = f"{prefix}gate.per_expert_scale"
            scales = weights.vector(name, experts.num_experts)
        self._of_experts = correction, scales
        router = library.Router(
            experts.num_experts,
            experts.num_experts_per_token,
            _SCORING[experts.scoring],
            experts.renormalizes,
            experts.num_groups,
            experts.num_groups_per_token,
            _NUM_BEST[experts.group_score],
            experts.scale,
            experts.mixer_noise,
            _address(correction),
            _address(scales),
        )
        super().__init__(
            router,
            outer_size,
            placement.experts.start,
            len(placement.experts),
            bool(experts.shared_intermediate_size) and not experts.latent_size,
            experts.has_shared_gate,
            experts.scales_inputs,
            *map(_array, matrices),
            *map(_address, self._vectors),
        )
        self._matrices = matrices
        self.input_kind = _common_kind(prefix, matrices[0]).for_whole_rows
        self.output_kind = _common_kind(prefix, matrices[2])


def _check(experts: ExpertsSpec) -> None:
    """Raise an error if a token cannot choose as many experts as it should."""
    group_size, rest = divmod(experts.num_experts, experts.num_groups)
    num_allowed = group_size * min(experts.num_groups_per_token, experts.num_groups)
    if rest or (experts.num_groups > 1 and experts.num_experts_per_token > num_allowed):
        raise NotSupportedNatively(
            f"{experts.num_experts} experts in {experts.num_groups} groups, of which a token chooses "
            f"{experts.num_groups_per_token}, do not give every token {experts.num_experts_per_token} experts"
        )


def _common_kind(prefix: str, matrices: Sequence[PackedWeight]) -> ActivationKind:
    kinds = {matrix.activation_kind for matrix in matrices}
    if len(kinds) > 1:
        raise NotSupportedNatively(
            f"the experts of {prefix.rstrip('.')} are stored in formats for different activations: "
            f"{', '.join(sorted(kind.name for kind in kinds))}"
        )
    return kinds.pop()


def _array(matrices: Sequence[PackedWeight]) -> Any:
    if not matrices:
        return None
    return (library.PackedWeight * len(matrices))(*matrices)


def _address(vector: Floats | None) -> int | None:
    return None if vector is None else vector.ctypes.data
