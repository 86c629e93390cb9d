"""Tiny block-diffusion checkpoints, and the generation loop that their authors published.

The loop computes the whole sequence in every pass, with a mask that hides later blocks, and has no cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from support.checkpoints.tiny import QWEN3, random_model, sentencepiece_tokenizer

MASK = 360
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


class Generated(NamedTuple):
    """The tokens that the loop generates, the log-probability of each when it was fixed, and the number of passes."""

    token_ids: list[int]
    logprobs: list[float]
    num_passes: int


class DiffusionModel(NamedTuple):
    """A model of transformers whose tokens attend to all tokens of their block, and to earlier blocks."""

    model: Any
    block_size: int

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits [T, V] of whole blocks."""
        blocks_T = torch.arange(len(token_ids)) // self.block_size
        hidden_TT = blocks_T[None, :] > blocks_T[:, None]
        mask_TT = torch.zeros(hidden_TT.shape).masked_fill(
            hidden_TT, torch.finfo(torch.float32).min
        )
        ids = torch.tensor([list(token_ids)])
        logits: torch.Tensor = self.model(input_ids=ids, attention_mask=mask_TT[None, None]).logits
        return logits[0]

    @torch.inference_mode()
    def edit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        threshold: float,
        edit: float,
        most_edits: int,
        penalty: float = 0.0,
    ) -> list[int]:
        """Denoise block after block like JointThreshold of SGLang."""
        known = list(prompt)
        while len(known) < len(prompt) + max_tokens:
            start = len(known) // self.block_size * self.block_size
            block = torch.tensor(known[start:] + [MASK] * (start + self.block_size - len(known)))
            is_mask = is_new = torch.arange(start, start + self.block_size) >= len(known)
            num_edits = 0
            while True:
                logits = self.logits(known[:start] + block.tolist())[start:]
                logits[torch.arange(1, self.block_size), block[:-1]] -= penalty
                probabilities = logits.softmax(-1)
                probabilities[:, MASK] = 0
                confidence, chosen = probabilities.max(-1)
                changed = is_mask & (confidence > threshold)
                if is_mask.any() and not changed.any():
                    changed[torch.where(is_mask, confidence, -1).argmax()] = True
                num_edits += not is_mask.any()
                changed |= is_new & ~is_mask & (confidence > edit) & (chosen != block)
                if num_edits > most_edits or not changed.any():
                    break
                block = torch.where(changed, chosen, block)
                is_mask = is_mask & ~changed
            known = known[:start] + block.tolist()
        return known[len(prompt) :][:max_tokens]

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        threshold: float = 0.95,
        stops: Sequence[int] = (),
    ) -> Generated:
        """Denoise block after block, like `block_diffusion_generate` of SDAR with `low_confidence_dynamic`.

        Unlike that function, it never fixes a mask token. The most confident token is fixed if none exceeds the
        threshold, as in SGLang's LowConfidence.
        """
        known, num_passes = list(prompt), 0
        logprobs: list[float] = []
        while len(known) < len(prompt) + max_tokens:
            start = len(known) // self.block_size * self.block_size
            block = known[start:] + [MASK] * (start + self.block_size - len(known))
            is_mask = torch.arange(start, start + self.block_size) >= len(known)
            found = torch.zeros(self.block_size)
            while is_mask.any():
                num_passes += 1
                logits = self.logits(known[:start] + block)[start:]
                logprobs_BV = logits.log_softmax(-1)
                logprobs_BV[:, MASK] = -torch.inf
                confidence, chosen = logprobs_BV.max(-1)
                confidence[~is_mask] = -torch.inf
                fixed = confidence.exp() > threshold
                if not fixed.any():
                    fixed[confidence.argmax()] = True
                found[fixed] = confidence[fixed]
                for i in fixed.nonzero()[:, 0].tolist():
                    block[i] = int(chosen[i])
                is_mask &= ~fixed
            logprobs += found[len(known) - start :].tolist()
            known = known[:start] + block
            new = known[len(prompt) :]
            ends = [i for i, token in enumerate(new) if token in stops]
            if ends:
                max_tokens = min(ends[0] + 1, max_tokens)
        tokens = known[len(prompt) :][:max_tokens]
        return Generated(tokens, logprobs[:max_tokens], num_passes)


