"""Look up drafts in earlier text: a request's prompt and output, a client's prediction, and other answers.

A draft is accepted if it equals the token that the model samples at its position, with the random number of that
position. Every request therefore gets the same tokens with and without drafts, greedy or not: Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding" (2023), with target and draft sharing their random numbers.
"""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np

from ....protocol.arrays import Int32Array, Int64Array, int32_bytes, int32_view, offsets_in_runs
from ....protocol.config import ProposerMethod, SpeculativeConfig
from ....protocol.worker_messages import DraftTokenIds, NewRequestData
from ...batch import PersistentBatch, SlotArray
from ..abi.structs import DraftLookup
from ..library import native_library
from .suffixes import SuffixStore

_LEVEL_STARTS: Final = np.array((3, 6, 12))
"""The fewest drafts found at each level of confidence but the first.

As many drafts are found as tokens matched, so a longer match has a higher level.
"""


class Drafts:
    """The drafts of every slot of a batch, which are stored after the slot's tokens.

    Raises:
        NotSupportedNatively: The native library was not built.
    """

    def __init__(self, config: SpeculativeConfig, batch: PersistentBatch) -> None:
        self._batch = batch
        self._look_up = native_library().engine_look_up_drafts
        self.max_drafts = batch.num_slots * config.num_speculative_tokens
        self._num_drafts: Int32Array = np.zeros(batch.num_slots, np.int32)
        self._most = config.num_speculative_tokens
        self.limits: Int32Array = np.full(
            (batch.num_slots, config.num_levels), self._most, np.int32
        )
        """The maximum number of drafts per slot and level of confidence, not counting forced ones."""
        self._search_limits: Int32Array = self.limits.max(1)
        self._suffixes: SuffixStore | None = None
        if config.method is ProposerMethod.SUFFIX:
            self._suffixes = SuffixStore(config, batch)
        self._num_forced: Int32Array = np.zeros(batch.num_slots, np.int32)
        self._forced_start: Int32Array = np.zeros(batch.num_slots, np.int32)
        # There must be space for a step's drafts, the token sampled after them, and the next step's drafts.
        width = 2 * config.num_speculative_tokens + 1
        self._forced: Int32Array = np.zeros((batch.num_slots, width), np.int32)
        self._slots: Int32Array = np.zeros(batch.num_slots, np.int32)
        self._counts: Int32Array = np.zeros(batch.num_slots, np.int32)
        self._tokens: Int32Array = np.zeros(self.max_drafts, np.int32)
        self._predictions: dict[int, Int32Array] = {}
        self._predicted_tokens = (ctypes.c_void_p * batch.num_slots)()
        self._num_predicted: Int32Array = np.zeros(batch.num_slots, np.int32)
        self._num_from_prediction: Int32Array = np.zeros(batch.num_slots, np.int32)
        self.lookup = DraftLookup(
            num_drafts=self._num_drafts.ctypes.data,
            limits=self._search_limits.ctypes.data,
            suffixes=None if self._suffixes is None else ctypes.pointer(self._suffixes.suffixes),
            is_searching=not config.method.runs_model,
            most=config.num_speculative_tokens,
            shortest_match=config.prompt_lookup_min,
            forced_width=width,
            num_forced=self._num_forced.ctypes.data,
            forced_start=self._forced_start.ctypes.data,
            forced_tokens=self._forced.ctypes.data,
            predicted_tokens=ctypes.addressof(self._predicted_tokens),
            num_predicted=self._num_predicted.ctypes.data,
            num_prompt_tokens=batch.num_prompt_tokens.ctypes.data,
            num_from_prediction=self._num_from_prediction.ctypes.data,
            found_slots=self._slots.ctypes.data,
            found_counts=self._counts.ctypes.data,
            found_tokens=self._tokens.ctypes.data,
        )

    def remove_requests(self, slots: Int32Array) -> None:
        """Store the answers of requests that leave these slots. Call this before other requests get the slots."""
        if self._suffixes is not None:
            for slot in slots.tolist():
                self._suffixes.keep_answer(slot)

    def set_limits(self, rows: Int32Array) -> None:
        """Set the maximum number of drafts of slots, from rows (slot, limit of each level)."""
        rows = rows.reshape(-1, 1 + self.limits.shape[1])
        slots = rows[:, 0]
        self.limits[slots] = rows[:, 1:].clip(0, self._most)
        # A search for fewer drafts would find too low a level, so `_limit_found` applies the limits.
        self._search_limits[slots] = np.where(self.limits[slots].any(1), self._most, 0)

    def add_requests(self, requests: list[NewRequestData]) -> None:
        """Set the predictions of new requests, and clear the drafts of their slots."""
        for new in requests:
            most = self._most if new.pooling_params is None else 0
            self.limits[new.slot] = self._search_limits[new.slot] = most
            if self._suffixes is not None:
                self._suffixes.add_request(new.slot)
            self._predictions[new.slot] = predicted = int32_view(new.predicted_token_ids)
            self._predicted_tokens[new.slot] = predicted.ctypes.data
            self._num_predicted[new.slot] = len(predicted)
        self.drop_drafts([new.slot for new in requests])

    def set_drafts(self, slots: SlotArray, counts: Int32Array, token_ids: Int32Array) -> None:
        """Replace the drafts of slots: slot i gets `counts[i]` of the concatenated `token_ids`."""
        self._batch.write_drafts(slots, counts, token_ids)
        self._num_drafts[slots] = counts
        # The core keeps a prefix of the drafts that were found, so the first drafts still come from the prediction.
        self._num_from_prediction[slots] = np.minimum(self._num_from_prediction[slots], counts)

    def set_forced_tokens(self, forced: DraftTokenIds) -> None:
        """Store tokens that grammars force after the last token of each slot."""
        slots, counts = int32_view(forced.slots), int32_view(forced.num_tokens)
        is_filled = np.arange(self._forced.shape[1]) < counts[:, None]
        rows = np.zeros(is_filled.shape, np.int32)
        rows[is_filled] = int32_view(forced.token_ids)
        self._forced[slots] = rows
        self._num_forced[slots] = counts
        self._forced_start[slots] = self._batch.num_tokens[slots]

    def drop_drafts(self, slots: Int32Array | list[int]) -> None:
        """Clear the drafts of these slots, because their tokens have changed."""
        self._num_drafts[slots] = 0
        self._num_forced[slots] = 0
        self._num_from_prediction[slots] = 0

    def look_up(self, slots: Int32Array) -> None:
        """Look up drafts for slots that have a new token."""
        slots_of_64_bits = slots.astype(np.int64)
        self._look_up(
            ctypes.byref(self.lookup),
            slots_of_64_bits.ctypes.data,
            len(slots),
            self._batch.max_model_len,
            self._batch.host_token_ids_NL.ctypes.data,
            self._batch.num_tokens.ctypes.data,
        )

    def add_found(self, slots: Int64Array, counts: Int32Array) -> None:
        """Record drafts that a draft model has written after the tokens of slots, `counts[i]` for slot i."""
        self._num_drafts[slots] = counts
        is_found = counts > 0
        slots, counts = slots[is_found], counts[is_found]
        begin = self.lookup.num_found
        end = begin + len(slots)
        first = int(self._counts[:begin].sum())
        self._slots[begin:end], self._counts[begin:end] = slots, counts
        self.lookup.num_found = end
        columns = offsets_in_runs(counts)
        columns += np.repeat(self._batch.num_tokens[slots], counts)
        tokens = self._batch.host_token_ids_NL[np.repeat(slots, counts), columns]
        self._tokens[first : first + len(tokens)] = tokens

    def num_drafts(self, slots: SlotArray) -> Int32Array:
        """Return how many drafts each of these slots has."""
        return self._num_drafts[slots]

    def get_found(self, step: int) -> DraftTokenIds | None:
        """Return the drafts that were found last, as a message after `step`, or None if there are none."""
        levels = b""
        if self.lookup.num_found and self.limits.shape[1] > 1:
            levels = self._limit_found().tobytes()
        num_found = self.lookup.num_found
        if not num_found:
            return None
        counts = self._counts[:num_found]
        return DraftTokenIds(
            step,
            self._slots[:num_found].tobytes(),
            counts.tobytes(),
            self._tokens[: counts.sum()].tobytes(),
            levels,
        )

    def _limit_found(self) -> Int32Array:
        """Drop the drafts beyond the limits of their levels. Return the levels of the others, int32 [num_found]."""
        num_found = self.lookup.num_found
        slots, counts = self._slots[:num_found], self._counts[:num_found]
        levels = np.searchsorted(_LEVEL_STARTS, counts, "right").astype(np.int32)
        is_forced = self._num_forced[slots] > 0
        levels[is_forced] = len(_LEVEL_STARTS)
        kept = np.where(is_forced, counts, np.minimum(counts, self.limits[slots, levels]))
        if np.array_equal(kept, counts):
            return levels
        self._num_drafts[slots] = kept
        self._num_from_prediction[slots] = np.minimum(self._num_from_prediction[slots], kept)
        offsets = offsets_in_runs(counts)
        tokens = self._tokens[: len(offsets)][offsets < np.repeat(kept, counts)]
        self._tokens[: len(tokens)] = tokens
        is_kept = kept > 0
        self.lookup.num_found = num_kept = int(is_kept.sum())
        self._slots[:num_kept], self._counts[:num_kept] = slots[is_kept], kept[is_kept]
        return levels[is_kept]

    def num_from_prediction(self, slots: SlotArray) -> Int32Array:
        """Return how many of each slot's drafts come from the client's prediction. They are the first ones."""
        return self._num_from_prediction[slots]


def count_predictions(
    slots: Int64Array, num_predicted: Int32Array, num_sampled: Int32Array, num_verified: Int32Array
) -> bytes:
    """Return int32 rows (slot, accepted tokens, rejected tokens) for drafts from predictions, as bytes.

    Args:
        slots: The slots of a step.
        num_predicted: The number of drafts of each slot that come from a prediction; these are the first ones.
        num_sampled: The number of tokens that each slot sampled: the accepted drafts, and one more.
        num_verified: The number of drafts of each slot that were verified.
    """
    num_tried = np.minimum(num_predicted, num_verified)
    num_accepted = np.minimum(num_tried, num_sampled - 1)
    is_tried = num_tried > 0
    rows = np.stack((slots, num_accepted, num_tried - num_accepted), 1)
    return int32_bytes(rows[is_tried])
