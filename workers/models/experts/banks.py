"""Experts that several layers share, beside an MLP of each layer's own.

Shapes: T tokens of a step, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from ...layers.specs.experts import ExpertsSpec
from ..layer_source import LayerSource
from .mixture import Experts, SharedExperts


class BankedExperts:
    """The MLP of a layer, and the experts of its bank, which `share_experts` sets."""

    gate_up = None
    """See `Experts.gate_up`."""
    experts: Experts

    def __init__(self, experts: ExpertsSpec, source: LayerSource) -> None:
        self.spec = experts
        self._shared = SharedExperts(experts, source)

    def forward(self, x_TD: Any) -> Tensor:
        """Return the output [T, D] of the chosen experts and of the MLP."""
        return self.experts.forward(x_TD).add_(self._shared.forward(x_TD))


def share_experts(layers: Sequence[BankedExperts], source: LayerSource) -> None:
    """Read each bank once, for all of these layers of a stage, whose model has the weights of `source`."""
    banks: dict[int | None, Experts] = {}
    for layer in layers:
        bank = layer.spec.bank
        if bank not in banks:
            routed = replace(layer.spec, shared_intermediate_size=0)
            banks[bank] = Experts(routed, source.at(f"expert_banks.{bank}."))
        layer.experts = banks[bank]
    numbers = {layer.experts.bank for layer in source.spec.layers if layer.experts is not None}
    source.weights.skip([f"expert_banks.{bank}." for bank in numbers - {None, *banks}])
