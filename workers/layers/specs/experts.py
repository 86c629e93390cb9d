"""The description of a mixture of experts as data."""

from collections.abc import Iterable
from typing import Literal

import msgspec

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

    The router's logits, times `logit_multiplier` and capped to +-`logit_softcap` if that is not 0, become scores by
    `scoring`: a softmax over all experts, or of each a sigmoid or the square root of its softplus. A token chooses the
    `num_experts_per_token` experts with the highest scores. If `has_correction_bias`, a stored bias is added to the
    scores for this choice only, or to the logits if `corrects_logits`. If `num_groups` is above 1 (DeepSeek-V3, arXiv
    2412.19437), the choice is limited to the `num_groups_per_token` groups with the highest score, which is the score
    of their best expert or the sum of their best two. The weights are the scores of the chosen experts, divided by
    their sum if `renormalizes`, times `scale`.

    With the scoring "sparse mixer" (arXiv 2409.12136), experts are chosen one after the other. The weight of each comes
    from a softmax over those remaining experts whose logits differ from it by at most 2 * `mixer_noise`, relatively.

    If `scales_inputs`, the weights multiply the inputs of the experts instead of their outputs. If `has_expert_scales`,
    each expert has a stored factor on its weight. If `has_own_norms`, the experts are added to the layer's MLP: they,
    the router and the MLP's output have their own norms.

    All tokens also pass through an MLP of `shared_intermediate_size` elements, unless that is 0. If `has_shared_gate`,
    its output is multiplied by the sigmoid of a logit. If `latent_size` is not 0, experts read a projection of the
    hidden state to `latent_size` elements, and the sum of their outputs is projected back. If `has_latent_norms`, this
    projection is normed, and so is each expert's output before it is multiplied by its weight. If `norms_latent_sum`,
    the sum is normed before it is projected back. `gate_limit` applies to the experts, not to the shared MLP. A token
    may also choose `num_identities` experts that return their input, or nothing if `skips_identities`; they come last.

    The last `num_always` experts are chosen by every token, without competing with the others: their scores only
    determine the weights (Inkling). If `has_stored_scale`, the weights are also multiplied by a stored number.

    If `second_size` is not 0, there is a second mixture of as many experts, with `second_size` intermediate elements
    (ERNIE 4.5 VL). The tokens `second_tokens` choose among these experts, and all other tokens among the first ones.
    Without such tokens, the second mixture is not read. The checkpoint stores its experts after the others, its
    correction biases as a second row, and routers as [inputs, experts]. Expert i of mixture m has the number
    i * `num_mixtures` + m, so that ranks that divide the experts have experts of both.

    If `is_hashed`, the experts of a token are instead those of its id in a stored table.

    If `is_shortcut`, the layer has an MLP, too. The output of the experts is added after the next layer instead of
    after this one (arXiv 2404.05019).
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    scoring: Literal["softmax", "sigmoid", "sqrt softplus", "sparse mixer"] = "softmax"
    mixer_noise: float = 0.0
    renormalizes: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_groups_per_token: int = 1
    group_score: Literal["best", "best two"] = "best"
    has_correction_bias: bool = False
    corrects_logits: bool = False
    has_router_bias: bool = False
    has_biases: bool = False
    scales_inputs: bool = False
    has_expert_scales: bool = False
    has_own_norms: bool = False
    shared_intermediate_size: int = 0
    has_shared_gate: bool = False
    latent_size: int = 0
    has_latent_norms: bool = False
    norms_latent_sum: bool = False
    gate_limit: GateLimit | None = None
    num_identities: int = 0
    skips_identities: bool = False
    num_always: int = 0
    has_stored_scale: bool = False
    is_shortcut: bool = False
    is_hashed: bool = False
    second_size: int = 0
    second_tokens: tuple[int, ...] = ()
    logit_softcap: float = 0.0
    logit_multiplier: float = 1.0
    router: RouterSpec | None = None

    @property
    def num_mixtures(self) -> int:
        """The number of mixtures that are read."""
        return 2 if self.second_tokens else 1

    @property
    def num_numbered(self) -> int:
        """The number of experts of all mixtures, each of which has its own number."""
        return self.num_experts * self.num_mixtures

    @property
    def reads_token(self) -> bool:
        """True if the choice of experts depends on the token itself."""
        return self.is_hashed or bool(self.second_tokens)

    def size_in(self, mixture: int) -> int:
        """Return the number of intermediate elements of an expert of a mixture."""
        return self.second_size if mixture else self.intermediate_size

    def stored_index(self, number: int) -> int:
        """Return the place of an expert in the checkpoint."""
        index, mixture = divmod(number, self.num_mixtures)
        return index + mixture * self.num_experts


def passed_size(mixtures: Iterable[ExpertsSpec | None]) -> int:
    """Return the number of elements that the routers of layers pass on to each other; 0 for other routers."""
    return max((each.router.size for each in mixtures if each and each.router), default=0)
