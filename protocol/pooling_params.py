"""Pooling parameters: the vector that a request reads from the hidden states of its prompt."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class PoolingKind(StrEnum):
    """The way in which the hidden states of a prompt become one vector.

    CLS takes the first token's, LAST the last token's, and MEAN the average over all tokens. ALIGNMENT reads the
    decoder's cross attention instead: its vector is a matrix [tokens of the prompt, `num_frames`], row by row, the
    higher, the more a token belongs to an output of the encoder. It is the average over the model's alignment heads of
    their attention, which is divided by its standard deviation over the tokens after its mean is subtracted, and
    filtered by a median of 7 outputs.
    """

    CLS = "cls"
    MEAN = "mean"
    LAST = "last"
    ALIGNMENT = "alignment"


class PoolingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The pooling of one prompt. The frontend truncates and normalizes the vector.

    With `computes_whole_prompt`, the hidden states of all tokens are needed, so no cached prefix is read. If the prompt
    is a pair of texts, tokens from `second_segment` on have the second token type; 0 for one text. `num_frames` is the
    number of encoder outputs that an alignment reads.
    """

    kind: PoolingKind
    computes_whole_prompt: bool
    second_segment: int = 0
    num_frames: int = 0
