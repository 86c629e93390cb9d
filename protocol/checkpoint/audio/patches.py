"""Read the config of MiDashengLM's encoder of patches."""

from __future__ import annotations

from typing import Final

from ...config.audio.tower import PatchesSpec
from ..config_fields import ConfigFields
from .fields import MAX_POSITIONS, read_num_heads

_FEATURES: Final = {
    "sample_rate": 16_000,
    "hop_length": 160,
    "win_length": 512,
    "n_fft": 512,
    "f_min": 0.0,
    "f_max": 8000.0,
    "center": True,
    "input_channels": 1,
}
"""Fields of the features, and the only values that are read."""

_MAX_FRAMES: Final = 30_000
"""The maximum length of a clip: 300 s. A clip has no windows, because an output may belong to two of them."""


def patches_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> PatchesSpec:
    """Return the encoder of MiDashengLM. Raise CheckpointError if a field is missing or invalid."""
    audio.require_all(**_FEATURES)
    num_mel_bins = audio.integer("n_mels", 64, maximum=1024)
    hidden_size = audio.integer("embed_dim", 768, maximum=MAX_POSITIONS)
    heads = audio.with_values({"num_attention_heads": audio.get("num_heads", 12)})
    patch = _pair(audio, "patch_size")
    if patch[0] != num_mel_bins:
        raise audio.wrong("patch_size", f"[{num_mel_bins}, frames]", audio.get("patch_size"))
    if _pair(audio, "patch_stride") != patch:
        raise audio.wrong("patch_stride", f"patch_size {patch}", audio.get("patch_stride"))
    length = audio.integer("target_length", 1012, minimum=patch[1], maximum=MAX_POSITIONS)
    return PatchesSpec(
        num_mel_bins=num_mel_bins,
        hidden_size=hidden_size,
        intermediate_size=int(hidden_size * audio.positive("mlp_ratio", 4.0)),
        num_layers=audio.integer("depth", 12, maximum=1024),
        num_heads=read_num_heads(heads, hidden_size, 12),
        num_frames=_MAX_FRAMES,
        frames_per_patch=patch[1],
        window=length // patch[1],
        patches_per_output=fields.integer("subsample_factor", 5, maximum=64),
        has_qkv_bias=audio.boolean("qkv_bias", True),
        has_layer_scale=bool(audio.optional_number("init_values")),
        output_size=output_size,
    )


def _pair(audio: ConfigFields, name: str) -> list[int]:
    """Return the numbers of features and of frames in a field, which are equal if it is one number."""
    if not isinstance(audio.get(name), list):
        return [audio.integer(name, 16)] * 2
    found = audio.integers(name)
    if len(found) != 2 or min(found) < 1:
        raise audio.wrong(name, "two positive numbers", found)
    return found
