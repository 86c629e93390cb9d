"""A DFlash 2 head, with a reference implementation on top of that of DFlash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from support.drafts.draft_heads import add_tensors, dflash_hidden_states, write_dflash
from support.drafts.models_with_heads import NUM_DRAFTS, Head, dflash_head, write_model
from torch import Tensor, nn

TAPS, GROUP, RANK, CANDIDATES = 3, 16, 8, 5
EMBEDDING_SCALE, LOGITS_SCALE, SOFTCAP = 0.5, 1.5, 2.0


class _Convolutions:
    """The convolutions around attention or an MLP of one layer."""

    def __init__(self, size: int) -> None:
        self.base = torch.randn(2, TAPS, size)
        self.projection = 0.2 * torch.randn(2 * TAPS * (size // GROUP), size)
        self._computed = torch.empty(0)

    def _apply(self, x_TD: Tensor, side: int) -> Tensor:
        y_TD = torch.zeros_like(x_TD)
        for token in range(len(x_TD)):
            for tap in range(min(TAPS, token + 1)):
                added = self._computed[token, side, tap].repeat_interleave(GROUP)
                y_TD[token] += (self.base[side, tap] + added) * x_TD[token - tap]
        return y_TD

    def before(self, x: Tensor) -> Tensor:
        """Return the convolved input [1, T, D]."""
        self._computed = (x[0] @ self.projection.T).view(len(x[0]), 2, TAPS, -1)
        return self._apply(x[0], 0)[None]

    def after(self, x: Tensor) -> Tensor:
        """Return the convolved output [1, T, D]."""
        return self._apply(x[0], 1)[None]


def _convolve(layer: Any, size: int) -> dict[str, Tensor]:
    """Add convolutions to a layer of the reference. Return their tensors."""
    attention, mlp = _Convolutions(size), _Convolutions(size)

    def before_attention(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> Any:
        return (), kwargs | {"hidden_states": attention.before(kwargs["hidden_states"])}

    layer.self_attn.register_forward_pre_hook(before_attention, with_kwargs=True)
    layer.self_attn.register_forward_hook(lambda _, __, out: (attention.after(out[0]), *out[1:]))
    layer.mlp.register_forward_pre_hook(lambda _, inputs: (mlp.before(inputs[0]),))
    layer.mlp.register_forward_hook(lambda _, __, out: mlp.after(out))
    parts = {"attention_conv": attention, "mlp_conv": mlp}
    bases = {f"{name}.base_kernel": each.base for name, each in parts.items()}
    return bases | {
        f"{name}.kernel_projection.weight": each.projection for name, each in parts.items()
    }


def dflash2(path: Path) -> Head:
    """A DFlash 2 head as published by its authors, some of whose layers have a window."""
    model = write_model(path, "Qwen3Config", "Qwen3ForCausalLM", {"num_hidden_layers": 6})
    directory, size = path / "head", model.config.hidden_size
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    made = write_dflash(directory, kinds)
    tensors = {}
    for index, layer in enumerate(made.layers):
        for name, tensor in _convolve(layer, size).items():
            tensors[f"layers.{index}.{name}"] = tensor
    selector = {
        "predecessor_codebook": torch.randn(model.config.vocab_size, RANK),
        "successor_codebook": torch.randn(model.config.vocab_size, RANK),
        "hidden_projection.weight": torch.randn(RANK, size),
    }
    tensors |= {f"candidate_selector.{name}": tensor for name, tensor in selector.items()}
    add_tensors(directory, tensors)
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= {
        "conv_kernel_size": TAPS,
        "conv_group_size": GROUP,
        "selector_rank": RANK,
        "selector_top_k": CANDIDATES,
        "input_embedding_scale": EMBEDDING_SCALE,
        "output_multiplier": LOGITS_SCALE,
        "final_logit_softcapping": SOFTCAP,
    }
    (directory / "config.json").write_text(json.dumps(config))
    made.register_forward_pre_hook(
        lambda _, args, kwargs: (
            args,
            kwargs | {"noise_embeds": EMBEDDING_SCALE * kwargs["noise_embeds"]},
        ),
        with_kwargs=True,
    )

    @torch.no_grad()
    def drafts(tokens: list[int]) -> list[int]:
        hidden_TD = dflash_hidden_states(
            model, made, tokens, NUM_DRAFTS, causal_kinds=["sliding_attention"]
        )
        found = tokens[-1:]
        for hidden_D in hidden_TD:
            logits, ids = (model.lm_head.weight @ hidden_D).topk(CANDIDATES)
            logits = LOGITS_SCALE * SOFTCAP * (logits / SOFTCAP).tanh()
            vector = selector["predecessor_codebook"][found[-1]] * (
                selector["hidden_projection.weight"] @ hidden_D
            )
            found.append(int(ids[(logits + selector["successor_codebook"][ids] @ vector).argmax()]))
        return found[1:]

    return dflash_head(model, path, drafts, made)
