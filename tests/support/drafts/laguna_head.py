"""A DFlash head for Laguna, with a reference implementation on the layers of transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from support.drafts.draft_heads import randomize
from support.drafts.dspark_heads import SIZE
from support.drafts.models_with_heads import NUM_DRAFTS, Head, dflash_head, write_model
from transformers.models.laguna import modeling_laguna as laguna

MASK, OUTPUTS = 5, [0, 2]


def dflash_of_laguna(path: Path) -> Head:
    """A DFlash head as published for Laguna: what it reads of the model is normed by layer and by reader."""
    model = write_model(path, "Qwen3Config", "Qwen3ForCausalLM", {"num_hidden_layers": 6})
    fields = model.config.to_dict() | {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention"] * 3,
        "mlp_layer_types": ["dense"] * 3,
        "num_attention_heads_per_layer": [model.config.num_attention_heads] * 3,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
        "gating": True,
        "sliding_window": 12,
    }
    config = transformers.LagunaConfig(**fields)
    made = randomize(laguna.LagunaModel._from_config(config, attn_implementation="eager"))
    norm, *norms = (randomize(copy.deepcopy(made.norm)) for _ in range(3))
    projection = torch.randn(SIZE, 2 * SIZE) * 0.1
    tensors = {f"layers.{name}": each for name, each in made.layers.state_dict().items()}
    tensors |= {"fc.weight": projection, "hidden_norm.weight": norm.weight}
    tensors |= {"norm.weight": made.norm.weight}
    tensors |= {f"aux_hidden_norms.{i}.weight": each.weight for i, each in enumerate(norms)}
    directory = path / "head"
    directory.mkdir()
    own = {"mask_token_id": MASK, "target_layer_ids": OUTPUTS, "block_size": 8}
    fields = config.to_dict() | {"dflash_config": own, "draft_vocab_size": config.vocab_size}
    fields |= {"architectures": ["DFlashLagunaForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(fields))
    copies = {name: each.detach().clone() for name, each in tensors.items()}
    save_file(copies, directory / "model.safetensors")

    @torch.no_grad()
    def drafts(tokens: list[int]) -> list[int]:
        states = model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        read = [each(states[i + 1][0]) for each, i in zip(norms, OUTPUTS, strict=True)]
        context_TD = norm(torch.cat(read, -1) @ projection.T)
        block = torch.tensor([tokens[-1], *[MASK] * NUM_DRAFTS])
        x_TD, begin = model.get_input_embeddings()(block), len(context_TD)
        places = torch.arange(begin + len(block))[None]
        tables = made.rotary_emb(x_TD[None], places, "full_attention")
        for layer in made.layers:
            inputs_TD = layer.input_layernorm(torch.cat((context_TD, x_TD)))
            x_TD = x_TD + layer.self_attn(inputs_TD[None], tables, None)[0][0, begin:]
            x_TD = x_TD + layer.mlp(layer.post_attention_layernorm(x_TD))
        return list(map(int, model.lm_head(made.norm(x_TD))[1:].argmax(-1)))

    return dflash_head(model, path, drafts)
