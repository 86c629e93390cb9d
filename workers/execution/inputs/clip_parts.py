"""Encode the parts of audio clips, each of which continues from the state of the encoder after the one before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ....protocol.encoder_inputs.inputs import EncoderInput

# Few models read audio clips in parts.
if TYPE_CHECKING:
    from ...towers.audio_tower import AudioTower


class ClipParts:
    """Encodes parts of clips, and keeps the state after the last encoded part of each clip.

    The content hash of a part covers the parts before it, so it identifies the state after it, too.
    """

    def __init__(self, tower: AudioTower) -> None:
        self._tower = tower
        self._states: dict[bytes, Any] = {}

    def encode(self, parts: Sequence[EncoderInput], index: int) -> torch.Tensor:
        """Return the outputs of one of the parts of a clip.

        Without the state before it, as after a preemption, earlier parts are encoded again.

        Raises:
            EngineError: A part is damaged.
        """
        first, state = index, None
        while first and state is None:
            state = self._states.pop(parts[first - 1].content_hash, None)
            first -= state is None
        for part in parts[first : index + 1]:
            outputs, state = self._tower.encode_next(part.data, state)
        assert state is not None
        self._states[parts[index].content_hash] = state
        return outputs

    def remove_clip(self, parts: Sequence[EncoderInput]) -> None:
        """Discard the state of a clip."""
        for part in parts:
            self._states.pop(part.content_hash, None)
