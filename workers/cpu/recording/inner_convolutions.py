"""Record short convolutions within a layer with attention in a native program."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from ....protocol.checkpoint.recurrent_layers import (
    ConvolvedAttention,
    HeadConvolutions,
    InnerConvolutions,
)
from ...layers.layer_spec import LayerSpec
from ...layers.parallel.tensor_parallel import elements
from ...models.mixers.head_convolutions import read_head_taps
from ...models.mixers.inner_convolutions import read_taps, term_factor
from ..abi import structs
from ..mixers import check_num_taps
from ..program import Floats
from .blocks import BLOCK, QKV, BlockRecorder

_INNER_CONVOLUTION = 7
_HEAD_CONVOLUTION = 8


def _convolution(
    layer: ConvolvedAttention, taps_FK: Floats, state_offset: int, head_dim: int = 1
) -> structs.Mixer:
    """Return a convolution with these taps [channels, kernel].

    `state_offset` is the number of floats before its state in a block. If a token also has taps of its own, groups of
    `head_dim` channels share them.
    """
    check_num_taps(layer.kernel)
    strength = 1.0
    if isinstance(layer, InnerConvolutions):
        strength = term_factor(layer, is_dynamic=True)
    return structs.Mixer(
        kind=_INNER_CONVOLUTION,
        channels=len(taps_FK),
        num_convolved=len(taps_FK),
        kernel=layer.kernel,
        segment=layer.segment,
        num_taps=layer.kernel,
        distance=1,
        value_dim=head_dim,
        strength=strength,
        state_offset=state_offset,
        taps=taps_FK.T,
    )


def _head_convolution(
    layer: HeadConvolutions, taps_JLKK: Floats, biases_JK: Floats
) -> structs.Mixer:
    """Return a convolution of heads with these taps [heads, kernel, elements, elements] and biases."""
    check_num_taps(layer.kernel)
    return structs.Mixer(
        kind=_HEAD_CONVOLUTION,
        channels=biases_JK.size,
        num_convolved=biases_JK.size,
        kernel=layer.kernel,
        segment=layer.segment,
        num_taps=layer.kernel,
        distance=1,
        num_heads=len(biases_JK),
        value_dim=layer.head_dim,
        taps=taps_JLKK,
        bias=biases_JK,
    )


class HeadConvolutionRecorder:
    """Records the convolutions of one layer of ZAYA1. `index` is the index of their states' cache."""

    def __init__(
        self,
        blocks: BlockRecorder,
        index: int,
        prefix: str,
        layer: LayerSpec,
        convolutions: HeadConvolutions,
    ) -> None:
        self._blocks, self._prefix, self._layer = blocks, prefix, convolutions
        self._state: dict[str, Any] = {"layer": index, "group": layer.state_group}

    def convolve_projection(self, _first_tap: int) -> None:
        """Record the convolutions of queries and keys, and of the values."""
        blocks, layer = self._blocks, self._layer
        spec, shard, program = blocks.spec, blocks.shard, blocks.program
        heads, kv_heads, size = len(shard.heads(spec)), shard.kv_heads(spec), spec.head_dim
        taps, biases = read_head_taps(layer, spec, blocks.weights, self._prefix, shard)
        mixer = _head_convolution(layer, taps.numpy(), biases.numpy())
        first_value = (heads + len(kv_heads)) * size
        first_mean = first_value + len(kv_heads) * size
        program.add_op(
            "average_heads",
            num_heads=heads,
            num_kv_heads=len(kv_heads),
            head_dim=size,
            first_column=first_mean,
        )
        program.add_op("convolve_heads", mixer=mixer, num_columns=first_mean, **self._state)
        # The latter half of the values comes from the token before.
        is_late = np.array(elements(kv_heads, size)) >= spec.num_kv_heads * size // 2
        taps_FK = np.zeros((len(is_late), layer.kernel), np.float32)
        taps_FK[:, -1], taps_FK[:, -2] = ~is_late, is_late
        num_inputs = layer.state_parts.size(shard.tensor_parallel.size).num_inputs
        values = _convolution(layer, taps_FK, num_inputs * first_value)
        program.add_op("convolve_inside", mixer=values, first_column=first_value, **self._state)

    def finish_attention(self) -> None:
        """Record the addition of the attention's output to the residual stream."""
        self._blocks.add_scaled(f"{self._prefix}attention_scale")

    def finish_mlp(self) -> None:
        """Record the addition of the experts' output."""
        self._blocks.add_scaled(f"{self._prefix}mlp_scale")


class InnerConvolutionRecorder:
    """Records the convolutions of one layer of Inkling. `index` is the index of their states' cache."""

    def __init__(
        self,
        blocks: BlockRecorder,
        index: int,
        prefix: str,
        layer: LayerSpec,
        convolutions: InnerConvolutions,
    ) -> None:
        self._blocks, self._prefix, self._layer = blocks, prefix, convolutions
        self._spec, self._shard = blocks.spec.for_layer(layer), blocks.shard
        self._state: dict[str, Any] = {"layer": index, "group": layer.state_group}
        self._num_floats = 0

    def convolve_projection(self, first_tap: int) -> None:
        """Record the convolution of the keys and values in the projection.

        If `first_tap` is not 0, the token's own taps begin at this column.
        """
        spec, shard = self._spec, self._shard
        own = elements(shard.kv_heads(spec), spec.head_dim)
        size = spec.num_kv_heads * spec.head_dim
        taps = [self._read(f"self_attn.{name}", size, own) for name in ("k_conv", "v_conv")]
        first_column = len(shard.heads(spec)) * spec.head_dim
        self._add(
            np.concatenate(taps), target=QKV, first_column=first_column, num_columns=first_tap
        )

    def finish_attention(self) -> None:
        """Record the convolution of the attention's output, and its addition to the residual stream."""
        self._add_block("attention_conv")

    def finish_mlp(self) -> None:
        """Record the convolution of the output of the MLP or the experts, and its addition to the residual stream."""
        self._add_block("mlp_conv")

    def _add_block(self, name: str) -> None:
        spec = self._spec
        self._add(self._read(name, spec.hidden_size), target=BLOCK)
        self._blocks.program.add_op("norm_add", scale=spec.residual_multiplier)

    def _read(self, name: str, channels: int, part: range | None = None) -> Floats:
        weights = self._blocks.weights
        taps_FK: Floats = read_taps(
            self._layer, weights, f"{self._prefix}{name}", channels, part
        ).numpy()
        return taps_FK

    def _add(self, taps_FK: Floats, **fields: Any) -> None:
        mixer = _convolution(self._layer, taps_FK, self._num_floats, self._spec.head_dim)
        num_inputs = self._layer.state_parts.size(self._shard.tensor_parallel.size).num_inputs
        self._num_floats += num_inputs * len(taps_FK)
        self._blocks.program.add_op("convolve_inside", mixer=mixer, **self._state, **fields)


ConvolutionRecorder: TypeAlias = InnerConvolutionRecorder | HeadConvolutionRecorder


def record_convolutions(
    blocks: BlockRecorder, index: int, prefix: str, layer: LayerSpec
) -> ConvolutionRecorder | None:
    """Return the recorder of the convolutions within a layer, or None if it has none."""
    if isinstance(layer.recurrent, InnerConvolutions):
        return InnerConvolutionRecorder(blocks, index, prefix, layer, layer.recurrent)
    if isinstance(layer.recurrent, HeadConvolutions):
        return HeadConvolutionRecorder(blocks, index, prefix, layer, layer.recurrent)
    return None
