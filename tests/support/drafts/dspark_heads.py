"""DSpark heads, with reference implementations."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from support.drafts.draft_heads import (
    add_dflash_vocabulary,
    add_tensors,
    dflash_hidden_states,
    randomize,
    write_dflash,
)
from support.drafts.models_with_heads import NUM_DRAFTS, Head, dflash_head, write_model
from torch import Tensor
from torch.nn import functional as F
from transformers.models.gemma4 import modeling_gemma4 as gemma4

RANK, SIZE = 16, 64


def write_markov_head(
    directory: Path, kind: str, num_tokens: int, num_drafts: int, **fields: Any
) -> Callable[[Tensor, int, bool], Tensor]:
    """Turn a DFlash head into a DSpark head. Return the bias of its logits.

    It is a function of a draft's hidden state, of the token before it, and of whether it is the first of its block.
    """
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config |= {
        "architectures": ["DSparkSpeculator" if fields else "Qwen3DSparkModel"],
        "markov_rank": RANK,
        "markov_head_type": kind,
        "enable_confidence_head": True,
        **fields,
    }
    file.write_text(json.dumps(config))
    weights = {
        "markov_w1": torch.randn(num_tokens, RANK),
        "markov_w2": torch.randn(num_drafts, RANK),
    }
    if kind == "gated":
        weights["gate_proj"] = 0.2 * torch.randn(RANK, SIZE + RANK)
    if kind == "rnn":
        weights["joint_proj"] = 0.2 * torch.randn(3 * RANK, SIZE + 2 * RANK)
    tensors = {f"markov_head.{name}.weight": each for name, each in weights.items()}
    biases = {name: torch.randn(len(weights[name])) for name in weights if name.endswith("_proj")}
    tensors |= {f"markov_head.{name}.bias": each for name, each in biases.items()}
    tensors["confidence_head.proj.weight"] = torch.zeros(1, SIZE + RANK)
    tensors["confidence_head.proj.bias"] = torch.zeros(1)
    add_tensors(directory, tensors)
    state = torch.zeros(RANK)

    def bias(hidden_D: Tensor, previous: int, is_first: bool) -> Tensor:
        nonlocal state
        state = torch.zeros(RANK) if is_first else state
        vector = weights["markov_w1"][previous]
        if kind == "gated":
            inputs = torch.cat((hidden_D, vector))
            vector = (weights["gate_proj"] @ inputs + biases["gate_proj"]).sigmoid() * vector
        if kind == "rnn":
            inputs = torch.cat((state, vector, hidden_D))
            joint = weights["joint_proj"] @ inputs + biases["joint_proj"]
            gate, candidate, output = joint.chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            vector = output.tanh()
        return weights["markov_w2"] @ vector

    return bias


def make_dspark(path: Path, kind: str, *, of_speculators: bool = False) -> Head:
    model = write_model(path, "Qwen3Config", "Qwen3ForCausalLM", {"num_hidden_layers": 6})
    directory = path / "head"
    made = write_dflash(directory, ["full_attention"] * 3)
    vocab_size = model.config.vocab_size
    token_ids, matrix = torch.arange(vocab_size), model.lm_head.weight
    fields = {}
    if of_speculators:
        token_ids = add_dflash_vocabulary(directory, model.config)
        matrix = load_file(directory / "model.safetensors")["lm_head.weight"]
        fields = {"sample_from_anchor": False}
    bias = write_markov_head(directory, kind, vocab_size, len(token_ids), **fields)

    @torch.no_grad()
    def drafts(tokens: list[int]) -> list[int]:
        hidden_TD = dflash_hidden_states(
            model, made, tokens, NUM_DRAFTS, from_last=not of_speculators
        )
        found = tokens[-1:]
        for index, hidden_D in enumerate(hidden_TD):
            logits = matrix @ hidden_D + bias(hidden_D, found[-1], index == 0)
            found.append(int(token_ids[logits.argmax()]))
        return found[1:]

    return dflash_head(model, path, drafts, made)


def dspark_with_pairs(path: Path) -> Head:
    """A DSpark head as published for LFM2, whose rotation pairs neighbors."""
    head = make_dspark(path, "vanilla")
    directory = path / "head"
    file = directory / "config.json"
    fields = {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if re.search(r"self_attn\.[qk]_(proj|norm)\.weight", name):
            halves = tensor.unflatten(0, (-1, 2, 8))
            tensors[name] = halves.transpose(1, 2).flatten(0, 2).contiguous()
    add_tensors(directory, tensors)
    return head


def dspark(path: Path) -> Head:
    """A DSpark head as published by its authors, whose last token predicts."""
    return make_dspark(path, "vanilla")


def dspark_with_gates(path: Path) -> Head:
    """A DSpark head with gates in its Markov head, as published for Ling."""
    head = make_dspark(path, "gated")
    file = path / "head" / "config.json"
    config = json.loads(file.read_text()) | {"architectures": ["LingDSparkModel"]}
    file.write_text(json.dumps(config))
    return head


def dspark_with_states(path: Path) -> Head:
    """A DSpark head with a recurrent Markov head."""
    return make_dspark(path, "rnn")


def dspark_of_speculators(path: Path) -> Head:
    """A DSpark head in the layout of Speculators, whose mask tokens predict, with a vocabulary of its own."""
    return make_dspark(path, "vanilla", of_speculators=True)


GEMMA4: dict[str, Any] = {
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "layer_types": ["full_attention"] * 2,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 4.0,
    "max_position_embeddings": 512,
}


def dspark_of_gemma4(path: Path) -> Head:
    """A DSpark head with layers of Gemma 4, whose values are its keys, and a vocabulary of its own."""
    model = write_model(path, "Qwen3Config", "Qwen3ForCausalLM", {"num_hidden_layers": 6})
    vocab_size, directory = model.config.vocab_size, path / "head"
    config = transformers.Gemma4TextConfig(**GEMMA4, vocab_size=vocab_size)
    made = randomize(gemma4.Gemma4TextModel._from_config(config, attn_implementation="eager"))
    for layer in made.layers:
        layer.layer_scalar.fill_(0.8)
    block = {"block_size": 8, "mask_token_id": 5, "target_layer_ids": [0, 2]}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config.to_dict() | block))
    parts = {
        "fc.weight": torch.randn(SIZE, 2 * SIZE) * 0.1,
        "hidden_norm.weight": torch.rand(SIZE) + 0.5,
        "lm_head.weight": torch.randn(vocab_size, SIZE),
    }
    save_file(made.state_dict() | parts, directory / "model.safetensors")
    bias = write_markov_head(directory, "vanilla", vocab_size, vocab_size)
    file = directory / "config.json"
    architectures = {"architectures": ["Gemma4DSparkModel"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | architectures))

    def hidden_states(tokens: list[int]) -> Tensor:
        """Return the outputs of the last token and of mask tokens."""
        states = model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        context_TD = torch.cat([states[i + 1][0] for i in block["target_layer_ids"]], -1)
        context_TD = F.rms_norm(
            context_TD @ parts["fc.weight"].T, (SIZE,), parts["hidden_norm.weight"], 1e-6
        )
        ids = [tokens[-1], *[block["mask_token_id"]] * (NUM_DRAFTS - 1)]
        x_TD = made.embed_tokens(torch.tensor(ids))
        positions = torch.arange(len(context_TD) + len(x_TD))[None]
        tables = made.rotary_emb(x_TD[None], positions, "full_attention")
        for layer in made.layers:
            inputs_TD = torch.cat((context_TD, layer.input_layernorm(x_TD)))
            attended = layer.self_attn(inputs_TD[None], tables, None, {})[0][0, -len(x_TD) :]
            x_TD = x_TD + layer.post_attention_layernorm(attended)
            fed_TD = layer.mlp(layer.pre_feedforward_layernorm(x_TD))
            x_TD = (x_TD + layer.post_feedforward_layernorm(fed_TD)) * layer.layer_scalar
        return made.norm(x_TD)

    @torch.no_grad()
    def drafts(tokens: list[int]) -> list[int]:
        found = tokens[-1:]
        for index, hidden_D in enumerate(hidden_states(tokens)):
            logits = 4 * torch.tanh(parts["lm_head.weight"] @ hidden_D / 4)
            logits = logits + bias(hidden_D, found[-1], index == 0)
            found.append(int(logits.argmax()))
        return found[1:]

    return dflash_head(model, path, drafts)


DSPARK_HEADS = [
    dspark,
    dspark_of_gemma4,
    dspark_with_pairs,
    dspark_with_gates,
    dspark_with_states,
    dspark_of_speculators,
]
