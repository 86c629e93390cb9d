"""An MLP with many small experts beside it, which pairs of keys choose.

Shapes: T tokens of a step, t tokens of a part of it, D hidden size, E experts, e experts of this rank, C experts that a
token chooses, K keys of a set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layers.activations import ACTIVATIONS
from ...layers.specs.pair_experts import PairExpertsSpec
from ..layer_source import LayerSource
from ..mlp import MLP

_TOKENS_AT_ONCE = 32
"""The number of tokens whose chosen rows, [t, C, D], are in memory at once."""


class PairExperts:
    """An MLP, and experts of one intermediate element each, of which every rank has a part.

    The output of an expert is its row in one table, times activation(x @ its row in the other), times its weight: the
    softmax over the logits of the chosen experts.
    """

    gate_up = None
    """None, so that a norm before the experts does not round its output: the router needs exact values."""

    def __init__(self, experts: PairExpertsSpec, source: LayerSource) -> None:
        spec, weights, prefix, shard, kernels = source
        self._mlp = MLP(source, spec.intermediate_size)
        self._spec, self._activate = experts, ACTIVATIONS[spec.activation]
        self._tensor_parallel = shard.tensor_parallel
        router = f"{prefix}router_gate.weight"
        self._keys = kernels.router_linear(
            weights.read_float32(router, 2 * experts.num_keys, spec.hidden_size)
        )
        self._own = shard.tensor_parallel.part(experts.num_experts)
        shape = experts.num_experts, spec.hidden_size
        self._inputs_eD, self._outputs_eD = (
            weights.read(f"{prefix}{name}_embed.weight", *shape, part=self._own)
            for name in ("down", "up")
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the sum [T, D] of the outputs of the MLP and of the chosen experts."""
        y_TD = torch.cat([self._experts(x_tD) for x_tD in x_TD.split(_TOKENS_AT_ONCE)])
        return self._mlp.forward(x_TD).add_(self._tensor_parallel.sum(y_TD))

    def _experts(self, x_tD: Tensor) -> Tensor:
        """Return the weighted sums [t, D] of the outputs of this rank's experts."""
        first_tK, second_tK = self._keys(x_tD).chunk(2, -1)
        logits_tE = (first_tK[:, :, None] + second_tK[:, None]).flatten(1)
        best = logits_tE.topk(self._spec.num_experts_per_token, -1)
        place_tC = best.indices - self._own.start
        is_own_tC = (place_tC >= 0) & (place_tC < len(self._own))
        place_tC = place_tC.masked_fill(~is_own_tC, 0)
        # Each sum has one order, whatever tokens share the step.
        hidden_tC = (self._inputs_eD[place_tC].float() * x_tD[:, None]).sum(-1)
        weights_tC = best.values.softmax(-1).masked_fill(~is_own_tC, 0.0)
        hidden_tC1 = (self._activate(hidden_tC) * weights_tC)[:, :, None]
        return (self._outputs_eD[place_tC] * hidden_tC1).sum(1).to(x_tD.dtype)
