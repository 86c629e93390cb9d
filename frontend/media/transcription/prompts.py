"""The interface for the prompts and answers of a speech model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ....protocol.messages import EncoderInput
from ....protocol.sampling_params import SamplingParams
from ...client.engine_client import Delta
from .options import TranscriptionOptions


class Answer(NamedTuple):
    """The parts of an answer: the code of the language that it names, or "", and the index of the first text token."""

    language: str
    start: int


class Held(Protocol):
    """Hides the beginning of a streamed answer."""

    def read(self, delta: Delta, *, is_end: bool = False) -> Delta:
        """Return what is shown after a piece of the answer; the last call has `is_end`."""


class Prompts(Protocol):
    """Creates the prompts of one model and reads its answers.

    Attributes:
        has_timestamps: Whether the model writes timestamps.
        first_timestamp_id: The token of the timestamp 0, or the size of the vocabulary if there are none.
    """

    has_timestamps: bool
    first_timestamp_id: int

    def is_text(self, token_id: int) -> bool:
        """Return whether a token is text, and neither a timestamp nor an end token."""

    def is_end(self, token_id: int) -> bool:
        """Return whether a token ends a text."""

    def for_window(
        self,
        options: TranscriptionOptions,
        language: str,
        inputs: Sequence[EncoderInput],
        *,
        has_timestamps: bool,
    ) -> tuple[list[int], list[EncoderInput]]:
        """Return the prompt for a window, and its encoder inputs at their places.

        Raises:
            ParameterError: The client's prompt contains special tokens that the server rejects.
        """

    def max_tokens(
        self, options: TranscriptionOptions, prompt: Sequence[int], seconds: float
    ) -> int:
        """Return the maximum number of text tokens for an audio clip of `seconds` seconds after a prompt."""

    def params(
        self,
        options: TranscriptionOptions,
        temperature: float,
        max_tokens: int,
        *,
        has_timestamps: bool,
    ) -> SamplingParams:
        """Return the sampling parameters for the text of a window."""

    def read_answer(self, token_ids: Sequence[int]) -> Answer:
        """Return the parts of an answer."""

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer's text tokens."""

    def hold(self, language: str) -> Held | None:
        """Return an object that hides the beginning of a streamed answer in `language`; None if nothing is hidden."""
