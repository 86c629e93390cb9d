"""DeepSeek-V4.1, computed in float32 from its description: shared entries, delayed connections, and n-grams."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.nn import functional as F

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 20,
    "o_groups": 2,
    "o_lora_rank": 12,
    "sliding_window": 10,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "compress_rope_theta": 5e4,
    "rope_scaling": {"rope_type": "default"},
    "compress_ratios": [0, 2, 2, 1, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 5,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 2,
    "candidate_block_size": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 0.5,
    "hc_mult": 3,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 4,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 3,
    "engram_n_heads": 2,
    "engram_head_dim": 8,
    "engram_vocab_size": 20,
    "engram_pad_token_id": 3,
    "engram_num_embeddings": [128, 230],
}
_PRIMES = ((23, 29, 31, 37), (41, 43, 47, 53))
"""The rows of the heads of each layer with n-grams."""


def classes_of(tokenizer: Tokenizer) -> list[int]:
    """Return the number of each token's text among all texts that differ in more than case, accents and spaces."""
    numbers: dict[str, int] = {}
    found = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:
            key = tokenizer.id_to_token(token) or ""
        else:
            parts = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
            plain = "".join(x for x in parts if not unicodedata.category(x).startswith("M")).lower()
            key = re.sub(r"[ \t\r\n]+", " ", plain)
            key = (key if key == " " else key.strip()) or text
        found.append(numbers.setdefault(key, len(numbers)))
    return found


