"""Read how a chat model reads audio clips, from its checkpoint."""

from __future__ import annotations

from pathlib import Path

from ...protocol.checkpoint.audio_tower import audio_tower_spec, has_audio_tower
from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.config.chat_audio import ChatAudioConfig


def read_chat_audio(path: Path, config: ConfigFields, text: ConfigFields) -> ChatAudioConfig | None:
    """Return how the model reads audio clips; None if it reads none.

    Args:
        path: The directory of the checkpoint.
        config: The config of the checkpoint.
        text: The text decoder's section of the config.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    if not has_audio_tower(config) or not path.is_dir():
        return None
    tower = audio_tower_spec(config, text.integer("hidden_size"))
    return ChatAudioConfig(
        token_id=config.integer(
            "audio_token_id" if config.get("audio_token_id") is not None else "audio_token_index",
            minimum=0,
            maximum=text.integer("vocab_size") - 1,
        ),
        num_mel_bins=tower.num_mel_bins,
        window_frames=tower.num_frames,
        # Qwen2-Audio reads a single window, and its processor drops the rest of an audio clip.
        max_windows=0 if tower.is_filled else 1,
        frames_per_output=2 * tower.rows_per_output,
        is_filled=tower.is_filled,
    )
