"""A native program: operations that are recorded once and replayed in every step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..layers.rope import RopeSpec
from ..layers.spec import LayerSpec, ModelSpec
from ..parallel.shard import ModelShard
from ..parallel.tensor_parallel import TensorParallel
from .adapters import NativeAdapters
from .attention import KV_FORMATS, NativeAttention
from .exchange import share_memory
from .experts import NativeExperts
from .head_matrices import HeadMatrices
from .library import (
    MAX_PARTS,
    OP_KINDS,
    DecodeBatch,
    LatentShape,
    ModelShape,
    Op,
    Step,
    native_library,
)
from .mixers import NativeMixer, mixer_sizes
from .weights import PackedWeight, intermediate_shares

_KIND = {name: number for number, name in enumerate(OP_KINDS)}
ACTIVATIONS = {
    "silu": 0,
    "gelu_tanh": 1,
    "clamped_swiglu": 2,
    "relu2": 3,
    "gelu": 5,
    "relu": 6,
    # Its numbers belong to the operation.
    "xielu": 0,
}
"""The activations of MLPs by their numbers in `csrc`."""

Floats = NDArray[np.float32]


class NativeProgram:
    """`Program` of `csrc/program/program.h`, with the threads that run it."""

    def __init__(
        self,
        spec: ModelSpec,
        shard: ModelShard,
        attention: NativeAttention,
        num_threads: int,
        adapters: NativeAdapters | None = None,
    ) -> None:
        self._adapters = adapters
        self._library = native_library()
        self._kept: list[Any] = []
        self._kinds: list[str] = []
        self._eps = spec.norm_eps
        sizes = [
            mixer_sizes(layer.recurrent, shard.tensor_parallel.size)
            for layer in spec.layers
            if layer.recurrent is not None
        ]
        if spec.gates_attention:
            heads = 2 * len(shard.heads(spec)) + 2 * len(shard.kv_heads(spec))
            sizes.append((heads * spec.head_dim, 0))
        sizes += [(layer.experts.latent_size, 0) for layer in spec.layers if layer.experts]
        self._handle = self._library.engine_program_new(
            ctypes.byref(
                ModelShape(
                    spec.hidden_size,
                    _intermediate_size(spec, shard.tensor_parallel),
                    len(shard.heads(spec)),
                    len(shard.kv_heads(spec)),
                    spec.head_dim,
                    spec.num_token_ids,
                    attention.block_size,
                    KV_FORMATS[attention.dtype],
                    ACTIVATIONS[spec.activation],
                    spec.norm_kind == "layer",
                    not spec.is_causal,
                    spec.is_parallel,
                    max(map(_router_size, spec.layers)),
                    max((projection for projection, _ in sizes), default=0),
                    max((mixed for _, mixed in sizes), default=0),
                    _latent_shape(spec),
                    num_threads,
                )
            )
        )

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.engine_program_free(handle)

    def add_rope(self, rope: RopeSpec, max_model_len: int) -> None:
        """Compute tables of this rotary embedding in every step. Operations refer to it by its index."""
        inv_freq, factor = rope.inverse_frequencies(max_model_len)
        frequencies = np.ascontiguousarray(inv_freq.numpy(), np.float32)
        axes = np.array(rope.axes, np.int32)
        self._library.engine_program_add_rope(
            self._handle,
            frequencies.ctypes.data,
            len(frequencies),
            factor,
            axes.ctypes.data if rope.axes else None,
        )

    def add_op(
        self,
        kind: str,
        *,
        parts: Sequence[PackedWeight] = (),
        vectors: Sequence[Floats | None] = (),
        experts: NativeExperts | None = None,
        mixer: NativeMixer | None = None,
        heads: HeadMatrices | None = None,
        **fields: Any,
    ) -> None:
        """Append an operation. The program keeps the arrays that it refers to alive.

        A product that LoRA adapters change follows the operation that multiplies by their first factors.

        Args:
            kind: The kind of operation, one of `OP_KINDS`.
            parts: The operation's matrices.
            vectors: The operation's vectors, such as biases; None for absent ones.
            experts: The mixture of experts that the operation belongs to.
            mixer: The recurrent layer that the operation belongs to.
            heads: A matrix for each query head.
            fields: Values of `Op`'s other fields. By default `scale` is 1 and `eps` the model's.
        """
        is_product = kind in ("linear", "gated_linear")
        table = self._adapters.table(parts) if self._adapters and is_product else None
        if table is not None:
            self._kept.append(table)
            fields |= {"adapter_rank": table.rank, "adapters": ctypes.addressof(table.entries)}
            self._add("adapt", parts, **fields)
        self._add(kind, parts, vectors, experts, mixer, heads, **fields)

    def _add(
        self,
        kind: str,
        parts: Sequence[PackedWeight],
        vectors: Sequence[Floats | None] = (),
        experts: NativeExperts | None = None,
        mixer: NativeMixer | None = None,
        heads: HeadMatrices | None = None,
        **fields: Any,
    ) -> None:
        self._kept += [*parts, *vectors, experts, mixer, heads]
        self._kinds.append(kind)
        fields = {"scale": 1.0, "eps": self._eps} | fields
        op = Op(kind=_KIND[kind], num_parts=len(parts), **fields)
        op.parts = (ctypes.c_void_p * MAX_PARTS)(*(ctypes.addressof(part) for part in parts))
        op.vectors = (ctypes.c_void_p * MAX_PARTS)(
            *(None if vector is None else vector.ctypes.data for vector in vectors)
        )
        if experts is not None:
            op.experts = ctypes.addressof(experts)
        if mixer is not None:
            op.mixer = ctypes.addressof(mixer)
        if heads is not None:
            op.heads = heads.address
        self._library.engine_program_add(self._handle, ctypes.byref(op))

    def join_ranks(self, tensor_parallel: TensorParallel) -> None:
        """Make this the program of one of several ranks, which run the same steps from now on.

        Raises:
            NotSupportedNatively: The ranks cannot share memory. It is raised on every rank.
        """
        size = self._library.engine_program_exchange_bytes(self._handle, tensor_parallel.size)
        memory = np.frombuffer(share_memory(tensor_parallel, size), np.uint8)
        self._kept.append(memory)
        self._library.engine_program_join(
            self._handle, memory.ctypes.data, tensor_parallel.rank, tensor_parallel.size
        )

    def run(self, step: Step) -> bool:
        """Run a step. Return False without doing anything if a token is not in the vocabulary."""
        return bool(self._library.engine_program_run(self._handle, ctypes.byref(step)))

    def decode(self, batch: DecodeBatch) -> int:
        """Decode a batch.

        Return how many rows could not be sampled, or -1 without doing anything if the batch is invalid.
        """
        return int(self._library.engine_program_decode(self._handle, ctypes.byref(batch)))

    def choose_tokens(self, batch: DecodeBatch) -> int:
        """Choose the tokens of a batch that `chooses_later`, after `decode`.

        Return how many rows could not be sampled.
        """
        return int(self._library.engine_program_choose(self._handle, ctypes.byref(batch)))

    def profile(self) -> list[tuple[str, float]]:
        """Return (kind, seconds so far) of each operation, in order, and of the final "sample"."""
        kinds = [*self._kinds, "sample"]
        seconds = np.empty(len(kinds))
        self._library.engine_program_profile(self._handle, seconds.ctypes.data)
        return list(zip(kinds, seconds.tolist(), strict=True))


def _intermediate_size(spec: ModelSpec, tensor_parallel: TensorParallel) -> int:
    """Return the intermediate elements that this rank has of the widest MLP."""
    sizes = {
        spec.intermediate_size if layer.experts is None else layer.experts.shared_intermediate_size
        for layer in spec.layers
    }
    return max(
        len(intermediate_shares(size, tensor_parallel)[tensor_parallel.rank]) for size in sizes
    )


def _latent_shape(spec: ModelSpec) -> LatentShape:
    latent = spec.latent
    if latent is None:
        return LatentShape()
    return LatentShape(
        latent.query_rank or 0,
        latent.kv_rank,
        latent.plain_dim,
        latent.rotary_dim,
        latent.value_dim,
    )


def _router_size(layer: LayerSpec) -> int:
    """Return how many logits a layer's router computes."""
    return 0 if layer.experts is None else layer.experts.num_experts + layer.experts.has_shared_gate
