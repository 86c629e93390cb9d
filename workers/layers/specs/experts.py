"""The description of a mixture of experts as data."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from ..activations import Activation

SMALLEST_SUM = 1e-20
"""Added to a sum of scores before dividing by it, so that the result is finite, as in the DeepSeek models."""


class GateLimit(msgspec.Struct, frozen=True):
    """Clamps a gated MLP: the gate to at most `value`, and the up projection to +-`value`.

    If `is_activated`, the gate is clamped after its activation, otherwise before it.
    """

    value: float
    is_activated: bool = False


class SoftCaps(msgspec.Struct, frozen=True):
    """Caps the factors of gated MLPs with SiLU softly (SiTU, Kimi K3, arXiv 2607.24653).

    The gate x becomes sigmoid(x) * `gate` * tanh(x / `gate`), and the up projection y becomes `up` * tanh(y / `up`),
    unless `up` is 0.
    """

    gate: float
    up: float = 0.0


class RouterSpec(msgspec.Struct, frozen=True):
    """A router whose logits are computed by an MLP (ZAYA1, arXiv 2511.17127).

    The hidden state is projected to `size` elements, to which the projection of the layer before is added, times stored
    factors. A norm with the epsilon `norm_eps`, two layers with the activation GELU and the output projection follow.
    """

    size: int
    norm_eps: float


class ExpertsSpec(msgspec.Struct, frozen=True):
    """A mixture of experts, which replaces the MLP of a layer.

    A router computes the logits of a token. `scoring` makes scores of them, the experts with the highest scores are
    chosen, and the token's output is the sum of their outputs, times their weights.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    """The number of intermediate elements of an expert."""

    # The choice of experts, and their weights.

    scoring: Literal["softmax", "sigmoid", "sqrt softplus", "sparse mixer"] = "softmax"
    """The function from logits to scores: a softmax over all experts, or a function of each logit.

    With "sparse mixer" (arXiv 2409.12136), experts are chosen one after the other. The weight of each comes from a
    softmax over those remaining experts whose logits differ from it by at most 2 * `mixer_noise`, relatively.
    """
    mixer_noise: float = 0.0
    renormalizes: bool = True
    """True if the weights are the scores of the chosen experts divided by their sum. Otherwise, they are the scores."""
    scale: float = 1.0
    """A factor on all weights."""
    num_groups: int = 1
    """The number of groups of experts. If above 1, only experts of the best groups are chosen (arXiv 2412.19437)."""
    num_groups_per_token: int = 1
    group_score: Literal["best", "best two"] = "best"
    """The score of a group: that of its best expert, or the sum of its best two."""
    divides_choice: bool = False
    """True if equally many experts of each group are chosen instead, the best of it."""
    block_size: int = 0
    """The number of tokens of a block that share their experts, in a block-diffusion model; 0 if none do."""
    num_experts_per_block: int = 0
    """The number of experts among which the tokens of a block choose: those with the highest scores of any token."""
    has_correction_bias: bool = False
    """True if a stored bias is added to the scores, for the choice only."""
    corrects_logits: bool = False
    """True if that bias is added to the logits instead of the scores."""
    has_router_bias: bool = False
    has_biases: bool = False
    """True if the projections of experts have biases."""
    scales_inputs: bool = False
    """True if the weights multiply the inputs of the experts instead of their outputs."""
    gate_activation: Activation | None = None
    """The activation of the experts' gates, which multiply up projections plus 1; None for experts like the MLP."""
    has_sum_bias: bool = False
    """True if a stored bias is added to the sum of the experts' outputs."""
    has_expert_scales: bool = False
    """True if each expert has a stored factor on its weight."""
    has_own_norms: bool = False
    """True if the experts are added to the layer's MLP, and they, the router and the MLP's output have own norms."""

    # An MLP that all tokens pass through.

    shared_intermediate_size: int = 0
    """The number of intermediate elements of the MLP; 0 if there is none."""
    has_shared_gate: bool = False
    """True if the output of the MLP is multiplied by the sigmoid of a logit."""

    bank: int | None = None
    """The number of the router and experts, which several layers share; None for the layer's own (Intern-S2 Mobius).

    The MLP that all tokens pass through is the layer's own.
    """

    # The inputs and outputs of experts.

    latent_size: int = 0
    """The size to which hidden states are projected for experts. Their sum is projected back. 0: no projection."""
    has_latent_norms: bool = False
    """True if this projection is normed, and each expert's output before it is multiplied by its weight."""
    norms_latent_sum: bool = False
    """True if the sum is normed before it is projected back."""
    gate_limit: GateLimit | None = None
    """The limit of gates in the experts, but not in the shared MLP."""
    num_identities: int = 0
    """The number of further experts that return their input. They come last."""
    skips_identities: bool = False
    """True if these experts return nothing instead."""
    capacity: int = 0
    """The number of tokens of a text that each expert computes, the first that chose it; 0 for all. Others skip it.

    Only in the encoder of an encoder-decoder model, which computes one text at a time.
    """
    num_always: int = 0
    """The number of last experts that every token chooses; their scores determine only their weights (Inkling)."""
    has_stored_scale: bool = False
    """True if the weights are also multiplied by a stored number."""
    is_shortcut: bool = False
    """True if the experts' output is added after the next layer (arXiv 2404.05019). The layer may also have an MLP."""
    is_hashed: bool = False
    """True if a stored table gives the experts of each token id, instead of the scores."""

    # A second mixture (ERNIE 4.5 VL). The checkpoint stores its experts after the others, its correction biases as a
    # second row, and routers as [inputs, experts]. Expert i of mixture m has the number i * `num_mixtures` + m, so that
    # ranks that divide the experts have experts of both.

    second_size: int = 0
    """The number of intermediate elements of an expert of the second mixture, which has as many; 0 if there is none."""
    second_tokens: tuple[int, ...] = ()
    """The ids of the tokens that choose among the second experts. If empty, the second mixture is not read."""

    # Adjugate experts (GroveMoE, arXiv 2508.07785), which are chosen with the others. Those of a group of consecutive
    # experts have one in common. Expert i of group g has the number g * `num_mixtures` + i, and the last number of a
    # group belongs to the adjugate expert, so that ranks that divide experts have experts of both.

    adjugate_size: int = 0
    """The number of intermediate elements of an adjugate expert; 0 if there is none."""
    adjugate_group: int = 0
    """The number of experts that have an adjugate expert in common; 0 if there is none."""
    adjugate_scale: float = 1.0
    """The factor of an adjugate expert's weight, compared to that of the chosen expert."""

    # Logits.

    logit_softcap: float = 0.0
    """The limit to which logits are capped; 0 for none."""
    logit_multiplier: float = 1.0
    """A factor on the logits, before the cap."""
    routes_input: bool = False
    """True if the router reads the layer's input, before attention and without a norm (SmallThinker)."""
    router: RouterSpec | None = None
    """The description of a router that is an MLP; None if it is one projection."""

    @property
    def num_mixtures(self) -> int:
        """The number of equal parts of the experts that are read. Every `num_mixtures`th number is in the same part."""
        if self.adjugate_group:
            return self.adjugate_group + 1
        return 2 if self.second_tokens else 1

    @property
    def num_numbered(self) -> int:
        """The number of experts of all mixtures, each of which has its own number."""
        return self.num_experts // (self.adjugate_group or 1) * self.num_mixtures

    @property
    def num_computed_per_token(self) -> int:
        """The number of experts that compute a token, including adjugate experts."""
        return self.num_experts_per_token * (2 if self.adjugate_group else 1)

    @property
    def reads_token(self) -> bool:
        """True if the choice of experts depends on the token itself."""
        return self.is_hashed or bool(self.second_tokens)

    def size_in(self, mixture: int) -> int:
        """Return the number of intermediate elements of an expert of a mixture."""
        if self.adjugate_group:
            is_adjugate = mixture == self.adjugate_group
            return self.adjugate_size if is_adjugate else self.intermediate_size
        return self.second_size if mixture else self.intermediate_size

    def stored_name(self, number: int) -> str:
        """Return the name of an expert in the checkpoint, within the mixture."""
        index, mixture = divmod(number, self.num_mixtures)
        if not self.adjugate_group:
            return f"experts.{index + mixture * self.num_experts}"
        if mixture == self.adjugate_group:
            return f"chunk_experts.{index}"
        return f"experts.{index * self.adjugate_group + mixture}"


def passed_size(mixtures: Iterable[ExpertsSpec | None]) -> int:
    """Return the number of elements that the routers of layers pass on to each other; 0 for other routers."""
    return max((each.router.size for each in mixtures if each and each.router), default=0)
