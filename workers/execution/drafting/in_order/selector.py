"""The selector of DFlash 2, which lets each draft of a block depend on the draft before it.

It chooses among the most likely tokens of each draft, and adds to their logits a product of vectors: one of the token
before, one of the draft's hidden state, and one of the candidate.

Shapes: S slots, R rank, K candidates, D hidden size, N drafts, C tokens with logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layouts import head_layout
from ..tensors import HeadTensors


class CandidateSelector:
    """The selector of a block of drafts.

    Args:
        tensors: The head's tensors.
        layout: The layout of the head, with the number of tokens among which a draft is chosen.

    Raises:
        CheckpointError: A tensor is missing.
    """

    def __init__(self, tensors: HeadTensors, layout: head_layout.HeadLayout) -> None:
        self._layout = layout
        self._before_VR, self._after_VR, self._projection_RD = (
            tensors.read(name, f"candidate_{name}")
            for name in (
                head_layout.SELECTOR_BEFORE,
                head_layout.SELECTOR_AFTER,
                head_layout.SELECTOR_PROJECTION,
            )
        )

    def candidates(self, ids_C: Tensor, logits_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the candidates of each draft [N, K], and their logits."""
        layout = self._layout
        logits_NK, chosen_NK = logits_NC.topk(min(layout.num_candidates, logits_NC.shape[1]))
        if (limit := layout.logits_softcap) > 0:
            logits_NK = limit * torch.tanh(logits_NK / limit)
        return ids_C[chosen_NK], logits_NK * layout.logits_scale

    def bias(self, previous_S: Tensor, hidden_SD: Tensor, ids_SK: Tensor) -> Tensor:
        """Return what is added to the logits of candidates after the tokens `previous_S`, [S, K]."""
        vectors_SR = self._before_VR[previous_S] * (hidden_SD.float() @ self._projection_RD.T)
        return torch.einsum("sr,skr->sk", vectors_SR, self._after_VR[ids_SK])
