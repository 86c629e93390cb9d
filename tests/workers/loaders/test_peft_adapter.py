"""LoRA adapters in PEFT's format and in GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.protocol.errors import CheckpointError
from engine.workers.loaders.gguf_adapter import GGUFAdapter
from engine.workers.loaders.peft_adapter import LowRank, PEFTAdapter, Replacement
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from support.gguf.finish import finish

MODULE = "model.layers.0.self_attn.q_proj"


def write(path: Path, suffix: str = "lora_A.weight", down_rank: int = 4, **config: Any) -> Path:
    tensors = {
        f"base_model.model.{MODULE}.{suffix}": torch.ones(down_rank, 6),
        f"base_model.model.{MODULE}.lora_B.weight": torch.ones(5, 4),
    }
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **config}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"k_proj": 1, "self_attn.q_proj": 6}}, 1.5),
        ({"r": 2, "rank_pattern": {r"layers\.\d+\..*q_proj": 4}}, 2.0),
        ({"r": 4, "alpha_pattern": {"j_proj": 1}, "modules_to_save": None}, 2.0),
    ],
)
def test_adapter_scale_follows_rank_and_alpha_patterns_of_the_module(
    tmp_path: Path, config: dict[str, Any], scale: float
) -> None:
    adapter = PEFTAdapter(write(tmp_path, **config), 16)
    assert list(adapter.modules()) == [MODULE]
    low = adapter.read(MODULE)
    assert isinstance(low, LowRank)
    assert low.down_RI.shape == (4, 6)
    assert torch.equal(low.up_OR, torch.full((5, 4), scale))
    halved = PEFTAdapter(tmp_path, 16, 0.5).read(MODULE)
    assert isinstance(halved, LowRank) and torch.equal(halved.up_OR, 0.5 * low.up_OR)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        (
            {"target_parameters": ["mlp.experts.gate_up_proj"]},
            "target_parameters .* is not supported",
        ),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"r": 8}, "has rank 4, but the config says 8"),
        ({"down_rank": 3}, r"shapes \[3, 6\] and \[5, 4\], which do not match"),
        ({"alpha_pattern": {"(": 1}}, r"alpha_pattern '\('"),
        (
            {"suffix": "lora_embedding_A"},
            "lora_B.weight, lora_embedding_A; it needs a pair",
        ),
        ({"suffix": "bias"}, "has the tensors bias, lora_B.weight; it needs"),
        ({"suffix": "lora_B.bias"}, "has the tensors lora_B.bias, lora_B.weight; it needs"),
        ({"suffix": "lora_magnitude_vector"}, "lora_magnitude_vector' is not supported"),
    ],
)
def test_other_adapters_are_refused_with_the_reason(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        PEFTAdapter(write(tmp_path, **config), 16).read(MODULE)


def test_factors_that_are_no_matrices_are_refused(tmp_path: Path) -> None:
    adapter = write(tmp_path)
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{MODULE}.lora_A.weight": torch.ones(())}, file)
    with pytest.raises(CheckpointError, match=r"shapes \[\] and \[5, 4\], which do not match"):
        PEFTAdapter(adapter, 8).read(MODULE)


def test_lora_bias_is_scaled_like_the_factors(tmp_path: Path) -> None:
    write(tmp_path, lora_bias=True)
    name = f"base_model.model.{MODULE}"
    tensors = {f"{name}.lora_A.weight": torch.ones(4, 6), f"{name}.lora_B.weight": torch.ones(5, 4)}
    file = tmp_path / "adapter_model.safetensors"
    save_file({**tensors, f"{name}.lora_B.bias": torch.arange(5.0)}, file)
    low = PEFTAdapter(tmp_path, 16).read(MODULE)
    assert isinstance(low, LowRank) and low.bias_O is not None
    assert torch.equal(low.bias_O, 2 * torch.arange(5.0))
    save_file({**tensors, f"{name}.lora_B.bias": torch.ones(6)}, file)
    with pytest.raises(CheckpointError, match=r"has shape \[6\], but the matrix has 5 rows"):
        PEFTAdapter(tmp_path, 16).read(MODULE)


def test_factors_of_an_embedding_are_those_of_its_matrix(tmp_path: Path) -> None:
    name = "base_model.model.model.embed_tokens"
    down, up = torch.randn(4, 9), torch.randn(6, 4)
    tensors = {
        f"{name}.lora_embedding_A": down,
        f"{name}.lora_embedding_B": up,
        f"{name}.base_layer.weight": torch.zeros(9, 6),
        "base_model.model.lm_head.weight": torch.ones(9, 6),
    }
    write(tmp_path, modules_to_save=["lm_head"])
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    adapter = PEFTAdapter(tmp_path, 16)
    assert set(adapter.modules()) == {"model.embed_tokens", "lm_head"}
    low, whole = adapter.read("model.embed_tokens"), adapter.read("lm_head")
    assert isinstance(low, LowRank) and isinstance(whole, Replacement)
    torch.testing.assert_close(low.up_OR @ low.down_RI, 2 * (up @ down).T)
    assert torch.equal(whole.weight, torch.ones(9, 6)) and whole.bias is None


def test_adapter_rank_over_the_limit_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="at most 3 is allowed; raise --max-lora-rank"):
        PEFTAdapter(write(tmp_path), 3).read(MODULE)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    (write(tmp_path) / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="missing or damaged"):
        PEFTAdapter(tmp_path, 16)


@pytest.mark.parametrize(
    ("kind", "tensors", "message"),
    [
        ("model", {}, "general.type .*adapter"),
        ("adapter", {"blk.0.attn_norm.weight": (4,)}, "'blk.0.attn_norm.weight' is not supported"),
        ("adapter", {"blk.0.attn_v.weight.lora_a": (4, 6)}, "no pair of matrices"),
        (
            "adapter",
            {"blk.0.attn_v.weight.lora_a": (3, 6), "blk.0.attn_v.weight.lora_b": (5, 4)},
            r"shapes \[3, 6\] and \[5, 4\], which do not match",
        ),
        (
            "adapter",
            {"blk.0.attn_v.weight.lora_a": (8, 6), "blk.0.attn_v.weight.lora_b": (5, 8)},
            "rank 8, but at most 4 is allowed",
        ),
    ],
)
def test_unsuitable_gguf_files_are_refused(
    tmp_path: Path, kind: str, tensors: dict[str, tuple[int, ...]], message: str
) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_type(kind)
    writer.add_string("adapter.type", "lora")
    for name, shape in tensors.items():
        writer.add_tensor(name, torch.ones(shape).numpy())
    finish(writer)
    with pytest.raises(CheckpointError, match=message):
        GGUFAdapter(tmp_path / "a.gguf", 4, 1.0, [(2, 1)]).read("model.layers.0.self_attn.v_proj")
