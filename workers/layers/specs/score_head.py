"""The description of a classification head as data."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..activations import Activation


class ScoreHeadSpec(msgspec.Struct, frozen=True):
    """A classification head on the pooled hidden state: output(norm(activation(dense(x)))), or output(x).

    The checkpoint's tensors are called `score_head.dense`, `score_head.norm` and `score_head.output`. With `token_ids`,
    the output's rows are the rows of these tokens in the model's output projection, or in the embedding if
    `reads_embedding`. Two tokens make one row, the second row minus the first. If `scores_vocabulary`, the rows are
    those of all tokens.

    With a `reduction`, the head reads the hidden states of all tokens of a prompt, and the result is the mean, the
    maximum or the sum over the tokens. Before that, log(1 + max(x, 0)) is applied `num_logarithms` times.

    With `takes_difference`, the projection has two rows, which make one: the first minus the second.

    `offset` is added to each output.
    """

    num_labels: int
    has_dense: bool = False
    dense_bias: bool = True
    activation: Activation = "tanh"
    has_norm: bool = False
    output_bias: bool = False
    token_ids: tuple[int, ...] = ()
    reads_embedding: bool = False
    scores_vocabulary: bool = False
    reduction: Literal["mean", "max", "sum"] | None = None
    num_logarithms: int = 0
    takes_difference: bool = False
    offset: float = 0.0

    @staticmethod
    def reads_pairs(head: ScoreHeadSpec | None) -> bool:
        """Return whether a head reads pairs of texts, which those that score the vocabulary do not."""
        return head is not None and not head.scores_vocabulary
