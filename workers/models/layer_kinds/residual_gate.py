"""Trained factors of each element of the residual stream, and of each element of a block's output.

Shapes: T tokens of a step, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layers.spec import ModelSpec
from ..weights import WeightReader

_LEAST_SQUARE = 1e-3
"""The minimum of the square of a stream's factor."""


class ResidualGate:
    """The factors of the stream, and of a block's output that is added to it, both float32 [D] (Muse Spark).

    The square of the one is 1 minus the square of the other, so that the sum of independent elements keeps its
    variance.
    """

    def __init__(self, spec: ModelSpec, weights: WeightReader, norm: str) -> None:
        """Read the gate of a block, given the name of the norm of its output."""
        gate_D = weights.read_float32(f"{norm}.residual_gate", spec.hidden_size)
        logits_D = gate_D / spec.residual_temperature
        if spec.interpolates_blocks:
            self.block_D = logits_D.abs()
            self.stream_D = 1 - self.block_D
            return
        self.block_D = torch.sigmoid(logits_D)
        square_D = torch.sigmoid(-logits_D) * (1 + self.block_D)
        self.stream_D = square_D.clamp(min=_LEAST_SQUARE).sqrt()

    def scale(self, x_TD: Tensor, block_TD: Tensor) -> Tensor:
        """Scale the stream in place, and return the scaled output of the block."""
        x_TD.copy_(x_TD * self.stream_D)
        return (block_TD * self.block_D).to(block_TD.dtype)


class ResidualFactor:
    """Multiplies the stream by a stored factor for each element, before a block's output is added (Doge)."""

    def __init__(self, spec: ModelSpec, weights: WeightReader, name: str) -> None:
        self._factor_D = weights.read(name, spec.hidden_size)

    def scale(self, x_TD: Tensor, block_TD: Tensor) -> Tensor:
        """Multiply the stream in place. Return the block's output as it is."""
        x_TD.mul_(self._factor_D)
        return block_TD


class OutputFactor:
    """Multiplies a block's output by 1 plus a stored number for each element (Qwen3-Next, Intern-S2 Mobius)."""

    def __init__(self, spec: ModelSpec, weights: WeightReader, name: str) -> None:
        self._factor_D = (1 + weights.read_elements(name, spec.hidden_size)).to(weights.dtype)

    def scale(self, x_TD: Tensor, block_TD: Tensor) -> Tensor:
        """Return the scaled output of the block. The stream stays as it is."""
        return block_TD * self._factor_D


class ResidualScale:
    """Factors of the stream and of a block's output, which are applied after biases, all float32 [D] (ZAYA1)."""

    def __init__(self, spec: ModelSpec, weights: WeightReader, name: str) -> None:
        """Read the factors and biases that belong to the block called `name`."""
        self.stream_D, self.stream_bias_D, self.block_D, self.block_bias_D = (
            weights.read_float32(f"{name}.{of}_{kind}", spec.hidden_size)
            for of in ("residual", "hidden_states")
            for kind in ("scale", "bias")
        )

    def scale(self, x_TD: Tensor, block_TD: Tensor) -> Tensor:
        """Scale the stream in place, and return the scaled output of the block."""
        x_TD.copy_((x_TD + self.stream_bias_D) * self.stream_D)
        return ((block_TD + self.block_bias_D) * self.block_D).to(block_TD.dtype)
