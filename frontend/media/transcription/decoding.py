"""Decode the windows of one clip with a speech model: language, text, silence and word times."""

from __future__ import annotations

import asyncio
import math
from collections import abc
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
from msgspec.structs import replace

from ....protocol.arrays import float32_view
from ....protocol.encoder_inputs.inputs import EncoderInput
from ....protocol.pooling_params import PoolingKind, PoolingParams
from ....protocol.sampling_params import SamplingParams
from ...client.engine_client import Delta, PositionLogprobs, RequestGroup, Sequence, SequenceRequest
from ...client.sequence_io import params_for_output
from ...tokenizer.tokenizer import Tokenizer
from ..audio.log_mel import HOP
from ..audio.windows import Window
from .chat_prompt import ChatPrompts, HeldTurns
from .decoder_prompt import DecoderPrompts
from .options import SpeechModel, TranscriptionOptions
from .segments import MAX_NO_SPEECH_PROB, DecodedWindow, Turn, Word, best_attempt
from .turns import join_turns
from .words import align_words

TEMPERATURES: Final = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures that are tried after 0 while the text is doubtful (Whisper, arXiv 2212.04356, section 4.5)."""

NUM_SAMPLED: Final = 5
"""Texts that are sampled at each of them, of which the most probable one is kept, as Whisper's own program does."""

Deltas: TypeAlias = asyncio.Queue[Delta | Turn | None]
"""A queue of the pieces of a text as they are generated and of the turns that they complete, followed by None."""


class AppendInputs(Protocol):
    """The type of `EngineClient.append_inputs`."""

    def __call__(
        self, sequence: Sequence, inputs: Iterable[EncoderInput], *, is_last: bool
    ) -> None:
        """Append encoder inputs to an open sequence, whose output ends with the last inputs."""


Prompts: TypeAlias = DecoderPrompts | ChatPrompts


@dataclass(frozen=True, slots=True)
class Submission:
    """The means by which the sequences of a transcription are submitted to the engine.

    Attributes:
        base: A request with the tenant, deadline and other fields that all sequences share.
        start: Function that submits sequences of one prompt.
        verify: Function that raises an error if a sequence failed.
        append: Function that appends encoder inputs to an open sequence.
    """

    base: SequenceRequest
    start: Callable[[list[SequenceRequest]], Awaitable[RequestGroup]]
    verify: Callable[[Delta], None]
    append: AppendInputs


