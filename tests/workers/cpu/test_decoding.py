"""A step in which the whole batch decodes is one native call with the same results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine.protocol.arrays import int32_bytes
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import NewRequestData, SchedulerOutput
from engine.workers.batch import PersistentBatch
from engine.workers.cpu.decoder import NativeDecoder
from support.checkpoints.tiny import gemma3_gguf
from support.workers.native_decoders import BLOCK_SIZE, native_decoder, small_spec
from support.workers.worker_steps import GREEDY, Steps

torch.set_num_threads(1)

PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=1.2, top_k=30, top_p=0.9, seed=2),
    SamplingParams(temperature=0.8, min_p=0.02, seed=3),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Write a checkpoint with two kinds of layers, and therefore several KV-cache groups."""
    return gemma3_gguf(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture
def steps(checkpoint) -> Steps:
    path, model = checkpoint
    steps = Steps(path, model.config.vocab_size, BLOCK_SIZE)
    assert isinstance(steps.runner.model, NativeDecoder) and steps.num_groups > 1
    return steps


@pytest.mark.parametrize("params", [[GREEDY] * 4, PARAMS], ids=["greedy", "sampled"])
def test_decoded_tokens_equal_those_after_a_prompt_of_all_tokens_so_far(steps, params):
    prompts = [list(range(20, 20 + length)) for length in (1, 15, 16, 29)]
    tokens = [list(prompt) for prompt in prompts]

    def run(batch: list[int], is_named: bool = True, **changes) -> None:
        sampled = steps.tokens(slots=batch if is_named else None, **changes)
        for slot, token in zip(batch, sampled, strict=True):
            tokens[slot].append(token)

    batch = [2, 0, 3, 1]
    new = [steps.new(slot, prompts[slot], params[slot]) for slot in range(4)]
    run(batch, new=new, chunks=[(row, len(prompts[slot])) for row, slot in enumerate(batch)])
    for _ in range(18):
        run(batch, is_named=False)
    # One request leaves and returns, as after a preemption.
    run([2, 0, 1], removed=[3])
    run([2, 0, 1], is_named=False)
    resumed = steps.new(3, tokens[3], params[3], prompt=len(prompts[3]))
    run([2, 0, 1, 3], chunks=[(3, len(tokens[3]))], new=[resumed])
    run([0, 3, 1, 2])
    run([0, 3, 1, 2], is_named=False)
    for slot, whole in enumerate(tokens):
        for length in range(len(prompts[slot]), len(whole)):
            prompt = steps.new(slot, whole[:length], params[slot])
            chunks = [(0, length)]
            assert steps.tokens(slots=[slot], chunks=chunks, new=[prompt]) == [whole[length]]


def test_prompt_logprobs_are_complete_if_the_last_token_is_computed_alone(steps: Steps) -> None:
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    steps.run(slots=[0], chunks=[(0, 4)], new=[steps.new(0, [20, 21, 22, 23, 24], params)])
    positions = [part.num_positions for part in steps.run().prompt_logprobs]
    assert sum(positions) == 4
    assert steps.run().prompt_logprobs == []


class Decoding:
    """Requests with one token to compute, over an empty cache."""

    def __init__(self, decoder: NativeDecoder, requests: list[list[int]], max_model_len: int = 64):
        num_slots = len(requests)
        self.batch = PersistentBatch(num_slots, max_model_len, BLOCK_SIZE, 1, torch.device("cpu"))
        self.sampler = decoder.make_sampler(self.batch)
        for slot, tokens in enumerate(requests):
            request = NewRequestData(
                slot=slot,
                request_id=(0, slot),
                token_ids=int32_bytes(tokens),
                num_prompt_tokens=1,
                num_computed_tokens=len(tokens) - 1,
                block_ids=(int32_bytes([1 + slot]),),
                sampling_params=GREEDY,
            )
            self.batch.apply_output(SchedulerOutput(1, new_requests=[request]))
        shape = decoder.attention.kv_cache_shape(1 + num_slots)
        self.kv_caches = [torch.zeros(shape) for _ in decoder.spec.layers]
        self._decoding = decoder.decoding(self.batch, self.kv_caches)

    def step(self) -> tuple[list[int], int]:
        assert self._decoding is not None
        slots = np.arange(self.batch.num_slots, dtype=np.int32)
        decoded = self._decoding.step(self.sampler.describe(slots))
        return decoded.tokens_K.tolist(), decoded.num_failed


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return native_decoder(small_spec(), tmp_path_factory.mktemp("checkpoint"))


def test_a_row_of_nans_fails_alone_and_continues_with_token_0(decoder) -> None:
    (alone,), _ = Decoding(decoder, [[5, 6, 7]]).step()
    both = Decoding(decoder, [[8, 9], [5, 6, 7]])
    both.kv_caches[1][1] = torch.nan
    assert both.step() == ([-1, alone], 1)
    assert both.batch.token_ids_NL[0, :3].tolist() == [8, 9, 0]
    assert both.batch.token_ids_NL[1, :4].tolist() == [5, 6, 7, alone]
    assert both.batch.num_tokens.tolist() == [3, 4]
    assert both.batch.num_computed_tokens.tolist() == [2, 3]


@pytest.mark.parametrize("tokens", [[5, 97], [5, -1], [5] * 16])
def test_requests_that_cannot_decode_are_rejected_unchanged(decoder, tokens) -> None:
    decoding = Decoding(decoder, [[5, 6], tokens], max_model_len=16)
    with pytest.raises(ValueError, match=r"slots \[0, 1\]"):
        decoding.step()
    assert decoding.batch.num_tokens.tolist() == [2, len(tokens)]
