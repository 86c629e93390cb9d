"""Blocks on disk are found only by servers that compute the same numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from support.checkpoints.lora_adapters import write_adapter
from support.checkpoints.tiny import qwen3_directory
from support.processes.program import wait_until
from support.servers.server import Server

WRITTEN = "engine:kv_disk_written_bytes_total"
PROMPT = [5, 9, 20, 31, 8, 44, 17, 3] * 12


def change_rope(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    section = config.get("rope_parameters", config)
    section["rope_theta"] *= 3
    (model / "config.json").write_text(json.dumps(config))


def change_tokenizer(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(tokenizer, indent=3))
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": 99}))


class Case(NamedTuple):
    """A server: the directory that replaces its model, a change of it, the adapter, and flags."""

    model: str = "first"
    change: Callable[[Path], None] | None = None
    adapter: str = ""
    flags: tuple[str, ...] = ()
    is_found: bool = False


CASES = [
    Case(),
    Case(flags=("--dtype", "float32")),
    Case(model="second"),
    Case(change=change_rope),
    Case(adapter="adapter 1"),
    Case(adapter="adapter 2"),
    Case(change=change_tokenizer, is_found=True),
]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Return a directory with two models of the same shape, and two adapters of the first one."""
    _, model = qwen3_directory(tmp_path / "first")
    weights = shutil.ignore_patterns("*.safetensors*")
    shutil.copytree(tmp_path / "first", tmp_path / "second", ignore=weights)
    type(model)(model.config).save_pretrained(tmp_path / "second")
    for seed in (1, 2):
        write_adapter(tmp_path / f"adapter {seed}", model, seed)
    return tmp_path


def test_blocks_of_other_numerics_are_not_found(files: Path) -> None:
    """All models have one path, and the adapters one path and one name."""
    for case in CASES:
        for name, source in (("model", case.model), ("adapter", case.adapter)):
            shutil.rmtree(files / name, ignore_errors=True)
            if source:
                shutil.copytree(files / source, files / name)
        if case.change is not None:
            case.change(files / "model")
        flags = ["--served-model-name", "tiny", "--kv-disk", str(files / "disk"), *case.flags]
        if case.adapter:
            flags += ["--enable-lora", "--lora-modules", f"adapter={files / 'adapter'}"]
        body = {
            "model": "adapter" if case.adapter else "tiny",
            "prompt": PROMPT,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        with Server(str(files / "model"), *flags) as server:
            status, answer = server.post("/v1/completions", body)
            assert status == 200, answer
            num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert bool(num_cached) == case.is_found, case
            if not case.is_found:
                wait_until(lambda server=server: server.metric(WRITTEN) > 0, what="blocks on disk")
            status, computed = server.post("/v1/completions", body | {"cache_salt": "other"})
            assert status == 200
            assert answer["choices"][0]["text"] == computed["choices"][0]["text"], case
