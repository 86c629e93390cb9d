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
from ....loaders import Checkpoint
from ....loaders.tensor_names import TensorNames, translate_names
from ..layouts import head_layout
from ..product import Product, read_product
from .refiner import BlockStart


class MarkovHead:
    """The Markov head of a block of drafts.

    Args:
        checkpoint: The head's checkpoint.
        tensor_names: Translates the names of its tensors to those of `head_layout`.
        dtype: The dtype of the matrices.
        device: The device of the head.
        num_threads: The number of threads that compute the product with the matrix; 0 to compute it in torch.
        name: The name of the head in error messages.

    Raises:
        CheckpointError: A tensor is missing.
        ConfigError: The tensors have the wrong shape.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensor_names: TensorNames,
        dtype: torch.dtype,
        device: torch.device,
        num_threads: int,
        name: str,
    ) -> None:
        stored = translate_names(checkpoint.names(), tensor_names)
        for needed in (head_layout.MARKOV_VECTORS, head_layout.MARKOV_MATRIX):
            if needed not in stored:
                raise checkpoint.missing("markov_head.markov_w1.weight or markov_w2.weight")

        def read(tensor: str) -> Tensor | None:
            if tensor not in stored:
                return None
            return checkpoint.tensor(stored[tensor], torch.float32).to(device)

        self._vectors_VR = checkpoint.tensor(stored[head_layout.MARKOV_VECTORS], dtype).to(device)
        rank = self._vectors_VR.shape[1]
        matrix = stored[head_layout.MARKOV_MATRIX]
        self.num_tokens = checkpoint.shape(matrix)[0]
        """The number of tokens that have a bias."""
        self._project: Product = read_product(
            checkpoint, matrix, (self.num_tokens, rank), dtype, device, num_threads, name
        )
        self._gate, self._gate_bias = (
            read(tensor) for tensor in (head_layout.MARKOV_GATE, head_layout.MARKOV_GATE_BIAS)
        )
        self._state, self._state_bias = (
            read(tensor) for tensor in (head_layout.MARKOV_STATE, head_layout.MARKOV_STATE_BIAS)
        )
        for weight, count in ((self._gate, 1), (self._state, 3)):
            if weight is not None and len(weight) != count * rank:
                raise ConfigError(
                    f"{name}: a matrix of the Markov head has {len(weight)} rows, not {count * rank}; use another head"
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
