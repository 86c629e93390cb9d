"""Stored factors on queries that grow with the logarithm of the position; see `LatentSpec`.

Shapes: T tokens of a step, H heads, K elements of a query.
"""

from __future__ import annotations

from torch import Tensor

from ..weights import WeightReader


class LogScales:
    """The stored scales and biases of `heads`, which are a part of the checkpoint's `num_heads`."""

    def __init__(self, weights: WeightReader, prefix: str, num_heads: int, heads: range) -> None:
        self._scale_H, self._bias_H = (
            weights.read_vector(f"{prefix}softmax_scaling.{kind}", num_heads, heads)
            for kind in ("scale", "bias")
        )

    def scale(self, q_THK: Tensor, positions_T: Tensor) -> Tensor:
        """Return queries multiplied by each head's factor at their positions."""
        log_T1 = positions_T.float().log1p().unsqueeze(1)
        factor_TH1 = (self._scale_H * log_T1 + self._bias_H).unsqueeze(-1)
        return (q_THK * factor_TH1).to(q_THK.dtype)
