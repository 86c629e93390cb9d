"""Check the limits of each new request, and refuse one that can never run or exceeds a queue limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import msgspec

from ...protocol.block_hash import HASH_BYTES
from ...protocol.config import SchedulerConfig
from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.errors import ConfigError, counted
from ...protocol.kv_cache_groups import AttentionKind, KVCacheGroup, max_request_tokens
from ...protocol.messages import EngineCoreRequest, FinishReason
from ..state.request import source_size


def check_config(
    config: SchedulerConfig,
    max_model_len: int,
    num_blocks: int,
) -> None:
    """Raise an error if settings of the scheduler contradict each other.

    Raises:
        ConfigError: Two settings contradict each other, or the KV cache is too small.
    """
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} is below "
            f"max_model_len={max_model_len}; raise it or enable chunked prefill"
        )
    if num_blocks < 2:
        raise ConfigError(f"the KV cache has {num_blocks} blocks but needs at least 2")


class Refusal(NamedTuple):
    """The reason why a request is refused: a finish reason and a message for the client."""

    reason: FinishReason
    message: str


class Requirements(msgspec.Struct, frozen=True):
    """The limits that a request must satisfy. A `max_num_queued_…` of 0 means unlimited.

    `max_computed_tokens` is how many tokens fit into the KV cache if one request holds every block.
    """

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    has_grammars: bool
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    max_num_queued_reqs_per_tenant: int
    max_encoder_input_size: int
    max_step_tokens: int
    splits_prompts: bool
    splits_encoder_inputs: bool
    max_computed_tokens: int
    reads_images: bool
    """True if cross attention reads images."""
    max_source_size: int
    """Length of the encoder output that cross attention reads, in embeddings; 0 for a model without cross attention."""

    @classmethod
    def from_config(
        cls,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        kv_cache_groups: tuple[KVCacheGroup, ...],
        has_grammars: bool,
    ) -> Self:
        """Return the limits of a scheduler that can allocate `num_blocks` blocks."""
        max_uncertain_tokens = config.max_uncertain_tokens
        reads_images = any(group.is_optional for group in kv_cache_groups)
        sources = (g.size for g in kv_cache_groups if g.kind is AttentionKind.CROSS)
        max_source_size = max(sources, default=0)
        return cls(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            has_grammars=has_grammars,
            max_num_queued_reqs=config.max_num_queued_reqs,
            max_num_queued_tokens=config.max_num_queued_tokens,
            max_num_queued_reqs_per_tenant=config.max_num_queued_reqs_per_tenant,
            max_encoder_input_size=min(config.encoder_budget, config.encoder_cache_capacity),
            max_step_tokens=config.max_num_batched_tokens,
            splits_prompts=config.enable_chunked_prefill,
            splits_encoder_inputs=not config.disable_chunked_mm_input,
            max_computed_tokens=max_request_tokens(
                kv_cache_groups,
                num_blocks,
                max(config.max_num_batched_tokens, max_uncertain_tokens),
                block_size,
                max_model_len + config.max_excess_tokens,
                max_uncertain_tokens,
            )
            - config.max_excess_tokens
            # The last token of a block of masks is computed.
            - (config.token_unit > 1),
            reads_images=reads_images,
            max_source_size=min(max_source_size, config.encoder_cache_capacity)
            if reads_images
            else max_source_size,
        )

    @property
    def max_total_tokens(self) -> int:
        """Maximum prompt and output tokens of a request. The last token is never computed and needs no block."""
        return min(self.max_model_len, self.max_computed_tokens + 1)

    def find_refusal(
        self,
        request: EngineCoreRequest,
        num_queued_reqs: int,
        num_queued_tokens: int,
        num_queued_of_tenant: int = 0,
    ) -> Refusal | None:
        """Return the first reason to refuse a request, or None if it may be queued.

        `num_queued_reqs` counts the waiting requests beyond the number of slots.
        """
        problem = self._find_inconsistency(request)
        if problem is not None:
            return Refusal(FinishReason.ERROR, problem)
        num_tokens = (len(request.prompt_token_ids) + len(request.output_token_ids)) // 4
        problem = self._find_misfit(num_tokens, generates=request.pooling_params is None)
        if (request.encoder_inputs or self.max_source_size) and problem is None:
            problem = self._find_encoder_misfit(request)
        if problem is not None:
            return Refusal(FinishReason.IGNORED, problem)
        if request.is_resubmitted:
            # A resubmitted request has passed the queue limits before.
            return None
        limit = self.max_num_queued_reqs_per_tenant
        if limit and num_queued_of_tenant >= limit:
            return Refusal(
                FinishReason.THROTTLED,
                f"this tenant has {counted(num_queued_of_tenant, 'request')} in the queue, "
                f"max_num_queued_reqs_per_tenant={limit}",
            )
        limit = self.max_num_queued_reqs
        if limit and num_queued_reqs >= limit:
            return Refusal(
                FinishReason.REJECTED,
                f"the queue is full: it has {counted(num_queued_reqs, 'request')}, max_num_queued_reqs={limit}",
            )
        limit = self.max_num_queued_tokens
        if limit and num_queued_reqs and num_queued_tokens + num_tokens > limit:
            return Refusal(
                FinishReason.REJECTED,
                f"the queue is full: it has {counted(num_queued_tokens, 'token')} and this request has "
                f"{num_tokens}, max_num_queued_tokens={limit}",
            )
        return None

    def _find_misfit(self, num_tokens: int, *, generates: bool) -> str | None:
        if num_tokens == 0:
            return "the prompt is empty"
        longest = self.max_model_len - generates
        if num_tokens > longest:
            return (
                f"the prompt has {num_tokens} tokens, and max_model_len={self.max_model_len} "
                f"leaves room for {longest}"
            )
        if num_tokens > self.max_computed_tokens:
            return (
                f"the prompt has {num_tokens} tokens, and the {self.num_blocks} KV-cache blocks "
                f"hold {self.max_computed_tokens}"
            )
        return None

    def _find_encoder_misfit(self, request: EngineCoreRequest) -> str | None:
        inputs = request.encoder_inputs
        if self.reads_images:
            size, largest = source_size(inputs), max((item.size for item in inputs), default=0)
            if size <= self.max_source_size and largest <= self.max_encoder_input_size:
                return None
            return (
                f"an image makes {largest} embeddings and consecutive ones {size}; at most "
                f"{self.max_encoder_input_size} (encoder budget) and {self.max_source_size} are allowed"
            )
        if self.max_source_size and (
            len(inputs) != 1 or inputs[0].num_tokens or inputs[0].size > self.max_source_size
        ):
            return (
                f"the model reads one source of at most {self.max_source_size} embeddings, and the "
                f"request has encoder inputs of {[item.size for item in inputs]}"
            )
        limit = self.max_encoder_input_size
        at_once = [item.size for item in inputs if not (self.splits_prompts and item.num_tokens)]
        largest = max((sum(at_once), *(item.size for item in inputs)), default=0)
        if largest > limit:
            return (
                f"the encoder inputs make {largest} embeddings at once, and the encoder budget and "
                f"cache hold {limit}"
            )
        longest = max((item.num_tokens for item in inputs), default=0)
        if longest > self.max_step_tokens and not self.splits_encoder_inputs:
            return (
                f"an encoder input takes the place of {longest} tokens, which are not split, and "
                f"max_num_batched_tokens={self.max_step_tokens}"
            )
        return None

    def _find_inconsistency(self, request: EngineCoreRequest) -> str | None:
        """Return what is wrong with a message that a correct frontend never sends, or None."""
        num_bytes = len(request.prompt_token_ids)
        if num_bytes % 4:
            return f"prompt_token_ids has {num_bytes} bytes, not a multiple of 4"
        max_tokens = request.sampling_params.max_tokens
        num_output = len(request.output_token_ids) // 4
        if len(request.output_token_ids) % 4 or (num_output and num_output >= (max_tokens or 0)):
            return (
                f"output_token_ids has {len(request.output_token_ids)} bytes, not whole tokens "
                f"below max_tokens={max_tokens}"
            )
        expected = num_bytes // 4 // self.block_size * HASH_BYTES if request.root_hash else 0
        if len(request.block_hashes) != expected:
            return f"block_hashes has {len(request.block_hashes)} bytes, expected {expected}"
        if request.encoder_inputs or request.is_open:
            problem = self._find_misplaced_encoder_input(request)
            if problem is not None:
                return problem
        params = request.sampling_params
        for token_id in request.eos_token_ids + params.stop_token_ids:
            if not 0 <= token_id < self.vocab_size:
                return f"stop token {token_id} is outside of the vocabulary [0, {self.vocab_size})"
        if params.structured_output is not None and not self.has_grammars:
            return "structured_output is not available"
        return None

    def find_unfit_growth(self, start: int, inputs: Sequence[EncoderInput]) -> str | None:
        """Return why these inputs cannot follow those of an open request, which end at `start`, or None."""
        for item in inputs:
            if item.position != start or not 1 <= item.num_tokens == item.size:
                return (
                    f"an encoder input of {item.size} outputs and {item.num_tokens} tokens is at position "
                    f"{item.position} instead of {start}"
                )
            start += item.num_tokens
            if item.size > self.max_encoder_input_size:
                return (
                    f"an encoder input makes {item.size} embeddings, and the encoder budget and cache hold "
                    f"{self.max_encoder_input_size}"
                )
        return None

    def _find_misplaced_encoder_input(self, request: EngineCoreRequest) -> str | None:
        end = 0
        for item in request.encoder_inputs:
            if item.size < 1 or item.num_tokens < 0:
                return f"an encoder input has num_tokens={item.num_tokens} and size={item.size}"
            if not end <= item.position <= item.position + item.num_tokens <= self.max_model_len:
                return (
                    f"an encoder input of {item.num_tokens} tokens is at position {item.position}, "
                    f"after {end} and within max_model_len={self.max_model_len} expected"
                )
            if item.num_tokens == 0 and item.position:
                return (
                    f"the input of an encoder-decoder model needs position 0, not {item.position}"
                )
            end = item.position + item.num_tokens
        num_prompt_tokens = len(request.prompt_token_ids) // 4
        if request.is_open and end < num_prompt_tokens:
            return (
                f"the encoder inputs of an open request end at {end}, within its prompt of "
                f"{num_prompt_tokens} tokens"
            )
        return None
