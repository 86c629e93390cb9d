"""The Markov head of DSpark, which lets each draft of a block depend on the draft before it.

A block's logits are computed in one pass, so no draft knows the others. The head adds to the logits of a draft a bias
that follows from the previous token: a vector of the token, multiplied by a matrix of low rank. In some heads a gate or
a recurrent state, which also read the hidden state of the draft, change the vector first.

Shapes: S slots, R rank, V tokens with logits, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .....protocol.errors import ConfigError
from ..layouts import head_layout
from ..tensors import HeadTensors
from .refiner import BlockStart


class MarkovHead:
    """The Markov head of a block of drafts.

    Raises:
        CheckpointError: A tensor is missing.
        ConfigError: The tensors have the wrong shape.
    """

    def __init__(self, tensors: HeadTensors) -> None:
        matrix, published = head_layout.MARKOV_MATRIX, "markov_head.markov_w{}.weight"
        self._vectors_VR = tensors.read(
            head_layout.MARKOV_VECTORS, published.format(1), tensors.dtype
        )
        rank = self._vectors_VR.shape[1]
        tensors.require(matrix, published.format(2))
        self.num_tokens = tensors.num_rows(matrix)
        """The number of tokens that have a bias."""
        self._project = tensors.product(matrix, (self.num_tokens, rank))
        self._gate = tensors.find(head_layout.MARKOV_GATE)
        self._gate_bias = tensors.find(head_layout.MARKOV_GATE_BIAS)
        self._state = tensors.find(head_layout.MARKOV_STATE)
        self._state_bias = tensors.find(head_layout.MARKOV_STATE_BIAS)
        for weight, count in ((self._gate, 1), (self._state, 3)):
            if weight is not None and len(weight) != count * rank:
                raise ConfigError(
                    f"{tensors.name}: a matrix of the Markov head has {len(weight)} rows, not {count * rank}; use another head"
                )

    def begin(self, start: BlockStart) -> Tensor:
        """Return the states [S, R] before the first draft of a block."""
        shape = len(start.previous_S), self._vectors_VR.shape[1]
        return self._vectors_VR.new_zeros(shape, dtype=torch.float32)

    def bias(
        self, previous_S: Tensor, hidden_SD: Tensor, state_SR: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the bias of the logits after the tokens `previous_S`, float32 [S, V], and the next states."""
        ids_S = previous_S.clamp(max=len(self._vectors_VR) - 1)
        vector_SR = self._vectors_VR[ids_S].float()
        if self._gate is not None:
            inputs = torch.cat((hidden_SD.float(), vector_SR), dim=1)
            gate_SR = torch.nn.functional.linear(inputs, self._gate, self._gate_bias).sigmoid()
            vector_SR = gate_SR * vector_SR
        if self._state is not None:
            inputs = torch.cat((state_SR, vector_SR, hidden_SD.float()), dim=1)
            joint = torch.nn.functional.linear(inputs, self._state, self._state_bias)
            gate_SR, candidate_SR, output_SR = joint.chunk(3, dim=1)
            gate_SR = gate_SR.sigmoid()
            state_SR = gate_SR * state_SR + (1 - gate_SR) * candidate_SR.tanh()
            vector_SR = output_SR.tanh()
        return self._project(vector_SR.contiguous()), state_SR
