"""Pool the hidden states of prompts, chunk by chunk, and send the result with the step that ends the prompt.

Shapes: T tokens of a step, R rows that end their prompt or sample, P pooled ones among them, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import torch

from ....protocol.arrays import BoolArray, Int32Array, float32_bytes, int32_bytes, int32_view
from ....protocol.pooling_params import PoolingKind
from ....protocol.worker_messages import ModelRunnerOutput, NewRequestData, RowVector
from ...batch import StepPlan
from ...device.dtypes import AnyArray, as_tensor, on_host
from ...device.transfers import Download
from ..inputs.alignment import Alignments

_OF_ALL_TOKENS: Final = (PoolingKind.ALL, PoolingKind.HEAD, PoolingKind.WEIGHTS)

NOT_FINITE: Final = "the model's output for this input is not finite"
_NO_ALIGNMENT: Final = (
    "the times of words need a model with alignment heads, and --pipeline-parallel-size 1"
)


Head = Callable[[torch.Tensor, int, PoolingKind], torch.Tensor]


class Pooled:
    """The pooled vectors of one step, float32, which may still be on the device. `is_pooled_R` marks their rows."""

    def __init__(
        self, slots_P: Int32Array, vectors: list[AnyArray], is_pooled_R: BoolArray
    ) -> None:
        self._slots_P = slots_P
        self._vectors = vectors
        self._is_pooled_R = is_pooled_R

    def fetch(self, download: Download) -> None:
        """Start to copy the vectors to the host."""
        self._vectors = [download.copy(vector_D) for vector_D in self._vectors]

    def add_to(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Add the vectors to the output of a step, and token 0 for each of their rows."""
        tokens_R = np.zeros(len(self._is_pooled_R), np.int32)
        tokens_R[~self._is_pooled_R] = int32_view(output.sampled_token_ids)
        output.sampled_token_ids = int32_bytes(tokens_R)
        for slot, vector in zip(self._slots_P.tolist(), self._vectors, strict=True):
            vector_D = on_host(vector)
            if not len(vector_D):
                output.failed_slots.append((slot, _NO_ALIGNMENT))
            elif np.isfinite(vector_D).all():
                output.pooled.append(RowVector(slot, float32_bytes(vector_D)))
            else:
                output.failed_slots.append((slot, NOT_FINITE))
        return output


