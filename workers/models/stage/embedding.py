"""The embedding of tokens, with which the first pipeline stage begins.

Shapes: T tokens of a step, D hidden size, E elements of an embedding, v this rank's part of the vocabulary, P
positions, G global tokens.
"""

from __future__ import annotations

from typing import Final

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from ...layers.layers import Linear, RMSNorm
from ...layers.parallel.parallel_layers import VocabParallelEmbedding
from ...layers.spec import ModelSpec
from ...towers.placed import Placed
from ..layer_kinds.altup import Streams
from ..layer_source import LayerSource
from ..lora.adapters import LoraAdapters
from ..lora.vocabulary import embedding_changes
from ..ngrams.averaged import AveragedNgrams
from ..norms import read_norm
from ..positions.neighbors import neighbor_rows
from ..positions.table import read_positions
from ..weights import WeightReader

_TOKEN_TYPES: Final = "embed_token_types.weight"


def read_embedding(source: LayerSource) -> Tensor:
    """Return this rank's rows of the embedding [v, E]."""
    spec = source.spec
    part = source.shard.tensor_parallel.part(spec.vocab_size)
    num_rows = spec.vocab_size + spec.num_unused_embeddings
    return source.weights.read("embed_tokens.weight", num_rows, spec.embedding_width, part=part)


def read_token_types(spec: ModelSpec, weights: WeightReader) -> Tensor:
    """Return the embeddings of token types, each with that of the first task if there are tasks."""
    types = weights.read(_TOKEN_TYPES, spec.num_token_types, spec.hidden_size)
    if not spec.num_tasks:
        return types
    return types + weights.read("embed_tasks.weight", spec.num_tasks, spec.hidden_size)[0]


