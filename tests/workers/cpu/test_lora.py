"""Rows with LoRA adapters get the same results natively as in torch, whatever shares the batch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from engine.protocol.file_identity import LoraAdapter
from engine.workers.cpu.decoder import NativeDecoder
from engine.workers.layers.layer_spec import LayerSpec
from engine.workers.layers.rope import RopeSpec
from engine.workers.layers.spec import ModelSpec
from engine.workers.loaders.checkpoint import Checkpoint
from engine.workers.models.decoder import Decoder
from engine.workers.models.lora.adapters import LoraAdapters, load_at_start
from safetensors.torch import save_file
from support.checkpoints.random import random_checkpoint
from support.workers.batches import Scheduled, attention_batch, positions
from support.workers.isas import ISAS, select_isa
from support.workers.native_decoders import BLOCK_SIZE, native_decoder, small_spec, torch_decoder

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

SPECS = {
    "llama": small_spec(),
    "biases": small_spec(qkv_bias=True, attention_output_bias=True, mlp_bias=True),
    "interleaved": small_spec(
        rope_order="interleaved", layers=(LayerSpec(RopeSpec(10_000.0, 24)), LayerSpec(None))
    ),
    "fused": small_spec(activation="gelu_tanh"),
}
RANKS = {"small": 3, "large": 40, "attention": 16}
NAMES = ["", *RANKS]
NUM_SLOTS = 70


def write_adapters(directory: Path, checkpoint: Checkpoint) -> dict[str, str]:
    """Write an adapter of every rank, and return their directories by name."""
    paths = {}
    for seed, (name, rank) in enumerate(RANKS.items()):
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for tensor in checkpoint.names():
            module = tensor.removesuffix(".weight")
            kind = "self_attn" if name == "attention" else ""
            if not module.endswith("_proj") or kind not in module:
                continue
            rows, columns = checkpoint.shape(tensor)
            for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                values = torch.randn(shape, generator=generator) * 0.3
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = values
            if name == "small":
                bias = torch.randn(rows, generator=generator) * 0.1
                tensors[f"base_model.model.{module}.lora_B.bias"] = bias
        embedding = "base_model.model.model.embed_tokens"
        size, width = checkpoint.shape("model.embed_tokens.weight")

        def random(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * 0.1

        if name == "large":
            tensors[f"{embedding}.lora_embedding_A"] = random(rank, size)
            tensors[f"{embedding}.lora_embedding_B"] = random(width, rank)
            tensors["base_model.model.lm_head.lora_A.weight"] = random(rank, width)
            tensors["base_model.model.lm_head.lora_B.weight"] = random(size, rank)
        if name == "attention":
            tensors[f"{embedding}.weight"] = random(size, width)
            tensors["base_model.model.lm_head.weight"] = random(size, width)
        path = directory / name
        path.mkdir()
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
        (path / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, path / "adapter_model.safetensors")
        paths[name] = str(path)
    return paths


def new_adapters() -> LoraAdapters:
    return LoraAdapters(capacity=3, max_rank=64, num_slots=NUM_SLOTS)


def load(decoder: NativeDecoder | Decoder, paths: dict[str, str]) -> NativeDecoder | Decoder:
    """Load adapters, numbered from 0, and give each slot one of them or none."""
    loras = decoder.loras
    assert loras is not None
    load_at_start(loras, [LoraAdapter.read(name, Path(path)) for name, path in paths.items()])
    for slot in range(NUM_SLOTS):
        number = slot * 7 % 5 % len(NAMES) - 1
        loras.set_slot(slot, number if paths else -1)
    return decoder


def logits(decoder: NativeDecoder | Decoder, slots: list[int], length: int) -> torch.Tensor:
    """Return the logits of each token of new sequences in these slots."""
    scheduled, tokens = [], []
    for slot in slots:
        blocks = [1 + 2 * slot, 2 + 2 * slot]
        scheduled.append(Scheduled(0, length, blocks))
        tokens += [(slot * 31 + i * 7) % decoder.spec.vocab_size for i in range(length)]
    batch = attention_batch(scheduled, BLOCK_SIZE)
    shape = decoder.attention.kv_cache_shape(2 * NUM_SLOTS + 1)
    caches = [torch.zeros(shape, dtype=decoder.attention.dtype) for _ in decoder.spec.layers]
    metadata = [decoder.attention.build(batch, each) for each in decoder.spec.windows_by_group]
    assert decoder.loras is not None
    slots_T = np.repeat(np.array(slots, np.int32), length)
    decoder.loras.begin_step(slots_T)
    hidden = decoder.forward(torch.tensor(tokens), positions(scheduled), caches, metadata)
    return decoder.compute_logits(hidden, slots_T)


@pytest.mark.parametrize("name", SPECS)
def test_adapters_give_the_logits_of_torch(tmp_path: Path, name: str) -> None:
    spec = SPECS[name]
    checkpoint = random_checkpoint(tmp_path, spec, fused=name == "fused")
    paths = write_adapters(tmp_path, checkpoint)
    native = load(native_decoder(spec, checkpoint, loras=new_adapters()), paths)
    in_torch = load(torch_decoder(spec, checkpoint, loras=new_adapters()), paths)
    base = load(native_decoder(spec, checkpoint, loras=new_adapters()), {})
    slots = list(range(20))
    found, expected = (logits(each, slots, 5) for each in (native, in_torch))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    plain = logits(base, slots, 5)
    for slot in slots:
        rows = slice(5 * slot, 5 * slot + 5)
        has_adapter = native.loras is not None and native.loras.number_by_slot[slot] >= 0
        assert torch.equal(found[rows], plain[rows]) != has_adapter


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        (None, torch.float32),
        (None, torch.bfloat16),
        ("int8", torch.float32),
        ("int4", torch.bfloat16),
    ],
)
def test_the_bits_of_a_row_do_not_depend_on_the_adapters_of_others(
    tmp_path: Path, quantization: str | None, dtype: torch.dtype, isa: int
) -> None:
    select_isa(isa)
    spec: ModelSpec = SPECS["biases"]
    checkpoint = random_checkpoint(tmp_path, spec)
    paths = write_adapters(tmp_path, checkpoint)
    kinds = {"dtype": dtype, "quantization": quantization}
    decoder = load(native_decoder(spec, checkpoint, **kinds, loras=new_adapters()), paths)
    for length in (1, 9):
        together = logits(decoder, list(range(NUM_SLOTS)), length)
        for slot in (0, 1, 2, 3, 69):
            alone = logits(decoder, [slot], length)
            assert torch.equal(together[length * slot : length * (slot + 1)], alone)
    errors = []
    for each in (paths, {}):
        in_torch = load(torch_decoder(spec, checkpoint, loras=new_adapters()), each)
        decoder = load(native_decoder(spec, checkpoint, **kinds, loras=new_adapters()), each)
        exact = logits(in_torch, [1, 2, 3], 9)
        errors.append((logits(decoder, [1, 2, 3], 9) - exact).norm() / exact.norm())
    assert errors[0] < 5 * errors[1]


def test_adapter_replaces_another_under_its_number(tmp_path: Path) -> None:
    spec = SPECS["llama"]
    checkpoint = random_checkpoint(tmp_path, spec)
    paths = write_adapters(tmp_path, checkpoint)
    decoder = load(native_decoder(spec, checkpoint, loras=new_adapters()), paths)
    loras = decoder.loras
    assert loras is not None
    loras.number_by_slot[:] = [0, 1, 2, *[-1] * (NUM_SLOTS - 3)]
    small, large, attention, base = (logits(decoder, [slot], 5) for slot in range(4))
    loras.number_by_slot[3] = 0
    # The same adapter twice, then another instead of it.
    for number, name in ((1, "small"), (0, "attention")):
        loras.install(number, loras.load(LoraAdapter.read(name, Path(paths[name]))))
    loras.number_by_slot[:3] = (1, 2, 2)
    assert torch.equal(logits(decoder, [0], 5), small)
    loras.number_by_slot[2] = 0
    assert torch.equal(logits(decoder, [2], 5), attention)
    loras.number_by_slot[3] = -1
    assert torch.equal(logits(decoder, [3], 5), base)
    assert not torch.equal(small, large)
