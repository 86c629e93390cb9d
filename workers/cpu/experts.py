"""Mixtures of experts for native code: this rank's experts, and the exchange of rows with ranks that have others."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...protocol.errors import CheckpointError
from ..layers.parallel.expert_group import ExpertGroup
from ..layers.parallel.shard import ModelShard
from ..layers.parallel.tensor_parallel import TensorParallel
from ..layers.spec import ModelSpec
from ..layers.specs.experts import ExpertsSpec, GateLimit
from ..models.experts.router import read_corrections, unused_experts
from .abi import structs
from .adapters import AdapterTable, NativeAdapters
from .library import NotSupportedNatively
from .packing import PackedWeight, common_kind
from .weights import NativeWeightReader, intermediate_shares

_SCORING = {"softmax": 0, "sigmoid": 1, "sparse mixer": 2, "sqrt softplus": 3}
_NUM_BEST = {"best": 1, "best two": 2}

Floats = NDArray[np.float32]


class NativeExperts(structs.ExpertLayer):
    """The router's parameters and this rank's experts, as a struct whose address is passed to native code.

    It keeps the matrices and vectors that it points to alive. A rank has a part of the elements of every expert or,
    with expert parallelism, some whole experts.
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
        outer_size = experts.latent_size or spec.hidden_size
        if outer_size > spec.hidden_size:
            raise NotSupportedNatively(
                f"experts with {outer_size} elements, more than the hidden size {spec.hidden_size}, are "
                "supported only in torch, not natively"
            )
        parallel = TensorParallel() if shard.has_whole_experts else shard.tensor_parallel
        names = ["gate_proj", "up_proj"] if spec.has_gate else ["up_proj"]
        matrices: list[list[PackedWeight]] = [[], [], []]
        biases: list[list[Floats]] = [[], [], []]
        for number in placement.experts:
            name = f"{prefix}{experts.stored_name(number)}."
            size, count = experts.size_in(number % experts.num_mixtures), len(names)
            shares = intermediate_shares(size, parallel)
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
        weights.skip(unused_experts(experts, prefix, placement.elsewhere))
        # Only one of the ranks that share an expert adds its bias.
        if not placement.adds_bias:
            biases[-1] = []
        correction = None
        if experts.has_correction_bias:
            correction = read_corrections(experts, weights, f"{prefix}gate.").numpy()
        scales = None
        if experts.has_expert_scales:
            name = f"{prefix}gate.per_expert_scale"
            scales = weights.vector(name, experts.num_experts + experts.num_identities)
        by_token: NDArray[np.int32] | None = None
        if experts.is_hashed:
            shape = spec.vocab_size, experts.num_experts_per_token
            by_token = weights.floats(f"{prefix}gate.tid2eid", *shape).astype(np.int32)
            if by_token.min() < 0 or by_token.max() >= experts.num_experts:
                raise CheckpointError(
                    weights.checkpoint.path,
                    f"{prefix}gate.tid2eid has experts {by_token.min()} to {by_token.max()}, but they are numbered from "
                    f"0 to {experts.num_experts - 1}; download the checkpoint again",
                )
        scale = experts.scale
        if experts.has_stored_scale:
            scale *= weights.vector(f"{prefix}gate.global_scale", 1).item()
        second_tokens = np.array(experts.second_tokens, np.int32)
        router = structs.Router(
            experts.num_experts + experts.num_identities,
            experts.num_computed_per_token,
            experts.num_identities,
            experts.skips_identities,
            experts.num_always,
            _SCORING[experts.scoring],
            experts.renormalizes,
            experts.num_groups,
            experts.num_groups_per_token,
            _NUM_BEST[experts.group_score],
            experts.corrects_logits,
            scale,
            experts.mixer_noise,
            experts.logit_softcap,
            correction,
            scales,
            by_token,
            len(second_tokens),
            second_tokens,
            experts.adjugate_group,
            experts.adjugate_scale,
        )
        super().__init__(
            router,
            outer_size,
            placement.experts.start,
            len(placement.experts),
            bool(experts.shared_intermediate_size) and not experts.latent_size,
            experts.has_shared_gate,
            experts.scales_inputs,
            native_limit(experts.gate_limit),
            *map(_array, matrices),
            *(np.concatenate(of_kind) if of_kind else None for of_kind in biases),
        )
        self._matrices = matrices
        self._has_gate = spec.has_gate
        # Rows from other replicas arrive without their adapters.
        self._is_exchanged = shard.expert_group is not None
        self._tables: list[AdapterTable | None] = []
        self._pointers: list[Any] = []
        owner = prefix.rstrip(".")
        self.input_kind = common_kind(owner, matrices[0]).for_whole_rows
        self.output_kind = common_kind(owner, matrices[2])

    def adapt(self, adapters: NativeAdapters) -> None:
        """Let LoRA adapters change the experts, unless replicas divide the experts."""
        if self._is_exchanged:
            return
        first, second, down = self._matrices
        gated = zip(first, second, strict=True) if self._has_gate else ((each,) for each in first)
        self.gated_adapters = self._add_tables([adapters.table(parts) for parts in gated])
        self.output_adapters = self._add_tables([adapters.table((each,)) for each in down])

    def _add_tables(self, tables: list[AdapterTable | None]) -> int:
        """Return the address of the table entries for each expert."""
        pointers = (ctypes.c_void_p * len(tables))(
            *(None if table is None else ctypes.addressof(table.entries) for table in tables)
        )
        self._tables += tables
        self._pointers.append(pointers)
        return ctypes.addressof(pointers)


