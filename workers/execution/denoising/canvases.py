"""Denoise the canvases of block-diffusion models that have no masks.

A canvas begins as random tokens. A pass computes a distribution for each place. Places with small entropies get
candidates from them, and all others random tokens again. Once the most probable tokens are stable and the entropies
small, or after the last pass, the most probable tokens are reported. The state of a canvas is only in the worker: a
request that returns to a slot begins its canvas again, with the same random numbers.

Shapes: N slots, R canvases of a step, B tokens of a canvas, P passes that are compared, T tokens of a step, V
vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....protocol.arrays import Int32Array, int32_bytes
from ....protocol.config.diffusion import BlockDiffusion, Renoising
from ....protocol.worker_messages import ModelRunnerOutput, SchedulerOutput
from ...batch import StepPlan
from ...device.dtypes import AnyArray, as_tensor, on_host
from ...device.transfers import to_device
from ...models.decoder import Decoder
from ...models.stage.self_conditioning import Canvases
from ...sampling import TorchSampler
from ...sampling.choice import NOT_A_NUMBER
from ...sampling.logprobs import compute_logprobs
from ...sampling.random import Stream, uniforms
from ...sampling.sampler import NOTHING_ALLOWED_MESSAGE
from ..request_states import RequestStates

_MOST_PASSES: Final = 1024
"""The number of passes over a canvas whose random numbers differ."""


class CanvasDenoising:
    """The canvases that the requests in a worker's slots are denoising."""

    def __init__(
        self, blocks: BlockDiffusion, settings: Renoising, model: Decoder, requests: RequestStates
    ) -> None:
        assert isinstance(requests.sampler, TorchSampler)
        self._model, self._batch, self._sampler = model, requests.batch, requests.sampler
        self._size, self._settings = blocks.block_size, settings
        num_slots = requests.batch.num_slots
        self._first_N = np.full(num_slots, -1, np.int32)
        """The number of tokens that each slot had when its canvas began."""
        self._seed_N = np.zeros(num_slots, np.int64)
        self._num_passes_N = np.zeros(num_slots, np.int32)
        self._earlier_NPB = np.zeros(
            (num_slots, settings.stability_threshold, self._size), np.int32
        )
        """The most probable tokens of the last passes, or -1."""
        self._predicted: dict[int, Tensor] = {}
        """The mean embeddings [B, D] of what the last pass over a slot's canvas predicted."""

    def begin(self, output: SchedulerOutput, plan: StepPlan) -> None:
        """Begin canvases, and give those of a step to the model."""
        for new in output.new_requests:
            self._first_N[new.slot] = -1
            self._seed_N[new.slot] = new.sampling_params.seed or 0
        slots_R = plan.slots_S[plan.sampling_rows]
        for slot in slots_R[self._first_N[slots_R] != self._batch.num_tokens[slots_R]].tolist():
            self._first_N[slot] = self._batch.num_tokens[slot]
            self._num_passes_N[slot] = 0
            self._earlier_NPB[slot] = -1
            self._predicted.pop(slot, None)
            self._write(slot, self._random_tokens(slot))
        model, device = self._model, self._batch.device
        nothing_BD = torch.zeros(
            (self._size, model.spec.hidden_size), dtype=model.hidden_dtype, device=device
        )
        found = [self._predicted.get(slot, nothing_BD) for slot in slots_R.tolist()]
        model.canvases = Canvases(
            to_device(self._rows(plan).ravel(), device), torch.cat([nothing_BD[:0], *found])
        )

    def finish(
        self, output: SchedulerOutput, plan: StepPlan, hidden_TD: AnyArray
    ) -> ModelRunnerOutput:
        """End the passes of a step. Return the tokens of the canvases that are complete."""
        result = ModelRunnerOutput(output.step)
        tokens: list[Int32Array] = []
        counts: list[int] = []
        damaged: list[int] = []
        for slot, rows_B in zip(
            plan.slots_S[plan.sampling_rows].tolist(), self._rows(plan), strict=True
        ):
            hidden_BD = as_tensor(hidden_TD)[to_device(rows_B, self._batch.device)]
            mark, is_complete = self._end_pass(slot, hidden_BD, result)
            if mark == NOT_A_NUMBER:
                damaged.append(slot)
            elif mark < 0:
                result.failed_slots.append((slot, NOTHING_ALLOWED_MESSAGE))
            elif is_complete:
                first = self._first_N[slot]
                tokens.append(self._batch.host_token_ids_NL[slot, first : first + self._size])
                self._batch.num_tokens[slot] += self._size
            counts.append(self._size if mark >= 0 and is_complete else 0)
        result.sampled_token_ids = b"".join(map(int32_bytes, tokens))
        result.num_sampled, result.nan_slots = int32_bytes(counts), int32_bytes(damaged)
        return result

    def _end_pass(
        self, slot: int, hidden_BD: Tensor, result: ModelRunnerOutput
    ) -> tuple[int, bool]:
        """Replace the tokens of a canvas. Return the smallest candidate, and whether the canvas is complete.

        Log-probabilities are added to the result.
        """
        settings, num_passes = self._settings, int(self._num_passes_N[slot])
        positions_B = self._first_N[slot] + np.arange(self._size, dtype=np.int32)
        slots_B = np.full(self._size, slot, np.int32)
        logits_BV = self._model.compute_logits(hidden_BD, slots_B)
        wanted = self._sampler.describe(slots_B).logprobs
        raw_BV = None if wanted is None else logits_BV.clone()
        self._sampler.change(logits_BV, slots_B, positions_B)
        left = 1 - num_passes / settings.max_denoising_steps
        logits_BV /= settings.t_min + (settings.t_max - settings.t_min) * left
        probabilities_BV = logits_BV.softmax(-1)
        likely = logits_BV.argmax(-1)
        # Overwrites the logits.
        chosen = self._sampler.choose(logits_BV, slots_B, self._draws(slot))
        candidates_B = on_host(chosen).astype(np.int32)
        likely_B = on_host(likely).astype(np.int32)
        # A few rows at once, because the temporary result has the size of their logits.
        entropies = [torch.special.entr(rows).sum(-1) for rows in probabilities_BV.split(32)]
        entropy_B = on_host(torch.cat(entropies))
        earlier_PB = self._earlier_NPB[slot]
        is_stable = bool((earlier_PB == likely_B).all())
        earlier_PB[:-1], earlier_PB[-1:] = earlier_PB[1:].copy(), likely_B
        self._num_passes_N[slot] = num_passes + 1
        if num_passes + 1 == settings.max_denoising_steps or (
            is_stable and entropy_B.mean() < settings.confidence_threshold
        ):
            self._write(slot, likely_B)
            self._predicted.pop(slot, None)
            if wanted is not None and raw_BV is not None:
                logprobs = compute_logprobs(raw_BV, likely, max(wanted.num_top), wanted.listed_RK)
                result.logprobs += logprobs.rows([slot], wanted.counts[:1], [self._size])
            return int(candidates_B.min()), True
        order_B = entropy_B.argsort(kind="stable")
        sorted_B = entropy_B[order_B]
        is_sure_B = np.zeros(self._size, np.bool_)
        is_sure_B[order_B] = sorted_B.cumsum() - sorted_B <= settings.entropy_bound
        self._write(slot, np.where(is_sure_B, candidates_B.clip(0), self._random_tokens(slot)))
        self._predicted[slot] = self._model.mix_embeddings(probabilities_BV)
        return int(candidates_B.min()), False

    def _rows(self, plan: StepPlan) -> NDArray[np.intp]:
        """Return the rows of a step's canvases, [R, B]."""
        ends_R = plan.query_start_loc[plan.sampling_rows + 1]
        return ends_R[:, None] - self._size + np.arange(self._size)

    def _draws(self, slot: int) -> Int32Array:
        """Return the numbers of the random draws of a pass, one for each place."""
        positions_B = self._first_N[slot] + np.arange(self._size)
        draws_B: Int32Array = (positions_B * _MOST_PASSES + self._num_passes_N[slot]).astype(
            np.int32
        )
        return draws_B

    def _random_tokens(self, slot: int) -> Int32Array:
        seeds_B = np.full(self._size, self._seed_N[slot])
        fractions_B = uniforms(seeds_B, self._draws(slot).astype(np.int64), Stream.CANVAS)
        return (fractions_B * self._model.spec.vocab_size).astype(np.int32)

    def _write(self, slot: int, token_ids_B: Int32Array) -> None:
        first = self._first_N[slot]
        self._batch.host_token_ids_NL[slot, first : first + self._size] = token_ids_B
