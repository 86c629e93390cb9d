"""Check that a model generates the same on a GPU as on a CPU, with every way of running a step.

Some requests have prompts that are computed in chunks while others decode. Tokens are the most likely ones, or sampled.
In float32, they must equal the tokens of plain torch on a CPU. In bfloat16, a model with random weights occasionally
takes another token, so the log-probabilities up to that token are compared.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine.protocol.arrays import float32_view, int32_bytes, int32_view
from engine.protocol.config import (
    CacheConfig,
    CPUBackend,
    Device,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from engine.protocol.config.cache import KVCacheDtype
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.workers.device.device import open_device
from engine.workers.execution.model_runner import ModelRunner
from engine.workers.loaders import open_checkpoint
from on_gpu.shapes import Shape, packed_integers
from safetensors.torch import save_file

MODEL = Shape("qwen3", 4096, 512, 1024, 4, 8, 2, 128, True)
TINY_MODEL = Shape("qwen3", 512, 64, 128, 2, 4, 2, 16, True)
LONGEST = 2
NUM_MOVED = 20
"""Number of blocks of the longest prompt, which are filled by its first two chunks."""

NUM_DRAFTS = 3
GROUP_SIZE = 32
"""Columns per scale in 4 bits, as in GGUF: so few that each group is scaled before the product."""

INPUT_SCALE = 0.05
"""Scale of the inputs of static float8 products, which are at most 22."""


@dataclass(frozen=True)
class Prompts:
    """Random prompts of several lengths, each with its own blocks of every KV-cache group.

    At most `chunk` tokens of a prompt are computed in one step.
    """

    lengths: tuple[int, ...] = (3, 1, 700, 40, 16, 290)
    max_model_len: int = 1024
    chunk: int = 250
    block_size: int = 16

    @property
    def blocks_each(self) -> int:
        return self.max_model_len // self.block_size

    def num_blocks(self, num_groups: int) -> int:
        return 1 + len(self.lengths) * num_groups * self.blocks_each

    def request(self, slot: int, vocab_size: int, num_groups: int) -> NewRequestData:
        tokens = np.random.default_rng(slot).integers(2, vocab_size, self.lengths[slot])
        first = 1 + slot * num_groups * self.blocks_each
        firsts = range(first, first + num_groups * self.blocks_each, self.blocks_each)
        return NewRequestData(
            slot=slot,
            request_id=(0, slot),
            token_ids=int32_bytes(tokens),
            num_prompt_tokens=len(tokens),
            num_computed_tokens=0,
            block_ids=tuple(int32_bytes(range(i, i + self.blocks_each)) for i in firsts),
            sampling_params=SamplingParams(temperature=0, ignore_eos=True),
        )


PROMPTS = Prompts()


@dataclass
class Said:
    """The generated tokens of each request, with their log-probabilities."""

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)


def write(shape: Shape, directory: Path, quantization: str | None = None) -> Path:
    """Write a checkpoint with random weights, so large that the logits are far apart.

    Its layers are stored in the format `quantization`. In that case attention also has biases.
    """
    shape.write(directory, PROMPTS.max_model_len)
    random = torch.Generator().manual_seed(0)
    named: dict[str, torch.Tensor] = {}
    for name, size in shape.tensors():
        x = torch.randn(size, generator=random) * (1.5 / size[-1] ** 0.5)
        if name == "model.embed_tokens":
            x = x * 4
        elif len(size) == 1:
            x = torch.ones(size) if name == "model.norm" else 1 + x
        if quantization is not None and name.endswith("_proj"):
            _, store = QUANTIZATIONS[quantization]
            named |= {f"{name}.{part}": y for part, y in store(x.bfloat16().float()).items()}
            if "self_attn" in name:
                named[f"{name}.bias"] = torch.randn(size[0], generator=random).bfloat16() * 0.1
        else:
            named[f"{name}.weight"] = x.bfloat16()
    if quantization is not None:
        path = directory / "config.json"
        how, _ = QUANTIZATIONS[quantization]
        fields = {"attention_bias": True, "quantization_config": how}
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    save_file(named, directory / "model.safetensors", {"format": "pt"})
    return directory


def _packed(weight_OD: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the nearest 4-bit integers, eight per word, the first in the lowest bits."""
    groups_OGN = weight_OD.unflatten(1, (-1, GROUP_SIZE))
    scale_OG = (groups_OGN.abs().amax(2) / 7).bfloat16()
    integers_OGN = (groups_OGN / scale_OG.float().unsqueeze(2)).round().clamp(-8, 7).long() + 8
    fields_OW8 = integers_OGN.flatten(1).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    return {
        "weight_packed": fields_OW8.sum(2).to(torch.uint32).view(torch.int32),
        "weight_scale": scale_OG,
        "weight_shape": torch.tensor(weight_OD.shape),
    }