def sdar(directory: Path, block_size: int = 4, *, has_experts: bool = False) -> DiffusionModel:
    """Write an SDAR, whose layers are those of a Qwen 3."""
    tokenizer = sentencepiece_tokenizer()
    classes = (
        ("Qwen3MoeConfig", "Qwen3MoeForCausalLM")
        if has_experts
        else ("Qwen3Config", "Qwen3ForCausalLM")
    )
    settings = QWEN3 | (EXPERTS | {"norm_topk_prob": True} if has_experts else {})
    model = random_model(*classes, settings, tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "architectures": ["SDARMoeForCausalLM" if has_experts else "SDARForCausalLM"],
        "model_type": "sdar_moe" if has_experts else "sdar",
        "block_size": block_size,
        "mask_token_id": MASK,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return DiffusionModel(model, block_size)


def llada2(directory: Path, block_size: int = 8, capacity: int | None = None) -> DiffusionModel:
    """Write an LLaDA 2. GLM-4.5 has the same layers under other names."""
    tokenizer = sentencepiece_tokenizer()
    settings = QWEN3 | {
        "tie_word_embeddings": False,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 2e4,
            "partial_rotary_factor": 0.5,
        },
    }
    model = random_model("Glm4MoeConfig", "Glm4MoeForCausalLM", settings, tokenizer)
    # Otherwise masks at neighboring positions are equally confident, and experts hardly matter.
    with torch.no_grad():
        model.lm_head.weight *= 24
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 8
            layer.self_attn.q_norm.weight *= 6
            layer.self_attn.k_norm.weight *= 6
            for name, parameter in layer.mlp.named_parameters():
                if not name.startswith("gate."):
                    parameter *= 4
    tokenizer.save_pretrained(directory)
    save_file(_published(model.state_dict()), directory / "model.safetensors")
    config = {name: value for name, value in settings.items() if not name.startswith("n_")}
    config |= {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "vocab_size": len(tokenizer),
        "num_experts": 6,
        "num_shared_experts": 2,
        "n_group": 3,
        "score_function": "sigmoid",
        "rope_parameters": None,
        "rope_theta": 2e4,
        "partial_rotary_factor": 0.5,
        "eos_token_id": tokenizer.eos_token_id,
        "block_size": block_size,
        "mask_token_id": MASK,
    }
    if capacity is not None:
        config["expert_capacity"] = capacity
        for layer in model.model.layers[1:]:
            layer.mlp.gate.forward = _route_blocks(layer.mlp.gate, block_size, capacity)
    (directory / "config.json").write_text(json.dumps(config))
    return DiffusionModel(model, block_size)


def _route_blocks(gate: Any, block_size: int, capacity: int) -> Callable[[torch.Tensor], Any]:
    """Return the choice of experts of SGLang's `block_topk_triton`."""

    def route(x_1TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_TE = x_1TD.flatten(0, -2).float() @ gate.weight.float().T
        experts, weights = [], []
        for scores in logits_TE.sigmoid().split(block_size):
            corrected = scores + gate.e_score_correction_bias
            allowed = corrected.max(0).values.topk(capacity).indices.sort().values
            chosen = allowed[corrected[:, allowed].topk(3).indices]
            weight = scores.gather(1, chosen)
            experts.append(chosen)
            weights.append(2.5 * weight / weight.sum(1, keepdim=True))
        return logits_TE, torch.cat(weights), torch.cat(experts)

    return route


_NAMES = (
    ("embed_tokens", "word_embeddings"),
    ("self_attn.o_proj", "attention.dense"),
    ("self_attn.q_norm", "attention.query_layernorm"),
    ("self_attn.k_norm", "attention.key_layernorm"),
    ("gate.e_score_correction_bias", "gate.expert_bias"),
)


def _published(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a GLM-4.5 under the names of an LLaDA 2."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        for old, new in _NAMES:
            name = name.replace(old, new)
        layer, _, part = name.rpartition(".self_attn.")
        if part == "q_proj.weight":
            parts = [tensors[f"{layer}.self_attn.{kind}_proj.weight"] for kind in "qkv"]
            found[f"{layer}.attention.query_key_value.weight"] = torch.cat(parts)
        elif name.endswith("experts.gate_up_proj"):
            for i, (gate, up) in enumerate(matrix.chunk(2) for matrix in tensor):
                found[name.replace("gate_up_proj", f"{i}.gate_proj.weight")] = gate.contiguous()
                found[name.replace("gate_up_proj", f"{i}.up_proj.weight")] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            for i, matrix in enumerate(tensor):
                found[name.replace("down_proj", f"{i}.down_proj.weight")] = matrix.contiguous()
        elif part not in ("k_proj.weight", "v_proj.weight"):
            found[name] = tensor.contiguous()
    return found
