"""Read the config of MERaLiON-2, whose fields of audio have names of their own."""

from __future__ import annotations

from typing import Any

from ..config_fields import ConfigFields


def meralion2(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of a MERaLiON-2. Raise CheckpointError if its config has no section of the encoder."""
    if fields.section("audio_config") is not None:
        return {}
    return {
        "audio_config": dict(fields.required_section("speech_config").config),
        "audio_token_id": fields.get("speech_token_index", 255_999),
    }
