"""Steps through padded graphs give the same results as steps without graphs."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from engine.protocol.config import CPUBackend, DeviceConfig
from engine.protocol.errors import EngineError
from engine.protocol.sampling_params import SamplingParams
from engine.workers.attention.torch_paged import TorchPagedAttention
from engine.workers.execution import torch_loader
from support.checkpoints.tiny import gemma3_gguf
from support.families import SMALL, make_reference, save_reference
from support.families.published import save_published
from support.gpu.graph_attention import GraphTorchPaged
from support.gpu.host_accelerator import HostAccelerator
from support.gpu.taped_graphs import TapedGraphs
from support.workers.worker_steps import Steps

pytestmark = pytest.mark.slow

EAGER = DeviceConfig(cpu_backend=CPUBackend.TORCH, enforce_eager=True)
SOME_STEPS = DeviceConfig(cpu_backend=CPUBackend.TORCH, max_cudagraph_capture_size=12)
ALL_STEPS = DeviceConfig(cpu_backend=CPUBackend.TORCH, max_cudagraph_capture_size=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Write a checkpoint with several KV-cache groups and a window that sequences exceed."""
    torch.set_num_threads(1)
    return gemma3_gguf(tmp_path_factory.mktemp("gemma3"))


def random_steps(steps: Steps, vocab_size: int, seed: int) -> list[list[int]]:
    """Return steps in which four slots are reused, prompts are split anywhere, and any requests take part."""
    rng = np.random.default_rng(seed)
    left: dict[int, int] = {}
    results = []
    for _ in range(40):
        free = [slot for slot in range(4) if slot not in left]
        new, removed = [], []
        if left and rng.random() < 0.15:
            removed.append(int(rng.choice(list(left))))
            del left[removed[0]]
        elif free and (not left or rng.random() < 0.4):
            length = int(rng.integers(1, 40))
            params = SamplingParams(temperature=float(rng.integers(2)), seed=len(results))
            slot = free[0]
            new.append(steps.new(slot, rng.integers(4, vocab_size, length).tolist(), params))
            left[slot] = length
        slots = sorted(slot for slot in left if rng.random() < 0.8)
        chunks = []
        for row, slot in enumerate(slots):
            count = min(left[slot], int(rng.integers(1, 20)))
            chunks.append((row, count))
            left[slot] = max(1, left[slot] - count)
        results.append(steps.tokens(slots=slots, chunks=chunks, new=new, removed=removed))
    return results


@pytest.mark.parametrize("device", [SOME_STEPS, ALL_STEPS], ids=["some steps", "all steps"])
def test_padding_and_previous_content_do_not_change_outputs(
    checkpoint, monkeypatch, device
) -> None:
    path, vocab_size = checkpoint[0], checkpoint[1].config.vocab_size
    plain = Steps(path, vocab_size, device=EAGER)
    expected = [random_steps(plain, vocab_size, seed) for seed in range(2)]
    monkeypatch.setattr(torch_loader, "attention_backend", GraphTorchPaged)
    accelerator = HostAccelerator()
    graphs = Steps(path, vocab_size, device=device, accelerator=accelerator)
    num_captured = accelerator.graphs.num_recorded
    assert [random_steps(graphs, vocab_size, seed) for seed in range(2)] == expected
    assert accelerator.graphs.num_recorded == num_captured
    assert accelerator.graphs.num_replayed > 40
    assert sum(map(len, expected[0])) > 20


# On a CPU, the tokens of several experts cannot be recorded.
ONE_EXPERT = {"num_experts_per_tok": 1}
# With recurrent layers, and with layers whose numbers of heads differ.
MODELS = {"mamba": {}, "mamba2": {}, "lfm2": {}, "qwen3.5": {}} | {
    "minimax": {"num_local_experts": 1} | ONE_EXPERT,
    "laguna": {"num_experts": 1} | ONE_EXPERT,
}


@pytest.mark.parametrize("name", MODELS)
def test_graphs_of_other_models_give_the_results_of_steps_without_graphs(
    name, tmp_path, monkeypatch
) -> None:
    """Requests pass the ends of segments and of blocks, and blocks are used again."""
    torch.set_num_threads(1)
    save_reference(make_reference(name, **MODELS[name]), tmp_path)
    vocab_size, blocks = SMALL["vocab_size"], {"block_size": 256, "max_model_len": 512}
    plain = Steps(tmp_path, vocab_size, device=EAGER, **blocks)
    expected = [random_steps(plain, vocab_size, seed) for seed in range(2)]
    monkeypatch.setattr(torch_loader, "attention_backend", GraphTorchPaged)
    accelerator = HostAccelerator()
    graphs = Steps(tmp_path, vocab_size, device=SOME_STEPS, accelerator=accelerator, **blocks)
    assert [random_steps(graphs, vocab_size, seed) for seed in range(2)] == expected
    assert accelerator.graphs.num_replayed > 20


