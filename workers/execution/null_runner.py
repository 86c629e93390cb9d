"""A runner without a model: each step takes a fixed time, and its tokens are hashes.

Like a GPU, it processes a queue of steps while the host continues. It is used to measure the cost of everything except
the model, and to test recovery. It never imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

import numpy as np

from ...protocol.arrays import (
    Float32Array,
    Int32Array,
    Int64Array,
    contains,
    float32_bytes,
    int32_bytes,
    int32_view,
)
from ...protocol.config import EngineConfig
from ...protocol.file_identity import LoraAdapter
from ...protocol.kv_cache_groups import FULL_ATTENTION, max_request_blocks
from ...protocol.pooling_params import PoolingKind
from ...protocol.worker_messages import (
    HeldRequest,
    ModelRunnerOutput,
    RowLogprobs,
    RowVector,
    SchedulerOutput,
)
from ..kv_transfer.connector import KVConnector
from ..models.lora.lora_loader import LoraLoader
from .runner import GrammarSource


class NullOutput:
    """The output of a step, ready at `ready_at` in seconds of the monotonic clock."""

    def __init__(self, output: ModelRunnerOutput, ready_at: float) -> None:
        self._output = output
        self._ready_at = ready_at

    def is_ready(self) -> bool:
        """Return whether the step has ended."""
        return time.monotonic() >= self._ready_at

    def wait(self) -> None:
        """Sleep until the step has ended."""
        time.sleep(max(self._ready_at - time.monotonic(), 0))

    def output(self) -> ModelRunnerOutput:
        """Wait for the output and return it."""
        self.wait()
        return self._output


NUM_TOKENS: Final = 2048
"""Number of distinct tokens of all outputs, because a text uses only a small part of a large vocabulary."""


class NullRunner:
    """A runner that replaces `ModelRunner`. Its tokens follow grammars. Log-probabilities are invented."""

    def __init__(self, config: EngineConfig) -> None:
        num_slots = config.scheduler.max_num_seqs
        self._vocab_size = config.model.vocab_size
        self._step_s = config.device.null_step_ms / 1000
        self.ordinary_ids = ordinary_token_ids(config.model.vocab_size, config.model.eos_token_ids)
        self._num_tokens = np.zeros(num_slots, np.int32)
        self._num_computed_tokens = np.zeros(num_slots, np.int32)
        self._seeds = np.zeros(num_slots, np.int64)
        self._logprobs: dict[int, Int32Array] = {}
        self._prompt_logprobs: dict[int, tuple[Int32Array, Int32Array]] = {}
        self._pooled: dict[int, Float32Array] = {}
        self._slots_S: Int32Array = np.zeros(0, np.int32)
        self._idle_from = 0.0
        self.connector: KVConnector | None = None
        self.loras: LoraLoader | None = None
        if config.model.enable_lora:
            # Adapters can be loaded but change nothing.
            self.loras = LoraLoader(LoraAdapter.verify, lambda number, _: None)

    def allocate_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Do nothing, because there is no KV cache."""

    def warm_up(self) -> None:
        """Do nothing, because no step is slow."""

    def release_requests(self) -> list[HeldRequest]:
        """Free every slot. Return no requests, because there is no KV cache."""
        self._slots_S = np.zeros(0, np.int32)
        if self.loras is not None:
            self.loras.cancel()
        return []

    @property
    def invitations_fd(self) -> None:
        """Return None, because this worker has no experts."""

    def join_rounds(self) -> None:
        """Do nothing, because this worker has no experts."""

    def close(self) -> None:
        """Do nothing, because no other worker waits for this one."""

    def execute(self, output: SchedulerOutput, await_grammar: GrammarSource) -> NullOutput:
        """Return the output of a step, which becomes ready one step time after the previous one."""
        for load in output.lora_loads:
            assert self.loras is not None
            self.loras.begin(load)
        for new in output.new_requests:
            params, slot = new.sampling_params, new.slot
            tokens = int32_view(new.token_ids)
            self._num_tokens[slot] = len(tokens)
            self._num_computed_tokens[slot] = new.num_computed_tokens
            self._seeds[slot] = params.seed or 0
            self._logprobs.pop(slot, None)
            self._prompt_logprobs.pop(slot, None)
            self._pooled.pop(slot, None)
            if new.pooling_params is not None:
                vector, kind = made_up_vector(tokens), new.pooling_params.kind
                is_by_token = kind in (PoolingKind.ALL, PoolingKind.WEIGHTS)
                self._pooled[slot] = np.tile(vector, len(tokens)) if is_by_token else vector
            if params.logprobs is not None:
                self._logprobs[slot] = self._alternatives(params.logprobs, params.logprob_token_ids)
            # The first token of a prompt has no log-probability.
            if params.prompt_logprobs is not None and new.num_prompt_tokens == len(tokens) > 1:
                candidates = params.prompt_candidates
                num_candidates = 0 if candidates is None else candidates.num_tokens
                listed = (*params.prompt_logprob_token_ids, *range(num_candidates))
                alternatives = self._alternatives(params.prompt_logprobs, listed)
                self._prompt_logprobs[slot] = alternatives, tokens
        slots_R = self._advance(output)
        positions_R = self._num_tokens[slots_R]
        token_ids = made_up_tokens(self._seeds[slots_R], positions_R, self.ordinary_ids)
        if output.grammar_slots:
            self._follow_grammars(output, slots_R, token_ids, await_grammar)
        self._num_tokens[slots_R] = positions_R + 1
        if len(self._slots_S):
            self._idle_from = max(self._idle_from, time.monotonic()) + self._step_s
        result = ModelRunnerOutput(output.step, sampled_token_ids=int32_bytes(token_ids))
        if self._logprobs or self._prompt_logprobs:
            self._add_logprobs(result, slots_R, token_ids)
        for slot in slots_R.tolist():
            if (vectors := self._pooled.pop(slot, None)) is not None:
                result.pooled.append(RowVector(slot, float32_bytes(vectors)))
        return NullOutput(result, self._idle_from)

    def _follow_grammars(
        self,
        output: SchedulerOutput,
        slots_R: Int32Array,
        token_ids: Int32Array,
        await_grammar: GrammarSource,
    ) -> None:
        """In rows with a grammar, replace the token with one that the grammar allows."""
        message = await_grammar(output.step)
        if message is None:
            return
        slots_G = int32_view(output.grammar_slots)
        bitmask_GK = int32_view(message.bitmask).reshape(len(slots_G), -1)
        rows = {slot: row for row, slot in enumerate(slots_R.tolist())}
        for slot, bitmask_K in zip(slots_G.tolist(), bitmask_GK, strict=True):
            bits = np.unpackbits(bitmask_K.view(np.uint8), bitorder="little")
            row, allowed = rows[slot], np.flatnonzero(bits).astype(np.int32)
            if len(allowed):
                seed, position = self._seeds[[slot]], self._num_tokens[[slot]]
                token_ids[row] = made_up_tokens(seed, position, allowed)[0]

    def _add_logprobs(
        self, result: ModelRunnerOutput, slots_R: Int32Array, token_ids: Int32Array
    ) -> None:
        for slot, token_id in zip(slots_R.tolist(), token_ids.tolist(), strict=True):
            if (alternatives := self._logprobs.get(slot)) is not None:
                result.logprobs.append(_made_up_logprobs(slot, alternatives, [token_id]))
            if (wanted := self._prompt_logprobs.pop(slot, None)) is not None:
                alternatives, prompt = wanted
                row = _made_up_logprobs(slot, alternatives, prompt[1:].tolist())
                result.prompt_logprobs.append(row)

    def _alternatives(self, count: int, listed: Iterable[int]) -> Int32Array:
        """Return the first `count` tokens of the vocabulary, and those that are listed."""
        num_top = self._vocab_size if count < 0 else count
        return np.array([*range(num_top), *listed], np.int32)

    def _advance(self, output: SchedulerOutput) -> Int32Array:
        """Advance the scheduled requests. Return the slots that sample, in batch order."""
        if output.slots is not None:
            self._slots_S = int32_view(output.slots)
        slots_S = self._slots_S
        num_scheduled_S = np.ones(len(slots_S), np.int32)
        if output.chunks:
            chunks = int32_view(output.chunks).reshape(-1, 2)
            num_scheduled_S[chunks[:, 0]] = chunks[:, 1]
        seq_lens_S = self._num_computed_tokens[slots_S] + num_scheduled_S
        self._num_computed_tokens[slots_S] = seq_lens_S
        return slots_S[seq_lens_S == self._num_tokens[slots_S]]


