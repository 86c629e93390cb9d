"""LoRA adapters of experts, as PEFT writes them for checkpoints with a module for each expert."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine.protocol.file_identity import LoraAdapter
from engine.workers.models.lora.adapters import LoraAdapters, load_at_start
from safetensors.torch import save_file
from support.checkpoints.tiny import mixture_directory
from support.workers.decoders import Runner, load_decoder, load_native_decoder

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

RANK, ALPHA = 4, 8


def write_expert_adapter(
    path: Path, model: transformers.PreTrainedModel, seed: int
) -> transformers.PreTrainedModel:
    """Write an adapter of a mixture's experts but the first, and return the model with it merged."""
    path.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    merged, tensors = copy.deepcopy(model), {}
    for number, layer in enumerate(merged.model.layers):
        experts = layer.mlp.experts
        for expert in range(1, len(experts.down_proj)):
            gate, up = experts.gate_up_proj.data[expert].chunk(2)
            matrices = {"gate": gate, "up": up, "down": experts.down_proj.data[expert]}
            for name, weight in matrices.items():
                rows, columns = weight.shape
                down = torch.randn(RANK, columns, generator=generator) * 0.2
                up = torch.randn(rows, RANK, generator=generator) * 0.2
                weight += ALPHA / RANK * up @ down
                module = f"base_model.model.model.layers.{number}.mlp.experts.{expert}.{name}_proj"
                tensors[f"{module}.lora_A.weight"] = down
                tensors[f"{module}.lora_B.weight"] = up
    save_file(tensors, path / "adapter_model.safetensors")
    return merged


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_a_batch_of_expert_adapters_gives_the_logits_of_merged_models(
    tmp_path: Path, load: Callable[..., Any]
) -> None:
    path, model = mixture_directory(tmp_path / "base")
    models = [model, *(write_expert_adapter(tmp_path / str(i), model, i) for i in range(2))]
    loras = LoraAdapters(capacity=2, max_rank=8, num_slots=3)
    decoder = load(path, loras=loras)
    load_at_start(loras, [LoraAdapter.read(str(i), tmp_path / str(i)) for i in range(2)])
    for slot, number in enumerate((-1, 0, 1)):
        loras.set_slot(slot, number)
    prompts = [[(7 * i + 3 * slot) % 300 for i in range(20)] for slot in range(3)]
    loras.begin_step(np.repeat(np.arange(3, dtype=np.int32), 20))
    found = Runner(decoder, 3).step(dict(enumerate(prompts)))
    if load is load_native_decoder:
        # The bits of a row do not depend on the adapters of others.
        loras.begin_step(np.full(20, 2, np.int32))
        assert torch.equal(Runner(decoder, 3).step({2: prompts[2]})[2], found[2])
    for slot, (prompt, each) in enumerate(zip(prompts, models, strict=True)):
        with torch.no_grad():
            expected = each(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(found[slot], expected, atol=1e-4, rtol=1e-4)
