"""Models with several layers for multi-token prediction, and a reference that computes all layers for all tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from support.draft_heads import add_tensors
from support.families.indexers import WITH_INDEXERS
from support.models_with_heads import Head, run_layer
from support.prediction_layers import (
    Names,
    glm5_mtp,
    hunyuan3_mtp,
    minimax3_mtp,
    step3_mtp,
    write_prediction_layer,
)
from torch import Tensor, nn


class _Layer(NamedTuple):
    """The computation of a layer, and its output projection."""

    run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    project: Callable[[Tensor], Tensor]


def _with_layers(
    path: Path,
    make: Callable[[Path], Head],
    number: str,
    following: Callable[[int], str],
    count: int,
) -> Head:
    """Write a model with `count` layers, made by one function with different random numbers.

    `number` matches the beginning of the first layer's names, which `following` returns for later layers.
    """
    head = make(path)
    layers = [_Layer(head.run, head.logits or head.model.lm_head)]
    for index in range(1, count):
        torch.manual_seed(20 + index)
        other = make(path / f"layer{index}")
        stored = load_file(other.path / "model.safetensors")
        add_tensors(
            path,
            {
                re.sub(f"^{number}", following(index), name): tensor
                for name, tensor in stored.items()
                if re.match(number, name)
            },
        )
        layers.append(_Layer(other.run, other.logits or head.model.lm_head))
    config = json.loads((path / "config.json").read_text())
    config |= {"num_nextn_predict_layers": count}
    (path / "config.json").write_text(json.dumps(config))
    return head._replace(
        drafts=lambda tokens: _drafts(head.model, layers, tokens, 3), logits=None, token_ids=None
    )


@torch.no_grad()
def _drafts(model: Any, layers: list[_Layer], tokens: list[int], count: int) -> list[int]:
    """Return the drafts after all tokens, the last of which the model has not computed."""
    embed = model.get_input_embeddings()
    hidden_TD = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
    drafts: list[int] = []
    read_TD = hidden_TD
    for index in range(count):
        number = min(index, len(layers) - 1)
        if index > number:
            # The last layer goes on after its last position, from its own output there.
            hidden_TD = torch.cat((read_TD, hidden_TD[-1:]))
        read_TD = hidden_TD
        embedded_TD = embed(torch.tensor([*tokens, *drafts][1 + number :]))
        chosen_TD, hidden_TD = layers[number].run(embedded_TD, read_TD)
        drafts.append(int(layers[number].project(chosen_TD[-1]).argmax()))
    return drafts


def step3_layers(path: Path) -> Head:
    """Three layers of Step 3.5, each with an output projection of its own."""
    start = r"model\.layers\.5\."
    return _with_layers(path, step3_mtp, start, lambda index: f"model.layers.{5 + index}.", 3)


def hunyuan3_layers(path: Path) -> Head:
    """Two layers of Hunyuan 3, the second of which computes two drafts."""
    start = r"model\.layers\.3\."
    return _with_layers(path, hunyuan3_mtp, start, lambda index: f"model.layers.{3 + index}.", 2)


def glm5_layers(path: Path) -> Head:
    """Three layers of GLM-5, which choose keys."""
    start = r"model\.layers\.3\."
    return _with_layers(path, glm5_mtp, start, lambda index: f"model.layers.{3 + index}.", 3)


def minimax3_layers(path: Path) -> Head:
    """Three layers of MiniMax-M3, which read hidden states before their final norms."""
    start = r"model\.mtp\.layers\.0\."
    return _with_layers(path, minimax3_mtp, start, lambda index: f"model.mtp.layers.{index}.", 3)


class _OneStream(nn.Module):
    """A layer of Hy4 without hyper-connections."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, **inputs: Any) -> Tensor:
        layer = self.layer
        x = x + layer.self_attn(hidden_states=layer.input_layernorm(x), **inputs)[0]
        return x + layer.mlp(layer.post_attention_layernorm(x))


def hy4_mtp(path: Path) -> Head:
    """The layer of Hy4, which has one residual stream and chooses keys, in a model with three streams."""
    start = "model.mtp_layers.0."
    names = Names(
        *(start + part for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
        {r"model\.layers\.2\.(?!.*hc)": start},
    )
    _, fields = WITH_INDEXERS["hy4"]
    return write_prediction_layer(
        path,
        "HYV4",
        fields | {"tie_word_embeddings": False},
        names,
        lambda donor, x: run_layer(_OneStream(donor.model.layers[2]), donor.model.rotary_emb, x),
    )


def hy4_layers(path: Path) -> Head:
    """Two layers of Hy4."""
    start = r"model\.mtp_layers\.0\."
    return _with_layers(path, hy4_mtp, start, lambda index: f"model.mtp_layers.{index}.", 2)


LAYERED_HEADS = [hy4_layers, step3_layers, hunyuan3_layers, glm5_layers, minimax3_layers]