def made_up_vector(prompt: Int32Array) -> Float32Array:
    """Return a vector, float32 [8], that depends on all tokens of the prompt and on their order."""
    numbers = prompt.astype(np.float64) + 1
    angles = np.arange(1, len(prompt) + 1)[:, None] * np.arange(1, 9)
    return (numbers @ np.sin(angles)).astype(np.float32)


def count_request_blocks(config: EngineConfig) -> int:
    """Return the configured number of blocks; by default, as many as the requests of a full batch can use."""
    if config.cache.num_blocks_override is not None:
        return config.cache.num_blocks_override
    blocks_per_request = max_request_blocks(
        FULL_ATTENTION,
        config.model.max_model_len,
        config.scheduler.max_num_batched_tokens,
        config.cache.block_size,
    )
    return blocks_per_request * config.scheduler.max_num_seqs + 1


def ordinary_token_ids(vocab_size: int, eos_token_ids: tuple[int, ...]) -> Int32Array:
    """Return tokens that do not end a sequence, spread over the vocabulary, int32 [at most about `NUM_TOKENS`]."""
    token_ids = np.arange(0, vocab_size, max(1, vocab_size // NUM_TOKENS), dtype=np.int32)
    return token_ids[~contains(eos_token_ids, token_ids)]


def made_up_tokens(seeds: Int64Array, positions: Int32Array, candidates: Int32Array) -> Int32Array:
    """Return one of `candidates` for each seed, int64 [R], and position in its sequence, int32 [R], as int32 [R].

    The index into `candidates` is a hash: the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014) over the position-th state of the seed.
    """
    steps = positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = seeds.view(np.uint64) + steps
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return candidates[state % np.uint64(len(candidates))]


def _made_up_logprobs(slot: int, alternatives: Int32Array, chosen: Iterable[int]) -> RowLogprobs:
    """Return log-probabilities for `chosen` and the alternatives."""
    chosen_T = np.fromiter(chosen, np.int32)
    ids_TK = np.empty((len(chosen_T), 1 + len(alternatives)), np.int32)
    ids_TK[:, 0] = chosen_T
    ids_TK[:, 1:] = alternatives
    logprobs_TK = -np.log(ids_TK + 2.0).astype(np.float32)
    return RowLogprobs(
        slot,
        len(chosen_T),
        int32_bytes(ids_TK),
        float32_bytes(logprobs_TK),
        int32_bytes(chosen_T + 1),
    )
