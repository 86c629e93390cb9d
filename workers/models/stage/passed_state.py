"""The base class of what layers pass on to later layers of a step, beside the residual stream.

Shapes: T tokens of a step, E elements of a token that a pipeline stage sends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class PassedState(ABC):
    """A part of a step that the layers of a stage share, and that each stage sends to the next one."""

    @abstractmethod
    def receive(self, received_TE: Tensor | None) -> None:
        """Begin a step with what the previous stage sent; None in the first stage."""

    @abstractmethod
    def sent(self) -> Tensor | None:
        """Return what the next stage needs, [T, E], or None if it needs nothing."""
