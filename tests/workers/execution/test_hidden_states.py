"""Steps return the hidden states of the tokens that they compute, also those of accepted drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine.protocol.arrays import float32_view, int32_bytes, int32_view
from engine.protocol.config import (
    CPUBackend,
    DeviceConfig,
    HiddenStatesConfig,
    ProposerMethod,
    SpeculativeConfig,
)
from engine.protocol.errors import ConfigError
from engine.protocol.sampling_params import ReturnedStates, SamplingParams, StatesOf
from engine.protocol.worker_messages import ModelRunnerOutput
from engine.workers.execution import torch_loader
from support.checkpoints.tiny import qwen3_directory
from support.gpu.graph_attention import GraphTorchPaged
from support.gpu.host_accelerator import HostAccelerator
from support.workers.worker_steps import Steps

PROMPT = list(range(20, 37))
NGRAM = SpeculativeConfig(3, ProposerMethod.NGRAM)


def rows(output: ModelRunnerOutput, width: int) -> dict[int, np.ndarray]:
    """Return the states by position."""
    return {
        each.first + index: row
        for each in output.pooled
        for index, row in enumerate(float32_view(each.vector).reshape(-1, width))
    }


@pytest.mark.parametrize("layers", [(), (0, 2)], ids=["normed", "layers"])
@pytest.mark.parametrize("place", ["native", "torch", "device"])
def test_states_are_those_of_accepted_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, layers: tuple[int, ...]
) -> None:
    _, model = qwen3_directory(tmp_path)
    monkeypatch.setattr(torch_loader, "attention_backend", GraphTorchPaged)
    device = DeviceConfig(cpu_backend=CPUBackend.NATIVE if place == "native" else CPUBackend.TORCH)
    steps = Steps(
        tmp_path,
        model.config.vocab_size,
        block_size=16,
        device=device,
        accelerator=HostAccelerator() if place == "device" else None,
        speculative=NGRAM,
        hidden_states=HiddenStatesConfig(layers=layers),
    )
    params = SamplingParams(temperature=0, returned_states=ReturnedStates(StatesOf.ALL))
    width = model.config.hidden_size * max(1, len(layers))
    with torch.no_grad():
        tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
        outputs = model.model(tokens, output_hidden_states=True)
    expected = outputs.last_hidden_state
    if layers:
        expected = torch.cat([outputs.hidden_states[layer] for layer in layers], -1)
    found = rows(steps.run(slots=[0], new=[steps.new(0, PROMPT, params)], chunks=[(0, 9)]), width)
    found |= rows(steps.run(chunks=[(0, len(PROMPT) - 9)]), width)
    following = tokens[0, len(PROMPT) :].tolist()
    for right, wrong in ((0, 2), (2, 0), (1, 1)):
        begin = len(found) - len(PROMPT) + 1
        drafts = [*following[begin : begin + right], *([0] * wrong)]
        counts = int32_bytes([(0, len(drafts))])
        ids = int32_bytes(drafts)
        chunks = [(0, len(drafts) + 1)]
        result = steps.run(chunks=chunks, drafts=counts, draft_token_ids=ids)
        added = rows(result, width)
        assert len(added) == len(int32_view(result.sampled_token_ids))
        found |= added
    states = np.stack([found[position] for position in range(len(found))])
    # The native program verifies no drafts in steps that return states.
    assert len(states) == len(PROMPT) + (3 if place == "native" else 6)
    torch.testing.assert_close(
        torch.from_numpy(states), expected[0, : len(states)], rtol=1e-4, atol=1e-4
    )


def test_layers_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    _, model = qwen3_directory(tmp_path)
    with pytest.raises(ConfigError, match="layer 4 do not exist: layers are 0 to 3"):
        Steps(
            tmp_path,
            model.config.vocab_size,
            block_size=16,
            hidden_states=HiddenStatesConfig(layers=(1, 4)),
        )
