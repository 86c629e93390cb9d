"""The model runner gives the tokens of a transformers model for the deltas of steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine.protocol.arrays import float32_view, int32_bytes, int32_view
from engine.protocol.config import CPUBackend, DeviceConfig
from engine.protocol.pooling_params import PoolingKind, PoolingParams
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import NewRequestData, SchedulerOutput
from engine.workers.execution import torch_loader
from support.checkpoints.tiny import qwen3_directory
from support.families import SMALL, make_reference, save_reference
from support.gpu.graph_attention import GraphTorchPaged
from support.gpu.host_accelerator import HostAccelerator
from support.workers.worker_steps import Steps, output_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return qwen3_directory(tmp_path_factory.mktemp("qwen3"))


def captured(size: int) -> DeviceConfig:
    return DeviceConfig(cpu_backend=CPUBackend.TORCH, max_cudagraph_capture_size=size)


EAGER = DeviceConfig(cpu_backend=CPUBackend.TORCH, enforce_eager=True)


@pytest.fixture(params=["host", "eager device", "chunk graphs", "decode graphs"])
def steps(request, monkeypatch, checkpoint) -> Steps:
    """Return a runner with graphs of up to 12 tokens, so that some steps are padded and some are too large."""
    path, model = checkpoint
    if request.param == "host":
        return Steps(path, model.config.vocab_size)
    device = EAGER if request.param == "eager device" else captured(12)
    if request.param == "decode graphs":
        monkeypatch.setattr(torch_loader, "attention_backend", GraphTorchPaged)
    return Steps(path, model.config.vocab_size, device=device, accelerator=HostAccelerator())


def greedy(model, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_decodes_next_to_prompt_chunks_use_the_sampled_tokens(steps: Steps, checkpoint) -> None:
    a, b = [5, 6, 7, 8, 9], list(range(20, 33))
    expected_a, expected_b = greedy(checkpoint[1], a, 6), greedy(checkpoint[1], b, 4)
    got_a = steps.tokens(slots=[0], chunks=[(0, 5)], new=[steps.new(0, a)])
    got_b: list[int] = []
    # The long prompt is computed in three chunks while the other request decodes.
    got_a += steps.tokens(slots=[0, 2], chunks=[(1, 6)], new=[steps.new(2, b)])
    got_a += steps.tokens(slots=[0, 2], chunks=[(1, 6)])
    for _ in range(3):
        token_a, token_b = steps.tokens(slots=None if got_b else [0, 2])
        got_a.append(token_a)
        got_b.append(token_b)
    assert got_a == expected_a
    assert got_b == expected_b[:3]


@pytest.mark.parametrize("kind", [PoolingKind.CLS, PoolingKind.LAST, PoolingKind.MEAN])
def test_pooled_prompts_share_steps_with_generation(
    steps: Steps, checkpoint, kind: PoolingKind
) -> None:
    a, b, c = [5, 6, 7, 8, 9], list(range(20, 33)), [40]
    expected = greedy(checkpoint[1], a, 4)

    def pooled(slot: int, prompt: list[int]) -> NewRequestData:
        new = steps.new(slot, prompt)
        new.pooling_params = PoolingParams(kind, kind is not PoolingKind.LAST)
        return new

    got = steps.tokens(slots=[0], chunks=[(0, 5)], new=[steps.new(0, a)])
    first = steps.run(slots=[0, 2], chunks=[(1, 6)], new=[pooled(2, b)])
    # The prompt ends beside another that has one token.
    second = steps.run(slots=[0, 2, 1], chunks=[(1, 7)], new=[pooled(1, c)])
    assert not first.pooled
    assert [row.slot for row in second.pooled] == [2, 1]
    for row, prompt in zip(second.pooled, (b, c), strict=True):
        with torch.no_grad():
            hidden = checkpoint[1].model(torch.tensor([prompt])).last_hidden_state[0]
        wanted = {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0)}[kind]
        np.testing.assert_allclose(float32_view(row.vector), wanted, atol=1e-4)
    got += [int32_view(first.sampled_token_ids)[0], int32_view(second.sampled_token_ids)[0]]
    assert int32_view(second.sampled_token_ids)[1:].tolist() == [0, 0]
    got += steps.tokens(slots=[0], removed=[1, 2])
    assert got == expected


def test_a_resumed_request_continues_with_the_same_tokens(steps: Steps, checkpoint) -> None:
    prompt = [40, 41, 42]
    expected = greedy(checkpoint[1], prompt, 8)
    got = steps.tokens(slots=[1], chunks=[(0, 3)], new=[steps.new(1, prompt)])
    for _ in range(3):
        got += steps.tokens()
    resumed = steps.new(3, prompt + got, prompt=3)
    got += steps.tokens(slots=[3], chunks=[(0, 7)], new=[resumed], removed=[1])
    for _ in range(3):
        got += steps.tokens()
    assert got == expected


def test_a_held_request_continues_under_another_core(steps: Steps, checkpoint) -> None:
    a, b, c = [40, 41, 42], list(range(20, 33)), [7, 8]
    expected = greedy(checkpoint[1], a, 6), greedy(checkpoint[1], b, 2)
    got_a = steps.tokens(slots=[0], chunks=[(0, 3)], new=[steps.new(0, a)])
    got_a += steps.tokens(slots=[0, 1], chunks=[(1, 10)], new=[steps.new(1, b)])
    steps.run(slots=[2], chunks=[(0, 2)], new=[steps.new(2, c)])
    steps.run(slots=[], removed=[2])
    first, second = steps.runner.release_requests()
    assert (first.request_id, first.num_computed_tokens) == ((0, 0), 4)
    assert (second.request_id, second.num_computed_tokens) == ((0, 1), 10)
    assert [len(held.block_ids[0]) // 4 for held in (first, second)] == [1, 3]
    assert steps.runner.release_requests() == []

    # Each takes the other's slot, and the last of the first one's two tokens was not received.
    a_again, b_again = steps.new(1, a + got_a[:1], prompt=3), steps.new(0, b)
    a_again.num_computed_tokens, a_again.block_ids = 3, steps.new(0, a).block_ids
    b_again.num_computed_tokens, b_again.block_ids = 10, steps.new(1, b).block_ids
    token_b, token_a = steps.tokens(slots=[0, 1], chunks=[(0, 3)], new=[a_again, b_again])
    assert token_a == got_a[1]
    got_a, got_b = [got_a[0], token_a], [token_b]
    for _ in range(4):
        token_b, token_a = steps.tokens()
        got_a.append(token_a)
        got_b.append(token_b)
    assert (got_a, got_b[:2]) == expected


def test_a_cache_of_one_block_has_room_for_all_layers_that_share_a_tensor(tmp_path) -> None:
    # Three layers with latent keys, and two with another size.
    save_reference(make_reference("dots3-note"), tmp_path)
    # The memory profile computes steps with one block.
    Steps(tmp_path, SMALL["vocab_size"], device=EAGER, accelerator=HostAccelerator())


def test_empty_steps_get_an_output(steps: Steps) -> None:
    result = steps.run(slots=[])
    assert result.step == 1 and result.sampled_token_ids == b""


def test_block_updates_change_the_block_table_of_a_request(steps: Steps, checkpoint) -> None:
    prompt = [50, 51, 52, 53]
    expected = greedy(checkpoint[1], prompt, 6)
    new = steps.new(0, prompt)
    new.block_ids = (int32_bytes([90]),)
    got = steps.tokens(slots=[0], chunks=[(0, 4)], new=[new])
    for index, block in ((1, 77), (2, 15)):
        output = SchedulerOutput(index + 1, block_updates=int32_bytes([[0, 0, index, block]]))
        result = output_of(steps.runner.execute(output, lambda step: None))
        got += int32_view(result.sampled_token_ids).tolist()
        for number in range(3):
            if len(got) < 6:
                steps.step = 10 * index + number
                got += steps.tokens()
    assert got == expected
    # Memory is populated for the blocks in use, and not again when they are assigned again.
    assert steps.runner.kv_cache.num_used_blocks == 91


def test_3_10_a_request_continues_from_offloaded_blocks(steps: Steps, checkpoint) -> None:
    prompt = list(range(30, 41))
    expected = greedy(checkpoint[1], prompt, 6)
    got = steps.tokens(slots=[0], chunks=[(0, 11)], new=[steps.new(0, prompt)])
    got += steps.tokens()
    got += steps.tokens()
    # 13 tokens are computed, three full blocks: they go out, and another request takes their place.
    other = steps.new(1, list(range(50, 63)))
    other.block_ids = (int32_bytes([1, 2, 3, 4]),)
    copies_out = int32_bytes([(1, 5), (2, 0), (3, 6)])
    steps.run(slots=[1], chunks=[(0, 13)], new=[other], removed=[0], host_copies_out=copies_out)
    resumed = steps.new(2, prompt + got, prompt=11)
    resumed.block_ids = (int32_bytes([9, 8, 7, 6, 5]),)
    resumed.num_computed_tokens = 12
    copies_in = int32_bytes([(5, 9), (0, 8), (6, 7)])
    got += steps.tokens(
        slots=[2], chunks=[(0, 2)], new=[resumed], removed=[1], host_copies_in=copies_in
    )
    got += steps.tokens()
    got += steps.tokens()
    assert got == expected


def test_prompt_logprobs_are_sent_once_with_the_first_token(steps: Steps, checkpoint) -> None:
    prompt = [60, 61, 62, 63, 64, 65, 66]
    params = SamplingParams(temperature=0, prompt_logprobs=2, logprobs=1)
    first = steps.run(slots=[0], chunks=[(0, 4)], new=[steps.new(0, prompt, params)])
    assert first.prompt_logprobs == [] and first.sampled_token_ids == b""
    second = steps.run(slots=[0], chunks=[(0, 3)])
    assert steps.run().prompt_logprobs == []
    with torch.no_grad():
        logits = checkpoint[1](torch.tensor([prompt])).logits[0].log_softmax(-1)
    scores = [
        float32_view(part.logprobs).reshape(part.num_positions, 3)[:, 0]
        for part in second.prompt_logprobs
    ]
    expected = [float(logits[i, prompt[i + 1]]) for i in range(6)]
    assert np.allclose(np.concatenate(scores), expected, atol=1e-4)
    (row,) = second.logprobs
    assert row.slot == 0 and np.isclose(
        float32_view(row.logprobs)[0], float(logits[-1].max()), atol=1e-4
    )


def test_grammar_bitmask_is_applied_before_sampling(steps: Steps, checkpoint) -> None:
    vocab_size = checkpoint[1].config.vocab_size
    allowed = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    allowed[123] = 1
    words = np.packbits(allowed, bitorder="little").view(np.int32)
    prompts = [steps.new(slot, [70 + slot, 71, 72]) for slot in (0, 1)]
    tokens = steps.tokens(
        slots=[0, 1], chunks=[(0, 3), (1, 3)], new=prompts, grammar=([1], [words])
    )
    assert tokens[1] == 123
    assert tokens[0] == greedy(checkpoint[1], [70, 71, 72], 1)[0]
