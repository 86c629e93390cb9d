"""Tell a pass over canvases what the pass before it predicted.

Shapes: T tokens of a step, K of them in canvases, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..layer_source import LayerSource
from ..mlp import MLP
from ..norms import read_norm

_PREFIX = "self_conditioning."


class Canvases(NamedTuple):
    """The tokens of a step that belong to canvases.

    Attributes:
        rows_K: Their rows, int64.
        predicted_KD: The mean embedding of the tokens that the last pass predicted at each place; 0 before any pass.
    """

    rows_K: Tensor
    predicted_KD: Tensor

    def mask(self, num_tokens: int) -> Tensor:
        """Return which tokens of a step belong to canvases, bool [T, 1]."""
        mask_T1 = torch.zeros((num_tokens, 1), dtype=torch.bool, device=self.rows_K.device)
        mask_T1[self.rows_K] = True
        return mask_T1


class SelfConditioning:
    """Adds an MLP of the predictions to the embeddings of canvases, and norms the sum."""

    def __init__(self, source: LayerSource) -> None:
        spec, weights, kernels = source.spec, source.weights, source.kernels
        self._mlp = MLP(source.at(_PREFIX), spec.self_conditioning_size)
        self._input_norm = read_norm(spec, weights, f"{_PREFIX}pre_norm", kernels)
        self._output_norm = read_norm(spec, weights, f"{_PREFIX}post_norm", kernels)

    def apply(self, x_TD: Tensor, canvases: Canvases) -> Tensor:
        """Return the embeddings of a step."""
        change_KD = self._mlp.forward(self._input_norm(canvases.predicted_KD.to(x_TD.dtype)))
        return x_TD.index_copy(
            0, canvases.rows_K, self._output_norm(x_TD[canvases.rows_K] + change_KD)
        )
