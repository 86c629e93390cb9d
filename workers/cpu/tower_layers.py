"""The layers of a vision or audio tower as a native program.

Shapes: P patches of an image (with the class token), or rows of an audio clip; D hidden size of the tower; F features.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention.interface import AttentionSpec
from ..device.device import usable_cores
from ..layers.activations import NAMES_IN_CONFIGS
from ..layers.window import SpanLayers
from ..towers.layers import LayersSpec, LayerWeights, Patches
from ..towers.rotary import PatchRotary
from ..towers.weights import Linear, Norm
from .abi.structs import AttentionLayer, GateLimit, ModelShape, Step, StepGroup, activation_number
from .attention import KV_FORMATS, NativeAttention
from .library import NotSupportedNatively
from .packing import ActivationKind, PackedWeight, WeightFormat, WeightMemory, pack_tensor
from .program import Floats, NativeProgram
from .recording.blocks import ACTIVATIONS, BLOCK, QKV, RESIDUAL

_BLOCK_SIZE: Final = 64
_F32: Final = ActivationKind.F32
_QK_NORMS: Final = {None: 0, "head": 1, "full": 2}


class NativeLayers:
    """The layers of a tower as one native program, in float32.

    The program computes one sequence at a time, so that results do not depend on others.

    Raises:
        NotSupportedNatively: Native programs lack an operation for the layers. It is raised before weights are read.
    """

    def __init__(
        self, spec: LayersSpec, layers: Iterable[LayerWeights], num_threads: int | None = None
    ) -> None:
        self._spec = spec
        size = spec.num_heads * spec.head_dim
        if spec.has_score_biases or spec.has_first_biases:
            raise NotSupportedNatively("native tower programs do not add biases to scores")
        if spec.num_chosen:
            raise NotSupportedNatively("native tower programs do not choose experts")
        if spec.gate_limit and spec.clips_products:
            raise NotSupportedNatively(
                "native tower programs do not support limits of gates with clipped products"
            )
        if spec.clips_products and not spec.has_gate:
            raise NotSupportedNatively(
                "native tower programs do not support clamped MLPs without a gate"
            )
        if spec.rotary is not None and spec.rotary.order == "crossed":
            raise NotSupportedNatively(
                "native tower programs rotate both elements of a pair equally"
            )
        self._attention = NativeAttention(
            AttentionSpec(
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_heads,
                head_dim=spec.head_dim,
                block_size=_BLOCK_SIZE,
                dtype=torch.float32,
                device=torch.device("cpu"),
                is_causal=False,
            )
        )
        block_bytes = math.prod(self._attention.kv_cache_shape(1)) * 4
        shape = ModelShape(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_heads,
            head_dim=spec.head_dim,
            vocab_size=1,
            block_size=_BLOCK_SIZE,
            block_bytes=block_bytes,
            kv_format=KV_FORMATS["float32"],
            activation=activation_number(NAMES_IN_CONFIGS[spec.activation]),
            norm=spec.norm_kind == "layer",
            norm_groups=1,
            is_bidirectional=True,
            projection_size=max(3 * size, 2 * spec.intermediate_size * spec.clips_products),
            mixed_size=size,
            num_threads=num_threads or usable_cores(),
        )
        self._program = NativeProgram(shape, spec.norm_eps)
        if spec.rotary is not None:
            rotary = spec.rotary
            self._program.add_rotation(rotary.frequencies(), 1.0, rotary.axes, rotary.first_angles)
        _Recorder(self._program, spec).record(layers)

    def __call__(self, x_PD: Tensor, patches: Patches) -> dict[int, Tensor]:
        """Return the hidden states [P, D] after each of the feature layers, float32."""
        spec, num_patches = self._spec, len(x_PD)
        size = spec.hidden_size
        features_PF = torch.empty(num_patches, len(spec.feature_layers) * size)
        features_PF[:, :size] = x_PD
        slots = np.arange(num_patches, dtype=np.int32)
        loc = np.array([0, num_patches], np.int32)
        blocks = np.arange(-(-num_patches // _BLOCK_SIZE), dtype=np.int32)
        # A layer stores the keys and values of all patches before it reads any, so all layers can share one cache.
        cache = torch.zeros(self._attention.kv_cache_shape(len(blocks)))
        groups = (StepGroup * 1)()
        groups[0].block_table, groups[0].block_table_stride = blocks.ctypes.data, len(blocks)
        groups[0].slot_mapping = slots.ctypes.data
        ids = np.zeros(num_patches, np.int32)
        step = Step(
            num_tokens=num_patches,
            num_sequences=1,
            wants_all_hidden=True,
            input_ids=ids.ctypes.data,
            positions=slots.ctypes.data,
            query_start_loc=loc.ctypes.data,
            groups=groups,
            kv_caches=(ctypes.c_void_p * 1)(cache.data_ptr()),
            hidden=features_PF.data_ptr(),
            hidden_stride=features_PF.shape[1],
            span_layers=SpanLayers.WITH_WINDOW if patches.visible_P2 is None else SpanLayers.ALL,
        )
        rotary_P3 = visible_P2 = None
        if patches.places_P2 is not None:
            rotary_P3 = np.zeros((num_patches, 3), np.int32)
            places_P2 = patches.places_P2.numpy()
            rotary_P3[:, :2] = places_P2.clip(0)
            rotary_P3[:, 2] = places_P2[:, 0] < 0
            step.rotary = rotary_P3.ctypes.data
        if patches.visible_P2 is not None:
            visible_P2 = patches.visible_P2.numpy().astype(np.int32)
        elif patches.windows is not None:
            visible_P2 = _visible(patches)
        if visible_P2 is not None:
            step.visible = visible_P2.ctypes.data
        self._program.run(step)
        parts = features_PF.unflatten(1, (-1, size)).unbind(1)
        return dict(zip(spec.feature_layers, parts, strict=True))

    def profile(self) -> list[tuple[str, float]]:
        """Return (kind, seconds spent so far) for each operation, in order."""
        return self._program.profile()


def _visible(patches: Patches) -> NDArray[np.int32]:
    """Return the range of patches to which each patch attends, int32 [P, 2]."""
    assert patches.windows is not None
    lengths = np.repeat(*np.array([(length, count) for count, length in patches.windows]).T)
    ends = np.cumsum(lengths)
    bounds = np.stack((ends - lengths, ends), 1).astype(np.int32)
    return np.repeat(bounds, lengths, axis=0)


class _Recorder:
    """Records the operations of a tower's layers in a program."""

    def __init__(self, program: NativeProgram, spec: LayersSpec) -> None:
        self._program, self._spec = program, spec
        self._memory = WeightMemory()

    def record(self, layers: Iterable[LayerWeights]) -> None:
        spec = self._spec
        self._program.add_op("embed")
        for number, weights in enumerate(layers, 1):
            self._record_attention(number, weights)
            self._record_sum_norm(weights.attention_norm)
            self._record_mlp(weights)
            self._record_sum_norm(weights.mlp_norm)
            if number in spec.feature_layers:
                column = spec.feature_layers.index(number) * spec.hidden_size
                self._program.add_op("keep_hidden", first_column=column)
        self._program.add_op("head")

    def _record_attention(self, number: int, weights: LayerWeights) -> None:
        spec = self._spec
        size = spec.num_heads * spec.head_dim
        self._record_products(weights.attention_norm, weights.qkv, rotary=spec.rotary)
        sees_window = bool(spec.full_layers) and number not in spec.full_layers
        attention: dict[str, Any] = {
            # With windows, the step says to which patches a patch attends.
            "attention": AttentionLayer(spec.scale, 0.0, int(sees_window)),
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_heads,
            "head_dim": spec.head_dim,
        }
        head_norms = [
            None if norm is None else _permuted(norm.weight, spec, spec.rotary).numpy()
            for norm in (weights.query_norm, weights.key_norm)
        ]
        self._program.add_op(
            "rotate_store",
            rope=-1 if spec.rotary is None else 0,
            num_stored=2,
            norms_values=spec.has_value_norm,
            scale=0.0,
            qk_norm=_QK_NORMS[spec.qk_norm],
            vectors=[*head_norms, None],
            eps=spec.norm_eps if weights.query_norm is None else weights.query_norm.eps,
            **attention,
        )
        self._program.add_op("attention", activation_kind=_F32, **attention)
        self._record_output(weights.output, weights.attention_output_norm, size)

    def _record_mlp(self, weights: LayerWeights) -> None:
        spec = self._spec
        up, down, gate = weights.up, weights.down, weights.gate
        inputs = [up] if gate is None else [gate, up]
        if spec.clips_products:
            self._record_products(weights.mlp_norm, inputs)
            self._program.add_op(
                "sparse_gates",
                activation_kind=_F32,
                num_columns=spec.intermediate_size,
            )
        else:
            self._record_norm(weights.mlp_norm)
            biases = [_floats(linear.bias) for linear in inputs]
            self._program.add_op(
                "gated_linear",
                input_kind=_F32,
                activation_kind=_F32,
                parts=[self._packed(linear.weight) for linear in inputs],
                vectors=[*biases, *[None] * (3 - len(biases))],
                gate_limit=GateLimit(spec.gate_limit),
            )
        self._record_output(down, weights.mlp_output_norm, spec.intermediate_size)

    def _record_sum_norm(self, norm: Norm | None) -> None:
        """Record the norm of the residual stream in place, if norms follow the sums."""
        if self._spec.norms_sums and norm is not None:
            self._program.add_op("norm", vectors=_vectors(norm))

    def _record_norm(self, norm: Norm | None) -> None:
        """Record the norm of the residual stream, whose result the next products read, unless norms follow the sums."""
        vectors = [None, None] if norm is None or self._spec.norms_sums else _vectors(norm)
        self._program.add_op("quantize", activation_kind=_F32, vectors=vectors)

    def _record_products(
        self, norm: Norm | None, linears: list[Linear], rotary: PatchRotary | None = None
    ) -> None:
        """Record products of the residual stream, which is first normed if `norm` is given. Results are concatenated.

        If `rotary` is given, they are queries, keys and values, permuted so that elements that are rotated together are
        half a head apart.
        """
        column = 0
        for index, linear in enumerate(linears):
            if index == 0 or linear.bounds is not None:
                self._record_norm(norm)
                self._record_bounds(linear.bounds, 0, self._spec.hidden_size, target=None)
            weight, bias = linear.weight, linear.bias
            if rotary is not None:
                weight = _permuted(weight, self._spec, rotary, index)
                bias = None if bias is None else _permuted(bias, self._spec, rotary, index)
            self._program.add_op(
                "linear",
                input_kind=_F32,
                source=0,
                target=QKV,
                parts=[self._packed(weight)],
                vectors=[_floats(bias)],
                first_column=column,
            )
            self._record_bounds(linear.bounds, 2, len(weight), target=QKV, first_column=column)
            column += len(weight)

    def _record_output(self, linear: Linear, norm: Norm | None, num_inputs: int) -> None:
        """Record the last product of a block, and its addition to the residual stream."""
        self._record_bounds(linear.bounds, 0, num_inputs, target=None, source=1)
        is_added = norm is None and linear.bounds is None
        self._program.add_op(
            "linear",
            input_kind=_F32,
            source=1,
            target=RESIDUAL if is_added else BLOCK,
            parts=[self._packed(linear.weight)],
            vectors=[_floats(linear.bias)],
        )
        if is_added:
            return
        self._record_bounds(linear.bounds, 2, self._spec.hidden_size, target=BLOCK)
        self._program.add_op("norm_add", vectors=[None] if norm is None else _vectors(norm))

    def _record_bounds(
        self,
        bounds: Tensor | None,
        first: int,
        num_columns: int,
        *,
        target: int | None,
        first_column: int = 0,
        source: int = 0,
    ) -> None:
        """Record the clipping of a target, by default of the activations `source`, if there are bounds."""
        if bounds is None:
            return
        self._program.add_op(
            "clamp",
            target=ACTIVATIONS if target is None else target,
            source=source,
            num_columns=num_columns,
            first_column=first_column,
            vectors=[_floats(bounds[first : first + 2])],
        )

    def _packed(self, weight: Tensor) -> PackedWeight:
        packed = pack_tensor(WeightFormat.F32, weight.float(), self._memory)
        assert packed is not None
        return packed


def _permuted(x: Tensor, spec: LayersSpec, rotary: PatchRotary | None, index: int = 0) -> Tensor:
    """Return rows of queries and keys, permuted so that elements that are rotated together are half a head apart.

    The rows are those of a head, of all heads, or of queries, keys and values. If `index` is 2, they are values, which
    are not permuted.
    """
    if rotary is None or rotary.num_parts == 1 or index == 2:
        return x
    order_K = torch.arange(spec.head_dim).view(rotary.num_parts, 2, -1).transpose(0, 1).flatten()
    rows = x.unflatten(0, (-1, spec.head_dim))
    num_rotated = 2 * spec.num_heads
    return torch.cat((rows[:num_rotated, order_K], rows[num_rotated:])).flatten(0, 1)


def _vectors(norm: Norm) -> list[Floats | None]:
    return [_floats(norm.weight), _floats(norm.bias)]


def _floats(x: Tensor | None) -> Floats | None:
    """Return a vector as float32, as the program reads it."""
    if x is None:
        return None
    vector: Floats = np.ascontiguousarray(x.float().numpy())
    return vector
