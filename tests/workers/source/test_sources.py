"""Encoder-decoder models give the logits of transformers, whatever shares the step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine.protocol.arrays import float32_view, int32_bytes, int32_view
from engine.protocol.config import CPUBackend, DeviceConfig
from engine.protocol.messages import EncoderInput
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import EncoderWork, ModelRunnerOutput
from support.host_accelerator import HostAccelerator
from support.source_checkpoints import MODELS, VOCAB_SIZE, greedy, logits, source, source_directory
from support.worker_steps import Steps

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
SCORED = SamplingParams(temperature=0, logprobs=-1)
BACKENDS = {
    "native": {"device": DeviceConfig(cpu_backend=CPUBackend.NATIVE)},
    "torch": {"device": DeviceConfig(cpu_backend=CPUBackend.TORCH)},
    "device": {
        "device": DeviceConfig(cpu_backend=CPUBackend.TORCH),
        "accelerator": HostAccelerator(),
    },
}


def encode(*rows: tuple[int, int]) -> EncoderWork:
    """Return the work to compute inputs, given as (slot, index)."""
    return EncoderWork(computed=int32_bytes([number for row in rows for number in row]))


def scores(output: ModelRunnerOutput) -> list[np.ndarray]:
    """Return the log-probabilities of each row, by token."""
    found = []
    for row in output.logprobs:
        of_row = np.empty(VOCAB_SIZE, np.float32)
        of_row[int32_view(row.token_ids)] = float32_view(row.logprobs)
        found.append(of_row)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_those_of_transformers(tmp_path, kind, backend):
    path, model = source_directory(tmp_path, kind)
    steps = Steps(path, VOCAB_SIZE, block_size=16, **BACKENDS[backend])
    sources = [
        source(model, seed, length) for seed, length in ((0, 0), (1, 37 if "t" in kind else 2000))
    ]
    prompts = [[3, 5, 7, 11], [3, 8]]

    def new(slot: int, inputs: list[EncoderInput]):
        return steps.new(slot, prompts[slot], SCORED, inputs=inputs)

    texts = [list(prompt) for prompt in prompts]

    def check(output: ModelRunnerOutput, slots: list[int]) -> None:
        tokens = int32_view(output.sampled_token_ids).tolist()
        for slot, found, token in zip(slots, scores(output), tokens, strict=True):
            expected = logits(model, sources[slot][0], texts[slot])[-1].log_softmax(-1)
            np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)
            texts[slot].append(token)

    new_a = new(0, [sources[0][1]])
    check(steps.run(slots=[0], chunks=[(0, 4)], new=[new_a], encoders=encode((0, 0))), [0])
    # The second prompt is computed in chunks, beside a request that decodes.
    new_b = new(1, [sources[1][1]])
    check(steps.run(slots=[0, 1], new=[new_b], encoders=encode((1, 0))), [0])
    for _ in range(20):
        check(steps.run(slots=[0, 1]), [0, 1])
    for slot in (0, 1):
        expected = greedy(model, sources[slot][0], prompts[slot], 20)
        assert texts[slot][len(prompts[slot]) :][:20] == expected
