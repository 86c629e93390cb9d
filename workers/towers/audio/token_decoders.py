"""Decoders that turn the rows of an encoder of speech into tokens, one row after another: CTC and transducers.

Shapes: P rows, D hidden size of the encoder, V tokens and durations, H hidden size of a transducer, R written tokens.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from ....protocol.config.model import TOKEN_FIELDS
from ....protocol.config.token_decoders import CtcSpec, TransducerSpec
from ...loaders import Checkpoint
from ..weights import Linear, VisionWeights, find_activation

_LSTM_PARTS: Final = (
    ("weight_ih", True),
    ("weight_hh", True),
    ("bias_ih", False),
    ("bias_hh", False),
)


class TokenDecoder(Protocol):
    """A decoder of the rows of one clip. It is greedy."""

    def __call__(self, x_PD: Tensor) -> Tensor:
        """Return the written tokens, float32 [R, `TOKEN_FIELDS`]."""


def read_token_decoder(
    decoder: CtcSpec | TransducerSpec,
    hidden_size: int,
    tensors: VisionWeights,
    checkpoint: Checkpoint,
    head: str = "ctc_head",
) -> TokenDecoder:
    """Return the decoder that reads the rows of an encoder. `head` is the name of the matrix of CTC."""
    if isinstance(decoder, CtcSpec):
        return _Ctc(decoder, tensors.read_linear(head, decoder.vocab_size, hidden_size))
    return _Transducer(decoder, hidden_size, tensors, checkpoint)


class _Ctc:
    def __init__(self, spec: CtcSpec, head: Linear) -> None:
        self._blank, self._head = spec.blank, head

    def __call__(self, x_PD: Tensor) -> Tensor:
        logprobs_P, ids_P = self._head(x_PD).float().log_softmax(1).max(1)
        is_new_P = torch.ones_like(ids_P, dtype=torch.bool)
        is_new_P[1:] = ids_P[1:] != ids_P[:-1]
        starts = is_new_P.nonzero()[:, 0]
        ends = torch.cat((starts[1:], starts.new_tensor([len(ids_P)])))
        written = ids_P[starts] != self._blank
        starts, ends = starts[written], ends[written]
        fields = (ids_P[starts], logprobs_P[starts], starts, ends)
        return torch.stack([each.float() for each in fields], 1)


class _Transducer:
    def __init__(
        self,
        spec: TransducerSpec,
        hidden_size: int,
        tensors: VisionWeights,
        checkpoint: Checkpoint,
    ) -> None:
        self._spec = spec
        size = spec.hidden_size
        self._encoded = tensors.read_linear("encoder_projector", size, hidden_size)
        self._embedding_VH = tensors.read("decoder.embedding.weight", spec.vocab_size, size)
        self._lstm = [
            tensors.read(f"decoder.lstm.{part}_l{layer}", 4 * size, *[size] * is_matrix)
            for layer in range(spec.num_layers)
            for part, is_matrix in _LSTM_PARTS
        ]
        self._read_tokens = tensors.read_linear("decoder.decoder_projector", size, size)
        self._activation = find_activation(checkpoint, spec.activation)
        num_scores = spec.vocab_size + len(spec.durations)
        self._head = tensors.read_linear("joint.head", num_scores, size)

    def __call__(self, x_PD: Tensor) -> Tensor:
        spec = self._spec
        rows_PH = self._encoded(x_PD)
        state = rows_PH.new_zeros(2, spec.num_layers, 1, spec.hidden_size)
        read_H, state = self._read(spec.blank, state)
        written: list[tuple[float, float, int, int]] = []
        row = num_symbols = 0
        while row < len(rows_PH):
            scores_V = self._head(self._activation(rows_PH[row] + read_H)).float()
            tokens_V, durations = scores_V[: spec.vocab_size], scores_V[spec.vocab_size :]
            token = int(tokens_V.argmax())
            step = spec.durations[int(durations.argmax())] if spec.durations else 0
            if token == spec.blank:
                row, num_symbols = row + max(step, 1), 0
                continue
            logprob = float(tokens_V[token] - tokens_V.logsumexp(0))
            num_symbols = 0 if step else num_symbols + 1
            if num_symbols >= spec.max_symbols:
                step, num_symbols = max(step, 1), 0
            end = min(row + max(step, 1), len(rows_PH))
            written.append((token, logprob, row, end))
            row += step
            read_H, state = self._read(token, state)
        return torch.tensor(written, device=x_PD.device).reshape(-1, TOKEN_FIELDS)

    def _read(self, token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the network joins after one more token, and the state after it."""
        embedded_11H = self._embedding_VH[token].view(1, 1, -1)
        output_11H, hidden, cell = torch.lstm(
            embedded_11H,
            list(state.unbind()),
            self._lstm,
            has_biases=True,
            num_layers=self._spec.num_layers,
            dropout=0.0,
            train=False,
            bidirectional=False,
            batch_first=False,
        )
        return self._read_tokens(output_11H[0, 0]), torch.stack((hidden, cell))
