"""The refiner of XPress heads, which lets each draft of a block depend on all drafts before it.

A place of the block has a vector, which follows from its hidden state, the block's mean, and the token before it.
A causal mixture of the vectors, and an MLP, give what is added to the place's logits. The published code computes all
places at once, several times, until no draft changes. In order, each draft is computed once.

Shapes: S slots, R rank, B places of a block, P places so far, V tokens with logits, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..layouts import head_layout
from ..tensors import HeadTensors


class BlockStart(NamedTuple):
    """The known tokens and states at which blocks of drafts begin.

    Attributes:
        first_SD: The hidden states of the last known tokens, where the blocks begin.
        mean_SD: The means of the blocks' hidden states.
        previous_S: The tokens before the last known ones.
    """

    first_SD: Tensor
    mean_SD: Tensor
    previous_S: Tensor


class Refiner:
    """The refiner of a block of drafts.

    Raises:
        CheckpointError: A tensor is missing.
        ConfigError: A tensor has the wrong shape.
    """

    def __init__(self, tensors: HeadTensors) -> None:
        def read(part: str, dtype: torch.dtype = torch.float32) -> Tensor:
            return tensors.read(f"{head_layout.REFINER}{part}", f"xpress_head.{part}", dtype)

        self._vectors_VR = read("w1.weight", tensors.dtype)
        rank = self._vectors_VR.shape[1]
        self._of_place, self._of_mean, self._project = (
            read(f"{part}.weight") for part in ("down_h", "down_g", "in_proj")
        )
        mixture_RBB = read("mix.L").tril()
        # A place's own vector is added to the mixture.
        self._mixture_BBR = mixture_RBB.permute(1, 2, 0) + torch.eye(
            mixture_RBB.shape[1], device=tensors.device
        ).unsqueeze(2)
        self._gate, self._up, self._down = (
            read(f"mlp.{part}_proj.weight") for part in ("gate", "up", "down")
        )
        matrix = f"{head_layout.REFINER}w2.weight"
        tensors.require(matrix, "xpress_head.w2.weight")
        self.num_tokens = tensors.num_rows(matrix)
        """The number of tokens that have a bias."""
        self._logits = tensors.product(matrix, (self.num_tokens, rank))

    def begin(self, start: BlockStart) -> Tensor:
        """Return the states of blocks, [S, 1 + P, R]: a vector of the mean, and those of the places so far."""
        state_S1R = F.linear(start.mean_SD.float(), self._of_mean).unsqueeze(1)
        return self._with_place(state_S1R, start.first_SD, start.previous_S)

    def bias(
        self, previous_S: Tensor, hidden_SD: Tensor, state_SPR: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the bias of the logits after the tokens `previous_S`, float32 [S, V], and the next states."""
        state_SPR = self._with_place(state_SPR, hidden_SD, previous_S)
        place = state_SPR.shape[1] - 2
        mixture_PR = self._mixture_BBR[place, : place + 1]
        mixed_SR = (state_SPR[:, 1:] * mixture_PR).sum(1)
        inner = F.silu(F.linear(mixed_SR, self._gate)) * F.linear(mixed_SR, self._up)
        return self._logits(mixed_SR + F.linear(inner, self._down)), state_SPR

    def _with_place(self, state_SPR: Tensor, hidden_SD: Tensor, previous_S: Tensor) -> Tensor:
        """Return the states with the vector of one more place."""
        token_SR = self._vectors_VR[previous_S.clamp(max=len(self._vectors_VR) - 1)].float()
        parts = F.linear(hidden_SD.float(), self._of_place), state_SPR[:, 0], token_SR
        vector_SR = F.linear(torch.cat(parts, 1), self._project)
        return torch.cat((state_SPR, vector_SR.unsqueeze(1)), 1)
