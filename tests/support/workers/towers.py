"""Load the tower of a model, and run its decoder on prompts with outputs of the tower."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine.workers.batch.rotary_positions import RotaryPositions
from engine.workers.loaders.open_checkpoint import open_checkpoint
from engine.workers.towers.image_tower import ImageTower, TowerSource
from engine.workers.towers.make_tower import make_tower
from engine.workers.towers.placed import Placed
from support.workers.decoders import CPU, TOWER_LAYERS, Runner, load_decoder


def load_tower(path: Path, decoder: Any, load: Callable[..., Any] = load_decoder) -> ImageTower:
    """Return the tower of a decoder, with the layers that belong to decoders that `load` returns."""
    layers = TOWER_LAYERS[load]
    source = TowerSource(open_checkpoint(path), CPU, torch.float32, make_layers=layers)
    return make_tower(decoder.spec.encoder, source)


def media_logits(
    runner: Runner,
    prompt: Sequence[int],
    is_media: np.ndarray,
    outputs: torch.Tensor,
    ends: Iterable[int],
    rotary: RotaryPositions | None = None,
) -> torch.Tensor:
    """Return the logits of a prompt, in which `outputs` of a tower replace media, in chunks that end at `ends`."""
    rows = np.where(is_media, np.cumsum(is_media) - 1, -1).astype(np.int32)
    assert len(outputs) == is_media.sum()
    found = []
    for start, end in pairwise((0, *ends, len(prompt))):
        runner.decoder.placed = None
        if is_media[start:end].any():
            runner.decoder.placed = Placed(rows[start:end].copy(), outputs)
        if rotary is not None:
            loc, at = np.array([0, end - start], np.int32), np.arange(start, end, dtype=np.int32)
            positions = rotary.of_step(np.zeros(1, np.int32), loc, at)
            assert positions is not None
            runner.decoder.rotary_T3 = torch.from_numpy(positions)
        found.append(runner.step({0: prompt[start:end]})[0])
    return torch.cat(found)
