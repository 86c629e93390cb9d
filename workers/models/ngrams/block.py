"""The block that adds embeddings of n-grams to the streams of a token; see `NgramSpec`.

The layer's recurrent state has what a later token needs: the ids of the last tokens, and the inputs of the convolution.

Shapes: T tokens of a step, D hidden size, N streams, E = N * D, P elements of a token's embeddings, S segments, C
tokens of a segment, W tokens before a segment.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.recurrent_layers import GatedDeltaNet
from ...layers.layer_spec import LayerSpec
from ...layers.specs.ngram import NgramSpec
from ..layer_source import LayerSource
from ..mixers.mixer import CausalConvolution
from ..mixers.states import StateBatch, StateCache
from ..norms import read_stream_norm
from .digits import from_digits, to_digits
from .embedding import NgramEmbedding


class NgramBlock:
    """A block that embeds the n-grams ending at each token, gates them by its hidden states, and convolves them."""

    def __init__(self, ngrams: NgramSpec, layer: LayerSpec, source: LayerSource) -> None:
        spec, weights, prefix, shard, kernels = source
        assert layer.ngram_table is not None
        recurrent = layer.recurrent
        assert isinstance(recurrent, GatedDeltaNet) and recurrent.ngrams is not None
        self._first_byte = recurrent.state_size(shard.tensor_parallel.size).num_own_bytes
        self._size = recurrent.ngrams.state_size(shard.tensor_parallel.size)
        self._segment = recurrent.ngrams.segment
        hidden, channels = spec.hidden_size, spec.num_streams * spec.hidden_size
        self._num_streams, self._channels = spec.num_streams, channels
        self._embed = NgramEmbedding(spec, ngrams, layer.ngram_table, weights, prefix, shard)
        self._keys, self._values = (
            kernels.linear(weights.read_matrix(f"{prefix}{name}.weight", rows, ngrams.size))
            for name, rows in (("key_proj", channels), ("value_proj", hidden))
        )
        self._key_norm, self._query_norm, self._value_norm = (
            read_stream_norm(spec, weights, f"{prefix}norm_{name}")
            for name in ("key", "query", "conv")
        )
        self._conv = CausalConvolution(
            weights.read(f"{prefix}conv1d.weight", channels, 1, ngrams.taps), None, ngrams.longest
        )

    def add_to(self, x_TE: Tensor, ids_T: Tensor, memory: Tensor, batch: StateBatch) -> None:
        """Add the output to the streams in place.

        Args:
            x_TE: The streams.
            ids_T: The tokens.
            memory: The blocks of the layer's states, uint8 [blocks, bytes].
            batch: The plan of the layer's state group.
        """
        plan, dtype = batch.ngrams, x_TE.dtype
        assert plan is not None
        cache = StateCache(memory[:, self._first_byte(dtype.itemsize) :], self._size, dtype)
        inputs, digits = cache.split(self._channels)
        # Without a token, all digits are 0.
        pool_X3 = digits.all_inputs(to_digits(ids_T + 1, dtype), plan)
        ids_SX = from_digits(pool_X3[plan.inputs_of_segments]) - 1
        embedding_TP = self._embed(ids_SX, self._segment, plan.tokens)
        gate_TN = self._gates(self._keys(embedding_TP), x_TE)
        added_TND = gate_TN.unsqueeze(2) * self._values(embedding_TP).unsqueeze(1)
        added_TE = added_TND.flatten(1)
        pool_XE = inputs.all_inputs(self._value_norm(added_TND).flatten(1), plan)
        convolved_SCE = self._conv(pool_XE[plan.inputs_of_segments])[:, -self._segment :]
        convolved_TE = F.silu(convolved_SCE).flatten(0, 1)[plan.tokens].to(dtype)
        x_TE += added_TE + convolved_TE

    def _gates(self, keys_TE: Tensor, x_TE: Tensor) -> Tensor:
        keys_TND, queries_TND = (
            norm(each.unflatten(-1, (self._num_streams, -1))).float()
            for norm, each in ((self._key_norm, keys_TE), (self._query_norm, x_TE))
        )
        scores_TN = (keys_TND * queries_TND).sum(-1) * keys_TND.shape[-1] ** -0.5
        roots_TN = scores_TN.abs().clamp(min=1e-6).sqrt() * scores_TN.sign()
        return torch.sigmoid(roots_TN).to(x_TE.dtype)
