"""Per-layer embeddings (PLE of Gemma 3n and 4): for each token, every layer has an input besides the hidden state.

Shapes: T tokens of a step, D hidden size, L layers, P elements of a token's input for one layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layers.layers import LayerKernels
from ..layers.parallel.parallel_layers import VocabParallelEmbedding
from ..layers.parallel.shard import ModelShard
from ..layers.spec import ModelSpec
from ..layers.specs.altup import PerLayerInputsSpec
from .layer_source import LayerSource
from .weights import WeightReader


class PerLayerInputs:
    """Computes the per-layer embeddings of all layers at once, in the first pipeline stage."""

    def __init__(
        self,
        spec: ModelSpec,
        inputs: PerLayerInputsSpec,
        weights: WeightReader,
        shard: ModelShard,
        kernels: LayerKernels,
    ) -> None:
        self._spec = inputs
        self._num_layers = len(spec.layers)
        self._product_scale = spec.hidden_size**-0.5
        self._table_scale = torch.tensor(inputs.size**0.5, dtype=weights.dtype).item()
        size = self._num_layers * inputs.size
        parallel = shard.tensor_parallel
        self._embed: VocabParallelEmbedding | None = None
        if inputs.vocab_size:
            table = weights.read_table(
                "embed_tokens_per_layer.weight",
                inputs.vocab_size,
                size,
                parallel.part(inputs.vocab_size),
            )
            self._embed = VocabParallelEmbedding(table, inputs.vocab_size, parallel)
        self._project = kernels.linear(
            weights.read_matrix("per_layer_model_projection.weight", size, spec.hidden_size)
        )
        weight_P = weights.read_vector("per_layer_projection_norm.weight", inputs.size)
        self._norm = kernels.norm(weight_P + spec.norm_weight_offset, spec.norm_eps)

    def __call__(self, input_ids_T: Tensor, x_TD: Tensor) -> Tensor:
        """Return the per-layer embeddings [T, L * P] of tokens whose scaled embeddings are `x_TD`."""
        product_TLP = (self._project(x_TD) * self._product_scale).unflatten(
            -1, (-1, self._spec.size)
        )
        normed_TLP: Tensor = self._norm(product_TLP)
        if self._embed is None:
            return normed_TLP.flatten(1)
        known_T = input_ids_T.masked_fill(input_ids_T >= self._spec.vocab_size, 0)
        stored_TLP = (
            self._embed(known_T).mul_(self._table_scale).unflatten(-1, (-1, self._spec.size))
        )
        return ((normed_TLP + stored_TLP) * 2**-0.5).flatten(1)


class PerLayerBlock:
    """The last block of a layer: norm(project(activation(gate(x)) * per-layer embedding))."""

    def __init__(self, inputs: PerLayerInputsSpec, source: LayerSource) -> None:
        spec, weights, prefix, kernels = source.spec, source.weights, source.prefix, source.kernels
        hidden = spec.hidden_size
        self._gate = kernels.linear(
            weights.read_matrix(f"{prefix}per_layer_input_gate.weight", inputs.size, hidden)
        )
        self._project = kernels.linear(
            weights.read_matrix(f"{prefix}per_layer_projection.weight", hidden, inputs.size)
        )
        self._activation = kernels.activation(spec.activation)
        weight_D = weights.read_vector(f"{prefix}post_per_layer_input_norm.weight", hidden)
        self._norm = kernels.norm(weight_D + spec.norm_weight_offset, spec.norm_eps)

    def forward(self, x_TD: Tensor, inputs_TP: Tensor) -> Tensor:
        """Return the block's output [T, D], which the caller adds to `x_TD`."""
        gated_TP = self._activation(self._gate(x_TD)) * inputs_TP
        block_TD: Tensor = self._norm(self._project(gated_TP))
        return block_TD
