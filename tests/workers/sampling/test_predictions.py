"""Tokens that are predicted for drafts, which the requests may never sample."""

import numpy as np
import pytest
import torch
from engine.protocol.sampling_params import SamplingParams
from engine.workers.sampling import TorchSampler
from support.workers.sampler_rows import Rows

pytestmark = pytest.mark.slow

V = 50


def test_predictions_equal_the_samples_and_change_nothing() -> None:
    """A presence penalty would otherwise count the predicted token."""
    rows = Rows(V, num_slots=4)
    assert isinstance(rows.sampler, TorchSampler)
    rows.add(0, SamplingParams(temperature=0, presence_penalty=2.0))
    rows.add(1, SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.5))
    slots = np.array([0, 1], np.int32)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        logits = torch.randn(2, V, generator=generator)
        predicted = [
            rows.sampler.predict(logits.clone(), slots, rows.lengths[slots]).tolist()
            for _ in range(2)
        ]
        assert predicted == [rows.tokens(logits, [0, 1])] * 2
