"""The conversations in which a chat model that reads audio transcribes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from ....protocol.config import ModelConfig
from ....protocol.config.chat_audio import ChatAudioConfig, SpeechFormat
from ....protocol.encoder_inputs.inputs import EncoderInput
from ....protocol.sampling_params import SamplingParams
from ...chat.messages import AUDIO_MARK, AUDIO_PART, TemplatePart
from ...chat.special_tokens import SpecialTokenGuard
from ...chat.template import ChatTemplate
from ...client.engine_client import Delta
from ...tokenizer.tokenizer import Tokenizer
from ..audio.clips import AudioPlaces, PreparedAudio
from .answer import Answer
from .languages import find_language
from .options import Task, TranscriptionOptions
from .segments import Turn
from .turns import TurnReader, make_reader

_CLAUSE: Final = re.compile(r"\[(.*?)\]")
"""A part of an instruction that is only written if the language is given."""

_MAX_HELD: Final = 16
"""Maximum tokens before the text mark. An answer with more tokens and no mark is only a transcript."""


class ChatPrompts:
    """Creates the prompts of one model and reads its answers, which have no timestamps."""

    def __init__(
        self,
        model: ModelConfig,
        audio: ChatAudioConfig,
        speech: SpeechFormat,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        guard: SpecialTokenGuard,
    ) -> None:
        self._speech = speech
        self._tokenizer, self._template, self._guard = tokenizer, template, guard
        self._places = AudioPlaces(audio, tokenizer)
        self._max_model_len = model.max_model_len
        self._end_token_ids = frozenset(model.eos_token_ids)
        self._mark_id = tokenizer.token_to_id(speech.text_mark) if speech.text_mark else None
        self.first_timestamp_id = model.vocab_size

    def is_text(self, token_id: int) -> bool:
        """Return whether a token is text, and does not end an answer."""
        return token_id not in self._end_token_ids

    def is_end(self, token_id: int) -> bool:
        """Return whether a token ends an answer."""
        return token_id in self._end_token_ids

    def for_window(
        self,
        options: TranscriptionOptions,
        language: str,
        inputs: Sequence[EncoderInput],
        *,
        seconds: float,
        has_timestamps: bool,
    ) -> tuple[list[int], list[EncoderInput]]:
        """Return the prompt for a window of `seconds` seconds, and its encoder inputs at their places.

        Raises:
            ParameterError: The client's prompt contains special tokens that the server rejects.
        """
        speech = self._speech
        is_translated = options.task is Task.TRANSLATE
        name = speech.languages[language] if language else ""
        clip = PreparedAudio(list(inputs), seconds)
        if speech.prompt:
            return self._place(speech.prompt.format(audio=AUDIO_MARK), clip)
        if speech.has_parts:
            content: Any = self._parts(options, name)
            return self._encode([{"role": "user", "content": content}], "", clip)
        instruction = speech.translation if is_translated else speech.instruction
        instruction = _CLAUSE.sub(r"\1" if name else "", instruction)
        content = instruction.format(audio=AUDIO_MARK, language=name)
        if AUDIO_MARK not in content:
            text_parts = [{"type": "text", "text": content}] if content else []
            content = [*text_parts, AUDIO_PART] if speech.follows else [AUDIO_PART, *text_parts]
        messages: list[Any] = [{"role": "user", "content": content}]
        if context := options.context:
            # If the server rejects special tokens, the error names this field.
            self._guard.protect(context, "prompt")
            messages.insert(0, {"role": "system", "content": context})
        answer = speech.answer.format(language=name) if name else ""
        return self._encode(messages, answer + speech.task_mark, clip)

    def _parts(self, options: TranscriptionOptions, language: str) -> list[Any]:
        """Return the parts of a message for a chat template that has the instruction."""
        parts: list[Any] = [AUDIO_PART]
        reads_keywords = self._speech.reads_keywords
        if text := options.prompt if reads_keywords else options.context:
            self._guard.protect(text, "prompt")
            parts.append({"type": "text", "text": text})
        if reads_keywords and (words := list(options.keywords)):
            self._guard.protect(words, "keywords")
            parts.append(TemplatePart(type="keywords", keywords=words))
        if language:
            parts.append(TemplatePart(type="language", language=language))
        return parts

    def _encode(
        self, messages: list[Any], answer: str, clip: PreparedAudio
    ) -> tuple[list[int], list[EncoderInput]]:
        """Return the tokens of a conversation with the beginning of an answer, and its encoder inputs."""
        assert self._template is not None
        return self._place(self._template.render(messages, self._guard) + answer, clip)

    def _place(self, text: str, clip: PreparedAudio) -> tuple[list[int], list[EncoderInput]]:
        """Return the tokens of a prompt, and its encoder inputs."""
        _, token_ids, placed = self._places.encode(
            text,
            [clip],
            lambda rendered: self._guard.encode(rendered, add_special_tokens=False),
        )
        return list(token_ids), placed

    def max_tokens(
        self, options: TranscriptionOptions, prompt: Sequence[int], seconds: float
    ) -> int:
        """Return the maximum number of tokens after a prompt, which only the context limits."""
        return max(1, self._max_model_len - len(prompt))

    def params(
        self,
        options: TranscriptionOptions,
        temperature: float,
        max_tokens: int,
        *,
        has_timestamps: bool,
    ) -> SamplingParams:
        """Return the sampling parameters for the answer to a window."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=options.seed,
            **options.sampling,
            logprobs=0,
        )

    def read_answer(self, token_ids: Sequence[int]) -> Answer:
        """Return the language that the model wrote first, and the number of tokens before the text."""
        if self._mark_id is None or self._mark_id not in token_ids:
            return Answer("", 0)
        start = list(token_ids).index(self._mark_id)
        before = self._tokenizer.decode(token_ids[:start]).strip()
        return Answer(find_language(before.removeprefix(self._speech.language_mark)), start + 1)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a transcript's tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def read_turns(self, text: str) -> list[Turn] | None:
        """Return the turns of an answer with this text; None if the model does not name speakers."""
        if not self._speech.turns:
            return None
        reader = make_reader(self._speech.turns)
        reader.feed(text, is_end=True)
        return reader.turns

    def hold(self, language: str) -> HeldAnswer | HeldTurns | None:
        """Return an object that hides parts of a streamed answer in `language`; None if nothing is hidden."""
        if self._speech.turns:
            return HeldTurns(make_reader(self._speech.turns))
        if self._mark_id is None or language:
            return None
        return HeldAnswer(self, self._mark_id, self._speech.text_mark)