def _float8(weight_OD: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize with one scale per row."""
    scale_O1 = weight_OD.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight_OD / scale_O1).to(torch.float8_e4m3fn), "weight_scale": scale_O1}


def _static_float8(weight_OD: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**_float8(weight_OD), "input_scale": torch.tensor([INPUT_SCALE])}


QUANTIZATIONS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], dict[str, torch.Tensor]]]]
QUANTIZATIONS = {
    "4 bits": (packed_integers(GROUP_SIZE), _packed),
    "float8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, _float8),
    "static float8": ({"quant_method": "fp8", "activation_scheme": "static"}, _static_float8),
}
"""For each format, the config entry and the function that stores a matrix."""


def config(
    path: Path,
    vocab_size: int,
    device: Device,
    dtype: str,
    *,
    prompts: Prompts = PROMPTS,
    max_num_batched_tokens: int = 512,
    kv_cache_dtype: KVCacheDtype = "auto",
    has_drafts: bool = False,
    **how: Any,
) -> EngineConfig:
    model = ModelConfig(
        "m",
        str(path),
        str(path),
        ("m",),
        "qwen3",
        vocab_size,
        prompts.max_model_len,
        (1,),
        dtype,
    )
    return EngineConfig(
        "",
        1,
        model,
        CacheConfig(block_size=prompts.block_size, kv_cache_dtype=kv_cache_dtype),
        SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=max_num_batched_tokens,
            speculative=SpeculativeConfig(NUM_DRAFTS) if has_drafts else None,
        ),
        device=DeviceConfig(device, cpu_backend=CPUBackend.TORCH, **how),
    )


@contextmanager
def opened(
    config: EngineConfig, *, has_host: bool = False, prompts: Prompts = PROMPTS
) -> Iterator[ModelRunner]:
    """Open a model runner whose KV cache has blocks for every prompt, and close it at the end."""
    # Free the graphs and the memory of a runner that was measured, or failed, before.
    gc.collect()
    device = open_device(config.device)
    checkpoint = open_checkpoint(config.model.path)
    runner = ModelRunner(config, device, checkpoint, lambda *_: None)
    runner.profile_memory(0.5)
    num_blocks = prompts.num_blocks(len(runner.kv_cache_groups))
    runner.allocate_kv_cache(num_blocks + NUM_MOVED, NUM_MOVED if has_host else 0)
    runner.warm_up()
    try:
        yield runner
    finally:
        runner.close()


def say(
    runner: ModelRunner,
    vocab_size: int,
    num_tokens: int,
    *,
    prompts: Prompts = PROMPTS,
    scored: bool = True,
    sampled: bool = False,
    moved: bool = False,
    drafted: Said | None = None,
) -> Said:
    """Generate `num_tokens` for every request, each starting one step after the previous one.

    If `drafted` is given, steps in which all requests decode verify its tokens as drafts, of which every third is
    changed. Unless `scored`, greedy tokens are chosen inside the captured graph. If `moved`, the first blocks of the
    longest prompt are copied to the CPU offload during its computation, and come back to other blocks.
    """
    num_prompts = len(prompts.lengths)
    said = Said([[] for _ in prompts.lengths], [[] for _ in prompts.lengths])
    left = list(prompts.lengths)
    running: list[int] = []
    step = 0
    while running or not step:
        fields: dict[str, Any] = {}
        if step < num_prompts:
            request = prompts.request(step, vocab_size, len(runner.kv_cache_groups))
            if sampled:
                request.sampling_params = _SAMPLED[step % len(_SAMPLED)]
            request.sampling_params.logprobs = 1 if scored else None
            fields["new_requests"] = [request]
            running.append(step)
        counts = [min(left[slot], prompts.chunk) for slot in running]
        if drafted is not None and step >= num_prompts and max(counts) == 1:
            drafts = [_drafts(drafted, said, slot, num_tokens) for slot in running]
            counts = [1 + len(tokens) for tokens in drafts]
            fields["drafts"] = int32_bytes(
                [(row, len(tokens)) for row, tokens in enumerate(drafts) if tokens]
            )
            fields["draft_token_ids"] = int32_bytes([x for tokens in drafts for x in tokens])
        fields["chunks"] = int32_bytes(
            [[row, count] for row, count in enumerate(counts) if count > 1]
        )
        if moved:
            fields |= _moves(step)
        step += 1
        scheduled = SchedulerOutput(step, slots=int32_bytes(running), **fields)
        result = runner.execute(scheduled, lambda step: None)
        output = result if isinstance(result, ModelRunnerOutput) else result.output()
        for slot, count in zip(running, counts, strict=True):
            left[slot] = max(0, left[slot] - count)
        speaking = [slot for slot in running if not left[slot]]
        tokens = iter(int32_view(output.sampled_token_ids).tolist())
        num_sampled = int32_view(output.num_sampled).tolist() or [1] * len(speaking)
        for slot, count in zip(speaking, num_sampled, strict=True):
            said.tokens[slot] += [next(tokens) for _ in range(count)]
            left[slot] = 1
        for row in output.logprobs:
            logprobs = float32_view(row.logprobs).reshape(row.num_positions, -1)
            said.logprobs[row.slot] += logprobs[:, 0].tolist()
        running = [slot for slot in running if len(said.tokens[slot]) < num_tokens]
    removed = int32_bytes(range(num_prompts))
    runner.execute(SchedulerOutput(step + 1, removed_slots=removed), lambda step: None)
    return said


def _drafts(drafted: Said, said: Said, slot: int, num_tokens: int) -> list[int]:
    """Return the next tokens of a request in `drafted`, some of them changed."""
    begin = len(said.tokens[slot])
    end = min(begin + NUM_DRAFTS, num_tokens - 1)
    tokens = enumerate(drafted.tokens[slot][begin:end], begin)
    return [token ^ 1 if place % 3 == 2 else token for place, token in tokens]


def repeats(directory: Path, device: Device, *, is_tiny: bool, is_eager: bool) -> dict[str, Any]:
    """Generate the same five times, and count the times whose bits differ from the first."""
    shape = TINY_MODEL if is_tiny else MODEL
    path = write(shape, directory)
    configured = config(path, shape.vocab_size, device, "bfloat16", enforce_eager=is_eager)
    with opened(configured) as runner:
        results = [say(runner, shape.vocab_size, 3 if is_tiny else 32) for _ in range(5)]
    return {
        "num_different": sum(said != results[0] for said in results[1:]),
        "worst": max(compared(results[0], said)["logprobs_apart"] for said in results[1:]),
    }


def _moves(step: int) -> dict[str, bytes]:
    """Out while the blocks hold two chunks, in again a step later."""
    begun = LONGEST + 2
    first = 1 + LONGEST * PROMPTS.blocks_each
    blocks = range(first, first + NUM_MOVED)
    if step == begun:
        return {"host_copies_out": int32_bytes([(b, i) for i, b in enumerate(blocks)])}
    if step == begun + 1:
        num_blocks = PROMPTS.num_blocks(1)
        spare = range(num_blocks, num_blocks + NUM_MOVED)
        return {
            "host_copies_in": int32_bytes(list(enumerate(spare))),
            "block_updates": int32_bytes([(0, LONGEST, i, b) for i, b in enumerate(spare)]),
        }
    return {}


_SAMPLED = [
    SamplingParams(temperature=0.8, seed=1, ignore_eos=True),
    SamplingParams(temperature=1, seed=2, top_p=0.9, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=3, top_k=40, min_p=0.01, ignore_eos=True),
]


def compared(expected: Said, said: Said) -> dict[str, float]:
    """Return the fractions of equal requests and of tokens before a difference, and the log-probability error."""
    num_same, apart = [], 0.0
    for index, tokens in enumerate(expected.tokens):
        same = [a == b for a, b in zip(tokens, said.tokens[index], strict=True)]
        num_same.append((*same, False).index(False) if not all(same) else len(same))
        pairs = zip(expected.logprobs[index], said.logprobs[index], strict=False)
        for a, b in list(pairs)[: num_same[-1]]:
            apart = max(apart, abs(a - b))
    length = len(expected.tokens[0])
    return {
        "same_requests": sum(n == length for n in num_same) / len(num_same),
        "same_tokens": sum(num_same) / (length * len(num_same)),
        "logprobs_apart": apart,
    }


# The simplest come first: what fails there fails everywhere. Those in float32 compile for the longest.
WAYS: dict[str, dict[str, Any]] = {
    "bfloat16, eager": {"dtype": "bfloat16", "enforce_eager": True},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, sampled": {"dtype": "bfloat16", "sampled": True},
    "bfloat16, drafts": {"dtype": "bfloat16", "has_drafts": True},
    "bfloat16, 4 bits": {"dtype": "bfloat16", "quantization": "4 bits"},
    "bfloat16, float8": {"dtype": "bfloat16", "quantization": "float8"},
    "bfloat16, FP8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "bfloat16, by way of the host": {"dtype": "bfloat16", "moved": True},
    "bfloat16, batch-invariant": {"dtype": "bfloat16", "batch_invariant": True},
    "bfloat16, static float8": {"dtype": "bfloat16", "quantization": "static float8"},
    "float32, eager": {"dtype": "float32", "enforce_eager": True},
    "float32": {"dtype": "float32"},
    "float32, tokens only": {"dtype": "float32", "scored": False},
    "float32, sampled": {"dtype": "float32", "sampled": True},
    "float32, drafts": {"dtype": "float32", "sampled": True, "has_drafts": True},
    "float32, by way of the host": {"dtype": "float32", "moved": True},
}
COURSE = ("scored", "sampled", "moved")
"""Settings of a way of running a step that are not part of the engine's configuration."""

EAGERLY = ", without graphs, waiting for each launch"
"""The suffix of the name of a way that runs without graphs and waits for each launch."""


class Agreement:
    """Compares each way of running a step with plain torch on a CPU."""

    def __init__(self, directory: Path, device: Device, *, is_tiny: bool) -> None:
        self._directory = directory
        self._device = device
        self._shape = TINY_MODEL if is_tiny else MODEL
        self._num_tokens = 3 if is_tiny else 32
        # Both are asked for again and again.
        self._path = cache(self._write)
        self._expected = cache(self._say_on_cpu)

    @property
    def ways(self) -> list[str]:
        is_cpu = self._device is Device.CPU
        return [
            name
            for name, way in WAYS.items()
            if not (is_cpu and way.get("kv_cache_dtype") == "fp8")
        ]

    def measure(self, name: str) -> dict[str, float]:
        how = dict(WAYS[name.removesuffix(EAGERLY)])
        if name.endswith(EAGERLY):
            how["enforce_eager"] = True
        course = {key: how.pop(key) for key in COURSE if key in how}
        quantization = how.pop("quantization", None)
        path = self._path(quantization)
        configured = config(path, self._shape.vocab_size, self._device, **how)
        expected = self._expected(quantization, course.get("sampled", False))
        if configured.scheduler.speculative is not None:
            course["drafted"] = expected
        with opened(configured, has_host=course.get("moved", False)) as runner:
            said = say(runner, self._shape.vocab_size, self._num_tokens, **course)
        return compared(expected, said)

    def _write(self, quantization: str | None) -> Path:
        return write(self._shape, self._directory / f"{quantization}", quantization)

    def _say_on_cpu(self, quantization: str | None, is_sampled: bool) -> Said:
        on_cpu = config(self._path(quantization), self._shape.vocab_size, Device.CPU, "float32")
        with opened(on_cpu) as runner:
            return say(runner, self._shape.vocab_size, self._num_tokens, sampled=is_sampled)
