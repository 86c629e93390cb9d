"""Create groups for requests: groups that cores compute, and groups whose tokens are already known."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from itertools import groupby

from ....protocol.config import EngineConfig
from ....protocol.messages import EngineCoreRequest, FinishReason
from ...tokenizer.detokenizer import IncrementalDetokenizer
from ...tokenizer.tokenizer import Tokenizer
from ..input_processor import InputProcessor
from ..request_group import RequestGroup, Sequence
from ..sequence_io import SEQUENCES_AT_ONCE, SequenceRequest
from .hidden_states import StatesFactory


class GroupFactory:
    """Creates sequences and groups.

    `wake_soon` schedules a turn of a group's reader.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        input_processor: InputProcessor,
        wake_soon: Callable[[RequestGroup], None],
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._input = input_processor
        self._wake_soon = wake_soon
        self._states = StatesFactory(config)

    def new_group(
        self,
        request_id: str,
        sequences: list[Sequence],
        num_outputs: list[int],
        on_abort: Callable[[RequestGroup], None],
    ) -> RequestGroup:
        """Return a group of sequences, with `num_outputs` of them per prompt."""
        return RequestGroup(
            request_id,
            sequences,
            num_outputs,
            stream_interval=self._config.frontend.stream_interval,
            on_abort=on_abort,
            wake_soon=self._wake_soon,
        )

    async def new_sequences(
        self, wanted: list[SequenceRequest], requests: list[EngineCoreRequest]
    ) -> list[Sequence]:
        """Return a sequence for each request message."""
        sequences: list[Sequence] = []
        for each in zip(wanted, requests, strict=True):
            sequences.append(self._new_sequence(*each))
            if len(sequences) % SEQUENCES_AT_ONCE == 0:
                await asyncio.sleep(0)
        return sequences

    async def mirror(
        self,
        sequences: list[SequenceRequest],
        *,
        request_id: str,
        on_abort: Callable[[RequestGroup], None],
    ) -> RequestGroup:
        """Return a group that is sent to no core. The caller adds its tokens.

        Raises:
            ParameterError: A parameter is invalid for this model.
        """
        requests = await self._input.process(sequences, time.monotonic())
        started = await self.new_sequences(sequences, requests)
        return self.new_group(request_id, started, count_outputs(sequences), on_abort)

    def finished_sequence(
        self,
        wanted: SequenceRequest,
        first: Sequence,
        token_ids: array[int],
        reason: FinishReason,
    ) -> Sequence:
        """Return a finished sequence with these tokens and the times of `first`, which the core has computed."""
        sequence = self._new_sequence(wanted, first.request)
        sequence.token_ids, sequence.finish_reason = token_ids, reason
        for name in ("num_cached_tokens", "queued_time", "scheduled_time", "first_token_time"):
            setattr(sequence, name, getattr(first, name))
        sequence.finish_time = sequence.last_token_time = time.monotonic()
        return sequence

    def finished_group(
        self, request_id: str, sequences: list[Sequence], num_outputs: list[int]
    ) -> RequestGroup:
        """Return a group of sequences that have ended, with `num_outputs` of them per prompt."""
        group = self.new_group(request_id, sequences, num_outputs, lambda group: None)
        for sequence in sequences:
            group.record_sequence_end(sequence)
        return group

    def _new_sequence(self, wanted: SequenceRequest, request: EngineCoreRequest) -> Sequence:
        params = wanted.params
        prompt = memoryview(request.prompt_token_ids).cast("i")
        detokenizer = None
        if params.detokenize and self._config.model.has_tokenizer:
            detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                prompt,
                stop=params.stop,
                stop_regex=params.stop_regex,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
        sequence = Sequence(request, params, len(prompt), detokenizer)
        sequence.states = self._states.collect(request.sampling_params, len(prompt))
        return sequence


def count_outputs(sequences: list[SequenceRequest]) -> list[int]:
    """Return the number of outputs of each prompt. Sequences of the same prompt must be adjacent."""
    return [len(list(same)) for _, same in groupby(sequences, lambda s: id(s.prompt_token_ids))]
