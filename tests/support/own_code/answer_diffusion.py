"""Models that denoise whole answers: published files, and the loop that generates from them without a cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from support.checkpoints.tiny import QWEN3, random_model, sentencepiece_tokenizer
from support.own_code.block_diffusion import EXPERTS, MASK

_UNTIED = QWEN3 | {"tie_word_embeddings": False}


class AnswerModel(NamedTuple):
    """A model of transformers whose tokens attend to all others. Its logits may be those of the next position."""

    model: Any
    predicts_next: bool = False

    @torch.inference_mode()
    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        threshold: float,
        block_size: int,
        answer_size: int,
        tokens_per_pass: int = 1,
    ) -> list[int]:
        """Denoise like LLaDA's `generate`, more tokens at once if they are probable. Masks are never fixed."""
        known = list(prompt)
        while len(known) < len(prompt) + max_tokens:
            num_new = len(known) - len(prompt)
            end = len(known) + answer_size - num_new % answer_size
            tokens = torch.tensor(known + [MASK] * (end - len(known)))
            block = slice(len(known), len(known) + block_size)
            while (is_mask := tokens[block] == MASK).any():
                logits = self._logits(tokens)[block]
                probabilities = logits.softmax(-1)
                probabilities[:, MASK] = -1
                confidence, chosen = probabilities.max(-1)
                confidence[~is_mask] = -1
                fixed = confidence > threshold
                fixed[confidence.topk(min(tokens_per_pass, int(is_mask.sum()))).indices] = True
                tokens[block] = torch.where(fixed, chosen, tokens[block])
            known = tokens[: block.stop].tolist()
        return known[len(prompt) :][:max_tokens]

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [T, V] of each position."""
        visible = torch.zeros(1, 1, len(tokens), len(tokens))
        logits: torch.Tensor = self.model(input_ids=tokens[None], attention_mask=visible).logits[0]
        return torch.cat((logits[:1], logits[:-1])) if self.predicts_next else logits


def _write(directory: Path, config: dict[str, Any]) -> None:
    """Write the config and the tokenizer of a model."""
    sentencepiece_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config | {"mask_token_id": MASK}))


def _llada_name(name: str) -> str:
    for old, new in (
        ("model.embed_tokens", "model.transformer.wte"),
        ("model.norm", "model.transformer.ln_f"),
        ("model.layers", "model.transformer.blocks"),
        ("lm_head", "model.transformer.ff_out"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ff_norm"),
        ("self_attn.o_proj", "attn_out"),
        ("self_attn.", ""),
        ("mlp.gate_proj", "ff_proj"),
        ("mlp.up_proj", "up_proj"),
        ("mlp.down_proj", "ff_out"),
    ):
        name = name.replace(old, new)
    return name


def llada(directory: Path) -> AnswerModel:
    """Write an LLaDA, a Llama with other names."""
    tokenizer = sentencepiece_tokenizer()
    settings = _UNTIED | {"rms_norm_eps": 1e-5, "rope_theta": 5e5}
    model = random_model("LlamaConfig", "LlamaForCausalLM", settings, tokenizer)
    config = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": 64,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_layers": 3,
        "mlp_hidden_size": 96,
        "mlp_ratio": 4,
        "vocab_size": len(tokenizer),
        "embedding_size": len(tokenizer),
        "max_sequence_length": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "weight_tying": False,
        "block_type": "llama",
        "layer_norm_type": "rms",
        "activation_type": "silu",
        "include_bias": False,
        "include_qkv_bias": False,
        "eos_token_id": tokenizer.eos_token_id,
    }
    tensors = {_llada_name(name): each.contiguous() for name, each in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors")
    _write(directory, config)
    return AnswerModel(model)


def llada_moe(directory: Path) -> AnswerModel:
    """Write an LLaDA-MoE, whose layers are those of a Qwen 3 with experts."""
    tokenizer = sentencepiece_tokenizer()
    settings = _UNTIED | EXPERTS | {"norm_topk_prob": False, "rms_norm_eps": 1e-5}
    model = random_model("Qwen3MoeConfig", "Qwen3MoeForCausalLM", settings, tokenizer)
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text()) | {
        "architectures": ["LLaDAMoEModelLM"],
        "model_type": "llada",
        "moe_layer_freq": [1, 1, 1],
        "expert_intermediate_size": EXPERTS["moe_intermediate_size"],
        "qk_layernorm": True,
    }
    del config["moe_intermediate_size"], config["intermediate_size"]
    _write(directory, config)
    return AnswerModel(model)


def dream(directory: Path) -> AnswerModel:
    """Write a Dream, a Qwen 2 whose logits are those of the next position."""
    tokenizer = sentencepiece_tokenizer()
    model = random_model("Qwen2Config", "Qwen2ForCausalLM", _UNTIED, tokenizer)
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    _write(directory, config | {"architectures": ["DreamModel"], "model_type": "Dream"})
    return AnswerModel(model, predicts_next=True)


def rnd1(directory: Path) -> AnswerModel:
    """Write an RND1, a Qwen 3 with experts whose logits are those of the next position."""
    tokenizer = sentencepiece_tokenizer()
    settings = _UNTIED | EXPERTS | {"norm_topk_prob": True}
    model = random_model("Qwen3MoeConfig", "Qwen3MoeForCausalLM", settings, tokenizer)
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    _write(directory, config | {"architectures": ["RND1LM"], "model_type": "rnd1"})
    return AnswerModel(model, predicts_next=True)


MAKERS = {"llada": llada, "llada moe": llada_moe, "dream": dream, "rnd1": rnd1}
