"""The changes to the logits of one batch, as tensors.

They are computed together with the batch's `SamplingMetadata`, and used as long as that is.

Shapes: S rows of the batch, V vocabulary; R, P, B, E: rows with a certain feature (E: entries, pairs of row and token).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ...protocol.arrays import Int64Array
from ..device.dtypes import torch_device
from ..device.transfers import to_device
from .bad_words import BadWordRows, BadWords
from .chain import ChainedSampler, ChainRows, Kind
from .masks import token_limits
from .penalties import PenaltyRows
from .repetitions import RepetitionRows, Repetitions
from .state import SamplingState
from .transcripts import TranscriptRows, Transcripts


class LimitedRows(msgspec.Struct):
    """Rows that may sample only certain tokens. `limits` float32 [R, V] is inf for these, and -inf for all others."""

    rows: torch.Tensor
    limits: torch.Tensor


class EndTokens(msgspec.Struct):
    """Tokens that must not end a row before it has `min_lengths_E` tokens. `index_E` are flat indices into [S, V]."""

    rows_E: Int64Array
    min_lengths_E: Int64Array
    index_E: Int64Array


class LogitBias(msgspec.Struct):
    """Biases `values_E`, to be added at the flat indices `index_E` into [S, V]."""

    index_E: torch.Tensor
    values_E: torch.Tensor


class LogitChanges(msgspec.Struct):
    """All changes of a batch's logits; None or an empty list means that no row needs the change."""

    allowed: LimitedRows | None
    bad_words: BadWordRows | None
    end_tokens: EndTokens | None
    logit_bias: LogitBias | None
    penalties: PenaltyRows | None
    repetitions: RepetitionRows | None
    chains: list[ChainRows]
    transcripts: TranscriptRows | None

    @classmethod
    def from_state(
        cls,
        state: SamplingState,
        bad_words: BadWords,
        transcripts: Transcripts,
        repetitions: Repetitions,
        slots_S: Int64Array,
    ) -> LogitChanges:
        """Return the changes for a batch of slots."""
        return cls(
            allowed=_allowed(state, slots_S),
            bad_words=bad_words.rows(state.bad_words, slots_S),
            end_tokens=_end_tokens(state, slots_S),
            logit_bias=_logit_bias(state, slots_S),
            penalties=_penalties(state, slots_S),
            repetitions=repetitions.rows(state.dry, slots_S),
            chains=_chains(state, slots_S),
            transcripts=transcripts.rows(state.transcripts, slots_S),
        )


def _allowed(state: SamplingState, slots_S: Int64Array) -> LimitedRows | None:
    rows = _rows_in(state.allowed_tokens, slots_S)
    if not rows:
        return None
    bitmask = np.stack([state.allowed_tokens[int(slots_S[row])] for row in rows])
    limits = token_limits(bitmask, state.vocab_size, torch_device(state.device))
    return LimitedRows(_to_device(np.array(rows, np.int64), state), limits)


def _end_tokens(state: SamplingState, slots_S: Int64Array) -> EndTokens | None:
    rows = _rows_in(state.end_token_ids, slots_S)
    if not rows:
        return None
    tokens = [state.end_token_ids[int(slots_S[row])] for row in rows]
    rows_E = np.repeat(rows, [len(ids) for ids in tokens])
    index_E = rows_E * state.vocab_size + np.concatenate(tokens)
    return EndTokens(rows_E, state.min_length[slots_S[rows_E]], index_E)


def _logit_bias(state: SamplingState, slots_S: Int64Array) -> LogitBias | None:
    rows = _rows_in(state.logit_bias, slots_S)
    if not rows:
        return None
    biases = [state.logit_bias[int(slots_S[row])] for row in rows]
    index = [row * state.vocab_size + ids for row, (ids, _) in zip(rows, biases, strict=True)]
    return LogitBias(
        _to_device(np.concatenate(index), state),
        _to_device(np.concatenate([values for _, values in biases]), state),
    )


def _penalties(state: SamplingState, slots_S: Int64Array) -> PenaltyRows | None:
    rows = np.flatnonzero(state.has_penalties[slots_S])
    if not len(rows):
        return None
    slots = slots_S[rows]
    return PenaltyRows(
        slots,
        _to_device(rows, state),
        _to_device(slots, state),
        _to_device(state.repetition_penalty[slots, None], state),
        _to_device(state.presence_penalty[slots, None], state),
        _to_device(state.frequency_penalty[slots, None], state),
    )


def _chains(state: SamplingState, slots_S: Int64Array) -> list[ChainRows]:
    rows_of: dict[tuple[Kind, ...], list[int]] = {}
    for row in _rows_in(state.chains, slots_S):
        kinds = tuple(each.kind for each in state.chains[int(slots_S[row])])
        rows_of.setdefault(kinds, []).append(row)
    return [
        ChainRows(
            rows,
            _to_device(np.array(rows, np.int64), state),
            kinds,
            _to_device(_values([state.chains[int(slots_S[row])] for row in rows]), state),
        )
        for kinds, rows in rows_of.items()
    ]


def _values(chains: list[list[ChainedSampler]]) -> npt.NDArray[np.float64]:
    return np.array([[each[1:] for each in samplers] for samplers in chains], np.float64)


def _rows_in(table: Mapping[int, object], slots_S: Int64Array) -> list[int]:
    if not table:
        return []
    return [row for row, slot in enumerate(slots_S.tolist()) if slot in table]


def _to_device(array: npt.NDArray[np.generic], state: SamplingState) -> torch.Tensor:
    return to_device(array, torch_device(state.device))
