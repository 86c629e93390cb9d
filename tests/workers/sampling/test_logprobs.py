"""Log-probabilities as they are sent to the core."""

import numpy as np
import pytest
import torch
from engine.protocol.arrays import float32_view, int32_view
from engine.protocol.sampling_params import SamplingParams
from support.workers.sampler_rows import NewRows

V = 301


def random_logits(n: int) -> torch.Tensor:
    return torch.randn((n, V), generator=torch.Generator().manual_seed(n)) * 3


@pytest.mark.parametrize(
    ("count", "listed"), [(0, ()), (0, (7, 300, 0)), (1, ()), (5, (3, 3)), (200, ()), (-1, (250,))]
)
def test_logprobs_are_those_of_the_raw_logits(
    new_rows: NewRows, count: int, listed: tuple[int, ...]
) -> None:
    logits = random_logits(3)
    batch = new_rows(V)
    shown = SamplingParams(
        logprobs=count, logprob_token_ids=listed, seed=1, temperature=4.0, top_k=40
    )
    batch.add(0, shown)
    batch.add(1, SamplingParams(seed=1))
    batch.add(2, SamplingParams(logprobs=2, temperature=0, logit_bias={77: 100.0}))
    output = batch.sample(logits, [0, 1, 2])
    expected = logits.double().log_softmax(1)
    first, last = output.logprobs
    assert (first.slot, first.num_positions, last.slot) == (0, 1, 2)
    k = V if count == -1 else count
    ids, values = int32_view(first.token_ids), float32_view(first.logprobs)
    assert len(ids) == len(values) == k + 1 + len(listed)
    chosen = int(output.token_ids[0])
    assert ids[0] == chosen
    assert ids[1:].tolist() == [*logits[0].argsort(descending=True)[:k].tolist(), *listed]
    np.testing.assert_allclose(values, expected[0][ids.tolist()], atol=2e-6)
    assert int32_view(first.ranks).tolist() == [1 + int((logits[0] > logits[0, chosen]).sum())]
    assert int32_view(last.token_ids)[0] == 77
    np.testing.assert_allclose(float32_view(last.logprobs)[0], expected[2, 77], atol=2e-6)


def processed(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the probabilities of a row after temperature and filters, computed from sorted probabilities."""
    order = logits.double().argsort(descending=True, stable=True)
    probs = (logits.double()[order] / params.temperature).softmax(0)
    if params.min_p:
        probs[probs < params.min_p * probs[0]] = 0
    if params.top_k:
        probs[params.top_k :] = 0
    probs /= probs.sum()
    probs[probs.cumsum(0) - probs >= params.top_p] = 0
    return torch.zeros_like(probs).index_put((order,), probs / probs.sum())


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.2, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.1, "top_k": 8, "top_p": 0.9},
    ],
)
def test_processed_logprobs_are_those_after_the_filters(
    new_rows: NewRows, filters: dict[str, float]
) -> None:
    logits = random_logits(3)
    batch = new_rows(V)
    shown = SamplingParams(
        logprobs=12,
        logprob_token_ids=(7, 0, 300, 7),
        processed_logprobs=True,
        logit_bias={7: 6.0},
        **filters,
    )
    batch.add(0, shown)
    batch.add(1, SamplingParams(logprobs=3, seed=1))
    batch.add(2, SamplingParams(logprobs=2, processed_logprobs=True, temperature=0))
    biased = logits[0].clone()
    biased[7] += 6
    output = batch.sample(logits.clone(), [0, 1, 2])
    first, raw, greedy = output.logprobs
    expected = processed(biased, shown)
    ids, values = int32_view(first.token_ids), float32_view(first.logprobs)
    num_kept = min(int((expected > 0).sum()), 12)
    assert ids[0] == int(output.token_ids[0]) and values[0] > -np.inf
    assert ids[1 : 1 + num_kept].tolist() == expected.argsort(descending=True)[:num_kept].tolist()
    np.testing.assert_allclose(
        values[: 1 + num_kept], expected[ids[: 1 + num_kept].tolist()].log(), atol=1e-5
    )
    assert (values[1 + num_kept : 13] == -np.inf).all()
    assert ids[13:].tolist() == [7, 0, 300, 7]
    np.testing.assert_allclose(values[13:], expected[[7, 0, 300, 7]].log(), atol=1e-5)
    assert int32_view(first.ranks).tolist() == [1 + int((expected > expected[ids[0]]).sum())]
    np.testing.assert_allclose(
        float32_view(raw.logprobs),
        logits[1].log_softmax(0)[int32_view(raw.token_ids).tolist()],
        atol=2e-6,
    )
    assert float32_view(greedy.logprobs).tolist() == [0, 0, -np.inf]


def test_equal_alternatives_are_ordered_by_token_id(new_rows: NewRows) -> None:
    logits = torch.zeros(1, V)
    logits[0, 250] = 1
    batch = new_rows(V)
    batch.add(0, SamplingParams(temperature=0, logprobs=4))
    [row] = batch.sample(logits, [0]).logprobs
    assert int32_view(row.token_ids).tolist() == [250, 250, 0, 1, 2]


def test_prompt_logprobs_are_computed_for_every_position(new_rows: NewRows) -> None:
    logits = random_logits(6)
    next_ids = [0, 5, 300, 7, 7, 9]
    rows = new_rows(V)
    row = rows.score_prompt(3, logits, next_ids, 2)
    assert (row.slot, row.num_positions) == (3, 6)
    ids = int32_view(row.token_ids).reshape(6, 3)
    assert ids[:, 0].tolist() == next_ids
    expected = logits.log_softmax(1)
    np.testing.assert_allclose(
        float32_view(row.logprobs).reshape(6, 3),
        expected.gather(1, torch.tensor(ids).long()),
        atol=2e-6,
    )
    above = (logits > logits.gather(1, torch.tensor(next_ids)[:, None])).sum(1) + 1
    assert int32_view(row.ranks).tolist() == above.tolist()
    wanted = [[300, i] for i in range(6)]
    listed = rows.score_prompt(3, logits, next_ids, 1, wanted)
    assert int32_view(listed.token_ids).reshape(6, 4)[:, 2:].tolist() == wanted
    np.testing.assert_allclose(
        float32_view(listed.logprobs).reshape(6, 4)[:, 2:],
        expected.gather(1, torch.tensor(wanted)),
        atol=2e-6,
    )
    whole = rows.score_prompt(3, logits, next_ids, -1)
    assert len(int32_view(whole.token_ids)) == 6 * (V + 1)
