"""The configuration of a model for conversations that reads sounds."""

from __future__ import annotations

import msgspec


class SoundProcessorConfig(msgspec.Struct, frozen=True):
    """The division of sounds into windows of log-mel features, whose embeddings are in place of tokens.

    Attributes:
        token_id: The token whose embeddings a sound's replace.
        num_mel_bins: The features of a frame.
        window_frames: The frames of a window.
        max_windows: The maximum windows of a sound; 0 without a limit.
        frames_per_output: The frames of an embedding.
        is_filled: Whether the last window is filled with silence, which then has embeddings as well.
    """

    token_id: int
    num_mel_bins: int
    window_frames: int
    max_windows: int
    frames_per_output: int
    is_filled: bool

    @property
    def outputs_per_window(self) -> int:
        """The embeddings of a whole window."""
        return self.window_frames // self.frames_per_output
