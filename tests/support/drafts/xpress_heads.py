"""An XPress head, with a reference implementation on top of that of DFlash."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from support.drafts.draft_heads import add_tensors, dflash_hidden_states, write_dflash
from support.drafts.models_with_heads import NUM_DRAFTS, Head, dflash_head, write_model
from torch import Tensor
from torch.nn import functional as F

RANK, INNER = 8, 12


def xpress(path: Path) -> Head:
    """An XPress head, whose drafts are computed until none of them changes."""
    model = write_model(path, "Qwen3Config", "Qwen3ForCausalLM", {"num_hidden_layers": 6})
    directory, size = path / "head", model.config.hidden_size
    made = write_dflash(directory, ["full_attention"] * 3)
    block, vocab_size = NUM_DRAFTS + 1, model.config.vocab_size
    shapes = {
        "w1.weight": (vocab_size, RANK),
        "down_h.weight": (RANK, size),
        "down_g.weight": (RANK, size),
        "in_proj.weight": (RANK, 3 * RANK),
        "mix.L": (RANK, block, block),
        "mlp.gate_proj.weight": (INNER, RANK),
        "mlp.up_proj.weight": (INNER, RANK),
        "mlp.down_proj.weight": (RANK, INNER),
        "w2.weight": (vocab_size, RANK),
    }
    parts = {name: 0.5 * torch.randn(shape) for name, shape in shapes.items()}
    add_tensors(directory, {f"xpress_head.{name}": each for name, each in parts.items()})
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["Qwen3XPressModel"], "xpress_block_size": block}
    (directory / "config.json").write_text(json.dumps(config))

    def added(hidden_BD: Tensor, before_B: Tensor) -> Tensor:
        """Return what is added to the logits of the places of a block, [B, V]."""
        mean_BD = hidden_BD.mean(0, keepdim=True).expand_as(hidden_BD)
        of_hidden = hidden_BD @ parts["down_h.weight"].T, mean_BD @ parts["down_g.weight"].T
        x_BR = torch.cat((*of_hidden, parts["w1.weight"][before_B]), 1) @ parts["in_proj.weight"].T
        x_BR = x_BR + torch.einsum("rij,jr->ir", parts["mix.L"].tril(), x_BR)
        gate = F.silu(x_BR @ parts["mlp.gate_proj.weight"].T)
        inner = gate * (x_BR @ parts["mlp.up_proj.weight"].T)
        return (x_BR + inner @ parts["mlp.down_proj.weight"].T) @ parts["w2.weight"].T

    @torch.no_grad()
    def drafts(tokens: list[int]) -> list[int]:
        hidden_BD = dflash_hidden_states(model, made, tokens, block, from_last=True)
        logits_BV = hidden_BD @ model.lm_head.weight.T
        found = logits_BV[1:].argmax(1).tolist()
        for _ in range(NUM_DRAFTS):
            before_B = torch.tensor([*tokens[-2:], *found[:-1]])
            found = (logits_BV + added(hidden_BD, before_B))[1:].argmax(1).tolist()
        return found

    return dflash_head(model, path, drafts, made)
