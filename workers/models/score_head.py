"""A classification head on pooled hidden states.

Shapes: D hidden size, L labels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..layers.layers import LayerNorm
from ..layers.spec import ModelSpec
from .weights import WeightReader

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
}


class ScoreHead:
    """The head of `spec`, in float32. It reads one vector at a time, so scores do not depend on the batch."""

    def __init__(self, spec: ModelSpec, weights: WeightReader) -> None:
        assert spec.score_head is not None
        head, size = spec.score_head, spec.hidden_size
        self._dense: tuple[Tensor, Tensor | None] | None = None
        if head.has_dense:
            self._dense = (
                weights.read_score_head("dense.weight", size, size),
                weights.read_score_head("dense.bias", size) if head.dense_bias else None,
            )
        self._norm: LayerNorm | None = None
        if head.has_norm:
            norm_bias_D = weights.read_score_head("norm.bias", size) if spec.norm_bias else None
            weight_D = weights.read_score_head("norm.weight", size)
            self._norm = LayerNorm(weight_D, spec.norm_eps, norm_bias_D)
        self._activation = _ACTIVATIONS[head.activation]
        if head.token_ids:
            rows_LD = weights.read_token_rows(
                head.token_ids, spec.vocab_size, size, of_embedding=head.reads_embedding
            )
            self._weight_LD = rows_LD[1:] - rows_LD[:1] if len(rows_LD) == 2 else rows_LD
        else:
            self._weight_LD = weights.read_score_head("output.weight", head.num_labels, size)
        self._bias_L: Tensor | None = None
        if head.output_bias:
            self._bias_L = weights.read_score_head("output.bias", head.num_labels)

    @classmethod
    def read(cls, spec: ModelSpec, weights: WeightReader) -> ScoreHead | None:
        """Return the head of a model, or None if it has none."""
        return None if spec.score_head is None else cls(spec, weights)

    @torch.inference_mode()
    def __call__(self, vector_D: Tensor) -> Tensor:
        """Return the scores [L] of the classes."""
        if self._dense is not None:
            vector_D = self._activation(F.linear(vector_D, *self._dense))
        if self._norm is not None:
            vector_D = self._norm(vector_D)
        return F.linear(vector_D, self._weight_LD, self._bias_L)
