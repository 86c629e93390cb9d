"""The state of the requests in a worker's slots.

Shapes: R rows that sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from ...protocol.arrays import Int32Array, int32_view
from ...protocol.config import EngineConfig
from ...protocol.errors import EngineError
from ...protocol.worker_messages import HeldRequest, NewRequestData, SchedulerOutput
from ..batch import PersistentBatch
from ..cpu.decoder import NativeDecoder
from ..device.dtypes import AnyArray, HostDevice
from ..layers.rope import INDEX_AXIS
from ..models.dense_layers import DenseLayers
from ..sampling import Grammar, SamplerOutput
from .denoising.candidates import with_logprobs
from .inputs.encoders import Encoders
from .model_loader import Model
from .outputs.hidden_states import HiddenStates
from .outputs.pooling import Head, Pooling, mark_second_segments
from .outputs.prompt_logprobs import POSITIONS_AT_ONCE, PromptLogprobs
from .pipeline import Pipeline, TokenFeed
from .runner import GrammarSource

_LAST_TOKEN: Final = np.array((0, 1), np.int32)


class RequestStates:
    """The tokens and blocks of each request and, on the last stage, the states for sampling and scoring.

    The first of several stages receives sampled tokens from the last one. With drafts, all stages do.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        pipeline: Pipeline,
        num_groups: int,
        device: torch.device | HostDevice,
        *,
        keeps_tokens_on_host: bool = False,
    ) -> None:
        num_slots = config.scheduler.max_num_seqs
        self._shard = model.shard
        source, diffusion = model.spec.source, config.scheduler.diffusion
        self.batch = PersistentBatch(
            num_slots,
            config.model.max_model_len,
            config.cache.block_size,
            num_groups,
            device,
            has_rotary_axes=bool(model.spec.rotary_axes),
            numbers_images=INDEX_AXIS in model.spec.rotary_axes,
            span_kind=model.spec.span_kind,
            source_sizes={}
            if source is None
            else dict.fromkeys(model.spec.cross_groups, source.max_positions),
            keeps_tokens_on_host=keeps_tokens_on_host,
            diffusion=diffusion,
            canvas_window=model.spec.longest_window,
        )
        self._has_masks = diffusion is not None and diffusion.renoising is None
        self.sampler = model.make_sampler(self.batch)
        scorer = None
        if isinstance(model, NativeDecoder):
            scorer = model.make_prompt_scorer(POSITIONS_AT_ONCE)
        self.prompt_logprobs = PromptLogprobs(model.compute_logits, scorer)
        self._spec = model.spec
        self.loras = model.loras
        self.pooling = Pooling(_pooling_head(model, DenseLayers.read(config.model, device)))
        states = config.scheduler.hidden_states
        keeps_layers = states is not None and bool(states.layers)
        self.hidden_states = HiddenStates(model, keeps_layers=keeps_layers)
        self.encoders: Encoders | None = None
        accepts_embeddings = config.model.enable_prompt_embeds and self._shard.is_first
        if model.encoder is not None or accepts_embeddings:
            self.encoders = Encoders(model.encoder, model.spec, device)
            if self.encoders.are_results:
                self.pooling.find_image = self.encoders.find_result
        self._token_feed: TokenFeed | None = None
        has_drafts = config.scheduler.speculative is not None
        if (self._shard.is_first or has_drafts) and not self._shard.is_last:
            self._token_feed = TokenFeed(pipeline, self.batch, num_slots)

    def apply_output(self, output: SchedulerOutput) -> None:
        """Apply a step's changes of requests."""
        if self._spec.tells_segments:
            mark_second_segments(output.new_requests, self._spec.vocab_size)
        self.batch.apply_output(output)
        if self._token_feed is not None:
            for new in output.new_requests:
                self._token_feed.drop_tokens(new.slot)
        if output.removed_slots:
            for slot in int32_view(output.removed_slots).tolist():
                self._remove(slot)
        if self.encoders is not None:
            self.encoders.add_requests(output.new_requests)
            if output.encoders is not None:
                self.encoders.apply_work(output.encoders)
        for new in output.new_requests:
            if self.loras is not None:
                self.loras.set_slot(new.slot, new.lora_number)
            if new.pooling_params is not None:
                self.pooling.add_request(new.slot, new.pooling_params.kind)
        if not self._shard.is_last:
            return
        if output.new_requests:
            self._add_to_sampler(output.new_requests)

    @torch.inference_mode()
    def _add_to_sampler(self, new_requests: Sequence[NewRequestData]) -> None:
        for new in new_requests:
            if new.pooling_params is not None:
                continue
            tokens = int32_view(new.token_ids)
            prompt, generated = np.split(tokens, [new.num_prompt_tokens])
            params = new.sampling_params
            if self._has_masks:
                params = with_logprobs(params)
            self.sampler.add_request(new.slot, params, prompt, new.eos_token_ids, generated)
            if params.returned_states is not None:
                wanted = params.returned_states.tokens
                self.hidden_states.add_request(new.slot, wanted, new.num_prompt_tokens)
            if params.prompt_logprobs is not None and not len(generated):
                self.prompt_logprobs.add_request(new.slot, params)

    def release_requests(self) -> list[HeldRequest]:
        """Free every slot.

        Return the requests that were in the slots, with the tokens and blocks that the KV cache holds.
        """
        for slot in range(self.batch.num_slots):
            self._remove(slot)
        if self.encoders is not None:
            self.encoders.clear()
        return self.batch.release_requests()

    def _remove(self, slot: int) -> None:
        self.sampler.remove_request(slot)
        self.prompt_logprobs.remove_request(slot)
        self.pooling.remove_request(slot)
        self.hidden_states.remove_request(slot)
        if self.encoders is not None:
            self.encoders.remove_request(slot)

    def decoding_slots(self, output: SchedulerOutput) -> Int32Array | None:
        """Return the slots of a step without chunks if each of them computes only its last token and drafts, else None.

        The result is None as well if the step reads encoder outputs, or returns more than sampled tokens.
        """
        if self.prompt_logprobs.is_pending or self.pooling.is_pending:
            return None
        slots_S = self.batch.decoding_slots(output)
        if slots_S is None or self.encoders is None:
            return slots_S
        is_reading = self.encoders.are_read(slots_S, self.batch.num_computed_tokens)
        return None if is_reading else slots_S

    @property
    def has_reports(self) -> bool:
        """True if a request reads the hidden states of steps for more than sampling."""
        return (
            self.prompt_logprobs.is_pending
            or self.pooling.is_pending
            or self.hidden_states.is_pending
        )

    def await_tokens(self, slots_S: Int32Array) -> None:
        """Wait until the tokens of these slots have arrived from the last stage."""
        if self._token_feed is not None:
            self._token_feed.await_tokens(slots_S)

    def expect_verified(self, slots_S: Int32Array, num_drafts_S: Int32Array) -> None:
        """Start to receive the tokens that the last stage samples in a step with drafts."""
        assert self._token_feed is not None
        self._token_feed.expect_verified(slots_S, 1 + int(num_drafts_S.max()))

    def expect_tokens(self, slots_R: Int32Array) -> None:
        """Record that the last stage samples for these slots, except those that are pooled.

        The first stage also starts to receive the tokens.
        """
        slots_R = slots_R[~self.pooling.find(slots_R)]
        if self._token_feed is None:
            self.batch.reserve_columns(slots_R)
        elif len(slots_R):
            self._token_feed.expect_tokens(slots_R)

    def sample(
        self,
        output: SchedulerOutput,
        logits_RV: AnyArray,
        slots_R: Int32Array,
        await_grammar: GrammarSource,
    ) -> SamplerOutput:
        """Sample from logits, which are overwritten."""
        grammar = self.await_bitmasks(output, await_grammar)
        return self.sampler.sample(logits_RV, slots_R, self.batch.num_tokens[slots_R], grammar)

    def await_bitmasks(
        self, output: SchedulerOutput, await_grammar: GrammarSource
    ) -> Grammar | None:
        """Wait for the bitmasks of the tokens that grammars allow, and return them, or None if no slot has a grammar.

        Raises:
            EngineError: The bitmasks have the wrong size.
        """
        if not output.grammar_slots:
            return None
        slots = int32_view(output.grammar_slots)
        message = await_grammar(output.step)
        if message is None:
            return None
        num_rows = 1 + self.batch.num_drafts(output)[slots]
        bitmask = int32_view(message.bitmask)
        if len(bitmask) % num_rows.sum():
            raise EngineError(
                f"step {output.step}: a bitmask of {len(bitmask)} words cannot be divided into the "
                f"{num_rows.sum()} rows of {len(slots)} slots"
            )
        return Grammar(slots, np.cumsum(num_rows) - num_rows, bitmask.reshape(num_rows.sum(), -1))

    def close(self) -> None:
        """Receive all tokens that the last stage has sent, and complete the writes of encoder outputs."""
        if self.encoders is not None:
            self.encoders.close()
        if self._token_feed is not None:
            self._token_feed.close()


def has_chunks(output: SchedulerOutput) -> bool:
    """Return whether a slot computes more than its last token and drafts."""
    if not output.chunks:
        return False
    drafts = int32_view(output.drafts).reshape(-1, 2)
    return not np.array_equal(int32_view(output.chunks), (drafts + _LAST_TOKEN).ravel())


def _pooling_head(model: Model, dense_layers: DenseLayers | None) -> Head | None:
    """Return the function from a slot's pooled vector to scores or an embedding; None if it is the result."""
    score_head, loras = model.score_head, model.loras
    if score_head is None:
        return (
            None if dense_layers is None else lambda vector_I, _, kind: dense_layers(vector_I, kind)
        )
    if loras is None:
        return lambda vector_D, _slot, _kind: score_head(vector_D)
    return lambda vector_D, slot, _: score_head(vector_D, int(loras.number_by_slot[slot]))
