"""A mixture of experts that replaces a layer's MLP.

Shapes: T tokens of a step, D hidden size, E experts, e experts of this rank, C experts that a token chooses, A = T * C
choices ordered by expert, F intermediate size, L size of the experts' inputs, which may be D. If replicas divide the
experts: N ranks, M messages that this rank sends, B messages that it receives; A are then the rank's own choices, or
those of the messages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...layers.expert_order import ExpertOrder
from ...layers.layers import InputScaledNorm, Linear, RMSNorm
from ...layers.parallel.expert_group import ExpertGroup
from ...layers.specs.experts import ExpertsSpec, GateLimit
from ..layer_source import LayerSource
from ..mlp import MLP
from .matrices import ChangedRows, ExpertMatrices
from .router import Router, unused_experts


class Experts:
    """The router, this rank's part of the experts, and the shared experts.

    Ranks have a part of the intermediate elements of every expert or, with expert parallelism, whole experts. If the
    ranks of several replicas divide the experts, each row is sent to the ranks of the experts that it chose.
    """

    gate_up = None
    """None, so that a norm before the experts does not round its output: the router needs exact values."""

    def __init__(
        self, experts: ExpertsSpec, source: LayerSource, shared_limit: GateLimit | None = None
    ) -> None:
        spec, weights, prefix, shard, kernels = source
        self._spec = experts
        self._kernels = kernels
        self._tensor_parallel = shard.tensor_parallel
        self._group = shard.expert_group
        # The norm of an expert's output needs the sum of all ranks that have a part of the expert.
        self._sums_choices = experts.has_latent_norms and not shard.has_whole_experts
        self._num_chosen = experts.num_computed_per_token
        self.router = Router(
            experts, spec.hidden_size, spec.vocab_size, weights, f"{prefix}gate.", kernels
        )
        self._placement = shard.placement(experts)
        self._to_latent: Linear | None = None
        self._from_latent: Linear | None = None
        self._size = size = experts.latent_size or spec.hidden_size
        if experts.latent_size:
            self._to_latent, self._from_latent = (
                source.read_linear(name, rows, columns, has_bias=spec.mlp_bias)
                for name, rows, columns in (
                    ("to_latent", size, spec.hidden_size),
                    ("from_latent", spec.hidden_size, size),
                )
            )
        self._latent_norm: RMSNorm | None = None
        self._expert_norm: RMSNorm | None = None
        if experts.has_latent_norms:
            weight_L, expert_weight_L = (
                weights.read_vector(f"{prefix}{name}.weight", size) + spec.norm_weight_offset
                for name in ("latent_norm", "expert_norm")
            )
            self._latent_norm = kernels.norm(weight_L, spec.norm_eps)
            eps = spec.norm_eps if spec.output_norm_eps is None else spec.output_norm_eps
            self._expert_norm = InputScaledNorm(expert_weight_L, eps)
        self._sum_norm: RMSNorm | None = None
        if experts.norms_latent_sum:
            weight_L = weights.read_vector(f"{prefix}latent_sum_norm.weight", size)
            self._sum_norm = kernels.norm(weight_L, spec.norm_eps)
        self._sum_bias_D: Tensor | None = None
        if experts.has_sum_bias:
            self._sum_bias_D = weights.read_vector(f"{prefix}experts.bias", spec.hidden_size)
        self._mixtures = [
            ExpertMatrices(experts, source, mixture) for mixture in range(experts.num_mixtures)
        ]
        weights.skip(unused_experts(experts, prefix, self._placement.elsewhere))
        self._shared: SharedExperts | None = None
        if experts.shared_intermediate_size:
            self._shared = SharedExperts(experts, source, shared_limit)

    def forward(
        self, x_TD: Any, router_x_TD: Any = None, token_ids_T: Tensor | None = None
    ) -> Tensor:
        """Return the output [T, D] of the chosen and the shared experts.

        `router_x_TD` is the router's input, if it differs from the experts' input. `token_ids_T` are needed if the
        tokens choose the experts.
        """
        router_x_TD = x_TD if router_x_TD is None else router_x_TD
        experts_TC, weights_TC = self.router(router_x_TD, token_ids_T)
        identity_T1: Tensor | None = None
        if self._spec.num_identities:
            is_identity_TC = experts_TC >= self._spec.num_experts
            if not self._spec.skips_identities:
                identity_T1 = weights_TC.masked_fill(~is_identity_TC, 0.0).sum(-1, keepdim=True)
            weights_TC = weights_TC.masked_fill(is_identity_TC, 0.0)
            if self._group is not None:
                experts_TC = experts_TC.masked_fill(is_identity_TC, 0)
        x_TL = x_TD if self._to_latent is None else self._to_latent(x_TD)
        if self._latent_norm is not None:
            x_TL = self._latent_norm(x_TL)
        if self._group is None:
            y_TL = self._own_outputs(x_TL, experts_TC, weights_TC)
        else:
            y_TL = torch.zeros_like(x_TL)
            rows = self._group.own_rows(len(x_TL))
            y_TL[rows] = self._exchange(self._group, x_TL[rows], experts_TC[rows], weights_TC[rows])
        if not self._sums_choices:
            y_TL = self._tensor_parallel.sum(y_TL)
        if self._sum_norm is not None:
            y_TL = self._sum_norm(y_TL)
        y_TD = y_TL if self._from_latent is None else self._from_latent(y_TL)
        if self._sum_bias_D is not None:
            y_TD = (y_TD + self._sum_bias_D).to(y_TD.dtype)
        if identity_T1 is not None:
            y_TD = y_TD + (x_TD * identity_T1).to(y_TD.dtype)
        return y_TD if self._shared is None else y_TD.add_(self._shared.forward(x_TD))

    def join_round(self, like: Tensor) -> None:
        """Compute rows of other replicas in an exchange to which this one contributes none.

        The hidden states have the dtype and device of `like`.
        """
        assert self._group is not None
        self._exchange(
            self._group,
            like.new_empty((0, self._size)),
            torch.empty((0, self._num_chosen), dtype=torch.int64, device=like.device),
            torch.empty((0, self._num_chosen), device=like.device),
        )

    def _own_outputs(self, x_TL: Tensor, experts_TC: Tensor, weights_TC: Tensor) -> Tensor:
        """Return the weighted sums [T, L] of the outputs of this rank's experts."""
        first, *others = (
            self._outputs_of(matrices, x_TL, experts_TC, weights_TC) for matrices in self._mixtures
        )
        return sum(others, first)

    def _outputs_of(
        self, matrices: ExpertMatrices, x_TL: Tensor, experts_TC: Tensor, weights_TC: Tensor
    ) -> Tensor:
        """Return the weighted sums [T, L] of the outputs of some experts."""
        place_TC = matrices.places(experts_TC)
        if not matrices.are_all:
            # No expert computes the choices of others, which are sorted to the end.
            weights_TC = weights_TC.masked_fill(place_TC == matrices.count, 0.0)
        order = self._kernels.order_choices(place_TC, matrices.count)
        x_AL, weights_TC = self._inputs(x_TL, order, weights_TC)
        changed = None
        if matrices.can_change:
            changed = place_TC.flatten()[order.choice_A], order.token_A
        y_AL = self._compute(matrices, x_AL, order.ends_E, changed)
        return self._kernels.combine(y_AL, order.place_A, weights_TC)

    def _exchange(
        self, group: ExpertGroup, x_TL: Tensor, experts_TC: Tensor, weights_TC: Tensor
    ) -> Tensor:
        """Return the weighted sums [T, L] over all experts, and compute the rows that other ranks sent.

        A message is one row with the numbers of the experts that it chose, as numbered by the receiver, or -1. It
        includes the weights of the choices if these multiply the inputs. A rank returns the outputs in the order of
        messages and choices.
        """
        parts = group.parts(self._spec.num_numbered)
        sizes_N = torch.tensor([len(part) for part in parts], device=x_TL.device)
        owners_E = torch.arange(group.size, device=x_TL.device).repeat_interleave(sizes_N)
        first_N = sizes_N.cumsum(0) - sizes_N
        owners_TC = owners_E[experts_TC]
        visits_TN = owners_TC.new_zeros((len(x_TL), group.size)).scatter_(1, owners_TC, 1)
        rank_M, row_M = visits_TN.T.nonzero(as_tuple=True)
        is_there_MC = owners_TC[row_M] == rank_M[:, None]
        choices_MC = (experts_TC[row_M] - first_N[rank_M, None]).masked_fill(~is_there_MC, -1)
        parts_of_message = [x_TL[row_M], choices_MC.int()]
        if self._spec.scales_inputs:
            parts_of_message.append(weights_TC[row_M].float())
        messages_MX = torch.cat([part.view(torch.uint8) for part in parts_of_message], 1)
        messages_BX, received_N = group.dispatch(messages_MX, visits_TN.sum(0))
        row_bytes, num_chosen = x_TL.shape[1] * x_TL.element_size(), self._num_chosen
        row_BX, choices_BX, factors_BX = messages_BX.split(
            (row_bytes, 4 * num_chosen, messages_BX.shape[1] - row_bytes - 4 * num_chosen), 1
        )
        choices_BC = choices_BX.contiguous().view(torch.int32).long()
        row_A, choice_A = (choices_BC >= 0).nonzero(as_tuple=True)
        x_AL = row_BX.contiguous().view(x_TL.dtype)[row_A]
        if self._spec.scales_inputs:
            factors_BC = factors_BX.contiguous().view(torch.float32)
            x_AL = (x_AL * factors_BC[row_A, choice_A][:, None]).to(x_TL.dtype)
            weights_TC = weights_TC.sign()
        chosen_A = choices_BC[row_A, choice_A] + self._placement.experts.start
        y_AL = torch.empty_like(x_AL)
        for matrices in self._mixtures:
            order = self._kernels.order_choices(matrices.places(chosen_A)[:, None], matrices.count)
            if num_own := int(order.ends_E[-1:].sum()):
                own_A = order.choice_A[:num_own]
                y_AL[own_A] = self._compute(matrices, x_AL[own_A], order.ends_E)
        sender_B = torch.arange(group.size, device=x_TL.device).repeat_interleave(received_N)
        returned_N = sender_B[row_A].bincount(minlength=group.size)
        order = self._kernels.order_choices(owners_TC, group.size)
        sent_N = owners_TC.flatten().bincount(minlength=group.size)
        y_AL = group.exchange(y_AL, returned_N, sent_N)
        return self._kernels.combine(y_AL, order.place_A, weights_TC)

    def _inputs(
        self, x_TL: Tensor, order: ExpertOrder, weights_TC: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs [A, L] of the ordered choices, and the weights for their outputs."""
        x_AL = x_TL.index_select(0, order.token_A)
        if not self._spec.scales_inputs:
            return x_AL, weights_TC
        weights_A = weights_TC.flatten()[order.choice_A]
        return (x_AL * weights_A[:, None]).to(x_TL.dtype), weights_TC.sign()

    def _compute(
        self,
        matrices: ExpertMatrices,
        x_AL: Tensor,
        ends_e: Tensor,
        changed: ChangedRows | None = None,
    ) -> Tensor:
        """Return the outputs of rows that are ordered by expert, after the norm of outputs; see `ExpertMatrices`."""
        outputs_AL = matrices.compute(x_AL, ends_e, changed)
        if self._sums_choices:
            outputs_AL = self._tensor_parallel.sum(outputs_AL)
        return outputs_AL if self._expert_norm is None else self._expert_norm(outputs_AL)


class SharedExperts:
    """The MLP that all tokens pass through beside the experts that they choose."""

    def __init__(
        self, experts: ExpertsSpec, source: LayerSource, limit: GateLimit | None = None
    ) -> None:
        size = experts.shared_intermediate_size
        self._mlp = MLP(source.at("shared_experts."), size, limit=limit)
        self._gate_1D: Tensor | None = None
        if experts.has_shared_gate:
            name = f"{source.prefix}shared_expert_gate.weight"
            self._gate_1D = source.weights.read(name, 1, source.spec.hidden_size)

    def forward(self, x_TD: Any) -> Tensor:
        """Return the output [T, D]."""
        y_TD: Tensor = self._mlp.forward(x_TD)
        return y_TD if self._gate_1D is None else y_TD.mul_(F.linear(x_TD, self._gate_1D).sigmoid())


class ExpertsBesideMLP:
    """Experts in addition to the layer's MLP, both of which read the same hidden states, with norms around both.

    The norm of the router's input includes division by the square root of the hidden size.
    """

    def __init__(self, experts: ExpertsSpec, source: LayerSource) -> None:
        spec, weights, prefix, kernels = source.spec, source.weights, source.prefix, source.kernels
        size = spec.hidden_size
        self.experts = Experts(experts, source.at("beside."))
        router_weight_D = weights.read_vector(f"{prefix}beside.router_scale", size)
        self.router_norm = RMSNorm(router_weight_D * size**-0.5, spec.norm_eps)
        self._mlp_output_norm, self._input_norm, self._output_norm = (
            kernels.norm(weights.read_vector(f"{prefix}{name}.weight", size), spec.norm_eps)
            for name in (
                "post_feedforward_layernorm_1",
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_2",
            )
        )

    def forward(self, mlp_TD: Tensor, x_TD: Tensor) -> Tensor:
        """Return the sum of the MLP's output `mlp_TD` and the experts' output for the hidden states `x_TD`."""
        y_TD = self.experts.forward(self._input_norm(x_TD), self.router_norm(x_TD))
        total_TD: Tensor = self._mlp_output_norm(mlp_TD) + self._output_norm(y_TD)
        return total_TD
