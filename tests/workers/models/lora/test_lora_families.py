"""LoRA adapters of layers of several kinds give the logits of transformers' models with the adapters merged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.protocol.errors import CheckpointError
from engine.protocol.file_identity import LoraAdapter
from engine.workers.models.lora.adapters import LoraAdapters, load_at_start
from support.checkpoints.lora_adapters import write_adapter
from support.families import assert_same, expected_logits, make_reference, prompt, save_reference
from support.families.published import save_published
from support.workers.decoders import Runner, load_decoder, load_native_decoder

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

LAYERS = r".*layers\.\d+\.(?!.*(kv_b_proj|router|gate$|altup|per_layer|experts|indexer)).*"
MODULES = {
    "gemma3n": LAYERS,
    "deepseek-v3": LAYERS,
    "mamba": LAYERS,
    "qwen3.5": LAYERS,
    # Stored factors multiply the outputs of modules.
    "dory": rf"{LAYERS}|lm_head",
    "inkling": LAYERS,
}
IN_TORCH = {
    "deepseek-v4": r".*self_attn\.(q_a|q_b|kv|o_b)_proj",
    "diffllama": LAYERS,
}


@pytest.mark.parametrize(
    ("family", "load"),
    [
        *((family, load) for family in MODULES for load in (load_decoder, load_native_decoder)),
        *((family, load_decoder) for family in IN_TORCH),
    ],
)
def test_adapted_layers_give_the_logits_of_a_merged_model(
    tmp_path: Path, family: str, load: Callable[..., Any]
) -> None:
    reference = make_reference(family)
    save_reference(reference, tmp_path / "base")
    modules = (MODULES | IN_TORCH)[family]
    merged = write_adapter(tmp_path / "adapter", reference, 1, modules)
    loras = LoraAdapters(capacity=1, max_rank=4, num_slots=2)
    decoder = load(tmp_path / "base", loras=loras)
    load_at_start(loras, [LoraAdapter.read("a", tmp_path / "adapter")])
    loras.set_slot(0, -1)
    loras.set_slot(1, 0)
    tokens = prompt(40)
    slots_T = np.repeat(np.arange(2, dtype=np.int32), len(tokens))
    loras.begin_step(slots_T)
    hidden = Runner(decoder, 2).hidden({0: tokens, 1: tokens})
    base, adapted = decoder.compute_logits(hidden, slots_T).split(len(tokens))
    plain = expected_logits(reference, tokens)
    assert_same(base, plain)
    assert_same(adapted, expected_logits(merged, tokens))
    # Otherwise, this test shows nothing.
    assert (adapted - plain).abs().max() > 0.1


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_an_adapter_of_normalized_rows_is_refused(tmp_path: Path, load: Callable[..., Any]) -> None:
    reference = copy.deepcopy(save_published("Baichuan", tmp_path, vocab_size=125696))
    write_adapter(tmp_path / "adapter", reference, 1, "lm_head")
    loras = LoraAdapters(capacity=1, max_rank=4, num_slots=1)
    load(tmp_path, loras=loras)
    with pytest.raises(CheckpointError, match=r"lm_head .* divides its rows by their norms"):
        load_at_start(loras, [LoraAdapter.read("a", tmp_path / "adapter")])
