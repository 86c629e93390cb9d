"""Choose the token of each row of logits, in torch.

Shapes: S rows of the batch, V vocabulary, R rows of a group.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from ...protocol.arrays import Int32Array
from ..device.transfers import to_device
from .distribution import BlockedLogits, argmax
from .filters import sample_top_k, sample_top_p, sample_unfiltered
from .metadata import Method, RowGroup, SamplingMetadata
from .random import Stream, uniforms

NOT_A_NUMBER: Final = -1
"""Returned instead of a token if a logit is NaN or infinite."""

NOTHING_ALLOWED: Final = -2
"""Returned instead of a token if no logit is above -inf."""


def choose_tokens(
    logits_SV: torch.Tensor, metadata: SamplingMetadata, positions_S: Int32Array
) -> torch.Tensor:
    """Return the next token of each row, or `NOT_A_NUMBER` or `NOTHING_ALLOWED`, as int64 [S].

    Args:
        logits_SV: Logits in float32.
        metadata: The sampling features of the rows.
        positions_S: The number of tokens that each row has so far, which is the index of the token to be chosen.
    """
    x = BlockedLogits.from_logits(logits_SV)
    return _marked(_choose(x, metadata, positions_S), x)


def choose_greedy(logits_SV: torch.Tensor) -> torch.Tensor:
    """Return the most likely token of each row, as `choose_tokens` does for greedy sampling."""
    x = BlockedLogits.from_logits(logits_SV)
    return _marked(argmax(x), x)


def _marked(token_ids: torch.Tensor, x: BlockedLogits) -> torch.Tensor:
    """In rows that cannot be sampled, replace the token with the reason, in place."""
    token_ids.masked_fill_(x.peak_R.isneginf(), NOTHING_ALLOWED)
    return mark_not_numbers(token_ids, x.peak_R)


def mark_not_numbers(token_ids: torch.Tensor, peak_R: torch.Tensor) -> torch.Tensor:
    """Mark rows with a NaN or infinite logit, in place. Their largest logit is NaN or infinite too."""
    return token_ids.masked_fill_(peak_R.isnan() | peak_R.isposinf(), NOT_A_NUMBER)


def _choose(x: BlockedLogits, metadata: SamplingMetadata, positions_S: Int32Array) -> torch.Tensor:
    device = x.peak_R.device
    uniform_S = None
    if not metadata.is_greedy:
        seeds_S = metadata.state.seed[metadata.slots_S]
        noise = uniforms(seeds_S, positions_S.astype(np.int64), Stream.TOKEN)
        uniform_S = to_device(noise, device)
    if len(metadata.groups) == 1:
        return _choose_group(x, metadata.groups[0], uniform_S)
    token_ids = torch.zeros(len(metadata.slots_S), dtype=torch.int64, device=device)
    for group in metadata.groups:
        token_ids[group.rows] = _choose_group(x.rows(group.rows), group, uniform_S)
    return token_ids


def _choose_group(
    x: BlockedLogits, group: RowGroup, uniform_S: torch.Tensor | None
) -> torch.Tensor:
    if group.method is Method.GREEDY or uniform_S is None:
        return argmax(x)
    uniform_R = uniform_S if group.rows is None else uniform_S[group.rows]
    if group.method is Method.TOP_K:
        return sample_top_k(x, group.filters, group.depth, uniform_R)
    if group.method is Method.TOP_P:
        return sample_top_p(x, group.filters, group.depth, uniform_R)
    return sample_unfiltered(x, group.filters, uniform_R)
