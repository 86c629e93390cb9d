"""The limits of the machine, and the minimum time of a point."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from .model_cost import ModelCost
from .points import Point

SOURCE = Path(__file__).with_name("roofline.cpp")


def measure_machine() -> dict[str, Any]:
    """Return the bytes read and operations done per second by all cores together; empty without a C++ compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return {}
    with tempfile.TemporaryDirectory() as directory:
        program = f"{directory}/roofline"
        flags = ["-O3", "-march=native", "-std=c++17", "-pthread"]
        subprocess.run([compiler, *flags, str(SOURCE), "-o", program], check=True)
        cores = str(len(os.sched_getaffinity(0)))
        output = subprocess.run([program, cores], check=True, capture_output=True, text=True)
    machine: dict[str, Any] = json.loads(output.stdout)
    return machine | {"time": round(time.time())}


def floor_seconds(point: Point, cost: ModelCost, machine: dict[str, Any], peak: str) -> float:
    """Return the seconds that a point's requests take at the limits of the machine.

    Prompts take their operations, at `machine[peak]`; a step of decoding takes the longer of its operations and of
    reading all weights and the KV caches of its requests.
    """
    prompt = point.prompt
    context = point.shared + prompt
    # A shared prefix is computed once.
    computed = point.requests * prompt + point.shared
    keys = point.requests * prompt * (point.shared + prompt / 2) + point.shared**2 / 2
    prompt_ops = computed * cost.layer_ops + keys * cost.attention_ops_per_key
    prompt_ops += point.requests * cost.head_ops
    streams = min(point.concurrency, point.requests)
    steps = point.requests / streams * (point.output - 1)
    mean_keys = context + point.output / 2
    step_bytes = cost.weight_bytes + streams * mean_keys * cost.kv_token_bytes
    token_ops = cost.layer_ops + cost.head_ops + mean_keys * cost.attention_ops_per_key
    step_s = max(step_bytes / machine["read_bytes_s"], streams * token_ops / machine[peak])
    return float(prompt_ops / machine[peak] + steps * step_s)
