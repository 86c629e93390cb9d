"""The choice of each token's experts.

Shapes: T tokens of a step, D hidden size, E experts of a mixture, M mixtures, C experts that a token chooses, including
adjugate experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ...layers.layers import LayerKernels
from ...layers.specs.experts import SMALLEST_SUM, ExpertsSpec
from ..weights import WeightReader
from .router_mlp import RouterMLP

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits_TE: logits_TE.softmax(-1),
    "sigmoid": lambda logits_TE: logits_TE.sigmoid(),
    "sqrt softplus": lambda logits_TE: F.softplus(logits_TE).sqrt(),
}
"""The scores of experts, by the name of the scoring."""


def read_router(spec: ExpertsSpec, weights: WeightReader, prefix: str, hidden_size: int) -> Tensor:
    """Return the matrices of the routers of all mixtures, [M * E, D], float32, times the multiplier of the logits."""
    num_experts, name = spec.num_experts + spec.num_identities, f"{prefix}weight"
    if spec.second_size:
        names = [name, f"{name}_1"]
        weights.skip(names[spec.num_mixtures :])
        routers = [
            weights.read_float32(each, hidden_size, num_experts).T
            for each in names[: spec.num_mixtures]
        ]
        return torch.cat(routers).contiguous()
    return weights.read_float32(name, num_experts, hidden_size) * spec.logit_multiplier


def read_corrections(spec: ExpertsSpec, weights: WeightReader, prefix: str) -> Tensor:
    """Return the router's correction biases [M, E], float32, which are added to scores only to choose experts.

    Experts that every token chooses have none.
    """
    num_experts = spec.num_experts + spec.num_identities - spec.num_always
    name = f"{prefix}e_score_correction_bias"
    num_stored = 2 if spec.second_size else 1
    stored = weights.read_elements(name, num_stored * num_experts).view(num_stored, -1)
    return stored[: spec.num_mixtures].clone()


def unused_experts(spec: ExpertsSpec, prefix: str, elsewhere: Sequence[int]) -> list[str]:
    """Return the prefixes of the tensors of experts that are `elsewhere`, or that no rank computes."""
    count = 2 * spec.num_experts if spec.second_size else spec.num_experts + spec.num_identities
    others = (f"experts.{i}" for i in range(spec.num_numbered, count))
    return [f"{prefix}{name}." for name in (*map(spec.stored_name, elsewhere), *others)]


class Router:
    """Chooses the experts of each token, in float32."""

    def __init__(
        self,
        spec: ExpertsSpec,
        hidden_size: int,
        vocab_size: int,
        weights: WeightReader,
        prefix: str,
        kernels: LayerKernels,
    ) -> None:
        self._spec = spec
        num_experts = spec.num_experts + spec.num_identities
        self.mlp: RouterMLP | None = None
        if spec.router is not None:
            shape = num_experts, hidden_size
            self.mlp = RouterMLP(spec.router, shape, weights, prefix, kernels)
        self._multiply = self.mlp or kernels.router_linear(
            read_router(spec, weights, prefix, hidden_size)
        )
        self._bias_E = (
            weights.read_vector(f"{prefix}bias", num_experts) if spec.has_router_bias else None
        )
        self._scale_E = (
            weights.read_vector(f"{prefix}per_expert_scale", num_experts)
            if spec.has_expert_scales
            else None
        )
        self._scale_1 = None
        if spec.has_stored_scale:
            self._scale_1 = weights.read_vector(f"{prefix}global_scale", 1)
        self._experts_VC: Tensor | None = None
        if spec.is_hashed:
            # Float32 has the exact number of every expert.
            table = weights.read_float32(f"{prefix}tid2eid", vocab_size, spec.num_experts_per_token)
            self._experts_VC = table.long()
        self._correction_ME: Tensor | None = None
        if spec.has_correction_bias:
            self._correction_ME = read_corrections(spec, weights, prefix).to(weights.device)
        self._second_tokens = torch.tensor(spec.second_tokens, device=weights.device)
        correction_E = None if self._correction_ME is None else self._correction_ME[0]
        self._choose = kernels.chooser(spec, self._bias_E, correction_E)

    def __call__(self, x_TD: Tensor, token_ids_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the numbers of the experts, int64 [T, C], and their weights, float32 [T, C]."""
        spec = self._spec
        logits_TE = self._multiply(x_TD)
        if self._choose is not None:
            return self._choose(logits_TE)
        mixture_T: Tensor | None = None
        if spec.second_tokens:
            assert token_ids_T is not None
            mixture_T = (token_ids_T[:, None] == self._second_tokens).any(1).long()
            logits_TE = logits_TE.unflatten(1, (2, -1)).take_along_dim(mixture_T[:, None, None], 1)
            logits_TE = logits_TE.squeeze(1)
        if self._bias_E is not None:
            logits_TE = logits_TE + self._bias_E
        if spec.logit_softcap:
            logits_TE = torch.tanh(logits_TE / spec.logit_softcap) * spec.logit_softcap
        if spec.scoring == "sparse mixer":
            return self._mixed(logits_TE)
        scores_TE = _SCORES[spec.scoring](logits_TE)
        choice_TE = logits_TE if spec.corrects_logits else scores_TE
        choice_TE = choice_TE[:, : choice_TE.shape[1] - spec.num_always]
        if self._correction_ME is not None:
            row = 0 if mixture_T is None else mixture_T
            choice_TE = choice_TE + self._correction_ME[row]
        if spec.divides_choice:
            choice_TE = self._best_of_groups(choice_TE)
        elif spec.num_groups > 1:
            choice_TE = self._within_best_groups(choice_TE)
        if spec.block_size:
            choice_TE = self._within_blocks(choice_TE)
        if self._experts_VC is None:
            num_free = spec.num_experts_per_token - spec.num_always
            experts_TC = choice_TE.topk(num_free, -1).indices
            if spec.num_always:
                first, count = choice_TE.shape[1], scores_TE.shape[1]
                always = torch.arange(first, count, device=experts_TC.device)
                experts_TC = torch.cat((experts_TC, always.expand(len(experts_TC), -1)), 1)
        else:
            assert token_ids_T is not None
            experts_TC = self._experts_VC[token_ids_T]
        weights_TC = scores_TE.gather(-1, experts_TC)
        if spec.renormalizes:
            weights_TC = weights_TC / (weights_TC.sum(-1, keepdim=True) + SMALLEST_SUM)
        if self._scale_E is not None:
            weights_TC = weights_TC * self._scale_E[experts_TC]
        if self._scale_1 is not None:
            weights_TC = weights_TC * self._scale_1
        if mixture_T is not None:
            experts_TC = experts_TC * spec.num_mixtures + mixture_T[:, None]
        weights_TC = weights_TC * spec.scale
        if spec.capacity:
            weights_TC = self._within_capacity(experts_TC, weights_TC)
        return (
            self._with_adjugates(experts_TC, weights_TC)
            if spec.adjugate_group
            else (experts_TC, weights_TC)
        )

    def _within_capacity(self, experts_TC: Tensor, weights_TC: Tensor) -> Tensor:
        """Return the weights, with 0 for choices of experts that compute enough tokens before them."""
        chosen_TE = weights_TC.new_zeros(len(experts_TC), self._spec.num_experts, dtype=torch.int64)
        places_TC = chosen_TE.scatter_(1, experts_TC, 1).cumsum(0).gather(1, experts_TC)
        return weights_TC.masked_fill(places_TC > self._spec.capacity, 0.0)

    def _with_adjugates(self, experts_TC: Tensor, weights_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of the chosen experts and of their adjugate experts, and their weights."""
        size = self._spec.adjugate_group
        groups_TC = experts_TC // size
        adjugates_TC = groups_TC * (size + 1) + size
        return (
            torch.cat((experts_TC + groups_TC, adjugates_TC), 1),
            torch.cat((weights_TC, weights_TC * self._spec.adjugate_scale), 1),
        )

    def _mixed(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts and weights of the sparse mixer (Phi-3.5-MoE)."""
        experts, weights, left_TE = [], [], logits_TE
        for _ in range(self._spec.num_experts_per_token):
            best_T1, expert_T1 = left_TE.max(-1, keepdim=True)
            distance_TE = (best_T1 - logits_TE) / logits_TE.abs().clamp(min=best_T1)
            near_TE = left_TE.masked_fill(distance_TE > 2 * self._spec.mixer_noise, -torch.inf)
            experts.append(expert_T1)
            weights.append(near_TE.softmax(-1).gather(-1, expert_T1))
            left_TE = left_TE.scatter(-1, expert_T1, -torch.inf)
        return torch.cat(experts, -1), torch.cat(weights, -1)

    def _within_best_groups(self, choice_TE: Tensor) -> Tensor:
        """Return the scores, with minus infinity for experts outside of the best groups."""
        spec = self._spec
        groups = choice_TE.unflatten(-1, (spec.num_groups, -1))
        num_best = 1 if spec.group_score == "best" else 2
        group_scores = groups.topk(num_best, -1).values.sum(-1)
        best = group_scores.topk(spec.num_groups_per_token, -1).indices
        is_outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
        return groups.masked_fill(is_outside.unsqueeze(-1), -torch.inf).flatten(-2)

    def _best_of_groups(self, choice_TE: Tensor) -> Tensor:
        """Return the scores, with minus infinity for experts that are not among the best of their groups."""
        spec = self._spec
        groups = choice_TE.unflatten(-1, (spec.num_groups, -1))
        best = groups.topk(spec.num_experts_per_token // spec.num_groups, -1).indices
        is_worse = torch.ones_like(groups, dtype=torch.bool).scatter_(-1, best, False)
        return groups.masked_fill(is_worse, -torch.inf).flatten(-2)

    def _within_blocks(self, choice_TE: Tensor) -> Tensor:
        """Return the scores, with minus infinity for experts that are not among the best of the token's block."""
        spec = self._spec
        num_tokens = len(choice_TE)
        # Only warm-ups have parts of blocks.
        missing = -num_tokens % spec.block_size
        padded_TE = F.pad(choice_TE, (0, 0, 0, missing), value=-torch.inf)
        best_BE = padded_TE.unflatten(0, (-1, spec.block_size)).amax(1)
        best = best_BE.topk(spec.num_experts_per_block, -1).indices
        is_outside_BE = torch.ones_like(best_BE, dtype=torch.bool).scatter_(-1, best, False)
        is_outside_TE = is_outside_BE.repeat_interleave(spec.block_size, 0)[:num_tokens]
        return choice_TE.masked_fill(is_outside_TE, -torch.inf)