class Reference:
    """The model, one token after the other in attention. `tokenizer` determines the classes of tokens."""

    def __init__(self, config: dict[str, Any], tokenizer: Tokenizer) -> None:
        self.tokenizer, self._classes = tokenizer, classes_of(tokenizer)
        self.inputs: list[Tensor] = []
        """The mean of the streams [T, D] before the attention of each layer, in the last text."""
        num_classes = {"engram_compressed_vocab_size": 1 + max(self._classes)}
        self.config = c = SimpleNamespace(**config, **num_classes)
        torch.manual_seed(0)
        self.tensors: dict[str, Tensor] = {}
        size, heads, inner = c.hidden_size, c.num_attention_heads, c.moe_intermediate_size
        streams = c.hc_mult
        for name, shape in {"embed": (c.vocab_size, size), "head": (c.vocab_size, size)}.items():
            self._add(f"{name}.weight", *shape)
        self._add("norm.weight", size)
        for i, rate in enumerate(c.compress_ratios):
            layer = f"layers.{i}."
            for name in ("attn_norm", "ffn_norm"):
                self._add(f"{layer}{name}.weight", size)
            for name in ("attn", "ffn"):
                count = streams * (2 + streams)
                self._add(f"{layer}hc_{name}_fn", count, streams * size)
                self._add(f"{layer}hc_{name}_base", count)
                self._add(f"{layer}hc_{name}_scale", 3)
            attn = f"{layer}attn."
            for name, shape in {
                "wq_a": (c.q_lora_rank, size),
                "wq_b": (heads * c.head_dim, c.q_lora_rank),
                "wkv": (c.head_dim, size),
                "wo_a": (c.o_groups * c.o_lora_rank, heads * c.head_dim // c.o_groups),
                "wo_b": (size, c.o_groups * c.o_lora_rank),
                "q_norm": (c.q_lora_rank,),
                "kv_norm": (c.head_dim,),
            }.items():
                self._add(f"{attn}{name}.weight", *shape)
            self._add(f"{attn}attn_sink", heads)
            if i in c.kv_source_layer_ids:
                self._add(f"{attn}compressor.wkv.weight", c.head_dim, size)
                if rate > 1:
                    self._add(f"{attn}compressor.wgate.weight", c.head_dim, size)
                self._add(f"{attn}compressor.norm.weight", c.head_dim)
                self._add(f"{attn}indexer.wk.weight", c.index_head_dim, c.head_dim)
                self._add(f"{attn}indexer.k_norm.weight", c.index_head_dim)
            if i in c.index_source_layer_ids:
                count = c.index_n_heads
                self._add(f"{attn}indexer.wq_b.weight", count * c.index_head_dim, c.q_lora_rank)
                self._add(f"{attn}indexer.weights_proj.weight", count, size)
            ffn = f"{layer}ffn."
            self._add(f"{ffn}gate.weight", c.n_routed_experts, size)
            self._add(f"{ffn}gate.bias", c.n_routed_experts)
            self._add(f"{ffn}gate.bias_vl", c.n_routed_experts)
            for name in (*(f"experts.{e}" for e in range(c.n_routed_experts)), "shared_experts"):
                for matrix, shape in {
                    "w1": (inner, size),
                    "w2": (size, inner),
                    "w3": (inner, size),
                }.items():
                    self._add(f"{ffn}{name}.{matrix}.weight", *shape)
            if i in c.engram_layer_ids:
                rows = c.engram_num_embeddings[c.engram_layer_ids.index(i)]
                width = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
                self._add(f"{layer}engram.embed.weight", rows, c.engram_head_dim)
                self._add(f"{layer}engram.wkv.weight", (streams + 1) * size, width)
                for name in ("q_weight", "k_weight"):
                    self._add(f"{layer}engram.{name}", streams, size)
        self._add("vision.patch_embed.weight", 4, 4)
        self._add("mtp.0.e_proj.weight", 4, 4)

    def _add(self, name: str, *shape: int) -> None:
        is_vector = len(shape) == 1 or name.endswith(("q_weight", "k_weight"))
        tensor = torch.empty(shape)
        self.tensors[name] = tensor.normal_(0.8, 0.3) if is_vector else tensor.normal_(0, 0.2)

    def save(self, path: Path) -> None:
        """Save the model and its tokenizer."""
        path.mkdir(exist_ok=True)
        save_file(self.tensors, path / "model.safetensors")
        text = vars(self.config)
        config = {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "text_config": text,
            "vision_config": {"num_hidden_layers": 1},
        }
        (path / "config.json").write_text(json.dumps(config))
        self.tokenizer.save(str(path / "tokenizer.json"))

    def __call__(self, ids: Tensor) -> Any:
        """Return the logits of a text [1, T]."""
        c, (ids_T,) = self.config, ids
        streams = self.tensors["embed.weight"][ids_T][:, None].repeat(1, c.hc_mult, 1)
        factors = F.one_hot(torch.zeros(len(ids_T), dtype=torch.long), c.hc_mult).float()
        shared: dict[str, Any] = {}
        self.inputs = []
        for i in range(c.num_hidden_layers):
            layer = f"layers.{i}."
            if i in c.engram_layer_ids:
                streams = streams + self._ngrams(ids_T, streams, i)
            self.inputs.append(streams.mean(1))
            for name, block in (("attn", self._attention), ("ffn", self._experts)):
                x = (streams * factors[..., None]).sum(1)
                factors, added, mixing = self._connection(f"{layer}hc_{name}_", streams)
                y = block(i, self._norm(x, f"{layer}{name}_norm.weight"), shared)
                streams = (
                    torch.einsum("tij,tid->tjd", mixing, streams) + added[..., None] * y[:, None]
                )
        x = self._norm((streams * factors[..., None]).sum(1), "norm.weight")
        return SimpleNamespace(logits=(x @ self.tensors["head.weight"].T)[None])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.tensors[name], self.config.rms_norm_eps)

    def _product(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def _connection(self, name: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count, eps = self.config.hc_mult, self.config.hc_eps
        fn, base, scale = (self.tensors[f"{name}{part}"] for part in ("fn", "base", "scale"))
        normed = F.rms_norm(streams.flatten(1), (streams[0].numel(),), eps=self.config.rms_norm_eps)
        scales = scale.repeat_interleave(torch.tensor([count, count, count**2]))
        before, after, mixing = ((normed @ fn.T) * scales + base).split([count, count, count**2], 1)
        mixing = mixing.view(-1, count, count).softmax(-1) + eps
        mixing = mixing / (mixing.sum(1, keepdim=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            mixing = mixing / (mixing.sum(2, keepdim=True) + eps)
            mixing = mixing / (mixing.sum(1, keepdim=True) + eps)
        return before.sigmoid() + eps, 2 * after.sigmoid(), mixing

    def _rotate(self, x: Tensor, positions: Tensor, theta: float) -> Tensor:
        """Rotate the last elements of vectors [T, ..., K]."""
        dim = self.config.qk_rope_head_dim
        angles = positions[:, None] * theta ** -(torch.arange(0, dim, 2) / dim)
        angles = angles.view(len(x), *[1] * (x.dim() - 2), dim // 2)
        pairs = torch.view_as_complex(x[..., -dim:].unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(
            -2
        )
        return torch.cat((x[..., :-dim], turned), -1)

    def _attention(self, i: int, x: Tensor, shared: dict[str, Any]) -> Tensor:
        c, name, rate = self.config, f"layers.{i}.attn.", self.config.compress_ratios[i]
        theta = c.compress_rope_theta if rate else c.rope_theta
        positions = torch.arange(len(x)).float()
        vector = self._norm(self._product(x, f"{name}wq_a"), f"{name}q_norm.weight")
        queries = self._product(vector, f"{name}wq_b").unflatten(-1, (-1, c.head_dim))
        queries = self._rotate(queries, positions, theta)
        keys = self._norm(self._product(x, f"{name}wkv"), f"{name}kv_norm.weight")
        keys = self._rotate(keys, positions, theta)
        if i in c.kv_source_layer_ids:
            shared["entries"] = self._entries(name, x, rate, theta)
        if i in c.index_source_layer_ids:
            shared["chosen"] = self._choose(i, x, vector, rate, theta, shared)
        out = []
        for t in range(len(x)):
            own = [keys[max(0, t + 1 - c.sliding_window) : t + 1]]
            if rate:
                own.append(shared["entries"][0][shared["chosen"][t]])
            attended = torch.cat(own)
            scores = queries[t] @ attended.T * c.head_dim**-0.5
            sinks = self.tensors[f"{name}attn_sink"][:, None]
            out.append(torch.cat((scores, sinks), 1).softmax(1)[:, :-1] @ attended)
        return self._outputs(name, self._rotate(torch.stack(out), -positions, theta))

    def _outputs(self, name: str, x: Tensor) -> Tensor:
        """Return the projection of heads [T, H, K], in groups."""
        c = self.config
        groups = x.flatten(1).unflatten(1, (c.o_groups, -1))
        matrices = self.tensors[f"{name}wo_a.weight"].unflatten(0, (c.o_groups, -1))
        return self._product(
            torch.einsum("tgk,grk->tgr", groups, matrices).flatten(1), f"{name}wo_b"
        )

    def _entries(self, name: str, x: Tensor, rate: int, theta: float) -> tuple[Tensor, Tensor]:
        values = self._product(x, f"{name}compressor.wkv")
        if rate > 1:
            logits = self._product(x, f"{name}compressor.wgate")
            count = len(x) // rate * rate
            values, logits = (each[:count].unflatten(0, (-1, rate)) for each in (values, logits))
            values = (values * logits.softmax(1)).sum(1)
        entries = self._norm(values, f"{name}compressor.norm.weight")
        keys = self._norm(
            self._product(entries, f"{name}indexer.wk"), f"{name}indexer.k_norm.weight"
        )
        first = torch.arange(len(entries)) * float(rate)
        return self._rotate(entries, first, theta), self._rotate(keys, first, theta)

    def _choose(
        self, i: int, x: Tensor, vector: Tensor, rate: int, theta: float, shared: dict[str, Any]
    ) -> list[Tensor]:
        c, name = self.config, f"layers.{i}.attn.indexer."
        positions = torch.arange(len(x)).float()
        queries = self._product(vector, f"{name}wq_b").unflatten(-1, (c.index_n_heads, -1))
        queries = self._rotate(queries, positions, theta)
        weights = (
            self._product(x, f"{name}weights_proj") * (c.index_n_heads * c.index_head_dim) ** -0.5
        )
        scores = torch.einsum("thi,ei->the", queries, shared["entries"][1]).relu()
        scores = torch.einsum("the,th->te", scores, weights)
        chosen, size = [], c.candidate_block_size
        blocks = shared.setdefault("blocks", {})
        for t in range(len(x)):
            own = scores[t, : (t + 1) // rate]
            if len(own) > c.index_topk and i == c.candidate_source_layer_id:
                best = torch.stack([each.max() for each in own.split(size)])
                best[-1] = torch.inf
                blocks[t] = best.sort(descending=True, stable=True).indices[
                    : c.candidate_topk_blocks
                ]
            if len(own) > c.index_topk and i > c.candidate_source_layer_id >= 0:
                is_candidate = torch.isin(torch.arange(len(own)) // size, blocks[t])
                own = own.masked_fill(~is_candidate, -torch.inf)
            # The first ones of equal scores, of which 0 is common.
            found = own.sort(descending=True, stable=True).indices[: c.index_topk]
            chosen.append(found[own[found] > -torch.inf])
        return chosen

    def _experts(self, i: int, x: Tensor, shared: dict[str, Any]) -> Tensor:
        c, name = self.config, f"layers.{i}.ffn."
        scores = F.softplus(self._product(x, f"{name}gate")).sqrt()
        chosen = (scores + self.tensors[f"{name}gate.bias"]).topk(c.num_experts_per_tok).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True) * c.routed_scaling_factor
        out = self._mlp(f"{name}shared_experts.", x)
        for e in range(c.n_routed_experts):
            weight = (weights * (chosen == e)).sum(1, keepdim=True)
            out = out + weight * self._mlp(f"{name}experts.{e}.", x)
        return out

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        limit = self.config.swiglu_limit
        gate = self._product(x, f"{name}w1").clamp(max=limit)
        up = self._product(x, f"{name}w3").clamp(-limit, limit)
        return self._product(F.silu(gate) * up, f"{name}w2")

    def _ngrams(self, ids_T: Tensor, streams: Tensor, i: int) -> Tensor:
        c, name = self.config, f"layers.{i}.engram."
        primes = _PRIMES[c.engram_layer_ids.index(i)]
        classes, pad = self._classes, c.engram_pad_token_id
        limit = (2**63 - 1) // c.engram_compressed_vocab_size // 2
        factors = (
            np.random.default_rng(10007 * i).integers(0, limit, c.engram_max_ngram_size) * 2 + 1
        )
        rows = []
        for t in range(len(ids_T)):
            last = [classes[int(ids_T[t - d]) if d <= t else pad] for d in range(3)]
            parts, number = [], last[0] * int(factors[0])
            for d in range(1, c.engram_max_ngram_size):
                number ^= last[d] * int(factors[d])
                first = (d - 1) * c.engram_n_heads
                parts += [
                    number % primes[head] + sum(primes[:head])
                    for head in range(first, first + c.engram_n_heads)
                ]
            rows.append(self.tensors[f"{name}embed.weight"][parts].flatten())
        keys, values = self._product(torch.stack(rows), f"{name}wkv").split(
            [c.hc_mult * c.hidden_size, c.hidden_size], 1
        )
        normed = [
            F.rms_norm(each, each.shape[-1:], eps=c.rms_norm_eps)
            * self.tensors[f"{name}{part}_weight"]
            for part, each in (("q", streams), ("k", keys.view_as(streams)))
        ]
        dots = (normed[0] * normed[1]).sum(-1) * c.hidden_size**-0.5
        gates = (dots.abs().clamp(min=1e-6).sqrt() * dots.sign()).sigmoid()
        return gates[..., None] * values[:, None]


def save_deepseek_v4_1(path: Path, tokenizer: Tokenizer | None = None, **others: Any) -> Reference:
    """Save a random model, and return one that is equal to it.

    Args:
        path: The directory.
        tokenizer: The tokenizer; by default one in which three forms of a letter have one class.
        others: The fields that differ in the config.
    """
    config = CONFIG | others
    if tokenizer is None:
        words = {f"{'aAá'[i % 3]}{i // 3}": i for i in range(config["vocab_size"])}
        tokenizer = Tokenizer(models.WordLevel(words, "A0"))
    reference = Reference(config, tokenizer)
    reference.save(path)
    return reference
