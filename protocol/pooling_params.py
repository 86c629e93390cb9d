"""Pooling parameters: how a request computes a vector from the hidden states of its prompt."""

from enum import StrEnum

import msgspec


class PoolingKind(StrEnum):
    """The way in which the hidden states of a prompt are combined into one vector.

    CLS takes the first token's hidden state, LAST the last token's, and MEAN the average over all tokens. ALL takes
    those of all tokens: its vector is a matrix [tokens of the prompt, elements of a token's result], row by row. HEAD
    takes them, too, but the model's head makes one vector of them. WEIGHTS takes them as well, and its vector has one
    number for each token: its weight in a sparse vector of the text.
    ALIGNMENT reads the decoder's cross attention instead. Its vector is a matrix [tokens of the prompt, `num_frames`],
    row by row; a higher value means that the token more likely belongs to that encoder output. It is the average over
    the model's alignment heads of their attention, which is standardized over the tokens and then filtered by a median
    of 7 encoder outputs.
    """

    CLS = "cls"
    MEAN = "mean"
    LAST = "last"
    ALL = "all"
    HEAD = "head"
    WEIGHTS = "weights"
    ALIGNMENT = "alignment"


class PoolingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The pooling of one prompt. The frontend truncates and normalizes the vector.

    If `computes_whole_prompt`, the hidden states of all tokens are needed, so no cached prefix is read. If the prompt
    is a pair of texts, `second_segment` is the index of the first token with the second token type; 0 for one text.
    `num_frames` is the number of encoder outputs that ALIGNMENT reads. If `num_visible` is not 0, the tokens of an
    encoder attend only to that many tokens at the start.
    """

    kind: PoolingKind
    computes_whole_prompt: bool
    second_segment: int = 0
    num_frames: int = 0
    num_visible: int = 0
