"""Log-probabilities as they are sent to the core."""

import numpy as np
import pytest
import torch
from engine.protocol.arrays import float32_view, int32_view
from engine.protocol.sampling_params import SamplingParams
from support.sampler_rows import NewRows

V = 301


def random_logits(n: int) -> torch.Tensor:
    return torch.randn((n, V), generator=torch.Generator().manual_seed(n)) * 3


@pytest.mark.parametrize("count", [0, 1, 5, 200, -1])
def test_logprobs_are_those_of_the_raw_logits(new_rows: NewRows, count: int) -> None:
    logits = random_logits(3)
    batch = new_rows(V)
    batch.add(0, SamplingParams(logprobs=count, seed=1, temperature=4.0, top_k=40))
    batch.add(1, SamplingParams(seed=1))
    batch.add(2, SamplingParams(logprobs=2, temperature=0, logit_bias={77: 100.0}))
    output = batch.sample(logits, [0, 1, 2])
    expected = logits.double().log_softmax(1)
    first, last = output.logprobs
    assert (first.slot, first.num_positions, last.slot) == (0, 1, 2)
    k = V if count == -1 else count
    ids, values = int32_view(first.token_ids), float32_view(first.logprobs)
    assert len(ids) == len(values) == k + 1
    chosen = int(output.token_ids[0])
    assert ids[0] == chosen
    assert ids[1:].tolist() == logits[0].argsort(descending=True)[:k].tolist()
    np.testing.assert_allclose(values, expected[0][ids.tolist()], atol=2e-6)
    assert int32_view(first.ranks).tolist() == [1 + int((logits[0] > logits[0, chosen]).sum())]
    assert int32_view(last.token_ids)[0] == 77
    np.testing.assert_allclose(float32_view(last.logprobs)[0], expected[2, 77], atol=2e-6)


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
    whole = rows.score_prompt(3, logits, next_ids, -1)
    assert len(int32_view(whole.token_ids)) == 6 * (V + 1)
