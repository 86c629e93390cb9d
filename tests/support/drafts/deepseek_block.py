"""The DSpark head of DeepSeek-V4.1, computed from its description."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.families.published.mixtures.deepseek_v4_1 import CONFIG, Reference, save_deepseek_v4_1
from torch import Tensor
from torch.nn import functional as F

NOISE, BLOCK, RANK, INPUTS = 9, 6, 8, [2, 3, 5]


class BlockReference(Reference):
    """Three layers without entries, which read means of a model's streams. `model` is that model."""

    def __init__(self, model: Reference) -> None:
        own = {"num_hidden_layers": 3, "compress_ratios": [0] * 3, "n_routed_experts": 4}
        none = ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids")
        super().__init__(CONFIG | own | {name: [] for name in none}, model.tokenizer)
        self._model = model
        size = self.config.hidden_size
        self._add("main_proj.weight", size, len(INPUTS) * size)
        self._add("main_norm.weight", size)
        for name in ("embed", "head"):
            self._add(f"markov_head.{name}.weight", self.config.vocab_size, RANK)

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors with their published names."""
        first = {"main_proj.weight", "main_norm.weight"}
        found = {"mtp.2.confidence_head.proj.weight": torch.zeros(1, 4)}
        for name, tensor in self.tensors.items():
            if name.startswith("layers."):
                found[re.sub("^layers", "mtp", name)] = tensor
            elif name in first:
                found[f"mtp.0.{name}"] = tensor
            elif name == "norm.weight" or name.startswith("markov_head."):
                found[f"mtp.2.{name}"] = tensor
        return found

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Return the drafts after tokens, the last of which the model has not computed."""
        c = self.config
        self._model(torch.tensor([tokens[:-1]]))
        main_TE = torch.cat([self._model.inputs[layer] for layer in INPUTS], 1)
        main_TD = self._norm(self._product(main_TE, "main_proj"), "main_norm.weight")
        ids = torch.tensor([tokens[-1], *[NOISE] * (count - 1)])
        streams = self._model.tensors["embed.weight"][ids][:, None].repeat(1, c.hc_mult, 1)
        factors = F.one_hot(torch.zeros(count, dtype=torch.long), c.hc_mult).float()
        for i in range(3):
            for name in ("attn", "ffn"):
                x = (streams * factors[..., None]).sum(1)
                factors, added, mixing = self._connection(f"layers.{i}.hc_{name}_", streams)
                x = self._norm(x, f"layers.{i}.{name}_norm.weight")
                y = self._block(i, x, main_TD) if name == "attn" else self._experts(i, x, {})
                mixed = torch.einsum("tij,tid->tjd", mixing, streams)
                streams = mixed + added[..., None] * y[:, None]
        hidden = self._norm((streams * factors[..., None]).sum(1), "norm.weight")
        found = tokens[-1:]
        for logits in hidden @ self._model.tensors["head.weight"].T:
            vector = self.tensors["markov_head.embed.weight"][found[-1]]
            biased = logits + self.tensors["markov_head.head.weight"] @ vector
            found.append(int(biased.argmax()))
        return found[1:]

    def _block(self, i: int, x: Tensor, main_TD: Tensor) -> Tensor:
        """Return the attention of the tokens of a block to each other and to the last tokens before it."""
        c, name, begin = self.config, f"layers.{i}.attn.", len(main_TD)
        positions = torch.arange(begin + len(x)).float()
        vector = self._norm(self._product(x, f"{name}wq_a"), f"{name}q_norm.weight")
        queries = self._product(vector, f"{name}wq_b").unflatten(-1, (-1, c.head_dim))
        queries = self._rotate(queries, positions[begin:], c.rope_theta)
        inputs = torch.cat((main_TD, x))
        keys = self._norm(self._product(inputs, f"{name}wkv"), f"{name}kv_norm.weight")
        keys = self._rotate(keys, positions, c.rope_theta)[max(0, begin - c.sliding_window) :]
        scores = torch.einsum("thk,jk->thj", queries, keys) * c.head_dim**-0.5
        sinks = self.tensors[f"{name}attn_sink"].view(1, -1, 1).expand(len(x), -1, 1)
        attended = torch.cat((scores, sinks), 2).softmax(2)[..., :-1] @ keys
        return self._outputs(name, self._rotate(attended, -positions[begin:], c.rope_theta))


def save_deepseek_block(path: Path) -> tuple[Reference, BlockReference]:
    """Save a random model with its head, and return references for both."""
    model = save_deepseek_v4_1(path)
    head = BlockReference(model)
    file = path / "model.safetensors"
    tensors = {name: x for name, x in load_file(file).items() if not name.startswith("mtp.")}
    save_file(tensors | head.stored(), file)
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    config["text_config"] |= {
        "num_nextn_predict_layers": 3,
        "dspark_block_size": BLOCK,
        "dspark_noise_token_id": NOISE,
        "dspark_target_layer_ids": INPUTS,
        "dspark_markov_rank": RANK,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
        "compress_ratios": [*CONFIG["compress_ratios"], 0, 0, 0],
    }
    (path / "config.json").write_text(json.dumps(config))
    return model, head
