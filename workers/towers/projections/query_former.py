"""A Q-Former, whose queries attend to each other and to rows of features, in torch, and the projection "former".

Shapes: B blocks of rows, Q queries of a block, T tokens of a text, S = Q + T, D elements of a query or token,
L rows of a block, E elements of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....protocol.arrays import int32_view
from ....protocol.checkpoint.vision.spec import VisionSpec
from ....protocol.config.query_former import QueryFormerSpec
from ....protocol.errors import EngineError
from ...loaders import Checkpoint
from ..image_tower import TowerSource
from ..weights import Linear, VisionWeights, attend, find_activation


class QueryFormer:
    """The norm of the queries and the layers that `spec` describes."""

    def __init__(
        self, spec: QueryFormerSpec, tensors: VisionWeights, prefix: str, checkpoint: Checkpoint
    ) -> None:
        self._norm = tensors.read_layer_norm(f"{prefix}layernorm", spec.size, spec.norm_eps)
        if spec.max_text_tokens:
            words = f"{prefix}embeddings.word_embeddings.weight"
            self._words = tensors.read(words, spec.vocab_size, spec.size)
            places = f"{prefix}embeddings.position_embeddings.weight"
            self._places = tensors.read(places, spec.max_text_tokens, spec.size)
        self._layers = [
            _Layer(spec, tensors, f"{prefix}encoder.layer.{index}.", checkpoint, index)
            for index in range(spec.num_layers)
        ]

    def __call__(
        self, queries_BQD: Tensor, rows_BLE: Tensor, text_BT: Tensor | None = None
    ) -> Tensor:
        """Return the outputs [B, Q, D] of queries that read rows, and the tokens of a text if there is one."""
        num_queries = queries_BQD.shape[1]
        x_BSD = queries_BQD
        if text_BT is not None:
            text_BTD = self._words[text_BT] + self._places[: text_BT.shape[1]]
            x_BSD = torch.cat((queries_BQD, text_BTD), 1)
        x_BSD = self._norm(x_BSD)
        for layer in self._layers:
            x_BSD = layer(x_BSD, rows_BLE, num_queries)
        return x_BSD[:, :num_queries]


def read_former(
    spec: VisionSpec, checkpoint: Checkpoint, read: Callable[[str], VisionWeights]
) -> Callable[[Tensor, int], Tensor]:
    """Return the projection "former", in which learned queries read the patches of an image."""
    assert spec.former is not None
    weights = read("query_tokens")
    size = spec.former.size
    queries_BQD = weights.read("query_tokens", 1, spec.num_queries, size)
    former = QueryFormer(spec.former, weights, "qformer.", checkpoint)
    product = weights.read_linear("language_projection", spec.output_size, size)
    return lambda x_PD, num_columns: product(former(queries_BQD, x_PD[None])[0])


class InstructedFormer:
    """The projection "former" of a Q-Former that reads a text. It maps the patches and the tokens to embeddings."""

    def __init__(self, spec: VisionSpec, source: TowerSource) -> None:
        assert spec.former is not None
        self._max_tokens, self._vocab_size = spec.former.max_text_tokens, spec.former.vocab_size
        weights = source.weights("query_tokens", spec.tensor_names)
        size = spec.former.size
        self._queries_BQD = weights.read("query_tokens", 1, spec.num_queries, size)
        self._former = QueryFormer(spec.former, weights, "qformer.", source.checkpoint)
        self._product = weights.read_linear("language_projection", spec.output_size, size)

    def __call__(self, x_PD: Tensor, token_ids: bytes) -> Tensor:
        """Return the embeddings [Q, output size].

        Raises:
            EngineError: The tokens are not int32, too many, or not in the vocabulary. No correct frontend sends these.
        """
        if len(token_ids) % 4 or len(token_ids) > 4 * self._max_tokens:
            raise EngineError(
                f"an instruction has {len(token_ids)} bytes, but the model reads {self._max_tokens} int32"
            )
        text_T = torch.tensor(int32_view(token_ids).tolist(), dtype=torch.int64)
        if len(text_T) and not 0 <= int(text_T.min()) <= int(text_T.max()) < self._vocab_size:
            raise EngineError(f"tokens of an instruction must be from 0 to {self._vocab_size - 1}")
        text_BT = text_T.to(x_PD.device)[None]
        return self._product(self._former(self._queries_BQD, x_PD[None], text_BT)[0])


class _Layer:
    def __init__(
        self,
        spec: QueryFormerSpec,
        tensors: VisionWeights,
        prefix: str,
        checkpoint: Checkpoint,
        index: int,
    ) -> None:
        size, inner, eps = spec.size, spec.intermediate_size, spec.norm_eps
        self._num_heads = spec.num_heads

        def attention(name: str, columns: int) -> list[Linear]:
            name = f"{prefix}{name}."
            return [
                tensors.read_linear(f"{name}attention.query", size, size),
                tensors.read_linear(f"{name}attention.key", size, columns),
                tensors.read_linear(f"{name}attention.value", size, columns),
                tensors.read_linear(f"{name}output.dense", size, size),
            ]

        self._attentions = [attention("attention", size)]
        names = ["attention.output"]
        if index % spec.cross_attention_every == 0:
            self._attentions.append(attention("crossattention", spec.read_size))
            names.append("crossattention.output")
        self._norms = [
            tensors.read_layer_norm(f"{prefix}{name}.LayerNorm", size, eps) for name in names
        ]
        activation = find_activation(checkpoint, spec.activation)

        def mlp(kind: str) -> Callable[[Tensor], Tensor]:
            up = tensors.read_linear(f"{prefix}intermediate{kind}.dense", inner, size)
            down = tensors.read_linear(f"{prefix}output{kind}.dense", size, inner)
            norm = tensors.read_layer_norm(f"{prefix}output{kind}.LayerNorm", size, eps)
            return lambda x: norm(x + down(activation(up(x))))

        self._query_mlp = mlp("_query")
        self._text_mlp = mlp("") if spec.max_text_tokens else None

    def __call__(self, x_BSD: Tensor, rows_BLE: Tensor, num_queries: int) -> Tensor:
        x_BSD = self._attend(0, x_BSD, x_BSD)
        x_BQD = x_BSD[:, :num_queries]
        if len(self._attentions) > 1:
            x_BQD = self._attend(1, x_BQD, rows_BLE)
        x_BQD = self._query_mlp(x_BQD)
        if self._text_mlp is None:
            return x_BQD
        return torch.cat((x_BQD, self._text_mlp(x_BSD[:, num_queries:])), 1)

    def _attend(self, index: int, x: Tensor, read: Tensor) -> Tensor:
        query, key, value, output = self._attentions[index]
        attended = attend(query(x), key(read), value(read), self._num_heads)
        return self._norms[index](x + output(attended))
