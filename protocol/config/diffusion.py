"""The configuration of block-diffusion models, which fill blocks of tokens in several passes (arXiv 2503.09573)."""

import enum
from typing import Annotated

import msgspec
from msgspec.structs import asdict, replace

_Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Temperature = Annotated[float, msgspec.Meta(gt=0, le=100)]
_Entropy = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Passes = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_Repeats = Annotated[int, msgspec.Meta(ge=0, le=64)]


class DenoisingAlgorithm(enum.StrEnum):
    """The rule by which a pass fixes tokens of a block, under the name that SGLang gave it.

    `LowConfidence` fixes the tokens whose probability exceeds a threshold, or else the most probable one.
    `JointThreshold` also replaces fixed tokens by more probable ones, until a pass changes nothing. `Gemma4Renoise`
    fixes nothing: each pass replaces the tokens of which it is not sure by random ones.
    """

    LOW_CONFIDENCE = "LowConfidence"
    JOINT_THRESHOLD = "JointThreshold"
    GEMMA4_RENOISE = "Gemma4Renoise"


class Renoising(msgspec.Struct, frozen=True):
    """The settings of `Gemma4Renoise`.

    Attributes:
        max_denoising_steps: The maximum number of passes over a block.
        entropy_bound: A pass keeps the tokens with the smallest entropies, as long as those of the tokens before add
            up to at most this.
        t_min: The temperature of the last possible pass.
        t_max: The temperature of the pass before the first one; it falls linearly.
        stability_threshold: The number of earlier passes whose most probable tokens must equal those of the last pass.
        confidence_threshold: The mean entropy of a block below which a stable block is complete.
    """

    max_denoising_steps: _Passes = 48
    entropy_bound: _Entropy = 0.1
    t_min: _Temperature = 0.4
    t_max: _Temperature = 0.8
    stability_threshold: _Repeats = 1
    confidence_threshold: _Entropy = 0.005


class DenoisingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a denoising algorithm. Fields that are None have the algorithm's or the checkpoint's default.

    Attributes:
        threshold: The probability above which a pass fixes a token.
        tokens_per_pass: The minimum number of masks that a pass replaces by tokens.
        edit_threshold: The probability above which `JointThreshold` replaces a fixed token.
        max_post_edit_steps: The maximum number of passes of `JointThreshold` over a block without masks.
        penalty_lambda: What `JointThreshold` subtracts from the logit of the token before each position.
        block_size: The number of tokens of a block, instead of the checkpoint's.
        answer_size: The number of tokens of an answer that are masks at first, instead of the default of 128.
    """

    threshold: _Probability | None = None
    tokens_per_pass: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    edit_threshold: _Probability = 0.0
    max_post_edit_steps: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 16
    penalty_lambda: Annotated[float, msgspec.Meta(ge=0, le=1e4)] = 0.0
    block_size: Annotated[int, msgspec.Meta(ge=2, le=1024)] | None = None
    answer_size: Annotated[int, msgspec.Meta(ge=2, le=8192)] | None = None
    max_denoising_steps: _Passes | None = None
    entropy_bound: _Entropy | None = None
    t_min: _Temperature | None = None
    t_max: _Temperature | None = None
    stability_threshold: _Repeats | None = None
    confidence_threshold: _Entropy | None = None

    def threshold_of(self, algorithm: DenoisingAlgorithm) -> float:
        """Return the threshold, whose default depends on the algorithm."""
        if self.threshold is not None:
            return self.threshold
        return 0.5 if algorithm is DenoisingAlgorithm.JOINT_THRESHOLD else 0.95

    def change(self, settings: Renoising) -> Renoising:
        """Return settings with those that are given here."""
        given = {
            name: value for name in asdict(settings) if (value := getattr(self, name)) is not None
        }
        return replace(settings, **given)


class BlockDiffusion(msgspec.Struct, frozen=True):
    """The blocks of a model.

    Block n has the tokens from position n * `block_size` on. A token attends to all tokens of its own block and of
    earlier ones. Unknown tokens of a block are `mask_token_id`. If `shares_experts`, the tokens of a block choose among
    the same experts, so its size cannot be changed.

    With `renoising`, a block is a canvas: it begins after the last known token, with random tokens, and there is no
    mask token. The tokens before it attend to earlier ones only.

    With an `answer_size`, all tokens attend to all others (LLaDA, arXiv 2502.09992). The first block begins after the
    prompt. The first `answer_size` tokens of the answer are masks when its first block begins, and so are the next ones
    after these. So every pass computes the prompt and the answer, and no keys are kept. If the model `predicts_next`,
    the candidate for a token is computed from the token before it.
    """

    block_size: int
    mask_token_id: int = -1
    shares_experts: bool = False
    renoising: Renoising | None = None
    answer_size: int = 0
    predicts_next: bool = False

    @property
    def token_unit(self) -> int:
        """The number of known tokens that are computed together, because their keys depend on each other."""
        return self.block_size if self.renoising is None and not self.answer_size else 1

    @property
    def max_excess_tokens(self) -> int:
        """The number of tokens by which a pass may exceed `max_model_len`: a canvas, or the masks of an answer.

        It is 0 if blocks begin at multiples of `block_size`, because `max_model_len` is one too.
        """
        return self.answer_size if self.renoising is None else self.block_size