class HeldAnswer:
    """Hides what a model writes before the text mark, and shows the rest of its answer."""

    def __init__(self, prompts: ChatPrompts, mark_id: int, mark: str) -> None:
        self._prompts = prompts
        self._mark_id, self._mark = mark_id, mark
        self._held = Delta("", [], [])
        self._is_past = False

    def read(self, delta: Delta, *, is_end: bool = False) -> Delta:
        """Return what is shown after a piece of the answer; the last call has `is_end`."""
        if self._is_past:
            return delta
        held = self._held
        held.text += delta.text
        held.token_ids += delta.token_ids
        held.logprobs = [*(held.logprobs or ()), *(delta.logprobs or ())]
        has_mark = self._mark_id in held.token_ids
        if not (is_end or has_mark or len(held.token_ids) > _MAX_HELD):
            return Delta("", [])
        self._is_past = True
        if not has_mark:
            return held
        start = held.token_ids.index(self._mark_id) + 1
        _, found, text = held.text.partition(self._mark)
        token_ids = held.token_ids[start:]
        # The text lacks the mark if the tokenizer counts it as a special token.
        text = text if found else self._prompts.text(token_ids)
        return Delta(text, token_ids, list(held.logprobs)[start:])


class HeldTurns:
    """Hides the times and speakers of an answer, and shows its words."""

    def __init__(self, reader: TurnReader) -> None:
        self._reader = reader

    def take_turns(self, *, is_end: bool = False) -> list[Turn]:
        """Return the turns that have ended since the last call; all the rest if `is_end`."""
        return self._reader.take_ended(is_end=is_end)

    def read(self, delta: Delta, *, is_end: bool = False) -> Delta:
        """Return what is shown after a piece of the answer; the last call has `is_end`."""
        return Delta(self._reader.feed(delta.text, is_end=is_end), [])
