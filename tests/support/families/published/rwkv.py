"""Small random RWKV models, computed token by token as in the papers, in the form of flash-linear-attention."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gguf import GGUFWriter
from safetensors.torch import save_file
from support.gguf.finish import finish
from torch import Tensor
from torch.nn import functional as F

RWKV7_CONFIG: dict[str, Any] = {
    "architectures": ["RWKV7ForCausalLM"],
    "model_type": "rwkv7",
    "vocab_size": 97,
    "hidden_size": 96,
    "hidden_ratio": 2.5,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "num_heads": None,
    "decay_low_rank_dim": 8,
    "a_low_rank_dim": 12,
    "v_low_rank_dim": 4,
    "gate_low_rank_dim": 32,
    "hidden_act": "sqrelu",
    "max_position_embeddings": 256,
    "norm_first": True,
    "norm_bias": True,
    "norm_eps": 1e-5,
    "fuse_norm": True,
    "attn": None,
    "tie_word_embeddings": False,
}


ARWKV7_CONFIG = RWKV7_CONFIG | {
    "shifts_mlp": False,
    "has_output_norm": False,
    "hidden_act": "silu",
    "gate_low_rank_dim": 0,
    "rms_norm_eps": 1e-5,
}
"""A model with the norms and MLPs of Llama."""
RWKV6_CONFIG = RWKV7_CONFIG | {
    "architectures": ["RWKV6ForCausalLM"],
    "model_type": "rwkv6",
    "num_heads": 6,
    "expand_k": 0.5,
    "expand_v": 1.0,
    "proj_low_rank_dim": 6,
    "gate_low_rank_dim": 8,
}
QRWKV6_CONFIG = RWKV6_CONFIG | {
    "shifts_mlp": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    # On AVX-512, torch computes the gates of the last elements of other widths in another way.
    "hidden_size": 64,
    "num_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "expand_k": 1.0,
    "attention_bias": True,
}
"""A model with the norms and MLPs of Llama, and heads that share keys and values."""
RWKV: dict[str, dict[str, Any]] = {
    "qrwkv6": QRWKV6_CONFIG,
    "rwkv7": RWKV7_CONFIG,
    "arwkv7": ARWKV7_CONFIG,
    "rwkv6": RWKV6_CONFIG,
    "rwkv7-one-head": RWKV7_CONFIG | {"head_dim": None, "num_heads": 1, "num_hidden_layers": 2},
}
"""The configs of models, by a name."""


def save_rwkv(name: str, path: Path, **others: Any) -> Rwkv7Reference:
    """Save a random model, and return one that is equal to it. `others` replace fields of the config."""
    config = RWKV[name] | others
    kind = Rwkv6Reference if config["model_type"] == "rwkv6" else Rwkv7Reference
    reference = kind(config)
    reference.save(path)
    return reference


_GATED = ("gate", "up", "down")


class Rwkv7Reference(torch.nn.Module):
    """RWKV-7 (arXiv 2503.14456), one token after the other, in float32."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        c = self.config
        torch.manual_seed(0)
        size, ratio = c.hidden_size, c.hidden_ratio
        self.head_dim = c.head_dim or size // c.num_heads
        self.inner = 32 * math.ceil(int(size * ratio) / 32)
        self.tensors: dict[str, Tensor] = {
            "model.embeddings.weight": _random(c.vocab_size, size),
            "lm_head.weight": _random(c.vocab_size, size),
            **_norm("model.norm", size),
        }
        self.is_shifted = config.get("shifts_mlp", True)
        if self.is_shifted:
            self.tensors |= _norm("model.layers.0.pre_norm", size)
        for i in range(c.num_hidden_layers):
            layer = f"model.layers.{i}."
            self.tensors |= _norm(f"{layer}attn_norm", size) | _norm(f"{layer}ffn_norm", size)
            if config.get("has_output_norm", True):
                self.tensors |= _norm(f"{layer}attn.g_norm", size)
            for name in "rkvo":
                self.tensors[f"{layer}attn.{name}_proj.weight"] = _random(size, size)
            for name in "rwkvag" if c.gate_low_rank_dim else "rwkva":
                self.tensors[f"{layer}attn.x_{name}"] = torch.rand(1, 1, size)
            for name in ("k_k", "k_a"):
                self.tensors[f"{layer}attn.{name}"] = torch.rand(size) + 0.5
            self.tensors[f"{layer}attn.r_k"] = _random(size // self.head_dim, self.head_dim)
            ranks = {
                "w": c.decay_low_rank_dim,
                "a": c.a_low_rank_dim,
                "v": c.v_low_rank_dim,
                "g": c.gate_low_rank_dim,
            }
            for name, rank in ranks.items():
                lora = f"{layer}attn.{name}_lora.lora."
                if (name, i) == ("v", 0) or not rank:
                    continue
                self.tensors[f"{lora}0.weight"] = _random(rank, size)
                self.tensors[f"{lora}2.weight"] = _random(size, rank, scale=0.4)
                if name != "g":
                    self.tensors[f"{lora}2.bias"] = torch.randn(size)
            if not self.is_shifted:
                mlp = f"{layer}mlp."
                for name in ("gate", "up"):
                    self.tensors[f"{mlp}{name}_proj.weight"] = _random(self.inner, size)
                self.tensors[f"{mlp}down_proj.weight"] = _random(size, self.inner)
                continue
            self.tensors[f"{layer}ffn.x_k"] = torch.rand(size)
            self.tensors[f"{layer}ffn.key.weight"] = _random(self.inner, size)
            self.tensors[f"{layer}ffn.value.weight"] = _random(size, self.inner)

    def save(self, path: Path) -> None:
        """Save the model in the form of flash-linear-attention."""
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(vars(self.config)))
        kept = (x for x in self.tensors if self.is_shifted or not x.endswith("norm.bias"))
        stored = {name: self.tensors[name].contiguous() for name in kept}
        save_file(stored, path / "model.safetensors")

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        """Return the logits [1, L, V] of a sequence [1, L]."""
        t = self.tensors
        x = F.embedding(tokens[0], t["model.embeddings.weight"])
        if self.is_shifted:
            x = self._normed("model.layers.0.pre_norm", x)
        first: Tensor | None = None
        for i in range(self.config.num_hidden_layers):
            layer = f"model.layers.{i}."
            y, first = self._time_mixed(
                f"{layer}attn.", self._normed(f"{layer}attn_norm", x), first
            )
            x = x + y
            h = self._normed(f"{layer}ffn_norm", x)
            if not self.is_shifted:
                gate, up, down = (t[f"{layer}mlp.{name}_proj.weight"] for name in _GATED)
                x = x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T
                continue
            x = x + self._fed(f"{layer}ffn.", h)
        x = self._normed("model.norm", x)
        return SimpleNamespace(logits=(x @ t["lm_head.weight"].T)[None])

    def _fed(self, layer: str, h: Tensor) -> Tensor:
        t = self.tensors
        mixed = h + (_shifted(h) - h) * t[f"{layer}x_k"]
        inner = F.relu(mixed @ t[f"{layer}key.weight"].T).square()
        return inner @ t[f"{layer}value.weight"].T

    def _normed(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self.tensors[f"{name}.{part}"] for part in ("weight", "bias"))
        if not self.is_shifted:
            return F.rms_norm(x, x.shape[-1:], weight, self.config.norm_eps)
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.config.norm_eps)

    def _time_mixed(self, layer: str, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        t, dim = self.tensors, self.head_dim
        difference = _shifted(x) - x
        r, w, k, v, a, *g = (
            x + difference * t[each][0] for name in "rwkvag" if (each := f"{layer}x_{name}") in t
        )

        def low_rank(name: str, x: Tensor, function: Any = lambda x: x) -> Tensor:
            lora = f"{layer}{name}_lora.lora."
            y = function(x @ t[f"{lora}0.weight"].T) @ t[f"{lora}2.weight"].T
            return y + t.get(f"{lora}2.bias", torch.zeros(1))

        decay = torch.exp(-math.exp(-0.5) * low_rank("w", w, torch.tanh).sigmoid())
        values = v @ t[f"{layer}v_proj.weight"].T
        if first is None:
            first = values
        else:
            values = torch.lerp(values, first, low_rank("v", v).sigmoid())
        rate = low_rank("a", a).sigmoid()
        gate = low_rank("g", g[0], torch.sigmoid) if g else 1.0
        keys = k @ t[f"{layer}k_proj.weight"].T
        heads = (-1, dim)
        removed = F.normalize((keys * t[f"{layer}k_k"]).unflatten(-1, heads), dim=-1)
        keys = (keys * (1 + (rate - 1) * t[f"{layer}k_a"])).unflatten(-1, heads)
        queries = (r @ t[f"{layer}r_proj.weight"].T).unflatten(-1, heads)
        decay, values, rate = (each.unflatten(-1, heads) for each in (decay, values, rate))
        state = torch.zeros(keys.shape[1], dim, dim)
        outputs = []
        for i in range(len(x)):
            recalled = torch.einsum("hk,hkv->hv", -removed[i], state)
            state = state * decay[i][..., None]
            state = state + (removed[i] * rate[i])[..., None] * recalled[:, None]
            state = state + keys[i][..., None] * values[i][:, None]
            outputs.append(torch.einsum("hk,hkv->hv", queries[i], state))
        y = torch.stack(outputs)
        if f"{layer}g_norm.weight" in t:
            weight, bias = (t[f"{layer}g_norm.{part}"] for part in ("weight", "bias"))
            eps = dim * self.config.norm_eps
            y = F.group_norm(y.flatten(1), keys.shape[1], weight, bias, eps).unflatten(-1, heads)
        y = y + (queries * keys * t[f"{layer}r_k"]).sum(-1, keepdim=True) * values
        return (y.flatten(1) * gate) @ t[f"{layer}o_proj.weight"].T, first.flatten(1)


class Rwkv6Reference(Rwkv7Reference):
    """RWKV-6 (arXiv 2404.05892) or its variant QRWKV6 (arXiv 2505.03005), one token after the other, in float32."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        c = self.config
        size, rank, keys = c.hidden_size, c.proj_low_rank_dim, int(c.hidden_size * c.expand_k)
        self.tensors = {x: y for x, y in self.tensors.items() if not re.search("ffn.|attn.", x)}
        shared = size // c.num_heads * vars(c).get("num_key_value_heads", c.num_heads)
        for i in range(c.num_hidden_layers):
            layer = f"model.layers.{i}."
            for name in ("attn_norm", "ffn_norm", "attn.g_norm"):
                self.tensors |= _norm(f"{layer}{name}", size)
            self.tensors |= {
                f"{layer}attn.x_proj.0.mu": torch.rand(size),
                f"{layer}attn.x_proj.0.linear.weight": _random(5 * rank, size),
                f"{layer}attn.x_proj.2.weight": _random(size, 5 * rank),
                f"{layer}attn.x_bias": torch.rand(5, size),
                f"{layer}attn.r_proj.linear.weight": _random(keys, size),
                f"{layer}attn.k_proj.linear.weight": _random(keys, size),
                f"{layer}attn.v_proj.linear.weight": _random(size, size),
                f"{layer}attn.g_proj.linear.weight": _random(size, size),
                f"{layer}attn.w_proj.linear.lora.0.weight": _random(c.gate_low_rank_dim, size),
                f"{layer}attn.w_proj.linear.lora.2.weight": _random(keys, c.gate_low_rank_dim),
                f"{layer}attn.w_proj.linear.lora.2.bias": torch.randn(keys) - 1,
                f"{layer}attn.bonus": torch.randn(c.num_heads, keys // c.num_heads),
                f"{layer}attn.o_proj.weight": _random(size, size),
                f"{layer}ffn.key.mu": torch.rand(size),
                f"{layer}ffn.key.linear.weight": _random(self.inner, size),
                f"{layer}ffn.receptance.mu": torch.rand(size),
                f"{layer}ffn.receptance.linear.weight": _random(size, size),
                f"{layer}ffn.value.weight": _random(size, self.inner),
            }
            if self.is_shifted:
                continue
            others = rf"{layer}(ffn\.|attn\.(bonus|g_norm))"
            self.tensors = {x: y for x, y in self.tensors.items() if not re.match(others, x)}
            for name, height in (("r", size), ("k", shared), ("v", shared)):
                product = f"{layer}attn.{name}_proj.linear."
                self.tensors[f"{product}weight"] = _random(height, size)
                self.tensors[f"{product}bias"] = torch.randn(height)

    def _fed(self, layer: str, h: Tensor) -> Tensor:
        t, difference = self.tensors, _shifted(h) - h
        key, gate = (h + difference * t[f"{layer}{name}.mu"] for name in ("key", "receptance"))
        inner = F.relu(key @ t[f"{layer}key.linear.weight"].T).square()
        gate = (gate @ t[f"{layer}receptance.linear.weight"].T).sigmoid()
        return gate * (inner @ t[f"{layer}value.weight"].T)

    def _time_mixed(self, layer: str, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        t, c, difference = self.tensors, self.config, _shifted(x) - x
        low = (x + difference * t[f"{layer}x_proj.0.mu"]) @ t[f"{layer}x_proj.0.linear.weight"].T
        up = t[f"{layer}x_proj.2.weight"].unflatten(1, (5, -1))
        shares = torch.einsum("tnr,hnr->tnh", low.tanh().unflatten(1, (5, -1)), up)
        shares = shares + t[f"{layer}x_bias"]
        r, w, k, v, g = (x + difference * share for share in shares.unbind(1))
        r, k, v, g = (
            F.linear(
                each, *(t[stored] for end in ("weight", "bias") if (stored := f"{name}.{end}") in t)
            )
            for name, each in zip(
                (f"{layer}{x}_proj.linear" for x in "rkvg"), (r, k, v, g), strict=True
            )
        )
        if not self.is_shifted:
            group = c.num_heads // c.num_key_value_heads
            k, v = (x.unflatten(1, (-1, 8)).repeat_interleave(group, 1).flatten(1) for x in (k, v))
        lora = f"{layer}w_proj.linear.lora."
        w = (w @ t[f"{lora}0.weight"].T).tanh() @ t[f"{lora}2.weight"].T + t[f"{lora}2.bias"]
        r, k, v, decay = (
            each.unflatten(-1, (c.num_heads, -1)) for each in (r, k, v, torch.exp(-w.exp()))
        )
        state = torch.zeros(c.num_heads, k.shape[-1], v.shape[-1])
        outputs = []
        if not self.is_shifted:
            k = k * (1 - decay)
            for i in range(len(x)):
                state = state * decay[i][..., None] + k[i][..., None] * v[i][:, None]
                outputs.append(torch.einsum("hk,hkv->hv", r[i], state) * 8**-0.5)
            y = torch.stack(outputs).flatten(1) * g.sigmoid()
            return y @ t[f"{layer}o_proj.weight"].T, x
        for i in range(len(x)):
            own = k[i][..., None] * v[i][:, None]
            read = state + t[f"{layer}bonus"][..., None] * own
            outputs.append(torch.einsum("hk,hkv->hv", r[i], read))
            state = state * decay[i][..., None] + own
        weight, bias = (t[f"{layer}g_norm.{part}"] for part in ("weight", "bias"))
        y = torch.stack(outputs).flatten(1)
        y = F.group_norm(y, c.num_heads, weight, bias, c.norm_eps)
        return (y * F.silu(g)) @ t[f"{layer}o_proj.weight"].T, x


_GGUF_NAMES = (
    (r"^model\.embeddings\.", "token_embd."),
    (r"^model\.layers\.0\.pre_norm\.", "token_embd_norm."),
    (r"^model\.norm\.", "output_norm."),
    (r"^lm_head\.", "output."),
    (r"^model\.layers\.", "blk."),
    (r"\.attn\.g_norm\.", ".time_mix_ln."),
    (r"\.attn\.([wavg])_lora\.lora\.0\.weight$", r".time_mix_\g<1>1.weight"),
    (r"\.attn\.([wavg])_lora\.lora\.2\.weight$", r".time_mix_\g<1>2.weight"),
    (r"\.attn\.([wavg])_lora\.lora\.2\.bias$", r".time_mix_\g<1>0.weight"),
    (r"\.attn\.x_proj\.0\.mu$", ".time_mix_lerp_x.weight"),
    (r"\.attn\.x_proj\.0\.linear\.", ".time_mix_w1."),
    (r"\.attn\.x_proj\.2\.", ".time_mix_w2."),
    (r"\.attn\.w_proj\.linear\.lora\.0\.", ".time_mix_decay_w1."),
    (r"\.attn\.w_proj\.linear\.lora\.2\.weight$", ".time_mix_decay_w2.weight"),
    (r"\.attn\.w_proj\.linear\.lora\.2\.bias$", ".time_mix_decay.weight"),
    (r"\.attn\.bonus$", ".time_mix_first.weight"),
    (r"\.attn\.g_proj\.", ".time_mix_gate."),
    (r"\.ffn\.key\.mu$", ".channel_mix_lerp_k.weight"),
    (r"\.ffn\.receptance\.mu$", ".channel_mix_lerp_r.weight"),
    (r"\.linear\.", "."),
    (r"\.attn\.r_proj\.", ".time_mix_receptance."),
    (r"\.attn\.k_proj\.", ".time_mix_key."),
    (r"\.attn\.v_proj\.", ".time_mix_value."),
    (r"\.attn\.o_proj\.", ".time_mix_output."),
    (r"\.attn\.(k_k|k_a|r_k|x_x)$", r".time_mix_\1.weight"),
    (r"_x_x\.", "_lerp_fused."),
    (r"\.ffn\.x_k$", ".channel_mix_lerp_k.weight"),
    (r"\.ffn\.", ".channel_mix_"),
    (r"\.mlp\.(\w+)_proj\.", r".ffn_\1."),
)


def write_rwkv(path: Path, reference: Rwkv7Reference) -> Path:
    """Write a model as llama.cpp's converter does, and return the file."""
    config, is_shifted = reference.config, reference.is_shifted
    is_rwkv6 = config.model_type == "rwkv6"
    variant = "rwkv6qwen2" if is_rwkv6 else "arwkv7"
    writer = GGUFWriter(path, config.model_type if is_shifted else variant)
    writer.add_type("model")
    writer.add_context_length(1_048_576)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if is_shifted:
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_token_shift_count(1)
    writer.add_wkv_head_size(reference.head_dim)
    writer.add_decay_lora_rank(64)
    writer.add_feed_forward_length(reference.inner)
    writer.add_head_count(0)
    tensors = dict(reference.tensors)
    if is_rwkv6 and not is_shifted:
        writer.add_head_count_kv(config.num_key_value_heads)
    if is_rwkv6:
        halved = ("attn.o_proj.weight", "ffn.value.weight") if is_shifted else ()
        writer.add_rescale_every_n_layers(2 if is_shifted else 0)
        for i in range(config.num_hidden_layers):
            layer = f"model.layers.{i}."
            for name in halved:
                tensors[f"{layer}{name}"] = tensors[f"{layer}{name}"] / 2 ** (i // 2)
            # The order is w, k, v, r, g.
            mixtures, order = f"{layer}attn.x_proj.", [1, 2, 3, 0, 4]
            ups = tensors[f"{mixtures}2.weight"].unflatten(1, (5, -1)).transpose(0, 1)
            tensors[f"{mixtures}2.weight"] = ups[order]
            downs = tensors[f"{mixtures}0.linear.weight"].unflatten(0, (5, -1))
            tensors[f"{mixtures}0.linear.weight"] = downs[order].flatten(0, 1)
            biases = tensors.pop(f"{layer}attn.x_bias")
            tensors[f"{layer}attn.x_x"] = biases[order][:, None, None]
    for i in range(0 if is_rwkv6 else config.num_hidden_layers):
        layer = f"model.layers.{i}.attn."
        mixtures = [tensors.pop(f"{layer}x_{x}", None) for x in "rwkvag"]
        tensors[f"{layer}x_x"] = torch.stack([x for x in mixtures if x is not None])
        tensors[f"{layer}r_k"] = tensors[f"{layer}r_k"].flatten()
    for part in () if is_rwkv6 else ("0.weight", "2.weight", "2.bias"):
        # The first layer has unused copies.
        layer = "model.layers.0.attn."
        tensors[f"{layer}v_lora.lora.{part}"] = tensors[f"{layer}a_lora.lora.{part}"]
    for name, tensor in tensors.items():
        if not is_shifted and name.endswith("norm.bias"):
            continue
        for pattern, replacement in _GGUF_NAMES:
            name = re.sub(pattern, replacement, name)
        if is_shifted:
            name = name.replace(".ffn_norm.", ".attn_norm_2.")
        writer.add_tensor(name, tensor.contiguous().numpy())
    return finish(writer)


def _random(*shape: int, scale: float = 0.15) -> Tensor:
    return torch.randn(*shape) * scale


def _norm(name: str, size: int) -> dict[str, Tensor]:
    return {
        f"{name}.weight": torch.randn(size) * 0.3 + 0.8,
        f"{name}.bias": torch.randn(size) * 0.3,
    }


def _shifted(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, -1))
