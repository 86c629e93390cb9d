"""The matrices of experts.

Shapes: A rows, ordered by expert, e experts, I and O elements of an expert's input and output, F intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from ...layers.activations import ACTIVATIONS
from ...layers.specs.experts import ExpertsSpec
from ...loaders.quantization.matrix import Weight
from ..layer_source import LayerSource
from ..lora.experts import ExpertChanges
from ..lora.matrices import AdaptedMatrix, AdaptedRows
from ..mlp import gated_activation

ChangedRows: TypeAlias = tuple[Tensor, Tensor]
"""The place of each row's expert, and the step's token to which the row belongs; both [A]."""


class ExpertMatrices:
    """This rank's part of the experts of one mixture, and the changes that LoRA adapters make to them.

    Attributes:
        count: The number of these experts.
        are_all: True if these are all experts that tokens can choose, of all mixtures and ranks.
        can_change: True if adapters may change them.
    """

    def __init__(self, experts: ExpertsSpec, source: LayerSource, mixture: int) -> None:
        spec, weights, prefix, shard, kernels = source
        placement = shard.placement(experts)
        step, own = experts.num_mixtures, placement.experts
        self._numbers = range(own.start + (mixture - own.start) % step, own.stop, step)
        self.count = len(self._numbers)
        self.are_all = step == 1 and not placement.elsewhere and not experts.num_identities
        total, elements = experts.size_in(mixture), placement.elements[mixture]
        size = experts.latent_size or spec.hidden_size
        activation = experts.gate_activation
        has_gate = spec.has_gate or activation is not None
        names = ["gate_proj", "up_proj"] if has_gate else ["up_proj"]
        adapted_gate_up: list[list[AdaptedMatrix]] = []
        adapted_down: list[list[AdaptedMatrix]] = []
        gate_up: list[Weight] = []
        down: list[Weight] = []
        gate_up_biases: list[Tensor] = []
        down_biases: list[Tensor] = []
        for number in self._numbers:
            name = f"{prefix}{experts.stored_name(number)}."
            rows = weights.rows(name, names, [total] * len(names), [elements] * len(names))
            gate_up.append(weights.read_matrix_rows(rows, size))
            down.append(
                weights.read_matrix(f"{name}down_proj.weight", size, total, part=elements, dim=1)
            )
            adapted_gate_up.append(
                [AdaptedMatrix(AdaptedRows(r.name, r.total, r.select_from_all), size) for r in rows]
            )
            outputs = AdaptedRows(f"{name}down_proj", size, lambda x: x)
            adapted_down.append([AdaptedMatrix(outputs, total, elements)])
            if experts.has_biases:
                gate_up_biases.append(weights.read_biases(rows))
                down_biases.append(weights.read(f"{name}down_proj.bias", size))
        self._gate_up_changes = self._down_changes = None
        self.can_change = (
            weights.loras is not None and kernels.finds_rows and shard.expert_group is None
        )
        if weights.loras is not None and self.can_change:
            self._gate_up_changes, self._down_changes = (
                ExpertChanges(each, weights.loras) for each in (adapted_gate_up, adapted_down)
            )
        self._gate_up = kernels.grouped_linear(gate_up, gate_up_biases)
        # Only one of the ranks that share an expert adds its bias.
        self._down = kernels.grouped_linear(down, down_biases if placement.adds_bias else [])
        self._activation: Callable[[Tensor], Any]
        if activation is not None:
            self._activation = partial(_times_next, ACTIVATIONS[activation])
        elif spec.has_gate:
            self._activation = gated_activation(kernels, spec, experts.gate_limit)
        else:
            self._activation = kernels.activation(spec.activation)

    def places(self, experts: Tensor) -> Tensor:
        """Return the places of experts among these; `count` for other experts."""
        if self.are_all:
            return experts
        places = experts - self._numbers.start
        is_other = (
            (experts >= self._numbers.stop) | (places < 0) | (places % self._numbers.step != 0)
        )
        return (places // self._numbers.step).masked_fill(is_other, self.count)

    def compute(self, x_AI: Tensor, ends_e: Tensor, changed: ChangedRows | None) -> Tensor:
        """Return the outputs [A, O] of rows that are ordered by expert and end at `ends_e`.

        Rows of other experts, at the end, have undefined outputs. `changed` are the rows as adapters need them; None if
        the rows come from other replicas.
        """
        projected_AF = self._gate_up(x_AI, ends_e)
        if self._gate_up_changes is not None and changed is not None:
            self._gate_up_changes.add(projected_AF, x_AI, *changed)
        activated_AF = self._activation(projected_AF)
        outputs_AO: Tensor = self._down(activated_AF, ends_e)
        if self._down_changes is not None and changed is not None:
            self._down_changes.add(outputs_AO, activated_AF, *changed)
        return outputs_AO


def _times_next(activate: Callable[[Tensor], Tensor], gate_up_AF: Tensor) -> Tensor:
    """Return the activated gates times the up projections plus 1."""
    gate_AF, up_AF = gate_up_AF.chunk(2, -1)
    return activate(gate_AF) * (up_AF + 1)
