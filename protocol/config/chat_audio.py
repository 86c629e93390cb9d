"""The audio preprocessing settings of a chat model that reads audio clips."""

import enum
from typing import Final, Literal

import msgspec

from .audio.tower import AnyAudioSpec


class Framing(enum.StrEnum):
    """The samples whose log-mel features are computed together.

    `CLIP`: the clip. `FILLED`: the clip, filled with silence up to the end of its last window. `WINDOWS`: each window
    by itself, the last one filled with silence. `PAIRS`: the clip, whose frames are joined in pairs (Granite Speech).
    `EMPHASIZED`: the clip, with emphasis of high frequencies (Gemma 3n). `LEADING`: the clip after half a frame of
    silence (Gemma 4). `SAMPLES`: none, because the samples themselves are read (Gemma 4's unified models). `PADDED`:
    the clip before two frames of silence, which have no features. `STACKED`: the clip, whose frames are joined in
    sevens, of which neighbors share one (Fun-ASR-Nano). `WAVE`: none, because the samples of parts are
    read, at a level of -25 dB (VibeVoice ASR). `NORMED`: the clip, whose features are normed (Nemotron Omni).
    `DECIBELS`: the clip, whose features are decibels (MiDashengLM). `KALDI`: the clip, with Kaldi's features
    (FireRedASR2). `STANDARD`: none, because the samples of the clip are read, with mean 0 and deviation 1 (OmniASR).
    """

    CLIP = "clip"
    FILLED = "filled"
    WINDOWS = "windows"
    PAIRS = "pairs"
    EMPHASIZED = "emphasized"
    LEADING = "leading"
    SAMPLES = "samples"
    PADDED = "padded"
    STACKED = "stacked"
    WAVE = "wave"
    NORMED = "normed"
    DECIBELS = "decibels"
    KALDI = "kaldi"
    STANDARD = "standard"


_HOPS: Final = {Framing.PAIRS: 320, Framing.STACKED: 960, Framing.WAVE: 1, Framing.STANDARD: 1}
"""The samples between frames that were joined; others have 160."""


class SpeechFormat(msgspec.Struct, frozen=True):
    """The conversation in which a chat model transcribes an audio clip.

    An instruction may have a part in brackets, which is only written if the language is given, with the language's name
    for "{language}". If it has "{audio}", the audio clip is a token of the text. Otherwise the clip is a part of the
    message, before the text unless it `follows`. With `has_parts`, the checkpoint's chat template has the instruction;
    the client's prompt, keywords and language are further parts of the message, of the types text, keywords and
    language.

    Attributes:
        prompt: The whole prompt, if the checkpoint's chat template does not write it, with "{audio}" for the clip.
        languages: The code of each language that may be given -> its name in instructions and answers; empty if the
            model always detects the language itself.
        instruction: The text of the message.
        follows: True if the clip follows the text.
        translation: The text that asks for an English translation instead; "" if the model cannot translate.
        has_parts: True if the chat template has the instruction.
        has_context: True if the client's prompt is read: as the system message, or as a part.
        reads_keywords: True if the chat template reads a part with the client's keywords. Otherwise they follow the
            prompt.
        answer: The beginning of the answer if the language is given, with the language's name for "{language}".
        task_mark: The text before the transcript, after `answer` if there is one; "" if the instruction is enough.
        language_mark: The text before the language's name in an answer that the model begins itself.
        text_mark: The token before the transcript in such an answer; "" if an answer is only a transcript.
        turns: The format of answers that are turns with times and speakers; "" for other answers.
    """

    prompt: str = ""
    languages: dict[str, str] = {}
    instruction: str = ""
    follows: bool = False
    has_parts: bool = False
    translation: str = ""
    has_context: bool = False
    reads_keywords: bool = False
    answer: str = ""
    task_mark: str = ""
    language_mark: str = ""
    text_mark: str = ""
    turns: Literal["", "marks", "json"] = ""


class TimeMarks(msgspec.Struct, frozen=True):
    """The times within a clip, as texts among its tokens: every `seconds` seconds, the seconds so far.

    A second has `outputs_per_second` embeddings.
    """

    outputs_per_second: float
    seconds: int

    @property
    def num_outputs(self) -> int:
        """The number of embeddings before each time."""
        return int(self.outputs_per_second * self.seconds)

    def num_times(self, num_outputs: int) -> int:
        """Return the number of times in a clip with this many embeddings."""
        return int(num_outputs / self.outputs_per_second) // self.seconds


class ClipMarks(msgspec.Struct, frozen=True):
    """The tokens and texts around an audio clip that the processor adds, and a chat template does not write.

    Attributes:
        begin_token_id: The token before the clip's tokens.
        end_token_id: The token after them.
        has_end_output: True if the clip's last embedding replaces that of the token after it.
        margin: The text before and after these tokens.
        are_unnamed: True if the tokenizer does not have these tokens.
    """

    begin_token_id: int
    end_token_id: int
    has_end_output: bool = False
    margin: str = ""
    are_unnamed: bool = False


class ChatAudioConfig(msgspec.Struct, frozen=True):
    """The division of an audio clip into windows of log-mel features, which an encoder turns into embeddings.

    Attributes:
        token_id: The placeholder token. The embeddings of an audio clip replace the embeddings of this token.
        tower: The encoder.
        framing: The samples whose features are computed together.
        max_windows: The maximum number of windows per clip; 0 for no limit.
        min_samples: The length up to which shorter clips are filled with silence.
        speech: The prompts for transcriptions; None if the model only answers questions about audio.
        marks: The tokens that the processor adds around a clip's; None if the chat template writes them.
        rate: The samples per second.
        duration_mark: The text in prompts that stands for the seconds of a clip; "" for none.
        times: The times that the processor adds among a clip's tokens; None for none.
        mark: The text that represents a clip in prompts; "" for that of the placeholder token.
        norms: The mean of each feature, and the factors of the differences from it; None if they are read as they are.
        around: The texts before and after a clip's tokens in prompts of chat templates that read only text.
    """

    token_id: int
    tower: AnyAudioSpec
    framing: Framing
    max_windows: int = 0
    min_samples: int = 0
    speech: SpeechFormat | None = None
    marks: ClipMarks | None = None
    times: TimeMarks | None = None
    mark: str = ""
    around: tuple[str, str] = ("", "")
    rate: int = 16_000
    duration_mark: str = ""
    norms: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    @property
    def window_samples(self) -> int:
        """The length of a window in samples, of which frames follow each other before they are joined."""
        hop = _HOPS.get(self.framing, 160)
        if self.framing is Framing.SAMPLES:
            hop = self.tower.num_mel_bins
        return self.tower.num_frames * hop

    @property
    def outputs_per_window(self) -> int:
        """The number of embeddings of a full window."""
        return self.tower.num_outputs(self.tower.num_frames)
