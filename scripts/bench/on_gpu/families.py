"""Check that small random models of every family say the same on a GPU as on a CPU.

Needs transformers and the test folder, which make the models. Each family has its own process, so that one whose
kernel fails does not spoil others.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))

import torch
from engine.protocol.config import Device
from engine.workers.loaders import open_checkpoint
from engine.workers.models.families import model_spec
from on_gpu.agreement import Prompts, Said, compared, config, opened, say
from on_gpu.reporting import Reporter
from support.families import CONFIGS, SMALL, make_reference, save_multimodal, save_reference
from support.families.multimodal import MULTIMODAL
from support.families.published import PUBLISHED, save_published

PROMPTS = Prompts((3, 1, 150, 20), 256, 40)
RECURRENT = Prompts((3, 1, 300, 20), 1024, 40, block_size=512)
"""The prompts of models with recurrent layers, whose blocks must be as large as a state."""

NUM_TOKENS = 12
LONGEST_S = 150
"""Seconds after which the process of a family is killed."""

NAMES = [*CONFIGS, *(name for name in MULTIMODAL if name != "Kimi_K25"), *PUBLISHED]
"""All families of the test table, except one whose random tower is not stored in the published form."""


def save(name: str, path: Path) -> None:
    """Write the checkpoint of a family."""
    if name in PUBLISHED:
        save_published(name, path)
    elif name in CONFIGS:
        save_reference(make_reference(name), path)
    else:
        save_multimodal(name, path)


def measure(name: str, device: Device) -> dict[str, Any]:
    """Compare the tokens and log-probabilities of a family with those of plain torch in float32 on a CPU."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        save(name, path)
        exact = _said(path, Device.CPU, "float32")
        found: dict[str, Any] = compared(exact, _said(path, device, "float32"))
        rounded = compared(exact, _said(path, device, "bfloat16"))
    return found | {"bfloat16_apart": rounded["logprobs_apart"]}


def _said(path: Path, device: Device, dtype: str) -> Said:
    layers = model_spec(open_checkpoint(path).config, path).layers
    prompts = PROMPTS if all(layer.recurrent is None for layer in layers) else RECURRENT
    configured = config(
        path, SMALL["vocab_size"], device, dtype, prompts=prompts, max_num_batched_tokens=64
    )
    with opened(configured, prompts=prompts) as runner:
        return say(runner, SMALL["vocab_size"], NUM_TOKENS, prompts=prompts)


def compare(names: Sequence[str], device: Device) -> None:
    """Print the figures of each family. Each has its own process, and as many run at once as there are CPUs.

    The first fork must come before this process uses the GPU.
    """
    context = multiprocessing.get_context("fork")
    left = list(reversed(names))
    running: dict[int, tuple[BaseProcess, float]] = {}
    while left or running:
        while left and len(running) < (os.cpu_count() or 1):
            process: BaseProcess = context.Process(target=_run, args=(left.pop(), device))
            process.start()
            running[process.sentinel] = process, time.monotonic() + LONGEST_S
        ended = wait(list(running), timeout=1)
        for sentinel, (process, end) in list(running.items()):
            if sentinel in ended:
                process.join()
                del running[sentinel]
            elif time.monotonic() > end:
                process.kill()


def _run(name: str, device: Device) -> None:
    torch.set_num_threads(1)
    Reporter().say(name, lambda: measure(name, device))
