"""The delta rule with decay, and its generalization in RWKV-7, computed segment by segment.

A state maps keys to values. Each token first decays the state. Then it corrects the value that the state has for the
token's key. Within a segment, the corrections depend on each other, so they are computed as the solution of a
triangular system.

Shapes: N segments, C tokens of a segment, H heads, K key dimension, V value dimension, S requests, R requests of a
round. X is K if each key element decays separately, and 1 if all elements of a head decay alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .mamba2 import causal_decay
from .states import StateBatch, StateCache


def delta_rule(
    q_NHCK: Tensor,
    k_NHCK: Tensor,
    v_NHCV: Tensor,
    strength_NHC1: Tensor,
    log_decay_NHCX: Tensor,
    cache: StateCache,
    batch: StateBatch,
) -> Tensor:
    """Update the states, and return the outputs of all tokens in all segments.

    `log_decay_NHCX` is the logarithm of the decay since the start of the segment. `strength_NHC1` is the fraction of an
    error that is corrected.
    """
    decay_NHCX = log_decay_NHCX.exp()
    products_NHCC, scores_NHCC = decayed_products((k_NHCK, q_NHCK), k_NHCK, log_decay_NHCX)
    # The corrections are `values - recalled @ state`, with the `state` at the start of the segment.
    values_NHCV, recalled_NHCK = _solve(
        (strength_NHC1 * products_NHCC).tril(-1),
        torch.cat((strength_NHC1 * v_NHCV, strength_NHC1 * decay_NHCX * k_NHCK), -1),
    ).split((v_NHCV.shape[-1], k_NHCK.shape[-1]), -1)
    q_NHCK = q_NHCK * decay_NHCX
    last_NH1X = log_decay_NHCX[..., -1:, :]
    keys_NHKC = (k_NHCK * (last_NH1X - log_decay_NHCX).exp()).transpose(-1, -2)
    last_NHX1 = last_NH1X.exp().transpose(-1, -2)
    y_NHCV = torch.empty_like(v_NHCV)
    states_SHKV = cache.load(batch).unflatten(1, (v_NHCV.shape[1], -1, v_NHCV.shape[-1]))
    for part in batch.rounds:
        own, full, num_full = part.segments, part.segments[: part.num_full], part.num_full
        states_RHKV = states_SHKV[part.requests]
        corrections_RHCV = values_NHCV[own] - recalled_NHCK[own] @ states_RHKV
        y_NHCV[own] = q_NHCK[own] @ states_RHKV + scores_NHCC[own] @ corrections_RHCV
        if num_full:
            added_RHKV = keys_NHKC[full] @ corrections_RHCV[:num_full]
            decayed_RHKV = states_RHKV[:num_full] * last_NHX1[full]
            part.replace_states(states_SHKV, decayed_RHKV + added_RHKV)
    cache.store(states_SHKV.flatten(1), batch)
    return y_NHCV


def generalized_delta_rule(
    q_NHCK: Tensor,
    k_NHCK: Tensor,
    v_NHCV: Tensor,
    recalled_NHCK: Tensor,
    replaced_NHCK: Tensor,
    log_decay_NHCK: Tensor,
    cache: StateCache,
    batch: StateBatch,
) -> Tensor:
    """Update the states, and return the outputs of all tokens in all segments.

    A token reads the value that the state has for its key `recalled_NHCK`. It decays the state, and adds that value
    under the key `replaced_NHCK` and its own value under its key. `log_decay_NHCK` is the logarithm of the token's
    decay, at least about -5.
    """
    log_decays_NHCK = log_decay_NHCK.cumsum(-2)
    decay_NHCK = log_decays_NHCK.exp()
    # The state is read before the token's decay, which is one of the factors in `decay_NHCK`.
    recalled_NHCK = recalled_NHCK * (-log_decay_NHCK).exp()
    queries = recalled_NHCK, q_NHCK
    of_replaced_NHCC, scores_NHCC = decayed_products(queries, replaced_NHCK, log_decays_NHCK)
    of_keys_NHCC, key_scores_NHCC = decayed_products(queries, k_NHCK, log_decays_NHCK)
    # The recalled values are `values + keys @ state`, with the `state` at the start of the segment.
    values_NHCV, keys_NHCK = _solve(
        -of_replaced_NHCC.tril(-1),
        torch.cat((of_keys_NHCC.tril(-1) @ v_NHCV, recalled_NHCK * decay_NHCK), -1),
    ).split((v_NHCV.shape[-1], k_NHCK.shape[-1]), -1)
    q_NHCK = q_NHCK * decay_NHCK
    y_NHCV = key_scores_NHCC @ v_NHCV
    remaining_NHCK = (log_decays_NHCK[..., -1:, :] - log_decays_NHCK).exp()
    added_NHKV = (k_NHCK * remaining_NHCK).transpose(-1, -2) @ v_NHCV
    replaced_NHKC = (replaced_NHCK * remaining_NHCK).transpose(-1, -2)
    last_NHK1 = decay_NHCK[..., -1:, :].transpose(-1, -2)
    states_SHKV = cache.load(batch).unflatten(1, (v_NHCV.shape[1], -1, v_NHCV.shape[-1]))
    for part in batch.rounds:
        own, full, num_full = part.segments, part.segments[: part.num_full], part.num_full
        states_RHKV = states_SHKV[part.requests]
        recalled_RHCV = values_NHCV[own] + keys_NHCK[own] @ states_RHKV
        y_NHCV[own] += q_NHCK[own] @ states_RHKV + scores_NHCC[own] @ recalled_RHCV
        if num_full:
            new_RHKV = states_RHKV[:num_full] * last_NHK1[full] + added_NHKV[full]
            new_RHKV += replaced_NHKC[full] @ recalled_RHCV[:num_full]
            part.replace_states(states_SHKV, new_RHKV)
    cache.store(states_SHKV.flatten(1), batch)
    return y_NHCV


def decayed_products(
    queries: tuple[Tensor, ...], k_NHCK: Tensor, log_decay_NHCX: Tensor
) -> list[Tensor]:
    """Return the products [N, H, C, C] of queries with keys up to their token, with the decay in between."""
    if log_decay_NHCX.shape[-1] == 1:
        decay_NHCC = causal_decay(log_decay_NHCX.squeeze(-1))
        keys_NHKC = k_NHCK.transpose(-1, -2)
        return [(q_NHCK @ keys_NHKC) * decay_NHCC for q_NHCK in queries]
    length = k_NHCK.shape[-2]
    products = [torch.zeros_like(k_NHCK[..., :1]).repeat(1, 1, 1, length) for _ in queries]
    # Do not multiply the decay into queries and keys separately, because the factors would overflow.
    for i in range(length):
        decay_NHcK = (log_decay_NHCX[..., i:, :] - log_decay_NHCX[..., i : i + 1, :]).exp()
        decayed_NHcK = k_NHCK[..., i : i + 1, :] * decay_NHcK
        for q_NHCK, products_NHCC in zip(queries, products, strict=True):
            products_NHCC[..., i:, i] = (q_NHCK[..., i:, :] * decayed_NHcK).sum(-1)
    return products


def unit(x_NCX: Tensor, dim: int) -> Tensor:
    """Return heads of `dim` elements, [N, C, G, K], each divided by its Euclidean norm."""
    x_NCGK = x_NCX.unflatten(-1, (-1, dim))
    return x_NCGK * (x_NCGK.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _solve(system_NHCC: Tensor, x_NHCX: Tensor) -> Tensor:
    """Solve y + system @ y = x for y, where `system` is strictly lower triangular.

    The rows are computed in order, so that a token's result does not depend on later tokens.
    """
    y_NHCX = x_NHCX.contiguous()
    for i in range(1, y_NHCX.shape[-2]):
        y_NHCX[..., i, :] -= (system_NHCC[..., i, :i, None] * y_NHCX[..., :i, :]).sum(-2)
    return y_NHCX
