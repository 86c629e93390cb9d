"""Check that the features of audio clips are those that frontends compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.config.chat_audio import ChatAudioConfig, Framing

_COMMON: Final = {"sampling_rate": 16_000, "hop_length": 160}
_WHISPER: Final = _COMMON | {"n_fft": 400}
_GEMMA: Final = _COMMON | {
    "preemphasis_htk_flavor": True,
    "input_scale_factor": 1.0,
    "per_bin_mean": None,
    "per_bin_stddev": None,
}
_NEEDED: Final[dict[Framing, dict[str, Any]]] = {
    **dict.fromkeys((Framing.FILLED, Framing.WINDOWS, Framing.CLIP, Framing.PADDED), _WHISPER),
    Framing.NORMED: _COMMON | {"n_fft": 512, "win_length": 400, "preemphasis": 0.97},
    Framing.EMPHASIZED: _GEMMA
    | {"frame_length": 512, "fft_length": 1024, "fft_overdrive": True, "preemphasis": 0.97}
    | {"min_frequency": 125.0, "max_frequency": 7600.0},
    Framing.LEADING: _GEMMA
    | {"frame_length": 320, "fft_length": 512, "fft_overdrive": False, "preemphasis": 0.0}
    | {"min_frequency": 0.0, "max_frequency": 8000.0},
}
"""Framing -> the only values of fields of a feature extractor that have features as frontends compute them."""


def verify_features(path: Path, config: ChatAudioConfig) -> None:
    """Raise CheckpointError if the feature extractor in the directory `path` makes other features."""
    needed = _NEEDED.get(config.framing)
    if needed is None or not path.is_dir():
        return
    needed = needed | {"feature_size": config.tower.num_mel_bins}
    if config.framing in (Framing.FILLED, Framing.WINDOWS):
        needed["chunk_length"] = config.tower.num_frames // 100
    processor = ConfigFields.read_if_present(path / "processor_config.json")
    own = processor.first_section("feature_extractor")
    for fields in (own, ConfigFields.read_if_present(path / "preprocessor_config.json")):
        for name, value in needed.items():
            fields.require(name, value)
