"""The configuration of block-diffusion models, which fill blocks of masks in several passes (arXiv 2503.09573)."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec


class DenoisingAlgorithm(enum.StrEnum):
    """The rule by which a pass fixes tokens of a block, under the name that SGLang gave it.

    `LowConfidence` fixes the tokens whose probability exceeds a threshold, or else the most probable one.
    `JointThreshold` also replaces fixed tokens by more probable ones, until a pass changes nothing.
    """

    LOW_CONFIDENCE = "LowConfidence"
    JOINT_THRESHOLD = "JointThreshold"


class DenoisingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a denoising algorithm. Fields that are None have the algorithm's default.

    Attributes:
        threshold: The probability above which a pass fixes a token.
        edit_threshold: The probability above which `JointThreshold` replaces a fixed token.
        max_post_edit_steps: The maximum number of passes of `JointThreshold` over a block without masks.
        penalty_lambda: What `JointThreshold` subtracts from the logit of the token before each position.
        block_size: The number of tokens of a block, instead of the checkpoint's.
    """

    threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    edit_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    max_post_edit_steps: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 16
    penalty_lambda: Annotated[float, msgspec.Meta(ge=0, le=1e4)] = 0.0
    block_size: Annotated[int, msgspec.Meta(ge=2, le=1024)] | None = None

    def threshold_of(self, algorithm: DenoisingAlgorithm) -> float:
        """Return the threshold, whose default depends on the algorithm."""
        if self.threshold is not None:
            return self.threshold
        return 0.5 if algorithm is DenoisingAlgorithm.JOINT_THRESHOLD else 0.95


class BlockDiffusion(msgspec.Struct, frozen=True):
    """The blocks of a model: block n has the tokens from position n * `block_size` on.

    A token attends to all tokens of its own block and of earlier ones. Unknown tokens of a block are `mask_token_id`.
    If `shares_experts`, the tokens of a block choose among the same experts, so its size cannot be changed.
    """

    block_size: int
    mask_token_id: int
    shares_experts: bool = False
