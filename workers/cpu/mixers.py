"""Read the parameters of a recurrent layer for native code.

Shapes: F channels, K taps of a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ...protocol.checkpoint.recurrent_layers import (
    GatedDeltaNet,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    MixerLayer,
    ShortConvolution,
)
from ...protocol.checkpoint.state_spaces.rg_lru import RgLru
from ..layers.parallel.shard import ModelShard
from ..layers.parallel.tensor_parallel import TensorParallel, elements
from ..layers.spec import ModelSpec
from ..models.mixers import (
    MixerRows,
    gated_delta_net,
    lightning_attention,
    mamba1,
    mamba2,
    mixer_rows,
    rg_lru,
)
from ..models.weights import Rows
from .abi import structs
from .library import NotSupportedNatively
from .packing import PackedWeight
from .weights import NativeWeightReader

Floats = NDArray[np.float32]

_KINDS = {
    ShortConvolution: 0,
    Mamba2: 1,
    GatedDeltaNet: 2,
    KimiDeltaAttention: 3,
    # Lightning attention is a state space with fixed steps.
    LightningAttention: 1,
    RgLru: 4,
    Mamba1: 6,
}
_MOST_TAPS = 16
_MOST_CHANNELS_OF_UNIT = 64
"""Maximum channels of a Mamba-1 layer whose states one thread updates together."""


class ColumnProduct(msgspec.Struct, frozen=True):
    """A product of `columns` of the projection, after an optional norm, written from `first_column` on.

    If `is_partial`, the other ranks have the other columns of the matrix.
    """

    columns: range
    weight: PackedWeight
    first_column: int
    norm: Floats | None = None
    is_partial: bool = False


class RotatedHeads(msgspec.Struct, frozen=True):
    """Heads of `size` elements in `columns` of the projection, which are normed, multiplied by `scale` and rotated."""

    columns: range
    size: int
    norm: Floats | None
    scale: float


class NativeMixer(structs.Mixer):
    """The parameters of a recurrent layer except its matrices, as a struct whose address is passed to native code.

    It keeps the vectors that it points to alive. `projection` has the rows of the first matrix that are in `rows`, in
    which consecutive rows of a module are joined. If `last_column` is not 0, the results of the last rows begin at this
    column, otherwise after those of the others. `second_products` are products of the projection's results, in order,
    and `convolved_products` those after the convolution. `normed_columns` are normed before the scan, with the epsilon
    `column_eps`. `rotated_heads` are rotated before the convolution. If `shares_norm`, the outputs are normed over the
    heads of all ranks.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: MixerLayer,
        weights: NativeWeightReader,
        prefix: str,
        shard: ModelShard,
    ) -> None:
        check_num_taps(layer.kernel)
        self._weights, self._prefix = weights, prefix
        self.shares_norm = False
        self.last_column = 0
        self.second_products: list[ColumnProduct] = []
        self.convolved_products: list[ColumnProduct] = []
        self.normed_columns: list[tuple[range, Floats]] = []
        self.column_eps = 0.0
        self.rotated_heads: list[RotatedHeads] = []
        tensor_parallel = shard.tensor_parallel
        self.rows = rows = mixer_rows(layer, weights, prefix, tensor_parallel)
        self.projection = _merged(rows.projection)
        own_eps = layer.norm_eps if isinstance(layer, Mamba2 | GatedDeltaNet) else None
        self.norm_eps = spec.norm_eps if own_eps is None else own_eps
        match layer:
            case ShortConvolution():
                fields: dict[str, Any] = {}
            case Mamba1():
                fields = self._mamba1(spec, layer, tensor_parallel)
            case Mamba2():
                fields = self._mamba2(layer, rows, tensor_parallel)
            case GatedDeltaNet():
                fields = self._gated_delta_net(layer, tensor_parallel)
            case KimiDeltaAttention():
                fields = self._kimi_delta_attention(layer, tensor_parallel)
            case LightningAttention():
                fields = self._lightning_attention(spec, layer, tensor_parallel)
            case RgLru():
                fields = self._rg_lru(spec, layer, tensor_parallel)
        super().__init__(
            kind=_KINDS[type(layer)],
            channels=layer.state_parts.size(tensor_parallel.size).channels,
            kernel=layer.kernel,
            segment=layer.segment,
            num_taps=layer.kernel,
            distance=1,
            **self._convolution(rows, layer.kernel) | fields,
        )

    def _mamba1(
        self, spec: ModelSpec, layer: Mamba1, tensor_parallel: TensorParallel
    ) -> dict[str, Any]:
        prefix, keys = self._prefix, layer.state_size_per_channel
        own = mamba1.own_channels(layer, tensor_parallel)
        heads = tensor_parallel.part(layer.num_heads) if layer.num_heads > 1 else range(1)
        size, selected = len(own) // len(heads), layer.step_rank + 2 * keys
        if tensor_parallel.size > 1 and selected > spec.hidden_size:
            raise NotSupportedNatively(
                f"the native CPU backend does not support time_step_rank + 2 * state_size, which is {selected}, above "
                f"hidden_size {spec.hidden_size} with --tensor-parallel-size {tensor_parallel.size}"
            )
        norms: list[Floats | None] = [None] * 3
        if layer.norm_eps is not None:
            self.column_eps = layer.norm_eps
            norms = [
                self._weights.vector(f"{prefix}{name}_layernorm.weight", count)
                if layer.has_norm_weights
                else np.ones(count, np.float32)
                for name, count in (("dt", layer.step_rank), ("b", keys), ("c", keys))
            ]
        selections, steps = self._selection_matrices(layer, own, heads, tensor_parallel)
        # Layers with `head_dim` have the vector for steps after B and C.
        first_step, first_key = (2 * keys, 0) if layer.head_dim else (0, layer.step_rank)
        for head in range(len(heads)):
            first, column = 3 * len(own) + head * selected, head * size
            inputs = range(2 * len(own) + column, 2 * len(own) + column + size)
            is_partial = tensor_parallel.size > 1 and layer.num_heads == 1
            start = first + first_step
            self.convolved_products += [
                ColumnProduct(inputs, selections[head], first, is_partial=is_partial),
                ColumnProduct(range(start, start + layer.step_rank), steps[head], column, norms[0]),
            ]
            for i, norm in enumerate(norms[1:]):
                start = first + first_key + i * keys
                if norm is not None:
                    self.normed_columns.append((range(start, start + keys), norm))
        unit = math.gcd(size, _MOST_CHANNELS_OF_UNIT)
        skip_I, step_bias_I = (
            mamba1.read_channels(layer, self._weights, f"{prefix}{name}", own)
            for name in ("D", "dt_proj.bias")
        )
        decay_IK = mamba1.read_decay(layer, self._weights, prefix, own)
        return {
            "num_heads": len(own) // unit,
            "num_groups": len(heads),
            "key_dim": keys,
            "value_dim": unit,
            # Native code expects B after as many columns.
            "step_rank": first_key,
            "gate_activation": structs.activation_number("silu"),
            "decay": decay_IK.unflatten(0, (-1, unit)).transpose(1, 2).numpy(),
            "skip": skip_I.numpy(),
            "step_bias": step_bias_I.numpy(),
        }

    def _selection_matrices(
        self, layer: Mamba1, own: range, heads: range, tensor_parallel: TensorParallel
    ) -> tuple[list[PackedWeight], list[PackedWeight]]:
        """Return each head's matrices of a Mamba-1 layer: to the vector for its steps, B and C; from that vector."""
        weights, names = self._weights, [f"{self._prefix}{name}" for name in ("x_proj", "dt_proj")]
        selected = layer.step_rank + 2 * layer.state_size_per_channel
        if layer.num_heads == 1:
            selection = weights.packed_columns(
                f"{names[0]}.weight",
                selected,
                layer.channels,
                self.rows.shares(tensor_parallel),
                tensor_parallel.rank,
            )
            rows = mamba1.step_rows(layer, names[1], own)
            steps = weights.packed_together([rows], layer.step_rank)
            return [selection], steps
        size = layer.channels // layer.num_heads
        selections, steps = (
            [
                weights.pack_tensor(name, matrix)
                for matrix in weights.read(f"{name}.weight", layer.num_heads, *shape, part=heads)
            ]
            for name, shape in zip(names, ((selected, size), (size, layer.step_rank)), strict=True)
        )
        return selections, steps

    def _mamba2(
        self, layer: Mamba2, rows: MixerRows, tensor_parallel: TensorParallel
    ) -> dict[str, Any]:
        self.shares_norm = tensor_parallel.size > 1 and layer.norm_groups == 1
        if 1 < layer.norm_groups < tensor_parallel.size:
            raise NotSupportedNatively(
                f"the native CPU backend does not support {layer.norm_groups} norm groups with "
                f"--tensor-parallel-size {tensor_parallel.size}"
            )
        prefix, heads = self._prefix, tensor_parallel.part(layer.num_heads)
        multipliers = None
        if layer.multipliers:
            multipliers = mamba2.column_multipliers(layer, rows).numpy()
        norm = None
        if layer.norm_groups:
            own = rows.shares(tensor_parallel)[tensor_parallel.rank]
            norm = self._weights.read_elements(f"{prefix}norm.weight", rows.num_columns).numpy()
            norm = norm[own.start : own.stop]
        return {
            "num_heads": len(heads),
            "num_groups": len(tensor_parallel.part(layer.num_groups)),
            "key_dim": layer.state_size_per_head,
            "value_dim": layer.head_dim,
            "norm_groups": -(-layer.norm_groups // tensor_parallel.size),
            "gates_before_norm": layer.gates_before_norm,
            "min_step": layer.min_step,
            "max_step": layer.max_step,
            "multipliers": multipliers,
            "skip": self._weights.vector(f"{prefix}D", layer.num_heads, heads),
            "norm": norm,
            **self._decay(layer.num_heads, heads),
        }

    def _gated_delta_net(
        self, layer: GatedDeltaNet, tensor_parallel: TensorParallel
    ) -> dict[str, Any]:
        prefix = self._prefix
        heads = gated_delta_net.head_runs(layer, tensor_parallel)
        num_heads = sum(map(len, heads))
        norm_V = self._weights.read_elements(f"{prefix}norm.weight", layer.value_dim).numpy()
        return {
            "num_heads": num_heads,
            "num_groups": len(tensor_parallel.part(layer.num_key_heads)),
            "key_dim": layer.key_dim,
            "value_dim": layer.value_dim,
            "norm_groups": num_heads,
            "gate_activation": structs.activation_number(
                "sigmoid" if layer.has_sigmoid_gate else "silu"
            ),
            "gates_before_norm": False,
            "has_tiled_heads": layer.has_tiled_heads,
            "strength": 2.0 if layer.has_negative_eigenvalues else 1.0,
            "norm": (norm_V + layer.norm_offset) * layer.norm_factor,
            **self._decay(layer.num_heads, *heads),
        }

    def _kimi_delta_attention(
        self, layer: KimiDeltaAttention, tensor_parallel: TensorParallel
    ) -> dict[str, Any]:
        prefix, dim, size = self._prefix, layer.head_dim, layer.num_heads * layer.head_dim
        heads = tensor_parallel.part(layer.num_heads)
        own = elements(heads, dim)
        # The low-rank inputs of gates and steps occupy the columns in which steps and gates will be written. Gates come
        # last, so compute them first.
        first_step = 3 * len(own) + len(heads)
        first_gate = first_step + len(own)
        second_products = []
        if layer.has_low_rank_gates:
            of_gates = range(first_step + dim, first_step + 2 * dim)
            second_products.append(("g_b_proj", of_gates, first_gate))
        elif layer.is_low_rank:
            self.last_column = first_gate
        if layer.is_low_rank:
            of_steps = range(first_step, first_step + dim)
            second_products.append(("f_b_proj", of_steps, first_step))
        for name, of_low_rank, first_column in second_products:
            (weight,) = self._weights.packed_together([Rows(f"{prefix}{name}", size, own)], dim)
            self.second_products.append(ColumnProduct(of_low_rank, weight, first_column))
        a_H = self._weights.read_elements(f"{prefix}A_log", layer.num_heads).numpy()
        return {
            "num_heads": len(heads),
            "num_groups": len(heads),
            "key_dim": dim,
            "value_dim": dim,
            "norm_groups": len(heads),
            "gate_activation": structs.activation_number("sigmoid"),
            "gates_before_norm": False,
            "strength": 1.0,
            "lowest_log_decay": layer.lowest_log_decay,
            "norm": self._weights.vector(f"{prefix}norm.weight", dim),
            "decay": -np.exp(a_H[heads.start : heads.stop]),
            "step_bias": self._weights.vector(f"{prefix}dt_bias", size, own),
        }

    def _lightning_attention(
        self, spec: ModelSpec, layer: LightningAttention, tensor_parallel: TensorParallel
    ) -> dict[str, Any]:
        prefix, dim = self._prefix, layer.head_dim
        heads = tensor_parallel.part(layer.num_heads)
        size, own = layer.num_heads * dim, elements(heads, dim)
        self.shares_norm = tensor_parallel.size > 1
        self.norm_eps = lightning_attention.norm_eps(spec, layer)
        if layer.is_rotated:
            self.shares_norm &= layer.norm_groups == 1
            for number, (name, scale) in enumerate(
                zip(lightning_attention.HEAD_NORMS, (1.0, dim**-0.5), strict=True)
            ):
                norm = (
                    self._weights.vector(f"{prefix}{name}.weight", dim)
                    if layer.norms_heads
                    else None
                )
                # Gates and values come first.
                columns = range((2 + number) * len(own), (3 + number) * len(own))
                self.rotated_heads.append(RotatedHeads(columns, dim, norm, scale))
        slopes_H = lightning_attention.decay_slopes(spec, layer, prefix).numpy()
        return {
            "num_convolved": 0 if layer.is_rotated else 3 * len(own),
            "num_heads": len(heads),
            "num_groups": len(heads),
            "key_dim": dim,
            "value_dim": dim,
            "norm_groups": max(1, layer.norm_groups // tensor_parallel.size),
            "gate_activation": structs.activation_number("sigmoid"),
            "taps": np.ones(3 * len(own), np.float32),
            "decay": -slopes_H[heads.start : heads.stop],
            "norm": self._weights.vector(f"{prefix}norm.weight", size, own),
        }

    def _rg_lru(
        self, spec: ModelSpec, layer: RgLru, tensor_parallel: TensorParallel
    ) -> dict[str, Any]:
        blocks = tensor_parallel.part(layer.num_blocks)
        own = elements(blocks, layer.block_size)
        gates_BWW, biases_BW = rg_lru.read_gates(layer, self._weights, self._prefix, blocks)
        decay_I = rg_lru.read_decay(layer, self._weights, self._prefix, own)
        return {
            "num_heads": len(blocks),
            "num_groups": len(blocks),
            "key_dim": 1,
            "value_dim": layer.block_size,
            "gate_activation": structs.activation_number(spec.activation),
            "decay": decay_I.numpy(),
            "gates": gates_BWW.numpy(),
            "gate_biases": biases_BW.numpy(),
        }

    def _convolution(self, rows: MixerRows, kernel: int) -> dict[str, Any]:
        """Return the channels of the convolution, and their taps and biases. A layer may have none."""
        if not rows.convolution:
            return {}
        taps, biases = [], []
        for each in rows.convolution:
            own = slice(each.part.start, each.part.stop)
            taps_X = self._weights.read_elements(f"{each.name}.weight", each.total * kernel)
            taps.append(taps_X.view(-1, kernel)[own])
            if rows.has_convolution_bias:
                biases.append(self._weights.read_elements(f"{each.name}.bias", each.total)[own])
        return {
            "num_convolved": sum(map(len, taps)),
            "taps": torch.cat(taps).T.numpy(),
            "bias": torch.cat(biases).numpy() if biases else None,
        }

    def _decay(self, count: int, *heads: range) -> dict[str, Any]:
        log_decay, step_bias = (
            np.concatenate([self._weights.vector(self._prefix + name, count, run) for run in heads])
            for name in ("A_log", "dt_bias")
        )
        return {"decay": -np.exp(log_decay), "step_bias": step_bias}


def check_num_taps(count: int) -> None:
    """Raise an error if native convolutions do not support this number of taps."""
    if count > _MOST_TAPS:
        raise NotSupportedNatively(
            f"convolutions over more than {_MOST_TAPS} tokens are supported only in torch, not natively, got {count}"
        )


def _merged(rows: Sequence[Rows]) -> list[Rows]:
    """Return the same rows, with consecutive rows of a module joined."""
    merged = []
    for _, group in groupby(rows, key=lambda each: (each.name, each.total)):
        of_module = list(group)
        index = torch.cat(
            [each.select(torch.arange(each.part.start, each.part.stop)) for each in of_module]
        )
        part = range(int(index.min()), int(index.max()) + 1)
        order = None if torch.equal(index, torch.tensor(part)) else index - part.start
        merged.append(Rows(of_module[0].name, of_module[0].total, part, order))
    return merged
