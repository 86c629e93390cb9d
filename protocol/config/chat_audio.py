"""The audio preprocessing settings of a chat model that reads audio clips."""

from __future__ import annotations

import enum

import msgspec

from .audio_tower import AnyAudioSpec


class Framing(enum.StrEnum):
    """The samples whose log-mel features are computed together.

    `CLIP`: the clip. `FILLED`: the clip, filled with silence up to the end of its last window. `WINDOWS`: each window
    by itself, the last one filled with silence. `PAIRS`: the clip, whose frames are joined in pairs (Granite Speech).
    `EMPHASIZED`: the clip, with emphasis of high frequencies (Gemma 3n). `LEADING`: the clip after half a frame of
    silence (Gemma 4). `SAMPLES`: none, because the samples themselves are read (Gemma 4's unified models). `PADDED`:
    the clip before two frames of silence, which have no features.
    """

    CLIP = "clip"
    FILLED = "filled"
    WINDOWS = "windows"
    PAIRS = "pairs"
    EMPHASIZED = "emphasized"
    LEADING = "leading"
    SAMPLES = "samples"
    PADDED = "padded"


class SpeechFormat(msgspec.Struct, frozen=True):
    """The conversation in which a chat model transcribes an audio clip.

    An instruction may have a part in brackets, which is only written if the language is given, with the language's name
    for "{language}". If it has "{audio}", the audio clip is a token of the text. Otherwise the clip is a part of the
    message, before the text unless it `follows`.

    Attributes:
        languages: The code of each language that may be given -> its name in instructions and answers; empty if the
            model always detects the language itself.
        instruction: The text of the message.
        follows: True if the clip follows the text.
        translation: The text that asks for an English translation instead; "" if the model cannot translate.
        has_context: True if the client's prompt is the system message. Otherwise the model reads no prompt.
        answer: The beginning of the answer if the language is given, with the language's name for "{language}".
        task_mark: The text before the transcript, after `answer` if there is one; "" if the instruction is enough.
        language_mark: The text before the language's name in an answer that the model begins itself.
        text_mark: The token before the transcript in such an answer; "" if an answer is only a transcript.
    """

    languages: dict[str, str] = {}
    instruction: str = ""
    follows: bool = False
    translation: str = ""
    has_context: bool = False
    answer: str = ""
    task_mark: str = ""
    language_mark: str = ""
    text_mark: str = ""


class ClipMarks(msgspec.Struct, frozen=True):
    """The tokens and texts around an audio clip that the processor adds, and a chat template does not write.

    Attributes:
        begin_token_id: The token before the clip's tokens.
        end_token_id: The token after them.
        has_end_output: True if the clip's last embedding replaces that of the token after it.
        margin: The text before and after these tokens.
    """

    begin_token_id: int
    end_token_id: int
    has_end_output: bool = False
    margin: str = ""


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
    """

    token_id: int
    tower: AnyAudioSpec
    framing: Framing
    max_windows: int = 0
    min_samples: int = 0
    speech: SpeechFormat | None = None
    marks: ClipMarks | None = None

    @property
    def window_samples(self) -> int:
        """The length of a window in samples at 16 kHz, of which frames follow each other before they are joined."""
        hop = 320 if self.framing is Framing.PAIRS else 160
        if self.framing is Framing.SAMPLES:
            hop = self.tower.num_mel_bins
        return self.tower.num_frames * hop

    @property
    def outputs_per_window(self) -> int:
        """The number of embeddings of a full window."""
        return self.tower.num_outputs(self.tower.num_frames)
