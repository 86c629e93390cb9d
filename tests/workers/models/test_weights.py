"""Checkpoints that do not match their config are rejected, and loading reports its progress."""

import json

import pytest
import torch
import transformers
from engine.protocol.config import (
    CacheConfig,
    CPUBackend,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.protocol.errors import CheckpointError
from engine.workers.execution.model_loader import load_model
from engine.workers.execution.parallel_state import ParallelState
from engine.workers.loaders.open_checkpoint import open_checkpoint
from engine.workers.models.weights import WeightReader
from safetensors.torch import load_file, save_file
from support.checkpoints.quantized import quantize_directory
from support.workers.decoders import Runner, load_decoder

torch.set_num_threads(1)


def save_llama(path, vocab_size=20, hidden_size=16, intermediate_size=24):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(path)
    return model


@pytest.fixture
def path(tmp_path):
    save_llama(tmp_path)
    return tmp_path


def edit_tensors(path, edit):
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


def edit_config(path, **differences):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | differences))


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"]
)
def test_a_missing_tensor_is_named(path, name):
    edit_tensors(path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=name.split(".", 1)[1]):
        load_decoder(path)


def test_a_shape_that_contradicts_the_config_is_rejected(path):
    edit_config(path, intermediate_size=32)
    with pytest.raises(CheckpointError, match=r"has shape \[24, 16\], the config needs \[32, 16\]"):
        load_decoder(path)


def test_unexpected_tensors_are_rejected(path):
    name = "model.layers.0.self_attn.q_proj.bias"
    edit_tensors(path, lambda tensors: tensors.update({name: torch.ones(16)}))
    with pytest.raises(CheckpointError, match=name):
        load_decoder(path)


def test_stored_frequencies_of_old_checkpoints_are_ignored(path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(path, lambda tensors: tensors.update({name: torch.ones(4)}))
    assert Runner(load_decoder(path)).step({0: [1, 2, 3]})[0].shape == (3, 20)


def test_loading_reports_its_progress(path):
    calls = []
    load_decoder(path, on_progress=lambda *sizes: calls.append(sizes))
    size = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    loaded = [call[0] for call in calls]
    assert loaded == sorted(loaded)
    assert calls[-1] == (size, size)
    assert {total for _, total in calls} == {size}


@pytest.mark.parametrize(
    "prefix", ["model.language_model.", "language_model.model."], ids=["new", "old"]
)
def test_gemma3_with_a_vision_tower_loads_its_text_decoder(tmp_path, prefix):
    """The text decoder is found in the multimodal checkpoint with both layouts of names."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
    )
    model = transformers.Gemma3ForCausalLM._from_config(config, attn_implementation="eager")
    model.save_pretrained(tmp_path)

    def rename(tensors):
        renamed = {name.replace("model.", prefix, 1): x for name, x in tensors.items()}
        tensors.clear()
        tensors.update(renamed, **{"vision_tower.patch.weight": torch.ones(3)})

    edit_tensors(tmp_path, rename)
    text_config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "model_type": "gemma3",
                "text_config": text_config,
            }
        )
    )
    tokens = list(range(20))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    logits = Runner(load_decoder(tmp_path)).step({0: tokens})[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([0.5] * 2)])
def test_scales_are_read_for_an_fp8_cache(path, scale):
    names = [f"model.layers.0.self_attn.{name}" for name in ("k_scale", "v_scale")]
    edit_tensors(path, lambda tensors: tensors.update({names[0]: scale, names[1]: scale * 4}))
    reader = WeightReader(open_checkpoint(path), torch.bfloat16, torch.device("cpu"), has_head=True)
    layer = "layers.0.self_attn."
    assert reader.read_kv_scales(layer, 2, range(2)).tolist() == [[0.5, 0.5], [2.0, 2.0]]
    assert reader.read_kv_scales(layer, 2, range(1, 2)).tolist() == [[0.5], [2.0]]
    assert reader.read_kv_scales("layers.1.self_attn.", 2, range(2)) is None
    if scale.dim() and len(scale) == 2:
        with pytest.raises(CheckpointError, match="k_scale' has 2 scales for 4 heads"):
            reader.read_kv_scales(layer, 4, range(4))


def test_scales_without_an_fp8_cache_are_not_unexpected(path):
    names = [f"model.layers.0.self_attn.{name}" for name in ("k_scale", "v_scale")]
    edit_tensors(path, lambda tensors: tensors.update({name: torch.ones(1) for name in names}))
    load_decoder(path)


@pytest.mark.parametrize("backend", [CPUBackend.NATIVE, CPUBackend.TORCH])
@pytest.mark.parametrize("name", ["torchao-int4", "hqq", "quark-int4", "compressed-int4"])
def test_a_quantized_head_is_read_although_the_config_ties_it(tmp_path, name, backend):
    """Tools quantize a copy of the embedding as the head, and leave the embedding as it is."""
    model = save_llama(tmp_path, 64, 64, 64)
    meaning = quantize_directory(tmp_path, name, ("_proj", "lm_head"))
    model.load_state_dict(meaning, strict=False)
    edit_config(tmp_path, tie_word_embeddings=True)
    config = EngineConfig(
        "/run",
        1,
        ModelConfig("m", "", "", ("m",), "llama", 64, 128, (1,), dtype="float32"),
        CacheConfig(block_size=16),
        SchedulerConfig(),
        device=DeviceConfig(cpu_backend=backend),
    )
    checkpoint = open_checkpoint(tmp_path)
    loaded = load_model(config, torch.device("cpu"), checkpoint, lambda *_: None, ParallelState())
    logits = Runner(loaded).step({0: list(range(64))})[0]
    expected = model(torch.arange(64)[None]).logits[0]
    # The native backend rounds activations to eight bits.
    assert torch.linalg.norm(logits - expected) <= 0.02 * torch.linalg.norm(expected)
