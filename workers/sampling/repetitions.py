"""The penalty for tokens that would continue a repetition ("DRY"); see `DryParams`.

Shapes: N slots, L tokens of a slot, D rows with the penalty, S rows of the batch, V vocabulary, K compared tokens, B
breakers of several tokens, M tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from ...protocol.arrays import Int32Array, Int64Array
from ..device.transfers import to_device
from .masks import token_limits
from .state import DryState

MAX_COMPARED: Final = 64
"""Longer repetitions count as this many tokens."""

MAX_PENALTY: Final = 1e30
_NO_TOKEN: Final = -1
_ANY: Final = -2


class RepetitionRows(msgspec.Struct):
    """The rows of a batch with the penalty. All arrays but `host_slots_D` are on the device.

    `is_breaker_DV` is true for breakers of one token. `breakers_DBM` has the others, aligned right and padded with a
    mark that matches any token. A row of such marks only stands for no breaker.
    """

    host_slots_D: Int64Array
    rows_D: torch.Tensor
    slots_D: torch.Tensor
    multiplier_D1: torch.Tensor
    log_base_D1: torch.Tensor
    allowed_length_D1: torch.Tensor
    last_n_D1: torch.Tensor
    is_breaker_DV: torch.Tensor
    breakers_DBM: torch.Tensor


class Repetitions:
    """The tokens of each slot's prompt and output."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._ids_NL = torch.full((num_slots, 0), _NO_TOKEN, dtype=torch.int64, device=device)
        self._num_tokens_N = np.zeros(num_slots, np.int64)

    def add_slot(
        self, slot: int, prompt_token_ids: Int32Array, output_token_ids: Int32Array
    ) -> None:
        """Set a slot's tokens."""
        tokens = np.concatenate([prompt_token_ids, output_token_ids]).astype(np.int64)
        self._reserve(len(tokens))
        self._ids_NL[slot] = _NO_TOKEN
        if len(tokens):
            self._ids_NL[slot, : len(tokens)] = to_device(tokens, self._device)
        self._num_tokens_N[slot] = len(tokens)

    def rows(self, dry: Mapping[int, DryState], slots_S: Int64Array) -> RepetitionRows | None:
        """Return the rows with the penalty of a batch of slots; None if there are none."""
        rows = [row for row, slot in enumerate(slots_S.tolist()) if slot in dry]
        if not rows:
            return None
        states = [dry[int(slots_S[row])] for row in rows]
        numbers = np.array(
            [
                (
                    each.params.multiplier,
                    np.log(each.params.base),
                    each.params.allowed_length,
                    each.params.last_n,
                )
                for each in states
            ],
            np.float64,
        )
        multiplier_D1, log_base_D1, allowed_D1, last_n_D1 = to_device(numbers, self._device).split(
            1, 1
        )
        limits_DV = token_limits(
            np.stack([each.breakers for each in states]), self._vocab_size, self._device
        )
        most = max(len(each.long_breakers) for each in states)
        longest = max((len(b) for each in states for b in each.long_breakers), default=0)
        breakers_DBM = np.full((len(rows), most, longest), _ANY, np.int64)
        for i, each in enumerate(states):
            for j, breaker in enumerate(each.long_breakers):
                breakers_DBM[i, j, -len(breaker) :] = breaker
        slots = slots_S[rows]
        return RepetitionRows(
            slots,
            to_device(np.array(rows, np.int64), self._device),
            to_device(slots, self._device),
            multiplier_D1,
            log_base_D1,
            allowed_D1.to(torch.int64),
            last_n_D1.to(torch.int64),
            limits_DV > 0,
            to_device(breakers_DBM, self._device),
        )

    def penalize(self, logits_SV: torch.Tensor, rows: RepetitionRows) -> None:
        """Apply the penalty in place."""
        num_tokens_D = self._num_tokens_N[rows.host_slots_D]
        longest = int(num_tokens_D.max())
        if longest < 2:
            return
        ids_DL = self._last_tokens(rows, num_tokens_D, longest)
        age_L = torch.arange(longest - 1, -1, -1, device=self._device)
        is_far_DL = (rows.last_n_D1 >= 0) & (age_L >= rows.last_n_D1)
        ids_DL = ids_DL.masked_fill(is_far_DL, _NO_TOKEN)
        compared = min(MAX_COMPARED, longest)
        last_DK = ids_DL[:, -compared:].flip(1)
        padded = F.pad(ids_DL, (compared - 1, 0), value=_NO_TOKEN)
        # The number of tokens before and at each place that equal the last ones.
        length_DL = torch.zeros_like(ids_DL)
        is_equal_DL = ids_DL >= 0
        for k in range(compared):
            before_DL = padded[:, compared - 1 - k : compared - 1 - k + longest]
            is_equal_DL = is_equal_DL & (before_DL == last_DK[:, k : k + 1]) & (before_DL >= 0)
            length_DL += is_equal_DL
        limit_D1 = self._tokens_after_breaker(last_DK, rows)
        length_DL = torch.minimum(length_DL, limit_D1)
        # The last token continues nothing.
        length_DL = length_DL[:, :-1]
        next_DL = ids_DL[:, 1:]
        is_repeated_DL = (
            (length_DL >= rows.allowed_length_D1) & (next_DL >= 0) & (ids_DL[:, :-1] >= 0)
        )
        is_repeated_DL &= next_DL < self._vocab_size
        most_DV = torch.full(
            (len(ids_DL), self._vocab_size), -1, dtype=torch.int64, device=self._device
        )
        most_DV.scatter_reduce_(
            1,
            next_DL.masked_fill(~is_repeated_DL, 0),
            length_DL.masked_fill(~is_repeated_DL, -1),
            "amax",
        )
        exponent_DV = (most_DV - rows.allowed_length_D1).double()
        penalty_DV = rows.multiplier_D1 * (rows.log_base_D1 * exponent_DV).exp()
        penalty_DV = penalty_DV.clamp_(max=MAX_PENALTY).to(torch.float32)
        penalty_DV.masked_fill_(most_DV < 0, 0)
        logits_SV[rows.rows_D] = logits_SV[rows.rows_D] - penalty_DV

    def append_sampled(self, rows: RepetitionRows, token_ids_S: torch.Tensor) -> None:
        """Append the token that each row has just sampled."""
        num_tokens_D = self._num_tokens_N[rows.host_slots_D]
        self._reserve(int(num_tokens_D.max()) + 1)
        column_D = to_device(num_tokens_D, self._device)
        self._ids_NL[rows.slots_D, column_D] = token_ids_S[rows.rows_D]
        self._num_tokens_N[rows.host_slots_D] = num_tokens_D + 1

    def _last_tokens(
        self, rows: RepetitionRows, num_tokens_D: Int64Array, longest: int
    ) -> torch.Tensor:
        """Return the tokens, int64 [D, L], aligned right and padded with `_NO_TOKEN`."""
        first_D1 = to_device(num_tokens_D - longest, self._device)[:, None]
        column_DL = first_D1 + torch.arange(longest, device=self._device)
        ids_DL = self._ids_NL[rows.slots_D[:, None], column_DL.clamp(min=0)]
        return ids_DL.masked_fill(column_DL < 0, _NO_TOKEN)

    def _tokens_after_breaker(self, last_DK: torch.Tensor, rows: RepetitionRows) -> torch.Tensor:
        """Return how many of the last tokens come after a breaker, int64 [D, 1]; `last_DK` has the last one first."""
        is_known_DK = (last_DK >= 0) & (last_DK < self._vocab_size)
        ends_DK = rows.is_breaker_DV.gather(1, last_DK.masked_fill(~is_known_DK, 0)) & is_known_DK
        size = rows.breakers_DBM.shape[2]
        if size:
            padded = F.pad(last_DK, (0, size - 1), value=_NO_TOKEN)
            windows_DK1M = padded.unfold(1, size, 1).flip(2)[:, :, None]
            breakers_D1BM = rows.breakers_DBM[:, None]
            is_equal_DKBM = (windows_DK1M == breakers_D1BM) | (breakers_D1BM == _ANY)
            is_breaker_D1B = (breakers_D1BM != _ANY).any(3)
            ends_DK = ends_DK | (is_equal_DKBM.all(3) & is_breaker_D1B).any(2)
        place_K = torch.arange(last_DK.shape[1], device=last_DK.device)
        none = last_DK.shape[1]
        return torch.where(ends_DK, place_K, none).amin(1, keepdim=True)

    def _reserve(self, num_tokens: int) -> None:
        capacity = self._ids_NL.shape[1]
        if num_tokens > capacity:
            missing = max(512, 2 * capacity, num_tokens) - capacity
            self._ids_NL = F.pad(self._ids_NL, (0, missing), value=_NO_TOKEN)
