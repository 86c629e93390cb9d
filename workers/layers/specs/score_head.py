"""The description of a classification head as data."""

from typing import Literal

import msgspec


class ScoreHeadSpec(msgspec.Struct, frozen=True):
    """A classification head on the pooled hidden state: output(norm(activation(dense(x)))), or output(x).

    The checkpoint's tensors are called `score_head.dense`, `score_head.norm` and `score_head.output`. With `token_ids`,
    the output's rows are the rows of these tokens in the model's output projection, or in the embedding if
    `reads_embedding`. Two tokens make one row, the second row minus the first.
    """

    num_labels: int
    has_dense: bool = False
    dense_bias: bool = True
    activation: Literal["tanh", "relu", "gelu"] = "tanh"
    has_norm: bool = False
    output_bias: bool = False
    token_ids: tuple[int, ...] = ()
    reads_embedding: bool = False