@pytest.mark.parametrize("name", ["DeepseekV41", "LongcatFlashNgram"])
def test_embeddings_of_ngrams_read_the_earlier_tokens_of_a_request(
    name: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    save_published(name, tmp_path)
    vocab_size = SMALL["vocab_size"]
    expected = random_steps(Steps(tmp_path, vocab_size, device=EAGER), vocab_size, 1)
    device = Steps(tmp_path, vocab_size, device=EAGER, accelerator=HostAccelerator())
    assert random_steps(device, vocab_size, 1) == expected


def test_graphs_larger_than_all_slots_are_not_captured(checkpoint, monkeypatch) -> None:
    path, vocab_size = checkpoint[0], checkpoint[1].config.vocab_size
    monkeypatch.setattr(torch_loader, "attention_backend", GraphTorchPaged)
    said = []
    for device in (EAGER, ALL_STEPS):
        # Four slots of eight tokens, in steps of up to 64.
        accelerator = HostAccelerator()
        steps = Steps(path, vocab_size, device=device, accelerator=accelerator, max_model_len=8)
        new = [steps.new(slot, list(range(9 + slot, 16 + slot))) for slot in range(4)]
        chunks = [(row, 7) for row in range(4)]
        said.append(steps.tokens(slots=range(4), chunks=chunks, new=new))
    assert said[0] == said[1] and len(said[0]) == 4
    assert accelerator.graphs.num_replayed


def test_outputs_arrive_in_order_once_the_device_has_finished(checkpoint) -> None:
    path, vocab_size = checkpoint[0], checkpoint[1].config.vocab_size
    plain = Steps(path, vocab_size, device=EAGER)
    expected = [plain.tokens(slots=[0], chunks=[(0, 3)], new=[plain.new(0, [9, 8, 7])])]
    expected += [plain.tokens(), plain.tokens()]
    late = Steps(path, vocab_size, device=EAGER, accelerator=HostAccelerator())
    # The next step needs the tokens of the one before, and does not wait until the host has them.
    begun = [late.begin(slots=[0], chunks=[(0, 3)], new=[late.new(0, [9, 8, 7])])]
    begun += [late.begin(), late.begin()]
    assert not any(result.is_ready() for result in begun)
    assert all(result.is_ready() for result in begun)
    outputs = [result.output() for result in begun]
    assert [output.step for output in outputs] == [1, 2, 3]
    assert [np.frombuffer(o.sampled_token_ids, np.int32).tolist() for o in outputs] == expected


def test_attention_that_cannot_be_captured_runs_without_graphs(
    checkpoint, monkeypatch, caplog
) -> None:
    path, vocab_size = checkpoint[0], checkpoint[1].config.vocab_size
    monkeypatch.setattr(torch_loader, "attention_backend", TorchPagedAttention)
    accelerator = HostAccelerator()
    with caplog.at_level("INFO"):
        steps = Steps(path, vocab_size, device=SOME_STEPS, accelerator=accelerator)
    assert len(steps.tokens(slots=[0], chunks=[(0, 3)], new=[steps.new(0, [9, 8, 7])])) == 1
    assert not accelerator.graphs.num_recorded
    assert "no CUDA graphs: TorchPagedAttention cannot be captured" in caplog.text


class LivingGraphs(TapedGraphs):
    """Graphs that record which of them can still be launched."""

    def __init__(self) -> None:
        super().__init__()
        self.living: weakref.WeakSet[Any] = weakref.WeakSet()

    def end(self) -> Any:
        replay = super().end()
        self.living.add(replay)
        return replay


def test_graphs_are_deleted_before_connections_to_other_workers_are_closed(
    checkpoint, monkeypatch
) -> None:
    """NCCL waits until all graphs that contain its operations are deleted."""
    path, vocab_size = checkpoint[0], checkpoint[1].config.vocab_size
    monkeypatch.setattr(torch_loader, "attention_backend", GraphTorchPaged)
    accelerator = HostAccelerator()
    accelerator.graphs = graphs = LivingGraphs()
    steps = Steps(path, vocab_size, device=SOME_STEPS, accelerator=accelerator)
    assert len(steps.tokens(slots=[0], chunks=[(0, 3)], new=[steps.new(0, [9, 8, 7])])) == 1
    assert len(graphs.living) > 5
    steps.runner.close()
    assert not graphs.living


class FullDevice(TorchPagedAttention):
    """A device that runs out of memory in a step of eleven tokens."""

    def forward(self, q_THK, *arguments):
        if len(q_THK) == 11:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return super().forward(q_THK, *arguments)


def test_running_out_of_memory_ends_the_worker_with_the_remedy(checkpoint, monkeypatch) -> None:
    path, vocab_size = checkpoint[0], checkpoint[1].config.vocab_size
    monkeypatch.setattr(torch_loader, "attention_backend", FullDevice)
    steps = Steps(path, vocab_size, device=EAGER, accelerator=HostAccelerator())
    assert len(steps.tokens(slots=[0], chunks=[(0, 9)], new=[steps.new(0, [7] * 9)])) == 1
    with pytest.raises(EngineError, match=r"out of memory in step 2.*--max-num-batched-tokens"):
        steps.tokens(slots=[1], chunks=[(0, 11)], new=[steps.new(1, [7] * 11)])


class StreamMonitor(TorchPagedAttention):
    """Records the steps as the numbers of queries and keys of their requests."""

    steps: ClassVar[list[list[tuple[int, int]]]] = []

    def build(self, batch, windows):
        query_lens = np.diff(batch.query_start_loc).tolist()
        self.steps.append(list(zip(query_lens, batch.seq_lens.tolist(), strict=True)))
        return super().build(batch, windows)


def test_every_kind_of_step_is_warmed_up_before_the_first_request(checkpoint, monkeypatch) -> None:
    """Otherwise the first request that needs a kernel would wait for the compiler."""
    path, vocab_size = checkpoint[0], checkpoint[1].config.vocab_size
    monkeypatch.setattr(torch_loader, "attention_backend", StreamMonitor)
    Steps(path, vocab_size, device=EAGER, accelerator=HostAccelerator())
    for kind in ([(1, 1)], [(1, 1)] * 4, [(1, 127)], [(16, 16)] * 4):
        assert kind in StreamMonitor.steps
    numbers_of_tokens = {sum(queries for queries, _ in step) for step in StreamMonitor.steps}
    assert numbers_of_tokens >= {1, 2, 4, 8, 16, 32, 64}