class TokenEmbedding:
    """The sum of a token's embedding and those of its type and position, scaled and normed as the model says.

    Args:
        source: The source of the model's weights.
        embedding_vE: This rank's rows of the embedding.
        loras: The LoRA adapters that requests may use.
        max_model_len: The length of the longest sequence.

    Raises:
        ConfigError: A sequence may be longer than the table of positions.
    """

    def __init__(
        self,
        source: LayerSource,
        embedding_vE: Tensor,
        loras: LoraAdapters | None,
        max_model_len: int,
    ) -> None:
        spec, weights = source.spec, source.weights
        self._projection: Linear | None = None
        if spec.embedding_size is not None:
            shape = spec.hidden_size, spec.embedding_size * (3 if spec.joins_neighbors else 1)
            has_bias = not spec.has_narrow_head
            self._projection = source.read_linear("embed_projection", *shape, has_bias=has_bias)
        width = spec.embedding_width
        if not (spec.joins_neighbors or spec.has_narrow_head):
            # Everything before the projection has the size of embeddings.
            spec = replace(spec, hidden_size=width, embedding_size=None)
        parallel = source.shard.tensor_parallel
        vocabulary, part = (spec.vocab_size, width), parallel.part(spec.vocab_size)
        changes = embedding_changes(vocabulary, part, loras)
        self._spec = spec
        self._embed = VocabParallelEmbedding(
            embedding_vE,
            spec.vocab_size,
            parallel,
            None if changes is None else changes.apply_in_step,
        )
        self._ngrams: AveragedNgrams | None = None
        if spec.averaged_ngrams is not None:
            self._ngrams = AveragedNgrams(spec.averaged_ngrams, source)
        self._scale = spec.rounded_embedding_scale(weights.dtype)
        self._norm: RMSNorm | None = None
        if spec.has_embedding_norm:
            self._norm = read_norm(spec, weights, "embed_norm", source.kernels)
        self._factor_and_bias: list[Tensor] = []
        if spec.has_residual_scales:
            self._factor_and_bias = [
                weights.read(f"embed_{name}", spec.hidden_size) for name in ("scale", "bias")
            ]
        self._first_type_D: Tensor | None = None
        self._second_type_D: Tensor | None = None
        if spec.num_token_types:
            types = read_token_types(spec, weights)
            self._first_type_D = types[0]
            if spec.tells_segments:
                # The row of the first type is added to every token, and this difference to tokens of the second type.
                self._second_type_D = types[1] - types[0]
        self._positions_PD: Tensor | None = None
        if spec.num_positions:
            self._positions_PD = read_positions(spec, weights, max_model_len)
        self._global_GD: Tensor | None = None
        if spec.num_global_tokens:
            self._global_GD = weights.read(
                "embed_global.weight", spec.num_global_tokens, spec.hidden_size
            )
        self._stream_D: Tensor | None = None
        if (predicted := spec.predicted_stream) is not None:
            shape = predicted.num_predicted, spec.hidden_size
            # That of the next token is the last one.
            self._stream_D = weights.read("embed_stream.weight", *shape)[-1]
        self._streams: Streams | None = None
        if spec.altup is not None:
            self._streams = Streams(spec, spec.altup, weights, "altup_projections", source.kernels)

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        placed: Placed | None,
        earlier_TW: Tensor | None = None,
    ) -> Tensor:
        """Return the embeddings [T, D]. The encoder outputs in `placed` replace those of their tokens.

        `earlier_TW` are the W tokens before each that the embedding reads; negative where there is none.
        """
        x_TD = self._with_type(ids_T, positions_T)
        if self._ngrams is not None:
            assert earlier_TW is not None
            x_TD = self._ngrams.average(x_TD, ids_T, earlier_TW)
        if self._scale != 1.0:
            x_TD *= self._scale
        if self._spec.dropped_token is not None:
            x_TD = _without_token(x_TD, ids_T == self._spec.dropped_token, positions_T)
        norms_first = self._spec.places_after_norm
        if placed is not None and not norms_first:
            x_TD = placed.put_into(x_TD)
        if self._positions_PD is not None:
            x_TD += F.embedding(positions_T + self._spec.position_offset, self._positions_PD)
        if norms_first and self._norm is not None:
            x_TD = self._norm(x_TD)
        if placed is not None and norms_first:
            x_TD = placed.put_into(x_TD)
        if self._factor_and_bias:
            factor_D, bias_D = self._factor_and_bias
            x_TD = (x_TD + bias_D) * factor_D
        if self._norm is not None and not norms_first:
            x_TD = self._norm(x_TD)
        is_projected = self._spec.joins_neighbors or self._spec.has_narrow_head
        return x_TD if self._projection is None or is_projected else self._projection(x_TD)

    def expand(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        """Return the hidden states that the first layer reads: the embeddings, or the streams made of them.

        Global tokens, if there are any, are the first rows.
        """
        if self._streams is not None:
            return self._streams.expand(x_TD)
        if self._global_GD is not None:
            return torch.cat((self._global_GD, x_TD))
        if self._stream_D is not None:
            assert self._positions_PD is not None and self._norm is not None
            following_T = positions_T + self._spec.position_offset + 1
            second_TD = F.embedding(following_T, self._positions_PD) + self._stream_D
            return torch.cat((x_TD, self._norm(second_TD)), 1)
        if self._spec.num_streams:
            return x_TD.repeat(1, self._spec.num_streams)
        return x_TD

    def base_rows(self, ids_T: Tensor) -> Tensor:
        """Return the scaled embeddings, float32 [T, E], without those of adapters, types and positions."""
        return self._embed.base_rows(ids_T).float() * self._scale

    def mix(self, probabilities_KV: Tensor) -> Tensor:
        """Return the mean scaled embeddings [K, E] of the tokens of distributions, without those of adapters."""
        return self._embed.mix(probabilities_KV) * self._scale

    def _with_type(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        if self._first_type_D is None:
            x_TD = self._embed(ids_T)
            if self._projection is not None and self._spec.has_narrow_head:
                x_TD = self._projection(x_TD)
            return x_TD
        x_TD = self._embed(ids_T % self._spec.vocab_size)
        if self._spec.joins_neighbors:
            assert self._projection is not None
            x_TD = self._projection(
                torch.cat([neighbor_rows(x_TD, positions_T, i) for i in (1, 0, -1)], 1)
            )
        x_TD = x_TD + self._first_type_D
        if self._second_type_D is None:
            return x_TD
        is_second_T1 = (ids_T >= self._spec.vocab_size).unsqueeze(1)
        return x_TD + is_second_T1 * self._second_type_D


def _without_token(x_TD: Tensor, is_dropped_T: Tensor, positions_T: Tensor) -> Tensor:
    """Return the embeddings with 0 for dropped tokens, and divided by the share of other tokens in their sequence."""
    sequence_T = (positions_T == 0).cumsum(0) - 1
    dropped_S = sequence_T.bincount(is_dropped_T.float()) / sequence_T.bincount()
    share_T1 = (1 - dropped_S)[sequence_T, None]
    return (x_TD / share_T1).to(x_TD.dtype).masked_fill_(is_dropped_T[:, None], 0.0)