class Pooling:
    """Collects the hidden states of the requests with pooling parameters.

    `head` computes the result from a pooled vector, its slot and its kind: the scores of a classification head, or the
    output of an embedding model's dense layers. `alignments` align the prompts of a speech model. `find_image` returns
    the embedding of a slot's image, which is a result without a head, or None for texts.
    """

    alignments: Alignments | None = None
    find_image: Callable[[int], torch.Tensor | None] | None = None

    def __init__(self, head: Head | None = None) -> None:
        self._head = head
        self._kinds: dict[int, PoolingKind] = {}
        self._sums: dict[int, AnyArray] = {}
        """Per slot, the sum of the hidden states so far, float64 [D]."""
        self._parts: dict[int, list[AnyArray]] = {}
        """Per slot, the hidden state of the first or the last token [D], or those of each chunk [T, D]."""

    def add_request(self, slot: int, kind: PoolingKind) -> None:
        """Pool the prompt of `slot`."""
        self._kinds[slot] = kind

    def remove_request(self, slot: int) -> None:
        """Discard the hidden states of a slot."""
        self._kinds.pop(slot, None)
        self._sums.pop(slot, None)
        self._parts.pop(slot, None)
        if self.alignments is not None:
            self.alignments.remove_prompt(slot)

    @property
    def is_pending(self) -> bool:
        """True if any slot has a request whose hidden states are pooled."""
        return bool(self._kinds)

    def find(self, slots_R: Int32Array) -> BoolArray:
        """Return which of the slots have a request that is pooled."""
        return np.fromiter((slot in self._kinds for slot in slots_R.tolist()), np.bool_)

    def collect(self, plan: StepPlan, hidden_TD: AnyArray) -> Pooled | None:
        """Read a step's hidden states. Return the vectors of the prompts that end, or None if none ends."""
        if not self._kinds:
            return None
        slots_S = plan.slots_S.tolist()
        is_pooled_R = self.find(plan.slots_S[plan.sampling_rows])
        ending = set(plan.sampling_rows[is_pooled_R].tolist())
        means_SD: AnyArray | None = None
        if any(self._kinds.get(slot) is PoolingKind.MEAN for slot in slots_S):
            means_SD = self._add_up(plan, slots_S, ending, hidden_TD)
        slots: list[int] = []
        vectors: list[AnyArray] = []
        bounds = plan.query_start_loc.tolist()
        for row, slot in enumerate(slots_S):
            kind = self._kinds.get(slot)
            if kind is None:
                continue
            chunk = slice(*bounds[row : row + 2])
            is_first = plan.num_computed_S[row] == 0
            if kind is PoolingKind.ALIGNMENT:
                if self.alignments is not None:
                    self.alignments.add_chunk(slot, chunk, is_first=is_first)
            elif kind is not PoolingKind.MEAN:
                self._add_chunk(slot, hidden_TD[chunk], is_first=is_first)
            if row in ending:
                slots.append(slot)
                if kind is PoolingKind.ALIGNMENT:
                    vectors.append(self._align(slot, int(plan.seq_lens_S[row])))
                elif means_SD is not None and kind is PoolingKind.MEAN:
                    vectors.append(self._finish(slot, means_SD[row]))
                else:
                    vectors.append(self._finish(slot, self._take_parts(slot)))
        if not slots:
            return None
        return Pooled(np.array(slots, np.int32), vectors, is_pooled_R)

    def _align(self, slot: int, num_tokens: int) -> AnyArray:
        """Return the alignment of a prompt; empty if the model has no alignment heads."""
        if self.alignments is None:
            return np.empty(0, np.float32)
        return self.alignments.finish(slot, num_tokens)

    def _add_chunk(self, slot: int, hidden_TD: AnyArray, *, is_first: bool) -> None:
        """Keep what a slot needs of the hidden states of a chunk. The next step may overwrite them, so copy them."""
        if self._kinds[slot] is PoolingKind.LAST:
            self._parts[slot] = [_copy(hidden_TD[-1])]
        elif is_first:
            # A request that was preempted begins again.
            is_whole = self._kinds[slot] in _OF_ALL_TOKENS
            self._parts[slot] = [_copy(hidden_TD if is_whole else hidden_TD[0])]
        elif self._kinds[slot] in _OF_ALL_TOKENS:
            self._parts[slot].append(_copy(hidden_TD))

    def _take_parts(self, slot: int) -> AnyArray:
        """Return the kept hidden state of a slot [D], or those of all tokens [T, D]."""
        parts = self._parts.pop(slot)
        if len(parts) == 1:
            return parts[0]
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts)
        return torch.cat([as_tensor(part) for part in parts])

    def _add_up(
        self, plan: StepPlan, slots_S: list[int], ending: set[int], hidden_TD: AnyArray
    ) -> AnyArray:
        """Return the mean over all tokens so far, float32 [S, D]. Keep the sums of prompts that continue."""
        # Sum in float64. The order of a sum depends on the chunks, but rounding to float32 removes the difference.
        sums_SD = _sum_chunks(hidden_TD, plan.query_start_loc)
        for row, slot in enumerate(slots_S):
            if self._kinds.get(slot) is PoolingKind.MEAN:
                if plan.num_computed_S[row]:
                    sums_SD[row] += self._sums[slot]
                if row not in ending:
                    self._sums[slot] = _copy(sums_SD[row])
        lengths_S1 = plan.seq_lens_S[:, None]
        if isinstance(sums_SD, np.ndarray):
            return (sums_SD / lengths_S1).astype(np.float32)
        return (sums_SD / torch.from_numpy(lengths_S1).to(sums_SD.device)).float()

    def _finish(self, slot: int, pooled: AnyArray) -> AnyArray:
        """Return the result for a pooled vector [D], or for the vectors of all tokens [T, D], row by row.

        The head reads the vectors of a whole prompt at once, so that its results do not depend on the chunks.
        """
        self._sums.pop(slot, None)
        if self.find_image is not None and (image_1D := self.find_image(slot)) is not None:
            return image_1D.float().flatten()
        if self._head is not None:
            return self._head(as_tensor(pooled).float(), slot, self._kinds[slot]).flatten()
        if isinstance(pooled, np.ndarray):
            return pooled.astype(np.float32, copy=False).ravel()
        return pooled.float().flatten()


def _copy(x: AnyArray) -> AnyArray:
    return x.copy() if isinstance(x, np.ndarray) else x.clone()


def _sum_chunks(x_TD: AnyArray, query_start_loc: Int32Array) -> AnyArray:
    """Return the sum over the tokens of each request of a step, float64 [S, D]."""
    bounds = query_start_loc.tolist()
    if isinstance(x_TD, np.ndarray):
        return np.add.reduceat(x_TD[: bounds[-1]].astype(np.float64), query_start_loc[:-1])
    x_TD = x_TD.double()
    if x_TD.device.type == "cpu":
        return torch.from_numpy(np.add.reduceat(x_TD[: bounds[-1]].numpy(), query_start_loc[:-1]))
    return torch.stack([x_TD[start:stop].sum(0) for start, stop in pairwise(bounds)])


def mark_second_segments(new_requests: Sequence[NewRequestData], vocab_size: int) -> None:
    """Add `vocab_size` to the ids of tokens with the second token type, as the model's embedding expects."""
    for new in new_requests:
        if new.pooling_params is not None and new.pooling_params.second_segment:
            token_ids = int32_view(new.token_ids).copy()
            token_ids[new.pooling_params.second_segment :] += vocab_size
            new.token_ids = int32_bytes(token_ids)
