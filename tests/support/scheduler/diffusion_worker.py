"""Workers without a model that fill blocks of masks, canvases, or whole answers.

The "KV entry" of a position is a fingerprint of the tokens on which it depends: those up to the end of its block, or up
to itself before a canvas. A pass writes other entries for the block that it denoises, or for a whole request. The
tokens of a block are those of `ModelWorker`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from engine.protocol.arrays import int32_bytes
from engine.protocol.config.diffusion import BlockDiffusion
from engine.protocol.worker_messages import ModelRunnerOutput, SchedulerOutput
from support.scheduler.model_worker import ModelWorker, Row, choose_token

MASKED = "masked"


class DiffusionWorker(ModelWorker):
    """Takes one to three passes for a block, as a function of the tokens before it."""

    unit = 4

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.num_passes: dict[tuple[int, int], int] = {}

    def _execute(
        self, step: SchedulerOutput, masks: dict[int, np.ndarray] | None
    ) -> ModelRunnerOutput:
        assert masks is None and not step.drafts
        counts = self._apply(step)
        for data in step.new_requests:
            self.num_passes[data.request_id] = 0
        sampled: list[int] = []
        num_sampled: list[int] = []
        rejected: list[tuple[Row, int]] = []
        for position, slot in enumerate(self.batch):
            row, count = self.rows[slot], counts[position]
            start = row.num_computed_tokens
            self._check_chunk(start, count)
            num_prompt = min(start + count, row.num_prompt_tokens)
            self.num_prompt_tokens_computed += max(num_prompt - start, 0)
            known = len(row.token_ids)
            certain, block_end, end = self._find_pass(row, known)
            samples = start + count > known
            assert start + count == end if samples else start + count <= certain
            certain = certain if samples else start + count
            for index in range(start + count):
                block, offset = self._place(row.block_tables[0], index)
                entry = self._entry(row, index) if index < certain else MASKED
                if index >= start:
                    self.kv_cache[block][offset] = entry
                assert self.kv_cache[block][offset] == entry, "wrong KV entry"
            row.num_computed_tokens = certain
            if samples:
                tokens = self._denoise(row, block_end - known)
                sampled += tokens
                num_sampled.append(len(tokens))
                rejected.append((row, 1 - len(tokens)))
        self.rejected.append(rejected)
        return ModelRunnerOutput(
            step.step,
            int32_bytes(sampled),
            num_sampled=int32_bytes(num_sampled),
            kv_connector_output=self.transfers.end_step(),
        )

    def _check_chunk(self, start: int, count: int) -> None:
        assert not start % self.unit and not count % self.unit

    def _find_pass(self, row: Row, known: int) -> tuple[int, int, int]:
        """Return how many tokens of a pass are certain, the end of the block that it denoises, and that of the pass."""
        start = known - known % self.unit
        return start, start + self.unit, start + self.unit

    def _entry(self, row: Row, index: int) -> int:
        return row.fingerprints[index - index % self.unit + self.unit - 1]

    def _denoise(self, row: Row, count: int) -> list[int]:
        """Run one pass. Return the tokens of the block if it is full."""
        self.num_passes[row.request_id] += 1
        if self.num_passes[row.request_id] <= (row.fingerprints[-1] >> 8) % 3:
            return []
        self.num_passes[row.request_id] = 0
        for _ in range(count):
            row.append(choose_token(row.fingerprints[-1], self.vocab_size))
        return row.token_ids[-count:]


class CanvasWorker(DiffusionWorker):
    """Fills canvases, which begin after the last known token."""

    def _check_chunk(self, start: int, count: int) -> None:
        assert count

    def _find_pass(self, row: Row, known: int) -> tuple[int, int, int]:
        return known, known + self.unit, known + self.unit

    def _entry(self, row: Row, index: int) -> int:
        return row.fingerprints[index]


class AnswerWorker(DiffusionWorker):
    """Fills answers with several blocks of masks. Each pass computes everything."""

    answer_size = 8

    def _check_chunk(self, start: int, count: int) -> None:
        assert not start

    def _find_pass(self, row: Row, known: int) -> tuple[int, int, int]:
        new = known - row.num_prompt_tokens
        block_end = known - new % self.unit + self.unit
        return 0, block_end, known - new % self.answer_size + self.answer_size


def worker_class(diffusion: BlockDiffusion | None) -> type[ModelWorker]:
    """Return the class of workers for a model with these blocks; None if it generates token by token."""
    if diffusion is None:
        return ModelWorker
    if diffusion.answer_size:
        return AnswerWorker
    return DiffusionWorker if diffusion.renoising is None else CanvasWorker
