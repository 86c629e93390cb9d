"""The audio preprocessing settings of a chat model that reads audio clips."""

from __future__ import annotations

import msgspec


class ChatAudioConfig(msgspec.Struct, frozen=True):
    """The division of an audio clip into windows of log-mel features, which an encoder turns into embeddings.

    Attributes:
        token_id: The placeholder token. The embeddings of an audio clip replace the embeddings of this token.
        num_mel_bins: The number of log-mel features per frame.
        window_frames: The number of frames per window.
        max_windows: The maximum number of windows per clip; 0 for no limit.
        frames_per_output: The number of frames per embedding.
        is_filled: Whether the last window is padded with silence, which is also encoded.
    """

    token_id: int
    num_mel_bins: int
    window_frames: int
    max_windows: int
    frames_per_output: int
    is_filled: bool

    @property
    def outputs_per_window(self) -> int:
        """The number of embeddings of a full window."""
        return self.window_frames // self.frames_per_output