def _check(experts: ExpertsSpec) -> None:
    """Raise NotSupportedNatively if the sum has a bias, or if a token chooses more experts than its groups have."""
    if experts.has_sum_bias:
        raise NotSupportedNatively("the native CPU backend has no bias of the sum of experts")
    group_size, rest = divmod(experts.num_experts + experts.num_identities, experts.num_groups)
    num_allowed = group_size * min(experts.num_groups_per_token, experts.num_groups)
    if rest or (experts.num_groups > 1 and experts.num_experts_per_token > num_allowed):
        raise NotSupportedNatively(
            f"{experts.num_experts} experts in {experts.num_groups} groups, {experts.num_groups_per_token} "
            f"of them chosen per token, are too few for {experts.num_experts_per_token} experts per token"
        )


def _array(matrices: Sequence[PackedWeight]) -> Any:
    if not matrices:
        return None
    return (structs.PackedWeight * len(matrices))(*matrices)


class NativeExpertExchange(structs.ExpertExchange):
    """The callbacks of a native program in a round of expert parallelism; see `csrc/model/expert_exchange.h`.

    Any of the program's threads may call them, one at a time. An exception cannot pass through native code. It ends the
    exchange instead, and `raise_if_failed` raises it after the step.
    """

    def __init__(self, group: ExpertGroup) -> None:
        self.group = group
        self._error: BaseException | None = None
        # Native code reads these tensors until the next exchange, so keep them alive.
        self._received: Tensor | None = None
        self._collected: Tensor | None = None
        functions = {name: kind for name, kind, *_ in structs.ExpertExchange._fields_}
        calls = [
            self._guarded(function)
            for function in (self._begin_round, self._dispatch, self._collect)
        ]
        names = ("begin_round", "dispatch", "collect")
        super().__init__(
            group.size, *(functions[name](call) for name, call in zip(names, calls, strict=True))
        )
        self._keep_errors_of(calls)

    def raise_if_failed(self) -> None:
        """Raise the error that ended an exchange."""
        if self._error is not None:
            raise self._error

    def _keep_errors_of(self, calls: list[Callable[..., int]]) -> None:
        """Catch errors that signal handlers raise before the first line of a callback, where no `try` catches them."""
        report = sys.unraisablehook

        def keep(unraisable: Any) -> None:
            if unraisable.object in calls:
                self._error = self._error or unraisable.exc_value
            else:
                report(unraisable)

        sys.unraisablehook = keep

    def _guarded(self, function: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            if self._error is not None:
                return 0
            try:
                return function(*args)
            except BaseException as error:
                self._error = error
                return 0

        return call

    def _begin_round(self) -> int:
        self.group.continue_step()
        return 1

    def _dispatch(self, rows: int, row_bytes: int, counts: int, received: int) -> int:
        counts_N = self._counts(counts)
        x_MD = _view(rows, (int(counts_N.sum()), row_bytes), np.uint8)
        self._received, received_N = self.group.dispatch(x_MD, counts_N)
        self._counts(received).copy_(received_N)
        return _address_of(self._received)

    def _collect(self, rows: int, row_bytes: int, counts: int, expected: int) -> int:
        counts_N = self._counts(counts)
        y_BD = _view(rows, (int(counts_N.sum()), row_bytes), np.uint8)
        self._collected = self.group.exchange(y_BD, counts_N, self._counts(expected))
        return _address_of(self._collected)

    def _counts(self, address: int) -> Tensor:
        return _view(address, (self.group.size,), np.int64)


_NOTHING = np.zeros(64, np.uint8)
"""A valid address for zero rows, because a null pointer means that a rank is lost."""


def _address_of(rows: Tensor) -> int:
    return rows.data_ptr() or _NOTHING.ctypes.data


def _view(address: int, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """Return a tensor on memory that native code keeps until this exchange ends."""
    if 0 in shape:
        return torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = (ctypes.c_uint8 * size).from_address(address)
    return torch.from_numpy(np.frombuffer(memory, dtype).reshape(shape))


def native_limit(limit: GateLimit | None) -> structs.GateLimit:
    """Return a limit of gates as native code expects it."""
    if limit is None:
        return structs.GateLimit()
    return structs.GateLimit(limit.value, limit.is_activated)
