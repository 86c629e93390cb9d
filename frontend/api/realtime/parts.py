"""The parts of an utterance that arrives, each of which is transcribed as soon as it is complete (vLLM's sessions)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ....protocol.arrays import Float32Array
from ...media.audio.windows import find_cut
from ...media.transcription.options import SpeechModel
from ...media.transcription.segments import separator

if TYPE_CHECKING:
    from ...media.transcription.transcriber import Transcript

_PART_SECONDS: Final = 10.0
"""The maximum length of a part for a model that reads clips of any length, so that text follows soon."""


class UtteranceParts:
    """The parts of one utterance, and the texts of those that were transcribed.

    Attributes:
        text: The text so far.
    """

    def __init__(self, speech: SpeechModel) -> None:
        seconds = speech.window_seconds
        if speech.audio is None:
            seconds = min(seconds, _PART_SECONDS)
        self._rate = speech.sampling_rate
        self._max_samples = int(seconds * self._rate)
        self._kept = np.zeros(0, np.float32)
        self._transcript: Transcript | None = None
        self.text = ""

    def append(self, samples: Float32Array) -> list[Float32Array]:
        """Return the parts that are complete after these samples."""
        self._kept = np.concatenate((self._kept, samples))
        found: list[Float32Array] = []
        while len(self._kept) > self._max_samples:
            cut = find_cut(self._kept, self._max_samples, self._rate)
            found.append(self._kept[:cut])
            self._kept = self._kept[cut:]
        return found

    def finish(self) -> Float32Array:
        """Return the last part, which may be empty."""
        return self._kept

    def join(self, text: str) -> str:
        """Return the text of the next part, after the separator between it and the text so far."""
        return separator(self.text, text) + text

    def add(self, transcript: Transcript) -> Transcript:
        """Add the transcript of the next part. Return the transcript of all parts so far."""
        self.text += self.join(transcript.text)
        if (found := self._transcript) is None:
            self._transcript = found = transcript
        else:
            found.duration += transcript.duration
            found.num_prompt_tokens += transcript.num_prompt_tokens
            found.num_generated_tokens += transcript.num_generated_tokens
        found.text = self.text
        return found
