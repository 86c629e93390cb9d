"""The servers that can be measured: Engine, and the peers in a directory.

    llama-server                 llama.cpp's server
    vllm/bin/vllm                vLLM for the CPU, in its own virtual environment
    openvino/bin/python          OpenVINO GenAI, in its own virtual environment
    smollm2-bf16/                the default model in the format of Hugging Face, bf16
    smollm2-bf16.gguf            the same for llama.cpp
    openvino-int8/ openvino-int4/  the same for OpenVINO

Each of them may be missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.frontend.model_source.config import resolve_model
from engine.frontend.model_source.options import ModelOptions
from engine.frontend.supervisor.console import Console
from support.servers.server import default_model

MIB = 1 << 20
ENGINE_KV_CACHE_BYTES = 1024 * MIB
LLAMA_CONTEXT = 98_304
VLLM_SPACE_GIB = 4
MAX_STREAMS = 64
MAX_MODEL_LEN = 8448
"""Number of tokens of the longest point, prompt and output."""


@dataclass(frozen=True)
class Contender:
    """A program that serves `model`, with its weights stored in the format `weights`.

    `command` contains a `{port}` to fill in; without one, the program answers on its standard output. `kv_cache_bytes`
    is the maximum memory of its KV cache.
    """

    key: str
    engine: str
    model: str
    weights: str
    path: Path
    command: tuple[str, ...]
    kv_cache_bytes: int
    health: str = "/health"
    env: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.engine} {self.weights}"

    @property
    def is_peer(self) -> bool:
        return self.engine != "Engine"


def _max_model_len(path: Path) -> int:
    """Return the maximum length with which a model is served, at most the length that it was trained for."""
    trained = resolve_model(ModelOptions(model=str(path)), Console()).config.max_model_len
    return min(trained, MAX_MODEL_LEN)


def _cores() -> str:
    return str(len(os.sched_getaffinity(0)))


def engine_contender(
    path: Path,
    key: str = "engine",
    model: str = "",
    weights: str = "as stored",
    flags: Sequence[str] = (),
) -> Contender:
    command = [sys.executable, "-P", "-m", "engine.frontend.cli.main", "serve", str(path)]
    command += ["--port", "{port}", "--served-model-name", "bench"]
    command += ["--max-model-len", str(_max_model_len(path))]
    # The peers do not draft. The gain of drafts depends on the text, which is random here.
    command += ["--speculative-config", '{"num_speculative_tokens": 0}']
    command += ["--kv-cache-memory-bytes", str(ENGINE_KV_CACHE_BYTES), *flags]
    return Contender(
        key, "Engine", model, weights, path, tuple(command), ENGINE_KV_CACHE_BYTES, "/readyz"
    )


def _llama(
    key: str,
    server: Path,
    model: str,
    weights: str,
    path: Path,
    kv_token_bytes: int,
    streams: int = MAX_STREAMS,
) -> Contender:
    command = [str(server), "-m", str(path), "-t", _cores(), "-tb", _cores()]
    command += ["-np", str(streams), "-c", str(LLAMA_CONTEXT), "-cb", "-fa", "on"]
    command += ["-ub", "2048", "-b", "2048", "--port", "{port}", "--alias", "bench"]
    kv_cache_bytes = kv_token_bytes * LLAMA_CONTEXT
    return Contender(key, "llama.cpp", model, weights, path, tuple(command), kv_cache_bytes)


def _vllm(key: str, vllm: Path, model: str, path: Path) -> Contender:
    command = [str(vllm), "serve", str(path), "--dtype", "bfloat16"]
    command += ["--max-model-len", str(_max_model_len(path)), "--max-num-seqs", str(MAX_STREAMS)]
    command += ["--port", "{port}", "--served-model-name", "bench"]
    env = {"VLLM_CPU_KVCACHE_SPACE": str(VLLM_SPACE_GIB), "HF_HUB_OFFLINE": "1"}
    # Its kernels are compiled by the compiler that it finds in its own environment.
    env["PATH"] = f"{vllm.parent}{os.pathsep}{os.environ['PATH']}"
    kv_cache_bytes = VLLM_SPACE_GIB << 30
    return Contender(key, "vLLM", model, "bf16", path, tuple(command), kv_cache_bytes, env=env)


def _openvino(key: str, python: Path, model: str, weights: str, path: Path) -> Contender:
    script = Path(__file__).with_name("openvino_child.py")
    cache_gib = 4
    command = (str(python), str(script), str(path), _cores(), str(cache_gib), str(MAX_STREAMS))
    return Contender(key, "OpenVINO", model, weights, path, command, cache_gib << 30)


def find_contenders(
    peers: Path,
    model_files: list[Path],
    kv_token_bytes: int,
    engine_flags: list[str],
    streams: int = MAX_STREAMS,
) -> list[Contender]:
    """Return Engine and the installed peers, with the default model or with each of `model_files` instead.

    `kv_token_bytes` is the size of a token in a 16-bit KV cache. With `model_files`, llama.cpp divides its context
    among `streams`.
    """
    server = peers / "llama-server"
    found = []
    for path in model_files:
        model = path.stem
        found.append(engine_contender(path, model=model, flags=engine_flags))
        found.append(_llama("llama", server, model, "as stored", path, kv_token_bytes, streams))
    if not model_files:
        model, path, safetensors = "SmolLM2-135M", Path(default_model()), peers / "smollm2-bf16"
        bf16 = peers / "smollm2-bf16.gguf"
        # The default of OpenVINO's KV cache.
        int8_kv = [*engine_flags, "--kv-cache-dtype", "int8"]
        found = [
            engine_contender(path, "engine", model, "Q4_1", engine_flags),
            engine_contender(path, "engine-int8-kv", model, "Q4_1, int8 KV", int8_kv),
            _llama("llama-bf16", server, model, "bf16", bf16, kv_token_bytes),
            _llama("llama-q4", server, model, "Q4_1", path, kv_token_bytes),
        ]
        if safetensors.exists():
            found += [
                engine_contender(safetensors, "engine-bf16", model, "bf16", engine_flags),
                _vllm("vllm", peers / "vllm/bin/vllm", model, safetensors),
            ]
        python = peers / "openvino/bin/python"
        for weights in ("int8", "int4"):
            path = peers / f"openvino-{weights}"
            found.append(_openvino(f"openvino-{weights}", python, model, weights, path))
    return [c for c in found if c.path.exists() and Path(c.command[0]).exists()]
