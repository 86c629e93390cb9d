"""The prompts and sampling rules of a speech model's decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ....protocol.config import ModelConfig
from ....protocol.config.audio.processor import AudioProcessorConfig
from ....protocol.encoder_inputs.inputs import EncoderInput
from ....protocol.errors import ConfigError
from ....protocol.sampling_params import SamplingParams, TranscriptRules
from ...tokenizer.tokenizer import Tokenizer
from .answer import Answer
from .options import Task, TranscriptionOptions

_MAX_START_TOKENS: Final = 4
"""Maximum number of tokens after the earlier text: the start, the language, the task, and "no timestamps"."""


class DecoderPrompts:
    """Creates the decoder prompts of one model."""

    def __init__(
        self, model: ModelConfig, audio: AudioProcessorConfig, tokenizer: Tokenizer
    ) -> None:
        self.audio = audio
        self._tokenizer = tokenizer
        self.max_model_len = model.max_model_len
        self._end_token_id = min(model.eos_token_ids, default=-1)
        self.has_timestamps = audio.no_timestamps_token_id >= 0
        self.first_timestamp_id = (
            audio.no_timestamps_token_id + 1 if self.has_timestamps else model.vocab_size
        )
        marks = () if audio.added is None else audio.added.marks
        self._mark_ids = frozenset(map(tokenizer.token_to_id, marks))
        if audio.added is not None:
            self._mark_ids |= tokenizer.special_ids

    @property
    def end_token_id(self) -> int:
        """The token that ends a text."""
        return self._end_token_id

    def is_text(self, token_id: int) -> bool:
        """Return whether a token is text, and neither a timestamp nor a mark nor the end token."""
        is_other = token_id == self._end_token_id or token_id in self._mark_ids
        return token_id < self.first_timestamp_id and not is_other

    def is_end(self, token_id: int) -> bool:
        """Return whether a token is the end token."""
        return token_id == self._end_token_id

    def for_window(
        self,
        options: TranscriptionOptions,
        language: str,
        inputs: Sequence[EncoderInput],
        *,
        seconds: float,
        has_timestamps: bool,
    ) -> tuple[list[int], list[EncoderInput]]:
        """Return the decoder's prompt for a window, and its encoder inputs, which have no place in the prompt."""
        return self.decode(options, language, has_timestamps=has_timestamps), list(inputs)

    def read_answer(self, token_ids: Sequence[int]) -> Answer:
        """Return an answer that is only text."""
        return Answer("", 0)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without timestamps."""
        return self._tokenizer.decode(filter(self.is_text, token_ids))

    def read_turns(self, text: str) -> None:
        """Return None, because an answer names no speakers."""

    def hold(self, language: str) -> None:
        """Return None, because an answer is only text."""

    def start(self, options: TranscriptionOptions) -> list[int]:
        """Return the prompt up to and including the start token, which follows the client's prompt if there is one."""
        audio = self.audio
        before: list[int] = []
        if context := options.context:
            encoded = self._tokenizer.encode(f" {context}", add_special_tokens=False)
            # Half of the context is reserved for the text. A long prompt is cut at its beginning, because its end
            # matters most.
            kept = encoded[-(self.max_model_len // 2 - 1) :]
            before = [audio.previous_token_id, *kept]
        return [*before, audio.start_token_id]

    def decode(
        self, options: TranscriptionOptions, language: str, *, has_timestamps: bool
    ) -> list[int]:
        """Return the complete decoder prompt."""
        audio = self.audio
        if audio.prompt:
            target = "en" if options.task is Task.TRANSLATE else language
            return [
                self._token(text.format(language=language, target=target)) for text in audio.prompt
            ]
        prompt = self.start(options)
        if audio.forced_token_id >= 0:
            prompt.append(audio.forced_token_id)
        is_translated = options.task is Task.TRANSLATE
        if audio.names_text_language:
            prompt.append(audio.language_token_ids["en" if is_translated else language])
        elif audio.language_token_ids:
            task = audio.translate_token_id if is_translated else audio.transcribe_token_id
            prompt += [audio.language_token_ids[language], task]
        if self.has_timestamps and not has_timestamps:
            prompt.append(audio.no_timestamps_token_id)
        return prompt

    def _token(self, text: str) -> int:
        token = self._tokenizer.token_to_id(text)
        if token is None:
            raise ConfigError(
                f"the tokenizer has no token {text!r}, which this model's prompt needs"
            )
        return token

    def align(self, language: str, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Return the prompt for the alignment of a text with its clip, and the row of the text's first token.

        The cross-attention of this prompt shows the time of each token.
        """
        prompt = self.decode(TranscriptionOptions(), language, has_timestamps=False)
        return [*prompt, *token_ids, self._end_token_id], len(prompt) - 1

    def max_tokens(
        self, options: TranscriptionOptions, prompt: Sequence[int], seconds: float
    ) -> int:
        """Return the maximum number of text tokens for an audio clip of `seconds` seconds after a prompt."""
        most = self.max_model_len - len(prompt)
        if options.has_words:
            # For the alignment, the text is read again after the longest prompt without earlier text, and an end token
            # follows.
            most = min(most, self.max_model_len - 2 - _MAX_START_TOKENS)
        if (added := self.audio.added) is not None:
            # A token for each output, which is the last one that has none itself.
            num_outputs = added.num_outputs(round(seconds * self.audio.sampling_rate))
            most = min(most, num_outputs - len(prompt))
        if limit := self.audio.max_tokens_per_second:
            most = min(most, int(seconds * limit))
        return max(1, most)

    def params(
        self,
        options: TranscriptionOptions,
        temperature: float,
        max_tokens: int,
        *,
        has_timestamps: bool,
    ) -> SamplingParams:
        """Return the sampling parameters for the text of a window."""
        audio = self.audio
        rules = TranscriptRules(
            audio.suppressed_token_ids,
            audio.begin_suppressed_token_ids,
            self.first_timestamp_id if has_timestamps and self.has_timestamps else 0,
            max(self._end_token_id, 0),
            audio.max_initial_timestamp,
        )
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=options.seed,
            **options.sampling,
            logprobs=0,
            transcript_rules=rules,
        )

    def choose_one(self, token_ids: Sequence[int]) -> SamplingParams:
        """Return sampling parameters that choose the most probable of `token_ids`."""
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=0,
            allowed_token_ids=tuple(token_ids),
            ignore_eos=True,
        )
