"""The block that adds embeddings of n-grams to the streams of a token; see `NgramSpec`.

Shapes: T tokens of a step, D hidden size, N streams, E = N * D, L tokens of the longest n-gram, S segments, C tokens of
a segment, X tokens of a segment and before it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.recurrent_layers import GatedDeltaNet
from ...layers.layer_spec import LayerSpec
from ...layers.specs.ngram import NgramSpec
from ..layer_source import LayerSource
from ..layer_step import LayerStep
from ..mixers.mixer import CausalConvolution
from ..mixers.states import StateCache
from ..norms import read_stream_norm
from ..weights import Rows
from .digits import from_digits, to_digits
from .embedding import NgramEmbedding


class NgramBlock:
    """A block that embeds the n-grams ending at each token, and gates them by its hidden states."""

    def __init__(self, ngrams: NgramSpec, layer: LayerSpec, source: LayerSource) -> None:
        spec, weights, prefix, shard, _ = source
        assert layer.ngram_table is not None
        hidden, channels = spec.hidden_size, spec.num_streams * spec.hidden_size
        self._num_streams, self._channels = spec.num_streams, channels
        self._embed = NgramEmbedding(spec, ngrams, layer.ngram_table, weights, prefix, shard)
        matrices = [("key_proj", channels), ("value_proj", hidden)]
        if not ngrams.taps:
            matrices = [("kv_proj", channels + hidden)]
        rows = [Rows(f"{prefix}{name}", count, range(count)) for name, count in matrices]
        self._project = source.read_rows(rows, ngrams.size)
        self._key_norm, self._query_norm = (
            read_stream_norm(spec, weights, f"{prefix}norm_{name}") for name in ("key", "query")
        )

    def add_to(self, x_TE: Tensor, step: LayerStep) -> None:
        """Add the output to the streams in place."""
        assert step.own_TP is not None
        x_TE += self._added(step.own_TP, x_TE).flatten(1)

    def _added(self, ids_TL: Tensor, x_TE: Tensor) -> Tensor:
        """Return the gated values [T, N, D] of tokens, which `ids_TL` has with the tokens before them."""
        keys_TE, values_TD = self._project(self._embed(ids_TL)).tensor_split((self._channels,), -1)
        keys_TND, queries_TND = (
            norm(each.unflatten(-1, (self._num_streams, -1))).float()
            for norm, each in ((self._key_norm, keys_TE), (self._query_norm, x_TE))
        )
        scores_TN = (keys_TND * queries_TND).sum(-1) * keys_TND.shape[-1] ** -0.5
        roots_TN = scores_TN.abs().clamp(min=1e-6).sqrt() * scores_TN.sign()
        gate_TN = torch.sigmoid(roots_TN).to(x_TE.dtype)
        return gate_TN.unsqueeze(2) * values_TD.unsqueeze(1)


class ConvolvedNgramBlock(NgramBlock):
    """A block that also convolves the gated embeddings.

    The layer's recurrent state has what a later token needs: the ids of the last tokens, and the inputs of the
    convolution.
    """

    def __init__(self, ngrams: NgramSpec, layer: LayerSpec, source: LayerSource) -> None:
        super().__init__(ngrams, layer, source)
        spec, weights, prefix, shard, _ = source
        recurrent = layer.recurrent
        assert isinstance(recurrent, GatedDeltaNet) and recurrent.ngrams is not None
        self._first_byte = recurrent.state_parts.size(shard.tensor_parallel.size).num_own_bytes
        self._size = recurrent.ngrams.state_parts.size(shard.tensor_parallel.size)
        self._segment, self._longest = recurrent.ngrams.segment, ngrams.longest
        self._value_norm = read_stream_norm(spec, weights, f"{prefix}norm_conv")
        taps = weights.read(f"{prefix}conv1d.weight", self._channels, 1, ngrams.taps)
        self._conv = CausalConvolution(taps, None, ngrams.longest)

    def add_to(self, x_TE: Tensor, step: LayerStep) -> None:
        """See `NgramBlock.add_to`."""
        assert step.own_TP is not None
        memory, batch = step.caches[-1]
        plan, dtype = batch.ngrams, x_TE.dtype
        assert plan is not None
        cache = StateCache(memory[:, self._first_byte(dtype.itemsize) :], self._size, dtype)
        inputs, digits = cache.split(self._channels)
        # Without a token, all digits are 0.
        pool_X3 = digits.all_inputs(to_digits(step.own_TP + 1, dtype), plan)
        ids_SX = from_digits(pool_X3[plan.inputs_of_segments]) - 1
        start = ids_SX.shape[1] - self._segment
        ids_TL = torch.stack(
            [
                ids_SX[:, start - distance :][:, : self._segment].flatten()[plan.tokens]
                for distance in range(self._longest)
            ],
            1,
        )
        added_TND = self._added(ids_TL, x_TE)
        pool_XE = inputs.all_inputs(self._value_norm(added_TND).flatten(1), plan)
        convolved_SCE = self._conv(pool_XE[plan.inputs_of_segments])[:, -self._segment :]
        convolved_TE = F.silu(convolved_SCE).flatten(0, 1)[plan.tokens].to(dtype)
        x_TE += added_TND.flatten(1) + convolved_TE
