"""The LSTM with a matrix as its memory of xLSTM (Beck et al., 2024, arXiv 2405.04517), computed token by token.

Shapes: T tokens of a step, D hidden size, H heads of this shard, K elements of a key, V of a value, S requests, R
requests of a round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.state_spaces.xlstm import MatrixLstm
from ...layers.parallel.tensor_parallel import TensorParallel, elements
from ..layer_source import LayerSource
from ..weights import Rows, WeightReader
from .mixer import Mixer, MixerRows
from .states import StateBatch, StateCache


class MatrixLstmMixer(Mixer):
    """Sums of outer products of keys and values, with exponential gates for each token."""

    def __init__(self, layer: MatrixLstm, source: LayerSource) -> None:
        super().__init__(layer, source)
        weights, prefix, parallel = source.weights, source.prefix, source.shard.tensor_parallel
        heads, self._layer = parallel.part(layer.num_heads), layer
        self._num_heads = len(heads)
        gates = _rows(
            weights,
            prefix,
            ("igate_preact", "fgate_preact"),
            "ifgate_preact",
            heads,
            layer.num_heads,
        )
        self._gates = source.read_rows(gates, source.spec.hidden_size, has_biases=True)
        own, total = elements(heads, layer.value_dim), layer.num_heads * layer.value_dim
        weight_I = weights.read_vector(f"{prefix}multihead_norm.weight", total, own)
        self._norm_HV = weight_I.float().view(len(heads), -1)

    @staticmethod
    def rows(
        layer: MatrixLstm, weights: WeightReader, prefix: str, tensor_parallel: TensorParallel
    ) -> MixerRows:
        """See `Mixer.rows`. The projections are those to queries, keys, values and outer gates."""
        heads = tensor_parallel.part(layer.num_heads)
        sizes = (layer.key_dim, layer.key_dim, layer.value_dim, layer.value_dim)
        if weights.has(f"{prefix}qkv_opreact.weight"):
            counts = [layer.num_heads * size for size in sizes]
            rows, first = [], 0
            for size, count in zip(sizes, counts, strict=True):
                part = elements(heads, size)
                own = range(first + part.start, first + part.stop)
                rows.append(Rows(f"{prefix}qkv_opreact", sum(counts), own))
                first += count
        else:
            rows = [
                Rows(f"{prefix}{name}", layer.num_heads * size, elements(heads, size))
                for name, size in zip(("q", "k", "v", "ogate_preact"), sizes, strict=True)
            ]
        return MixerRows(rows, [], layer.num_heads, layer.value_dim)

    def forward(self, x: Any, memory: Tensor, batch: StateBatch) -> Tensor:
        """See `Mixer.forward`."""
        layer, count = self._layer, self._num_heads
        keys, values = count * layer.key_dim, count * layer.value_dim
        q, k, v, outer = (
            part.unflatten(1, (count, -1)).float()
            for part in self.projection(x).split((keys, keys, values, values), 1)
        )
        gates_TX = layer.gate_cap * torch.tanh(self._gates(x).float() / layer.gate_cap)
        input_TH, forget_TH = gates_TX.chunk(2, 1)
        cache = StateCache(memory, self._size, x.dtype)
        y_THV = self._scan(
            q * layer.key_dim**-0.5, k, v, input_TH, F.logsigmoid(forget_TH), cache, batch
        )
        y_THV = F.layer_norm(y_THV, y_THV.shape[-1:], None, None, layer.norm_eps) * self._norm_HV
        return self._output((y_THV * outer.sigmoid()).flatten(1).to(x.dtype))

    def _scan(
        self,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        input_TH: Tensor,
        log_forget_TH: Tensor,
        cache: StateCache,
        batch: StateBatch,
    ) -> Tensor:
        """Update the states, and return the outputs of all tokens."""
        layer, y_THV = self._layer, torch.empty_like(v_THV)
        states_SHX = cache.load(batch).unflatten(1, (self._num_heads, -1))
        # The sum of keys is one more column of the matrix.
        v_THV = F.pad(v_THV, (0, 1), value=1.0)
        columns = layer.value_dim + 1
        # A segment is one token, and the tokens of a request follow each other.
        for part in batch.rounds:
            tokens, requests = part.segments, part.requests
            state_RHX = states_SHX[requests]
            matrix_RHKV = state_RHX[..., :-1].unflatten(-1, (-1, columns))
            decayed_RH = log_forget_TH[tokens] + state_RHX[..., -1]
            scale_RH = torch.maximum(decayed_RH, input_TH[tokens])
            k_RHK = k_THK[tokens] * (input_TH[tokens] - scale_RH).exp()[..., None]
            old_RH11 = (decayed_RH - scale_RH).exp()[..., None, None]
            matrix_RHKV = matrix_RHKV * old_RH11 + k_RHK[..., None] * v_THV[tokens][:, :, None]
            sums_RHV = (q_THK[tokens][..., None] * matrix_RHKV).sum(2)
            divisor_RH = torch.maximum(sums_RHV[..., -1].abs(), (-scale_RH).exp()) + layer.eps
            y_THV[tokens] = sums_RHV[..., :-1] / divisor_RH[..., None]
            states_SHX[requests] = torch.cat((matrix_RHKV.flatten(2), scale_RH[..., None]), -1)
        cache.store(states_SHX.flatten(1), batch)
        return y_THV


def _rows(
    weights: WeightReader, prefix: str, names: tuple[str, str], joined: str, own: range, count: int
) -> list[Rows]:
    """Return these rows of two modules with `count` rows each, which may be stored as one module."""
    if not weights.has(f"{prefix}{joined}.weight"):
        return [Rows(f"{prefix}{name}", count, own) for name in names]
    parts = [range(first + own.start, first + own.stop) for first in (0, count)]
    return [Rows(f"{prefix}{joined}", 2 * count, part) for part in parts]
