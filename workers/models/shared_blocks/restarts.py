"""Passes through layers that are computed several times; see `Restart`.

Shapes: T tokens of a step, D hidden size, K kept states, E = K * D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layers.layers import RMSNorm
from ...layers.shared_block import Restart
from ...layers.spec import ModelSpec
from ..layer_kinds.messages import skip_message_queries
from ..weights import WeightReader


class Restarts:
    """Changes hidden states where a pass begins, and holds the kept states of a step."""

    def __init__(self, spec: ModelSpec, weights: WeightReader) -> None:
        self._size, self._count = spec.hidden_size, spec.num_kept_states
        weight_D = torch.ones(spec.hidden_size, device=weights.device)
        if any(layer.restart and layer.restart.has_norm_weights for layer in spec.layers):
            weight_D = weights.read_vector("norm.weight", spec.hidden_size)
        self._norm = RMSNorm(weight_D, spec.norm_eps)
        self._initial_D: Tensor | None = None
        self._kept: list[Tensor] = []
        self._residuals = spec.attention_residuals
        if self._residuals is not None:
            skip_message_queries(weights)
        first = spec.layers[0].restart
        if first is not None and first.adds_initial and weights.has("initial_state"):
            self._initial_D = weights.read("initial_state", spec.hidden_size)

    def begin(self, kept_TE: Tensor | None, x_TD: Tensor) -> None:
        """Start a step with the states that the previous pipeline stage kept, or with zeros if it kept none.

        Args:
            kept_TE: The kept states; None in the first stage.
            x_TD: The hidden states, which determine the shape and dtype of the zeros.
        """
        if kept_TE is None:
            self._kept = [torch.zeros_like(x_TD)] * self._count
        else:
            self._kept = list(kept_TE.split(self._size, -1))

    def apply(self, x_TD: Tensor, restart: Restart) -> Tensor:
        """Return the hidden states with which a pass over layers begins. `x_TD` may be changed."""
        if restart.copies_sums:
            assert self._residuals is not None
            streams_TND = x_TD.unflatten(-1, (self._residuals.num_streams, self._size))
            repeated = self._residuals.repeated_sums
            streams_TND[:, -len(repeated) :] = streams_TND[:, repeated.start : repeated.stop]
            return x_TD
        if restart.norms:
            x_TD = self._norm(x_TD)
        if restart.keeps is not None:
            self._kept[restart.keeps] = x_TD
        if restart.adds is not None and restart.share:
            return torch.lerp(x_TD, self._kept[restart.adds], restart.share)
        if restart.adds is not None:
            return x_TD + self._kept[restart.adds]
        if restart.adds_initial and self._initial_D is not None:
            return x_TD + self._initial_D
        return x_TD.clone()

    def joined(self, x_TD: Tensor) -> Tensor:
        """Return hidden states and kept states side by side, for the next stage."""
        return torch.cat((x_TD, *self._kept), -1)
