"""Every drafting method changes only the number of steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.config import CPUBackend, DeviceConfig, ProposerMethod, SpeculativeConfig
from engine.protocol.errors import ConfigError
from engine.protocol.pooling_params import PoolingKind, PoolingParams
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import ModelRunnerOutput
from engine.workers.execution import torch_loader
from support.checkpoints.tiny import QWEN3, gemma3_gguf, layers_directory, qwen3_directory
from support.drafts.draft_heads import write_eagle3_head, write_eagle_head
from support.gpu.graph_attention import GraphTorchPaged
from support.gpu.host_accelerator import HostAccelerator
from support.workers.native_decoders import BLOCK_SIZE
from support.workers.worker_steps import GREEDY, Steps
from transformers import LlamaConfig

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

PARAMS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=2),
    "penalties": SamplingParams(
        temperature=0.7,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        seed=1,
        bad_words_token_ids=((5, 6), (7,)),
        min_tokens=20,
        stop_token_ids=tuple(range(60)),
    ),
    "logprobs": SamplingParams(temperature=0.6, seed=3, logprobs=2),
}
PROMPTS = [[20, 21, 22], list(range(20, 35)), [30, 31, 32, 33] * 4, list(range(40, 69))]
TORCH = {"device": DeviceConfig(cpu_backend=CPUBackend.TORCH)}
NUM_OUTPUT = 40
NUM_DRAFTS = 5
EMBEDDED = len(PROMPTS)
"""The slot of a text that is embedded."""


class Received(NamedTuple):
    """The tokens of each request and the log-probabilities of the last one."""

    tokens: list[list[int]]
    logprobs: list[bytes]


class Checkpoints(NamedTuple):
    target: tuple[object, int]
    other: tuple[object, int]
    head: object
    eagle3: object


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Checkpoints:
    """Write two models with one tokenizer, and a head. The first one's layers have several KV-cache groups."""
    target, target_model = gemma3_gguf(tmp_path_factory.mktemp("target"))
    other, other_model = qwen3_directory(tmp_path_factory.mktemp("other"))
    head = tmp_path_factory.mktemp("head")
    vocab_size = target_model.config.vocab_size
    write_eagle_head(head, LlamaConfig(**QWEN3 | {"vocab_size": vocab_size}))
    eagle3 = tmp_path_factory.mktemp("eagle3")
    write_eagle3_head(eagle3, target_model.config, 100, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    return Checkpoints((target, vocab_size), (other, other_model.config.vocab_size), head, eagle3)


def make_steps(
    model: tuple[object, int], speculative: SpeculativeConfig | None, **options: Any
) -> Steps:
    options = {"block_size": BLOCK_SIZE, "num_slots": EMBEDDED + 1} | options
    return Steps(*model, speculative=speculative, **options)


def take(received: Received, result: ModelRunnerOutput, slots: list[int]) -> int:
    """Add the tokens of a step. Return how many drafts were correct."""
    counts = int32_view(result.num_sampled).tolist() or [1] * len(slots)
    tokens = iter(int32_view(result.sampled_token_ids).tolist())
    for slot, count in zip(slots, counts, strict=True):
        received.tokens[slot] += [next(tokens) for _ in range(count)]
    for row in result.logprobs:
        width = len(row.logprobs) // row.num_positions
        received.logprobs.extend(
            row.logprobs[k * width : (k + 1) * width] for k in range(row.num_positions)
        )
    return sum(counts) - len(slots)


def generate(
    steps: Steps, *, num_drafts: int = NUM_DRAFTS, resumes: bool = False
) -> tuple[Received, int, int]:
    """Return the output of four requests, and how many drafts were verified and how many were correct.

    A prompt is computed in two steps. With `resumes`, a request is preempted and continues in its blocks. The others
    have drafts in that step, which also embeds a text.
    """
    received = Received([[] for _ in PROMPTS], [])
    slots = list(range(len(PROMPTS)))
    params = list(PARAMS.values())
    new = [steps.new(slot, PROMPTS[slot], params[slot]) for slot in slots]
    chunks = [(slot, len(PROMPTS[slot])) for slot in slots]
    chunks[3] = (3, 16)
    take(received, steps.run(slots=slots, new=new, chunks=chunks), slots[:3])
    take(received, steps.run(chunks=[(3, len(PROMPTS[3]) - 16)]), slots)
    num_verified = num_right = 0
    removed: list[int] = []
    while slots := [slot for slot in slots if len(received.tokens[slot]) < NUM_OUTPUT]:
        if resumes and len(received.tokens[1]) > 12:
            resumes = False
            known = PROMPTS[1] + received.tokens[1]
            again = steps.new(1, known, params[1], prompt=len(PROMPTS[1]))
            again.num_computed_tokens = BLOCK_SIZE
            drafted = [(row, num_drafts) for row, slot in enumerate(slots) if slot != 1]
            result = steps.run(
                slots=[*slots, EMBEDDED],
                removed=[1],
                new=[
                    again,
                    steps.new(
                        EMBEDDED,
                        PROMPTS[1],
                        pooling=PoolingParams(PoolingKind.LAST, computes_whole_prompt=False),
                    ),
                ],
                chunks=[
                    *((row, count + 1) for row, count in drafted),
                    (slots.index(1), len(known) - BLOCK_SIZE),
                    (len(slots), len(PROMPTS[1])),
                ],
                drafts=int32_bytes(drafted) if num_drafts else b"",
            )
            assert [row.slot for row in result.pooled] == [EMBEDDED]
            if num_drafts:
                assert int32_view(result.num_verified).tolist() == [0] * (len(slots) + 1)
            result.sampled_token_ids = result.sampled_token_ids[:-4]
            take(received, result, slots)
            removed = [EMBEDDED]
            continue
        options: dict[str, Any] = {"removed": removed}
        removed = []
        if num_drafts:
            rows = range(len(slots))
            options |= {
                "chunks": [(row, num_drafts + 1) for row in rows],
                "drafts": int32_bytes([(row, num_drafts) for row in rows]),
            }
        result = steps.run(slots=slots, **options)
        num_verified += int(int32_view(result.num_verified).sum())
        num_right += take(received, result, slots)
    assert not resumes
    tokens = [row[:NUM_OUTPUT] for row in received.tokens]
    return Received(tokens, received.logprobs[:NUM_OUTPUT]), num_verified, num_right


@pytest.fixture(scope="module")
def plain(checkpoints) -> dict[str, Received]:
    return {
        name: generate(make_steps(getattr(checkpoints, name), None), num_drafts=0)[0]
        for name in ("target", "other")
    }


def method(name: str, **fields) -> SpeculativeConfig:
    return SpeculativeConfig(NUM_DRAFTS, ProposerMethod(name), **fields)


@pytest.mark.parametrize("resumes", (False, True), ids=("alone", "resumed"))
@pytest.mark.parametrize("name", ["ngram", "suffix", "draft_model", "eagle", "eagle3"])
def test_drafts_change_no_token(checkpoints, plain, name, resumes):
    models = {
        "draft_model": checkpoints.other[0],
        "eagle": checkpoints.head,
        "eagle3": checkpoints.eagle3,
    }
    fields = {"model": str(models[name])} if name in models else {}
    steps = make_steps(checkpoints.target, method(name, **fields))
    received, num_verified, num_right = generate(steps, resumes=resumes)
    assert received == plain["target"]
    assert num_right <= num_verified
    assert num_verified > 0


@pytest.fixture(scope="module")
def in_torch(checkpoints) -> Received:
    return generate(make_steps(checkpoints.target, None, **TORCH), num_drafts=0)[0]


def check_drafts_in_torch(steps: Steps, expected: Received) -> None:
    received, num_verified, num_right = generate(steps, resumes=True)
    assert received.tokens == expected.tokens
    assert len(received.logprobs) == len(expected.logprobs)
    assert 0 < num_right <= num_verified


@pytest.mark.parametrize("name", ["suffix", "draft_model"])
def test_drafts_of_models_in_torch_change_no_token(checkpoints, in_torch, name):
    fields = {"model": str(checkpoints.other[0])} if name == "draft_model" else {}
    check_drafts_in_torch(make_steps(checkpoints.target, method(name, **fields), **TORCH), in_torch)


@pytest.mark.parametrize("name", ["suffix", "draft_model", "eagle3"])
def test_drafts_on_a_device_change_no_token(checkpoints, in_torch, monkeypatch, name):
    """Some requests of a step sample from all of its rows at once, others do not. Draft models use graphs as well."""
    models = {"draft_model": checkpoints.other[0], "eagle3": checkpoints.eagle3}
    fields = {"model": str(models[name])} if name in models else {}
    monkeypatch.setattr(torch_loader, "attention_backend", GraphTorchPaged)
    accelerator = HostAccelerator()
    steps = make_steps(
        checkpoints.target,
        method(name, **fields),
        accelerator=accelerator,
        num_slots=24,
        **TORCH,
    )
    check_drafts_in_torch(steps, in_torch)
    assert accelerator.graphs.num_replayed > 0


@pytest.mark.parametrize("backend", [CPUBackend.NATIVE, CPUBackend.TORCH])
def test_drafts_do_not_change_tokens_of_recurrent_models(tmp_path, backend):
    """The blocks and segments of states limit the drafts."""
    path, model = layers_directory(tmp_path, "delta net")
    target = path, model.config.vocab_size
    options = {"device": DeviceConfig(cpu_backend=backend), "block_size": 96}
    expected, _, _ = generate(make_steps(target, None, **options), num_drafts=0)
    other, _ = qwen3_directory(tmp_path / "other")
    for name, fields in (("suffix", {}), ("draft_model", {"model": str(other)})):
        steps = make_steps(target, method(name, **fields), **options)
        received, num_verified, _ = generate(steps)
        assert received.tokens == expected.tokens
        assert num_verified > 0


@pytest.mark.parametrize("name", ["other", "target"])
def test_every_draft_of_an_equal_model_is_right(checkpoints, plain, name):
    """Its tokens are drawn with the same parameters and random numbers, also after a request was resumed.

    Layers of one model have windows.
    """
    model = getattr(checkpoints, name)
    steps = make_steps(model, method("draft_model", model=str(model[0])))
    received, num_verified, num_right = generate(steps, resumes=True)
    assert received == plain[name]
    assert num_verified == num_right > 3 * NUM_OUTPUT // 2


def test_requests_without_a_limit_get_no_drafts(checkpoints, plain):
    """A draft model computes what it missed once a request may have drafts again."""
    steps = make_steps(checkpoints.other, method("draft_model", model=str(checkpoints.other[0])))
    limits = int32_bytes([(0, 0)])
    result = steps.run(
        slots=[0], new=[steps.new(0, PROMPTS[1])], chunks=[(0, 15)], draft_limits=limits
    )
    tokens = int32_view(result.sampled_token_ids).tolist()
    for _ in range(20):
        result = steps.run()
        assert result.drafts is None
        tokens += int32_view(result.sampled_token_ids).tolist()
    result = steps.run(draft_limits=int32_bytes([(0, 3)]))
    tokens += int32_view(result.sampled_token_ids).tolist()
    assert int32_view(result.drafts.num_tokens).tolist() == [3]
    result = steps.run(chunks=[(0, 4)], drafts=int32_bytes([(0, 3)]))
    assert int32_view(result.num_sampled).tolist() == [4]
    tokens += int32_view(result.sampled_token_ids).tolist()
    alone = make_steps(checkpoints.other, None)
    result = alone.run(slots=[0], new=[alone.new(0, PROMPTS[1])], chunks=[(0, 15)])
    expected = int32_view(result.sampled_token_ids).tolist()
    while len(expected) < len(tokens):
        expected += int32_view(alone.run().sampled_token_ids).tolist()
    assert tokens == expected


def test_suffix_drafts_come_from_answers_of_earlier_requests(checkpoints):
    steps = make_steps(checkpoints.other, method("suffix"))

    def answer() -> tuple[list[int], int]:
        removed = [0] if steps.step else []
        new = steps.new(0, PROMPTS[3])
        result = steps.run(slots=[0], removed=removed, new=[new], chunks=[(0, len(PROMPTS[3]))])
        tokens, num_steps = int32_view(result.sampled_token_ids).tolist(), 1
        while len(tokens) < 30:
            counts = int32_bytes([(0, NUM_DRAFTS)])
            result = steps.run(chunks=[(0, NUM_DRAFTS + 1)], drafts=counts)
            tokens += int32_view(result.sampled_token_ids).tolist()
            num_steps += 1
        return tokens[:30], num_steps

    first, many = answer()
    again, few = answer()
    assert again == first
    assert few < many
    assert few <= 10


def test_models_that_cannot_draft_are_refused(checkpoints, tmp_path):
    recurrent, _ = layers_directory(tmp_path, "delta net")
    with pytest.raises(ConfigError, match="layers other than attention"):
        make_steps(checkpoints.other, method("draft_model", model=str(recurrent)))
