"""The output projection, with which the last pipeline stage ends.

Shapes: S tokens to be sampled, D hidden size, V vocabulary, v this rank's part of it.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ....protocol.arrays import Int32Array
from ...layers.activations import ACTIVATIONS
from ...layers.layers import Linear
from ...layers.parallel.parallel_layers import VocabParallelHead, unsampled_bias
from ...loaders.quantization.matrix import Weight
from ..layer_source import LayerSource
from ..lora.adapters import LoraAdapters
from ..lora.vocabulary import head_changes
from ..norms import read_norm


class OutputHead:
    """Computes the logits of hidden states, with the LoRA adapters of their requests.

    Args:
        source: The source of the model's weights.
        embedding_vD: This rank's rows of the embedding, if the model uses them as its output projection.
        loras: The LoRA adapters that requests may use.
    """

    def __init__(
        self, source: LayerSource, embedding_vD: Tensor | None, loras: LoraAdapters | None
    ) -> None:
        spec, weights = source.spec, source.weights
        parallel = source.shard.tensor_parallel
        size = spec.embedding_width if spec.has_narrow_head else spec.hidden_size
        vocabulary, part = (spec.vocab_size, size), parallel.part(spec.vocab_size)
        bias_v = weights.read_head_bias(spec.vocab_size, part) if spec.head_bias else None
        head: Weight
        if embedding_vD is not None:
            head = embedding_vD
        elif spec.num_unsampled:
            head = weights.read_padded_head(*vocabulary, part, spec.num_unsampled)
        else:
            head = weights.read_head(*vocabulary, part, spec.num_unused_embeddings)
        if spec.num_unsampled or any(spec.silent_tokens):
            never_v = unsampled_bias(spec, part).to(weights.device, weights.dtype)
            bias_v = never_v if bias_v is None else bias_v + never_v
        self._dense: Linear | None = None
        self._projection: Linear | None = None
        if spec.has_narrow_head:
            shape = size, spec.hidden_size
            self._projection = source.read_linear("head_projection", *shape, has_bias=False)
        if spec.head_dense_bias is not None:
            self._dense = source.kernels.linear(
                weights.read_matrix("head_dense.weight", size, size),
                weights.read("head_dense.bias", size) if spec.head_dense_bias else None,
            )
            self._activate = ACTIVATIONS[spec.activation]
            self._norm = read_norm(spec, weights, "head_norm", source.kernels)
        self._loras = loras
        self._changes = head_changes(vocabulary, part, loras, bias_v)
        self._head = VocabParallelHead(head, bias_v, spec, parallel, source.kernels)

    def logits(self, hidden_SD: Tensor, slots_S: Int32Array | None) -> Tensor:
        """Return the logits, float32 [S, V], with the adapters of these slots; None for the base model."""
        if self._dense is not None:
            hidden_SD = self._norm(self._activate(self._dense(hidden_SD)))
        if self._projection is not None:
            hidden_SD = self._projection(hidden_SD)
        change = None
        if self._loras is not None and self._changes is not None and slots_S is not None:
            change = partial(self._changes.apply, adapters=self._loras.of_slots(slots_S))
        return self._head.logits(hidden_SD, change)
