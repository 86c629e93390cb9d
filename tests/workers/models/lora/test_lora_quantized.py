"""LoRA adapters give the same results with quantized weights as with the same weights in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from engine.protocol.file_identity import LoraAdapter
from engine.workers.cpu.decoder import NativeDecoder
from engine.workers.models.decoder import Decoder
from engine.workers.models.lora.adapters import LoraAdapters, load_at_start
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from support.checkpoints.lora_adapters import greedy, write_adapter, write_gguf_adapter
from support.checkpoints.quantized import quantize_directory
from support.gguf.quantizers import quantize
from support.gguf.writer import write_gguf
from support.workers.decoders import Runner, load_decoder, load_native_decoder

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
FAMILIES = {"llama": "Llama", "qwen3": "Qwen3"}
FILES = ("awq", "gptq", "gptq-act-order", "fp8", "mxfp4")
GGUF = {"q4_k": GGMLQuantizationType.Q4_K, "q8_0": GGMLQuantizationType.Q8_0}


def quantized(directory: Path, family: str, kind: str) -> tuple[Path, transformers.PreTrainedModel]:
    """Write a quantized checkpoint, and return its path and the model with the weights that it represents."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**SIZES)
    model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.08)
    if kind in GGUF:
        directory.mkdir()
        path = write_gguf(directory / "model.gguf", model, ggml_type=GGUF[kind])
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                rows = quantize(module.weight.detach().numpy(), GGUF[kind])
                meaning = dequantize(rows, GGUF[kind])
                module.weight = torch.nn.Parameter(torch.from_numpy(meaning))
        return path, model
    model.save_pretrained(directory)
    model.load_state_dict(quantize_directory(directory, kind), strict=False)
    return directory, model


def logits_and_tokens(
    decoder: Decoder | NativeDecoder, slot: int, prompt: list[int]
) -> tuple[torch.Tensor, list[int]]:
    """Return the logits of a prompt in a slot, and the tokens that follow it."""
    runner, chunk, tokens = Runner(decoder, 2), prompt, []
    assert decoder.loras is not None
    first = None
    for _ in range(8):
        slots_T = np.full(len(chunk), slot, np.int32)
        decoder.loras.begin_step(slots_T)
        logits = decoder.compute_logits(runner.hidden({slot: chunk}), slots_T)
        first = logits if first is None else first
        chunk = [int(logits[-1].argmax())]
        tokens += chunk
    assert first is not None
    return first, tokens


@pytest.mark.parametrize("kind", [*FILES, *GGUF])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_adds_to_what_quantized_weights_stand_for(
    tmp_path: Path, family: str, kind: str
) -> None:
    path, model = quantized(tmp_path / "base", family, kind)
    merged = write_adapter(tmp_path / "adapter", model, 1, r".*(_proj|embed_tokens|lm_head)", r=8)
    adapter = tmp_path / "adapter"
    if kind in GGUF:
        adapter = write_gguf_adapter(tmp_path / "adapter.gguf", adapter, model.config)
    prompt = [(7 * i + i * i) % SIZES["vocab_size"] for i in range(20)]
    for load in (load_decoder, load_native_decoder):
        loras = LoraAdapters(capacity=2, max_rank=8, num_slots=2)
        decoder = load(path, loras=loras)
        load_at_start(loras, [LoraAdapter.read("adapter", adapter)])
        loras.set_slot(1, 0)
        errors = []
        for slot, reference in enumerate((model, merged)):
            with torch.no_grad():
                expected = reference(torch.tensor([prompt])).logits[0]
            logits, tokens = logits_and_tokens(decoder, slot, prompt)
            errors.append(
                (torch.linalg.norm(logits - expected) / torch.linalg.norm(expected)).item()
            )
            if load is load_decoder:
                assert tokens == greedy(reference, prompt, 8)
        # Natively, the activations of some formats are rounded to eight bits.
        limits = (1e-4, 1e-4) if load is load_decoder else (0.05, max(1e-4, 4 * errors[0]))
        assert errors[0] < limits[0] and errors[1] < limits[1], errors