class WindowDecoder:
    """Decodes the windows of one clip. Several may be decoded at the same time.

    Attributes:
        language: The code of the spoken language; "" until `detect_language` or the caller sets it.
    """

    def __init__(
        self,
        speech: SpeechModel,
        prompts: Prompts,
        tokenizer: Tokenizer,
        options: TranscriptionOptions,
        submission: Submission,
    ) -> None:
        self._rate = speech.sampling_rate
        self._prompts = prompts
        self._decoder = prompts if isinstance(prompts, DecoderPrompts) else None
        self._tokenizer = tokenizer
        self._options = options
        self._submission = submission
        self.language = options.language
        if len(speech.languages) == 1:
            [self.language] = speech.languages

    @property
    def needs_language(self) -> bool:
        """True if `detect_language` must be called before windows are decoded."""
        has_languages = self._decoder is not None and self._decoder.audio.language_token_ids
        return bool(has_languages) and not self.language

    async def detect_language(self, inputs: abc.Sequence[EncoderInput]) -> None:
        """Set the language to the most probable one for a window."""
        assert self._decoder is not None
        audio = self._decoder.audio
        languages = audio.language_token_ids
        if possible := self._options.languages:
            languages = {code: languages[code] for code in possible}
        delta, _ = await self._choose([audio.start_token_id], inputs, [*languages.values()])
        self.language = next(
            code for code, token in languages.items() if token == delta.token_ids[0]
        )

    async def decode(
        self, window: Window, inputs: abc.Sequence[EncoderInput], deltas: Deltas
    ) -> DecodedWindow | None:
        """Return the text of a window; None if nobody speaks in it.

        Args:
            window: The window.
            inputs: The encoder inputs of the window.
            deltas: Receives the text as it is generated, if the transcription is streamed. The text of a window that
                may be silent comes at its end.
        """
        options = self._options
        asked: asyncio.Task[float] | None = None
        if options.has_segments or options.is_streamed:
            # Without a stream, both requests run at the same time, so that the encoder runs once for both.
            asked = asyncio.create_task(self._no_speech_prob(inputs))
        shown, held = deltas, Deltas()
        try:
            if asked is not None and options.is_streamed and await asked > MAX_NO_SPEECH_PROB:
                shown = held
            decoded = await self._decode_once(window, inputs, options.temperature, shown)
            if asked is not None:
                decoded.no_speech_prob = await asked
            while not (held.empty() or decoded.is_silent):
                deltas.put_nowait(held.get_nowait())
        finally:
            deltas.put_nowait(None)
            if asked is not None:
                asked.cancel()
        if asked is None and decoded.is_doubtful:
            decoded.no_speech_prob = await self._no_speech_prob(inputs)
        no_speech_prob = decoded.no_speech_prob
        if not options.is_streamed:
            attempts = [decoded]
            for temperature in TEMPERATURES if options.temperature == 0 else ():
                if attempts[-1].is_silent or not attempts[-1].is_doubtful:
                    break
                attempts.append(await self._sample(window, inputs, temperature))
                attempts[-1].no_speech_prob = no_speech_prob
            decoded = best_attempt(attempts)
        if decoded.is_silent:
            return None
        if options.has_words:
            decoded.words = await self._align(window, inputs, decoded)
        return decoded

    async def _decode_once(
        self,
        window: Window,
        inputs: abc.Sequence[EncoderInput],
        temperature: float,
        deltas: Deltas | None,
    ) -> DecodedWindow:
        prompt, placed, params = self._rules(window, inputs, temperature)
        group = await self._start(prompt, placed, [params])
        try:
            if deltas is not None and self._options.is_streamed:
                whole = await self._stream(group, deltas)
            else:
                [whole] = await group.result()
                self._submission.verify(whole)
        finally:
            group.abort()
        return self._decoded(window, temperature, whole)

    async def _sample(
        self, window: Window, inputs: abc.Sequence[EncoderInput], temperature: float
    ) -> DecodedWindow:
        """Return the most probable of several texts."""
        prompt, placed, params = self._rules(window, inputs, temperature)
        group = await self._start(
            prompt, placed, [params_for_output(params, index) for index in range(NUM_SAMPLED)]
        )
        try:
            sampled = await group.result()
            for each in sampled:
                self._submission.verify(each)
        finally:
            group.abort()
        texts = [self._decoded(window, temperature, each) for each in sampled]
        return max(texts, key=lambda text: text.mean_logprob)

    def _rules(
        self, window: Window, inputs: abc.Sequence[EncoderInput], temperature: float
    ) -> tuple[list[int], list[EncoderInput], SamplingParams]:
        """Return the prompt of a window, its encoder inputs, and the parameters of its text."""
        options, prompts = self._options, self._prompts
        prompt, placed = prompts.for_window(
            options,
            self.language,
            inputs,
            seconds=self._seconds(window),
            has_timestamps=options.has_segments,
        )
        max_tokens = prompts.max_tokens(options, prompt, self._seconds(window))
        params = prompts.params(
            options,
            temperature,
            min(max_tokens, options.max_tokens or max_tokens),
            has_timestamps=options.has_segments,
        )
        return prompt, placed, params

    def _seconds(self, window: Window) -> float:
        return len(window.samples) / self._rate

    def _decoded(self, window: Window, temperature: float, whole: Delta) -> DecodedWindow:
        prompts = self._prompts
        logprobs = list(whole.logprobs or ())
        answer = prompts.read_answer(whole.token_ids)
        token_ids = [
            token for token in whole.token_ids[answer.start :] if not prompts.is_end(token)
        ]
        values = [each.logprob for each in logprobs]
        text = prompts.text(token_ids)
        if (turns := prompts.read_turns(text)) is not None:
            text = join_turns(turns)
        return DecodedWindow(
            start=window.start / self._rate,
            duration=self._seconds(window),
            token_ids=token_ids,
            num_generated_tokens=len(whole.token_ids),
            text=text,
            turns=turns,
            temperature=temperature,
            mean_logprob=sum(values) / len(values) if values else 0.0,
            logprobs=[each for each in logprobs[answer.start :] if prompts.is_text(each.token_id)],
            language=answer.language,
        )

    async def _stream(self, group: RequestGroup, deltas: Deltas) -> Delta:
        """Return the complete output, and put each new piece of it into the queue."""
        whole = Delta("", [])
        logprobs: list[PositionLogprobs] = []
        held = self._prompts.hold(self.language)

        def show(delta: Delta) -> None:
            found = delta.logprobs or ()
            delta.logprobs = [each for each in found if self._prompts.is_text(each.token_id)]
            deltas.put_nowait(delta)

        while updates := await group.wait_for_updates():
            for sequence in updates:
                delta = sequence.read_some()
                self._submission.verify(delta)
                delta.logprobs = list(delta.logprobs or ())
                whole.token_ids += delta.token_ids
                logprobs += delta.logprobs
                show(delta if held is None else held.read(delta))
                if isinstance(held, HeldTurns):
                    for turn in held.take_turns():
                        deltas.put_nowait(turn)
        if held is not None:
            show(held.read(Delta("", []), is_end=True))
        if isinstance(held, HeldTurns):
            for turn in held.take_turns(is_end=True):
                deltas.put_nowait(turn)
        whole.logprobs = logprobs
        return whole

    async def _no_speech_prob(self, inputs: abc.Sequence[EncoderInput]) -> float:
        """Return the probability that nobody speaks in a window, from the probability of the no-speech token."""
        prompts = self._decoder
        if prompts is None or (token_id := prompts.audio.no_speech_token_id) < 0:
            return 0.0
        delta, _ = await self._choose(prompts.start(self._options), inputs, [token_id])
        [chosen] = delta.logprobs or ()
        return math.exp(chosen.logprob)

    async def _align(
        self, window: Window, inputs: abc.Sequence[EncoderInput], decoded: DecodedWindow
    ) -> list[Word]:
        prompts = self._decoder
        assert prompts is not None
        text_ids = [token for token in decoded.token_ids if prompts.is_text(token)]
        if not text_ids:
            return []
        samples_per_output = HOP * math.prod(prompts.audio.strides)
        num_outputs = min(inputs[0].size, -(-len(window.samples) // samples_per_output))
        prompt, first_row = prompts.align(self.language, text_ids)
        pooling = PoolingParams(PoolingKind.ALIGNMENT, True, num_frames=num_outputs)
        _, pooled = await self._choose(prompt, inputs, [prompts.end_token_id], pooling)
        # The dynamic programming runs in Python, long enough to delay other tasks of the event loop.
        return await asyncio.to_thread(
            align_words,
            float32_view(pooled).reshape(len(prompt), -1)[first_row:-1],
            text_ids,
            self._tokenizer,
            language=self.language,
            start=decoded.start,
            seconds_per_output=samples_per_output / self._rate,
        )

    async def _choose(
        self,
        prompt: list[int],
        inputs: abc.Sequence[EncoderInput],
        token_ids: list[int],
        pooling: PoolingParams | None = None,
    ) -> tuple[Delta, bytes]:
        """Generate one of `token_ids` after a prompt, or pool the prompt if `pooling` is given.

        Returns:
            The output with the most probable token, and the pooled data (b"" without `pooling`).
        """
        assert self._decoder is not None
        params = self._decoder.choose_one(token_ids)
        group = await self._start(prompt, inputs, [params], pooling)
        try:
            [delta] = await group.result()
            self._submission.verify(delta)
            return delta, group.sequences[0].pooled
        finally:
            group.abort()

    async def _start(
        self,
        prompt: list[int],
        inputs: abc.Sequence[EncoderInput],
        params: list[SamplingParams],
        pooling: PoolingParams | None = None,
    ) -> RequestGroup:
        request = replace(
            self._submission.base,
            prompt_token_ids=np.array(prompt, np.int32),
            params=params[0],
            encoder_inputs=list(inputs),
            pooling=pooling,
        )
        return await self._submission.start([replace(request, params=each) for each in params])
