"""The rules by which a pass fixes the tokens of blocks.

Shapes: R blocks of a pass, B tokens of a block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ....protocol.arrays import BoolArray, Float32Array, Int32Array
from ....protocol.config import SchedulerConfig
from ....protocol.config.diffusion import DenoisingAlgorithm


class Pass(NamedTuple):
    """The blocks of a pass.

    `is_generated_RB` marks positions that are not part of the prompt. Among these, `is_mask_RB` marks those without a
    token. Other positions have no candidate, or one that may replace the token, and a `confidence_RB`, which is a
    log-probability. `num_edits_R` is the number of earlier passes over the block without masks.
    """

    token_ids_RB: Int32Array
    candidates_RB: Int32Array
    confidence_RB: Float32Array
    is_generated_RB: BoolArray
    is_mask_RB: BoolArray
    num_edits_R: Int32Array


class Chosen(NamedTuple):
    """The result of a pass: the positions whose candidates become tokens, and the blocks that are complete."""

    is_fixed_RB: BoolArray
    is_complete_R: BoolArray


class LowConfidence:
    """Fixes the candidates whose probability exceeds the threshold, and the `count` most probable ones of a block."""

    reads_fixed = False
    """True if fixed tokens get candidates too."""

    def __init__(self, threshold: float, count: int) -> None:
        self._threshold, self._count = _log(threshold), count

    def choose(self, blocks: Pass) -> Chosen:
        """Return what a pass fixes. A block without masks is complete."""
        is_fixed_RB = _most_confident(blocks, self._threshold, self._count)
        is_open_RB: BoolArray = blocks.is_mask_RB & ~is_fixed_RB
        is_open_R: BoolArray = np.any(is_open_RB, axis=1)
        return Chosen(is_fixed_RB, ~is_open_R)


class JointThreshold:
    """Also replaces tokens by more probable candidates, until a pass changes nothing, as in SGLang."""

    reads_fixed = True

    def __init__(self, threshold: float, count: int, edit_threshold: float, max_edits: int) -> None:
        self._threshold, self._count = _log(threshold), count
        self._edit_threshold = _log(edit_threshold)
        self._max_edits = max_edits

    def choose(self, blocks: Pass) -> Chosen:
        """Return what a pass fixes and replaces. A block is complete if it does neither, or after too many passes."""
        is_spent_R = ~blocks.is_mask_RB.any(1) & (blocks.num_edits_R >= self._max_edits)
        is_edited_RB = (
            blocks.is_generated_RB
            & ~blocks.is_mask_RB
            & (blocks.confidence_RB > self._edit_threshold)
            & (blocks.candidates_RB != blocks.token_ids_RB)
        )
        is_fixed_RB = _most_confident(blocks, self._threshold, self._count) | is_edited_RB
        is_fixed_RB[is_spent_R] = False
        changes_R: BoolArray = is_fixed_RB.any(1)
        return Chosen(is_fixed_RB, ~changes_R)


def make_rule(config: SchedulerConfig) -> LowConfidence | JointThreshold:
    """Return the rule of the configured algorithm."""
    algorithm, settings = config.dllm_algorithm, config.dllm_algorithm_config
    threshold = settings.threshold_of(algorithm)
    if algorithm is DenoisingAlgorithm.LOW_CONFIDENCE:
        return LowConfidence(threshold, settings.tokens_per_pass)
    return JointThreshold(
        threshold, settings.tokens_per_pass, settings.edit_threshold, settings.max_post_edit_steps
    )


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf


def _most_confident(blocks: Pass, threshold: float, count: int) -> BoolArray:
    """Return which masks get tokens: those above the threshold, and the `count` most confident ones of each block."""
    confidence_RB = np.where(blocks.is_mask_RB, blocks.confidence_RB, -np.inf)
    is_chosen_RB: BoolArray = confidence_RB > threshold
    best_RC = np.argsort(-confidence_RB, axis=1, kind="stable")[:, :count]
    np.put_along_axis(is_chosen_RB, best_RC, True, axis=1)
    return is_chosen_RB & blocks.is_mask_RB
