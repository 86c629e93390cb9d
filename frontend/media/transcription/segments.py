"""Segments of a transcript: pieces of text between two timestamps, and the checks for doubtful text."""

from __future__ import annotations

import unicodedata
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from ...client.engine_client import PositionLogprobs
from ...tokenizer.tokenizer import Tokenizer

MAX_COMPRESSION_RATIO: Final = 2.4
MIN_MEAN_LOGPROB: Final = -1.0
MAX_NO_SPEECH_PROB: Final = 0.6
"""Thresholds of Whisper (arXiv 2212.04356, section 4.5).

Text repeats itself if its compression ratio is higher, and is doubtful if its mean log-probability is lower. Text
that is doubtful and whose probability of silence is higher is dropped.
"""


class Word(msgspec.Struct, gc=False):
    """A word and its times in seconds."""

    word: str
    start: float
    end: float


class Segment(msgspec.Struct):
    """A piece of the transcript, with OpenAI's fields.

    Attributes:
        id: The number of the segment, from 0.
        seek: The start of the window that has the segment, in hundredths of a second.
        start: The start in seconds.
        end: The end in seconds.
        text: The text, which usually begins with a space.
        tokens: The tokens, including timestamps.
        temperature: The temperature at which the window was decoded.
        avg_logprob: The mean log-probability of the window's tokens, including the end token.
        compression_ratio: The length of the window's text divided by its compressed length.
        no_speech_prob: The probability that nobody speaks in the window.
        speaker: The number of the speaker, if the model names speakers; -1 for an unknown one.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    speaker: int | msgspec.UnsetType = msgspec.UNSET


class Turn(msgspec.Struct):
    """The words of a speaker: times in seconds from the start of the window, and the speaker's number, or -1."""

    start: float
    end: float
    speaker: int
    text: str

    def times(self, duration: float) -> tuple[float, float]:
        """Return the start and the end in a window of `duration` seconds, with which a turn without an end ends."""
        start = min(self.start, duration)
        return start, min(self.end if self.end > start else duration, duration)


class DecodedWindow(msgspec.Struct):
    """The text that a model wrote for one window of an audio clip.

    Attributes:
        start: The start of the window in seconds.
        duration: The length of the window in seconds.
        token_ids: The tokens, without the one that ends the text.
        text: The text without timestamps.
        temperature: The temperature at which the text was sampled.
        mean_logprob: The mean log-probability of the tokens and the end.
        no_speech_prob: The probability that nobody speaks; 0 if it was not computed.
        logprobs: The log-probability of each token.
        num_generated_tokens: The number of generated tokens, with those that are no text.
        words: The words with their times in the clip, if they were requested.
        language: The code of the language that the model named; "" if it named none.
        turns: The turns of speakers, if the model writes them; otherwise None.
    """

    start: float
    duration: float
    token_ids: list[int]
    text: str
    temperature: float
    mean_logprob: float
    no_speech_prob: float = 0.0
    logprobs: list[PositionLogprobs] = []
    num_generated_tokens: int = 0
    words: list[Word] = []
    language: str = ""
    turns: list[Turn] | None = None

    @property
    def compression_ratio(self) -> float:
        """The length of the text divided by its compressed length; high if the text repeats itself."""
        text = self.text.encode()
        return len(text) / len(zlib.compress(text))

    @property
    def is_repetitive(self) -> bool:
        """True if the text repeats itself more than speech does."""
        return self.compression_ratio > MAX_COMPRESSION_RATIO

    @property
    def is_doubtful(self) -> bool:
        """True if the text repeats itself or is improbable, so that another temperature may give a better one."""
        return self.is_repetitive or self.mean_logprob < MIN_MEAN_LOGPROB

    @property
    def is_silent(self) -> bool:
        """True if nobody speaks in the window, so that the model made up the text."""
        return self.no_speech_prob > MAX_NO_SPEECH_PROB and self.mean_logprob < MIN_MEAN_LOGPROB


def best_attempt(attempts: Iterable[DecodedWindow]) -> DecodedWindow:
    """Return the best of several attempts at a window.

    This is the attempt that is not doubtful; of doubtful ones, the most probable. Texts that repeat themselves come
    last, and so do texts of high temperatures, because they have a low probability.
    """
    return max(attempts, key=lambda x: (not x.is_doubtful, not x.is_repetitive, x.mean_logprob))


def split_segments(
    window: DecodedWindow,
    tokenizer: Tokenizer,
    *,
    first_timestamp_id: int,
    time_precision: float,
    first_id: int,
) -> list[Segment]:
    """Return the segments of a window.

    A timestamp after text ends a segment, and a timestamp before text begins one. Text without an end timestamp ends
    with the window.

    Args:
        window: The window.
        tokenizer: The model's tokenizer.
        first_timestamp_id: The token of the timestamp 0, or the size of the vocabulary if there are none.
        time_precision: Seconds between two successive timestamp tokens.
        first_id: The id of the first segment.
    """
    if window.turns is not None:
        return _turn_segments(window, window.turns, first_id)
    pieces: list[tuple[float, float, list[int]]] = []
    start, has_text = 0.0, False
    tokens: list[int] = []
    for token in window.token_ids:
        if token < first_timestamp_id:
            tokens.append(token)
            has_text = True
            continue
        seconds = min((token - first_timestamp_id) * time_precision, window.duration)
        if has_text:
            pieces.append((start, max(seconds, start), [*tokens, token]))
        tokens, has_text = ([] if has_text else [token]), False
        start = seconds
    if has_text:
        pieces.append((start, max(window.duration, start), tokens))
    segments: list[Segment] = []
    for start, end, tokens in pieces:
        text = _text(tokens, tokenizer, first_timestamp_id)
        if not text.strip():
            continue
        segments.append(_segment(window, first_id + len(segments), start, end, text, tokens))
    return segments


def _turn_segments(window: DecodedWindow, turns: Iterable[Turn], first_id: int) -> list[Segment]:
    """Return the turns that have words as segments. A turn without an end ends with the window."""
    segments: list[Segment] = []
    for turn in turns:
        if not turn.text:
            continue
        start, end = turn.times(window.duration)
        found = _segment(window, first_id + len(segments), start, end, turn.text, [])
        found.speaker = turn.speaker
        segments.append(found)
    return segments


def _segment(
    window: DecodedWindow, number: int, start: float, end: float, text: str, tokens: list[int]
) -> Segment:
    """Return a segment between two times in a window."""
    return Segment(
        id=number,
        seek=round(window.start * 100),
        start=round(window.start + start, 2),
        end=round(window.start + end, 2),
        text=text,
        tokens=tokens,
        temperature=window.temperature,
        avg_logprob=window.mean_logprob,
        compression_ratio=window.compression_ratio,
        no_speech_prob=window.no_speech_prob,
    )


def separator(before: str, after: str) -> str:
    """Return what separates the texts of two windows: a space, unless there is one or the script has none."""
    if not before or not after or before[-1].isspace() or after[0].isspace():
        return ""
    return "" if _has_no_spaces(before[-1]) and _has_no_spaces(after[0]) else " "


def _has_no_spaces(character: str) -> bool:
    """Return whether a character is Chinese or Japanese, or wide punctuation. Korean is also wide, but has spaces."""
    is_wide = unicodedata.east_asian_width(character) in "WF"
    return is_wide and not unicodedata.name(character, "").startswith("HANGUL")


def _text(tokens: Sequence[int], tokenizer: Tokenizer, first_timestamp_id: int) -> str:
    return tokenizer.decode(
        [token for token in tokens if token < first_timestamp_id], skip_special_tokens=True
    )
