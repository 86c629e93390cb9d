"""Record short convolutions within a layer with attention in a native program."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....protocol.checkpoint.recurrent_layers import InnerConvolutions
from ...layers.spec import LayerSpec
from ...models.mixers.mixer import elements
from ..abi import structs
from ..mixers import check_num_taps
from ..program import Floats
from .blocks import BLOCK, QKV, BlockRecorder

_INNER_CONVOLUTION = 7


class NativeConvolution(structs.Mixer):
    """A convolution with these taps [channels, kernel], as a struct whose address is passed to native code.

    It keeps the taps alive. `state_offset` is the number of floats before its state in a block.
    """

    def __init__(self, layer: InnerConvolutions, taps_FK: Floats, state_offset: int) -> None:
        check_num_taps(layer.kernel)
        self._taps = taps_FK.T.copy()
        # The convolution's result is added to its input.
        self._taps[-1] += 1
        super().__init__(
            kind=_INNER_CONVOLUTION,
            channels=len(taps_FK),
            num_convolved=len(taps_FK),
            kernel=layer.kernel,
            segment=layer.segment,
            num_taps=layer.kernel,
            distance=1,
            state_offset=state_offset,
            taps=self._taps.ctypes.data,
        )


class ConvolutionRecorder:
    """Records the convolutions of one layer. `index` is the index of their states' cache."""

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

    def convolve_keys(self) -> None:
        """Record the convolution of the keys and values in the projection."""
        spec, shard = self._spec, self._shard
        own = elements(shard.kv_heads(spec), spec.head_dim)
        size = spec.num_kv_heads * spec.head_dim
        taps = [self._read(f"self_attn.{name}", size, own) for name in ("k_conv", "v_conv")]
        first_column = len(shard.heads(spec)) * spec.head_dim
        self._add(np.concatenate(taps), target=QKV, first_column=first_column)

    def add_convolved(self, name: str) -> None:
        """Record the convolution of a block's output, and its addition to the residual stream."""
        spec = self._spec
        self._add(self._read(name, spec.hidden_size), target=BLOCK)
        self._blocks.program.add_op("norm_add", vectors=[None], scale=spec.residual_multiplier)

    def _read(self, name: str, channels: int, part: range | None = None) -> Floats:
        name, shape = f"{self._prefix}{name}.weight", (channels, 1, self._layer.kernel)
        return self._blocks.weights.floats(name, *shape, part=part)[:, 0]

    def _add(self, taps_FK: Floats, **fields: Any) -> None:
        mixer = NativeConvolution(self._layer, taps_FK, self._num_floats)
        num_inputs = self._layer.state_size(self._shard.tensor_parallel.size).num_inputs
        self._num_floats += num_inputs * len(taps_FK)
        self._blocks.program.add_op("convolve_inside", mixer=mixer, **self._state, **fields)
