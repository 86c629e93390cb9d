"""Transcribe a clip while its samples arrive, with a model that reads audio beside its text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np
from msgspec.structs import replace

from ....protocol.config.audio.processor import AddedAudioConfig
from ....protocol.encoder_inputs.inputs import EncoderInput
from ....protocol.errors import ParameterError
from ...client.engine_client import PositionLogprobs, RequestGroup
from ...client.executor import ThreadExecutor
from ..audio.added_clip import AddedClip
from ..audio.live_samples import LiveSamples
from .decoder_prompt import DecoderPrompts
from .decoding import Submission
from .options import TranscriptionOptions

MAX_SECONDS: Final = 3600.0
"""The maximum length of a clip. It bounds the size of a message with all of its features to 190 MB."""


class LiveDecoder:
    """Decodes one clip. Its request starts as soon as audio for the prompt has arrived, and grows with the clip.

    Attributes:
        num_samples: The number of samples so far.
        token_ids: The tokens of the text so far.
        logprobs: Their log-probabilities.
    """

    def __init__(
        self,
        prompts: DecoderPrompts,
        added: AddedAudioConfig,
        options: TranscriptionOptions,
        submission: Submission,
        on_text: Callable[[str, list[PositionLogprobs]], Awaitable[None]] | None,
        executor: ThreadExecutor,
    ) -> None:
        self._prompts = prompts
        self._options = options
        self._submission = submission
        self._on_text = on_text
        self._executor = executor
        rate = prompts.audio.sampling_rate
        self._max_outputs = min(
            prompts.max_model_len, int(MAX_SECONDS * rate) // added.samples_per_output
        )
        self._clip = AddedClip(prompts.audio, added)
        self._prompt = prompts.decode(options, "", has_timestamps=False)
        self._group: RequestGroup | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: list[EncoderInput] = []
        self.num_samples = 0
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []

    async def decode(self, samples: LiveSamples) -> None:
        """Decode a clip until its end.

        Raises:
            ClipDropped: The clip was dropped.
            ParameterError: The clip is longer than the context.
        """
        try:
            async for piece in samples:
                self.num_samples += len(piece)
                await self._grow(await self._executor.in_thread(self._clip.append, piece))
            await self._grow(await self._executor.in_thread(self._clip.finish), is_last=True)
            assert self._reader is not None
            await self._reader
        finally:
            # Nothing may come before this: waiting for the reader can be cancelled.
            if self._group is not None:
                self._group.abort()
            if self._reader is not None:
                self._reader.cancel()
                await asyncio.gather(self._reader, return_exceptions=True)

    async def _grow(self, inputs: list[EncoderInput], *, is_last: bool = False) -> None:
        if self._clip.num_outputs > self._max_outputs:
            raise ParameterError(
                "audio",
                f"must make at most {self._max_outputs} tokens, as many as {MAX_SECONDS:g} s of audio and "
                f"--max-model-len {self._prompts.max_model_len} allow; commit shorter utterances",
            )
        self._waiting += inputs
        if self._group is None and self._clip.num_outputs >= len(self._prompt):
            inputs, self._waiting = self._waiting, []
            self._group = await self._start(inputs)
            self._reader = asyncio.create_task(self._read(self._group))
        if self._group is not None and (self._waiting or is_last):
            inputs, self._waiting = self._waiting, []
            self._submission.append(self._group.sequences[0], inputs, is_last=is_last)

    async def _start(self, inputs: list[EncoderInput]) -> RequestGroup:
        params = self._prompts.params(
            self._options,
            self._options.temperature,
            self._prompts.max_model_len - len(self._prompt),
            has_timestamps=False,
        )
        request = replace(
            self._submission.base,
            prompt_token_ids=np.array(self._prompt, np.int32),
            params=params,
            encoder_inputs=inputs,
            is_open=True,
        )
        return await self._submission.start([request])

    async def _read(self, group: RequestGroup) -> None:
        """Read the output until it ends."""
        while updates := await group.wait_for_updates():
            for sequence in updates:
                delta = sequence.read_some()
                self._submission.verify(delta)
                found = [x for x in delta.logprobs or () if self._prompts.is_text(x.token_id)]
                self.token_ids += delta.token_ids
                self.logprobs += found
                if self._on_text is not None:
                    await self._on_text(delta.text, found)
