"""A native program: operations that are recorded once and replayed in every step."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..device.dtypes import AnyArray, address, float32_array
from ..layers.parallel.expert_group import ExpertGroup
from ..layers.parallel.tensor_parallel import TensorParallel
from ..layers.rope import RopeSpec
from .abi.description import enum_names
from .abi.structs import MAX_PARTS, DecodeBatch, ModelShape, Op, Step, StepGroup
from .adapters import AdapterTable, NativeAdapters
from .attention import NativeAttentionMetadata
from .exchange import share_memory
from .experts import NativeExpertExchange, NativeExperts
from .head_matrices import HeadMatrices
from .library import native_library
from .packing import PackedWeight

_PRODUCTS = ("linear", "gated_linear")
_CACHE_OPS = ("rotate_store", "attention", "convolve_inside")
_POINTERS = {name for name, kind, *_ in Op._fields_ if kind is ctypes.c_void_p}
_KIND = {name: number for number, name in enumerate(enum_names("OpKind"))}
Floats = NDArray[np.float32]


class NativeProgram:
    """The C++ class `Program` of `csrc/program/program.h`, with the threads that run it.

    Attributes:
        is_optional: True if operations that are added are skipped in steps without encoder outputs to read.
        is_deferred: True if operations that are added run only when `repeat` appends them.
    """

    def __init__(
        self, shape: ModelShape, norm_eps: float, adapters: NativeAdapters | None = None
    ) -> None:
        self._adapters = adapters
        self._exchange: NativeExpertExchange | None = None
        self._library = native_library()
        self._kept: list[Any] = []
        self._kinds: list[str] = []
        self._ops: list[tuple[str, Op]] = []
        self._eps = norm_eps
        self.is_optional = False
        self.is_deferred = False
        self._handle = self._library.engine_program_new(ctypes.byref(shape))

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.engine_program_free(handle)

    def add_rope(
        self, rope: RopeSpec, max_model_len: int, log_factors: Floats | None = None
    ) -> None:
        """Add a rotary embedding, whose tables are computed in every step.

        `log_factors` are the stored numbers of a rope that `has_factors`, float32 [rotary_dim / 2].
        """
        inv_freq, factor = rope.inverse_frequencies(max_model_len)
        if log_factors is not None:
            inv_freq = inv_freq * np.exp(log_factors)
        self.add_rotation(inv_freq, factor, rope.axes)

    def add_rotation(
        self,
        inv_freq: AnyArray,
        factor: float,
        axis_of_each: Sequence[int],
        shifts: Sequence[float] = (),
    ) -> None:
        """Add a rotation with these frequencies, whose sines and cosines are multiplied by `factor`.

        If `axis_of_each` is given, it says which of a token's three positions each frequency uses. If `shifts` are
        given, one for each frequency, their products with the third position are added to the angles.
        """
        frequencies = float32_array(inv_freq)
        axes, shift_of_each = np.array(axis_of_each, np.int32), np.array(shifts, np.float32)
        self._library.engine_program_add_rope(
            self._handle,
            frequencies.ctypes.data,
            len(frequencies),
            factor,
            axes.ctypes.data if len(axes) else None,
            shift_of_each.ctypes.data if len(shift_of_each) else None,
        )

    def add_op(
        self,
        kind: str,
        *,
        parts: Sequence[PackedWeight] = (),
        vectors: Sequence[Floats | None] = (),
        experts: NativeExperts | None = None,
        heads: HeadMatrices | None = None,
        **fields: Any,
    ) -> None:
        """Append an operation. The program keeps the arrays that it refers to alive.

        Args:
            kind: The kind of operation, one of `OP_KINDS`.
            parts: The operation's matrices.
            vectors: The operation's vectors, such as biases; None for absent ones.
            experts: The mixture of experts that the operation belongs to.
            heads: A matrix for each query head.
            fields: Values of `Op`'s other fields; for pointers, the structs that they point to. By default, `scale` is
                1 and `eps` the model's.
        """
        if kind == "gated_experts" and experts is not None and self._adapters is not None:
            experts.adapt(self._adapters)
        table = None if self._adapters is None else self._table(self._adapters, kind, parts)
        if table is not None:
            self._kept.append(table)
            fields |= {"adapter_rank": table.rank, "adapters": ctypes.addressof(table.entries)}
        self._add(kind, parts, vectors, heads, experts=experts, **fields)

    @property
    def num_ops(self) -> int:
        """The number of operations so far, with those that are deferred."""
        return len(self._ops)

    def repeat(self, ops: range, first_layer: int, groups: Sequence[int]) -> None:
        """Append operations again, with other tensors of the KV cache.

        Args:
            ops: The range of the operations.
            first_layer: The difference between the numbers of the tensors.
            groups: The group of the KV cache for each of the tensors that the operations use, in order.
        """
        recorded = [self._ops[i] for i in ops]
        numbers = sorted({op.layer for kind, op in recorded if kind in _CACHE_OPS})
        for kind, recorded_op in recorded:
            op = Op.from_buffer_copy(recorded_op)
            if kind in _CACHE_OPS:
                op.group = groups[numbers.index(op.layer)]
                op.layer += first_layer
            self._append(kind, op)

    def _table(
        self, adapters: NativeAdapters, kind: str, parts: Sequence[PackedWeight]
    ) -> AdapterTable | None:
        """Return the adapters of an operation, or None if they cannot change it."""
        if kind in _PRODUCTS:
            return adapters.table(parts)
        if kind == "embed" and parts:
            return adapters.embedding_table(parts[0])
        return adapters.head_table(parts[0]) if kind == "head" and parts else None

    def _add(
        self,
        kind: str,
        parts: Sequence[PackedWeight],
        vectors: Sequence[Floats | None] = (),
        heads: HeadMatrices | None = None,
        **fields: Any,
    ) -> None:
        self._kept += [*parts, *vectors, heads]
        for name in _POINTERS & fields.keys():
            if isinstance(pointed := fields[name], ctypes.Structure):
                self._kept.append(pointed)
                fields[name] = ctypes.addressof(pointed)
        fields = {"scale": 1.0, "eps": self._eps, "is_optional": self.is_optional} | fields
        op = Op(kind=_KIND[kind], num_parts=len(parts), **fields)
        op.parts = (ctypes.c_void_p * MAX_PARTS)(*(ctypes.addressof(part) for part in parts))
        op.vectors = (ctypes.c_void_p * MAX_PARTS)(
            *(None if vector is None else vector.ctypes.data for vector in vectors)
        )
        if heads is not None:
            op.heads = heads.address
        self._append(kind, op)

    def _append(self, kind: str, op: Op) -> None:
        self._ops.append((kind, op))
        if self.is_deferred:
            return
        self._kinds.append(kind)
        self._library.engine_program_add(self._handle, ctypes.byref(op))

    def join_ranks(self, tensor_parallel: TensorParallel) -> None:
        """Make this program one of several ranks, which run the same steps from now on.

        Raises:
            NotSupportedNatively: The ranks cannot share memory. This is raised on every rank.
        """
        size = self._library.engine_program_exchange_bytes(self._handle, tensor_parallel.size)
        memory = np.frombuffer(share_memory(tensor_parallel, size), np.uint8)
        self._kept.append(memory)
        self._library.engine_program_join(
            self._handle, memory.ctypes.data, tensor_parallel.rank, tensor_parallel.size
        )

    def join_experts(self, group: ExpertGroup) -> None:
        """From now on, divide the experts of every layer among the ranks of a group."""
        self._exchange = NativeExpertExchange(group)
        self._library.engine_program_join_experts(self._handle, ctypes.byref(self._exchange))

    def join_round(self) -> None:
        """Compute rows of other replicas, which chose experts of this rank. Raise RuntimeError if a rank is lost."""
        assert self._exchange is not None
        self._library.engine_program_join_round(self._handle)
        self._exchange.raise_if_failed()

    def run(self, step: Step) -> bool:
        """Run a step. Return False without doing anything if a token is not in the vocabulary."""
        with self._round_of(step.num_tokens):
            return bool(self._library.engine_program_run(self._handle, ctypes.byref(step)))

    @contextmanager
    def _round_of(self, num_rows: int) -> Iterator[None]:
        """A context in which a round of expert parallelism runs, if replicas divide the experts and there are rows."""
        if self._exchange is None or not num_rows:
            yield
            return
        self._exchange.group.begin_round(self.join_round)
        yield
        self._exchange.raise_if_failed()

    def decode(self, batch: DecodeBatch) -> int:
        """Decode a batch.

        Return how many rows could not be sampled, or -1 without doing anything if the batch is invalid.
        """
        with self._round_of(batch.num_slots):
            return int(self._library.engine_program_decode(self._handle, ctypes.byref(batch)))

    def choose_tokens(self, batch: DecodeBatch) -> int:
        """Choose the tokens of a batch that `chooses_later`, after `decode`.

        Return how many rows could not be sampled.
        """
        return int(self._library.engine_program_choose(self._handle, ctypes.byref(batch)))

    def profile(self) -> list[tuple[str, float]]:
        """Return (kind, seconds so far) for each operation, in order, and for the final "sample"."""
        kinds = [*self._kinds, "sample"]
        seconds = np.empty(len(kinds))
        self._library.engine_program_profile(self._handle, seconds.ctypes.data)
        return list(zip(kinds, seconds.tolist(), strict=True))


class StoringProgram(NativeProgram):
    """A program that computes and stores keys and values, without attention."""

    def store(
        self,
        hidden_TD: NDArray[np.float32],
        positions_T: NDArray[np.int32],
        kv_caches: Sequence[AnyArray],
        attn_metadata: Mapping[int, NativeAttentionMetadata],
    ) -> None:
        """Store the keys and values of `hidden_TD` in the caches of the groups in `attn_metadata`."""
        ids_T = np.zeros_like(positions_T)
        groups = (StepGroup * (1 + max(attn_metadata)))()
        for group, metadata in attn_metadata.items():
            groups[group].block_table = metadata.block_table.ctypes.data
            groups[group].block_table_stride = metadata.block_table.shape[1]
            groups[group].slot_mapping = metadata.slot_mapping.ctypes.data
        pointers = (ctypes.c_void_p * len(kv_caches))(*map(address, kv_caches))
        step = Step(
            num_tokens=len(hidden_TD),
            num_sequences=len(metadata.query_start_loc) - 1,
            wants_all_hidden=True,
            input_ids=ids_T.ctypes.data,
            positions=positions_T.ctypes.data,
            query_start_loc=metadata.query_start_loc.ctypes.data,
            groups=groups,
            kv_caches=pointers,
            hidden=hidden_TD.ctypes.data,
            hidden_stride=hidden_TD.shape[1],
        )
        self.run(step)
