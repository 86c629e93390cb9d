"""Quantize checkpoints into the formats of other tools, each written from its definition, by plain rounding.

O output features, D input features, G groups of a row. A format converts a matrix [O, D] to the tensors of its module,
and to the matrix that these represent, float32 [O, D].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import minifloats, torchao
from support.checkpoints.bitsandbytes import eight_bits, four_bits
from torch import Tensor

GROUP = 32
BLOCK = 48
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]

Stored = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    config: dict[str, Any]
    store: Callable[[Tensor], Stored]
    kind: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The class of torchao whose attributes `fields` the header of the file describes."""


def quantize_directory(
    directory: Path, name: str, modules: tuple[str, ...] = ("_proj",)
) -> dict[str, Tensor]:
    """Rewrite a checkpoint's `modules` in the format `name`; return the resulting weights by tensor name."""
    files = sorted(directory.glob("*.safetensors"))
    tensors = {key: value for file in files for key, value in load_file(file).items()}
    for file in files:
        file.unlink()
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    stored, meaning, texts = {}, {}, {}
    form = FORMATS[name]
    for key, tensor in tensors.items():
        module, _, last = key.rpartition(".")
        if last == "weight" and module.endswith(modules):
            parts, meaning[key] = form.store(tensor.float())
            if "bias" in parts:
                # Quantizers add one of zeros where a module has none.
                bias = meaning[f"{module}.bias"] = tensors.get(f"{module}.bias", parts["bias"])
                parts["bias"] = bias
            if form.kind:
                texts[key] = torchao.header(form.kind, tensor, **form.fields)
            stored |= {
                f"{module}.{part}": x.clone(memory_format=torch.contiguous_format)
                for part, x in parts.items()
            }
        else:
            stored[key] = meaning[key] = tensor
    save_file(stored, directory / "model.safetensors", texts or None)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = form.config
    (directory / "config.json").write_text(json.dumps(config))
    return meaning


def _integers(
    w_OD: Tensor, bits: int, *, symmetric: bool = False, groups_D: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round to `bits`: values int64 [O, D], zeros int64 [O, G], scales float16 [O, G], and the resulting matrix."""
    columns = w_OD.shape[1]
    groups_D = torch.arange(columns) // GROUP if groups_D is None else groups_D
    one_hot_DG = torch.nn.functional.one_hot(groups_D).bool()
    spread = w_OD.unsqueeze(2).expand(-1, -1, one_hot_DG.shape[1])
    low_OG = spread.masked_fill(~one_hot_DG, 0).amin(1)
    high_OG = spread.masked_fill(~one_hot_DG, 0).amax(1)
    levels = 2**bits - 1
    if symmetric:
        scale_OG = (torch.maximum(-low_OG, high_OG) * 2 / levels).half()
        zero_OG = torch.full_like(low_OG, 2 ** (bits - 1)).long()
    else:
        scale_OG = ((high_OG - low_OG) / levels).half()
        zero_OG = (-low_OG / scale_OG.float()).round().clamp(0, levels).long()
    scale_OD, zero_OD = scale_OG.float()[:, groups_D], zero_OG[:, groups_D]
    q_OD = ((w_OD / scale_OD).round() + zero_OD).clamp(0, levels).long()
    return q_OD, zero_OG, scale_OG, (q_OD - zero_OD) * scale_OD


def _pack(fields: Tensor, bits: int) -> Tensor:
    """Pack neighbors in the last dimension into int32 words, with the first one in the lowest bits."""
    places = torch.arange(bits)
    each_bit = (fields.unsqueeze(-1) >> places & 1).flatten(-2)
    words = each_bit.unflatten(-1, (-1, 32)) << torch.arange(32)
    return words.sum(-1).to(torch.uint32).view(torch.int32)


def _awq(w_OD: Tensor) -> Stored:
    q_OD, zero_OG, scale_OG, meaning_OD = _integers(w_OD, 4)

    def packed(x_OX: Tensor) -> Tensor:
        return _pack(x_OX.T.unflatten(1, (-1, 8))[:, :, _AWQ_ORDER].flatten(1), 4)

    tensors = {"qweight": packed(q_OD), "qzeros": packed(zero_OG), "scales": scale_OG.T}
    return tensors, meaning_OD


def _gptq(
    bits: int, *, symmetric: bool, act_order: bool, v2: bool = False
) -> Callable[..., Stored]:
    def store(w_OD: Tensor) -> Stored:
        groups_D = torch.arange(w_OD.shape[1]) // GROUP
        if act_order:
            groups_D = groups_D[torch.randperm(len(groups_D), generator=torch.manual_seed(3))]
        q_OD, zero_OG, scale_OG, meaning_OD = _integers(
            w_OD, bits, symmetric=symmetric, groups_D=groups_D
        )
        # Without this, the first version of the format could not store it.
        zero_OG = zero_OG if v2 else zero_OG.clamp(min=1)
        meaning_OD = (q_OD - zero_OG[:, groups_D]) * scale_OG.float()[:, groups_D]
        tensors = {
            "qweight": _pack(q_OD, bits).T,
            "qzeros": _pack((zero_OG if v2 else zero_OG - 1).T, bits),
            "scales": scale_OG.T,
            "g_idx": groups_D.int(),
            # AutoGPTQ writes one for every module.
            "bias": torch.zeros(len(w_OD), dtype=torch.float16),
        }
        return tensors, meaning_OD

    return store


def _packed_integers(w_OD: Tensor) -> Stored:
    q_OD, zero_OG, scale_OG, _ = _integers(w_OD, 4)
    tensors = {
        "weight_packed": _pack(q_OD, 4),
        "weight_zero_point": _pack(zero_OG.T, 4).T,
        "weight_scale": scale_OG.bfloat16(),
        "weight_shape": torch.tensor(w_OD.shape),
    }
    groups_D = torch.arange(w_OD.shape[1]) // GROUP
    scale_OD = scale_OG.bfloat16().float()[:, groups_D]
    return tensors, (q_OD - zero_OG[:, groups_D]) * scale_OD


def _int8(w_OD: Tensor) -> Stored:
    scale_O1 = w_OD.abs().amax(1, keepdim=True) / 127
    q_OD = (w_OD / scale_O1).round()
    return {"weight": q_OD.to(torch.int8), "weight_scale": scale_O1}, q_OD * scale_O1


def _float8(scale_of: Callable[[Tensor], Tensor], **others: Tensor) -> Callable[[Tensor], Stored]:
    def store(w_OD: Tensor) -> Stored:
        scale = scale_of(w_OD)
        q_OD = (w_OD / scale).to(torch.float8_e4m3fn)
        return {"weight": q_OD, "weight_scale": scale, **others}, q_OD.float() * scale

    return store


def _mixed_groups(w_OD: Tensor) -> Stored:
    """Store wide matrices with four bits, and high ones with eight."""
    if w_OD.shape[0] < w_OD.shape[1]:
        return _packed_integers(w_OD)
    return _float8(lambda x_OD: x_OD.abs().amax(1, keepdim=True) / 448)(w_OD)


def _float8_powers(w_OD: Tensor) -> Stored:
    """Store float8 blocks whose scales are powers of two, as DeepSeek-V4 does."""
    tensors, _ = _float8_blocks(w_OD)
    scale = 2 ** tensors["weight_scale_inv"].log2().ceil()
    rows, columns = (torch.arange(size) // BLOCK for size in w_OD.shape)
    scale_OD = scale[rows][:, columns]
    q_OD = (w_OD / scale_OD).to(torch.float8_e4m3fn)
    return {"weight": q_OD, "scale": scale.to(torch.float8_e8m0fnu)}, q_OD.float() * scale_OD


def _float8_blocks(w_OD: Tensor) -> Stored:
    rows, columns = w_OD.shape
    row_block, column_block = torch.arange(rows) // BLOCK, torch.arange(columns) // BLOCK
    scale = torch.zeros(int(row_block[-1]) + 1, int(column_block[-1]) + 1)
    index = row_block[:, None] * scale.shape[1] + column_block
    scale.view(-1).scatter_reduce_(0, index.flatten(), w_OD.abs().flatten(), "amax")
    scale /= 448
    scale_OD = scale[row_block][:, column_block]
    q_OD = (w_OD / scale_OD).to(torch.float8_e4m3fn)
    return {"weight": q_OD, "weight_scale_inv": scale}, q_OD.float() * scale_OD


def _compressed(
    stored_as: str, weights: dict[str, Any], activations: dict[str, Any] | None = None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _auto_round(w_OD: Tensor) -> Stored:
    """Store wide matrices with four bits, and high ones with eight, as exceptions of AutoRound's configs say."""
    bits = 4 if w_OD.shape[0] < w_OD.shape[1] else 8
    return _gptq(bits, symmetric=True, act_order=False)(w_OD)


def _quark(w_OD: Tensor) -> Stored:
    """Store wide matrices with four bits, and high ones with eight."""
    if w_OD.shape[0] < w_OD.shape[1]:
        return minifloats.packed_minifloats("mxfp4", "weight")(w_OD)
    return _float8(lambda x_OD: x_OD.abs().max() / 448)(w_OD)


def _gptq_config(bits: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, **others}


_FLOAT8_POWERS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [BLOCK, BLOCK],
}

_E4M3 = {"num_bits": 8, "type": "float"}


def _mixed_precision(w_OD: Tensor) -> Stored:
    """Store wide matrices with four bits, and high ones with eight."""
    if w_OD.shape[0] < w_OD.shape[1]:
        return minifloats.packed_minifloats("nvfp4", "weight")(w_OD)
    static = _float8(lambda x_OD: x_OD.abs().max() / 448, input_scale=torch.tensor(0.02))
    return static(w_OD)


def _bitnet(w_OD: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Round to -1, 0 and 1 times the mean magnitude, and pack four rows into one."""
    scale = w_OD.abs().mean().reshape(1)
    q_OD = (w_OD / scale).round().clamp(-1, 1)
    parts = (q_OD + 1).to(torch.uint8).unflatten(0, (4, -1))
    packed = sum(part << 2 * i for i, part in enumerate(parts))
    return {"weight": packed, "weight_scale": scale}, q_OD * scale


def _quark_integers(*, is_signed: bool) -> Callable[[Tensor], Stored]:
    """Store integers in AWQ's order, or signed ones in plain order."""

    def store(w_OD: Tensor) -> Stored:
        q_OD, _, scale_OG, meaning_OD = _integers(w_OD, 4, symmetric=is_signed)
        if is_signed:
            words = {"weight": _pack((q_OD ^ 8).T, 4)}
        else:
            stored, _ = _awq(w_OD)
            words = {"weight": stored["qweight"], "weight_zero_point": stored["qzeros"]}
        return words | {"weight_scale": scale_OG.T}, meaning_OD

    return store


def _block_grid(w_OD: Tensor) -> Stored:
    """Store float8 blocks of 128 as ModelOpt does."""
    scale = w_OD.abs().max() / 448
    grid = scale * torch.ones(-(-w_OD.shape[0] // 128), 1, -(-w_OD.shape[1] // 128), 1)
    q_OD = (w_OD / scale).to(torch.float8_e4m3fn)
    return {"weight": q_OD, "weight_scale": grid}, q_OD.float() * scale


_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

_TORCHAO = {"quant_method": "torchao"}
_AUTO_ROUND_MX = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:llm_compressor",
    "data_type": "mx_fp",
    "group_size": 32,
}

FORMATS = {
    "bnb-nf4": Format(_BNB, four_bits("nf4", is_nested=False)),
    "bnb-nf4-nested": Format(
        _BNB | {"bnb_4bit_use_double_quant": True}, four_bits("nf4", is_nested=True)
    ),
    "bnb-fp4": Format(_BNB | {"bnb_4bit_quant_type": "fp4"}, four_bits("fp4", is_nested=False)),
    "bnb-int8": Format(
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
        eight_bits,
    ),
    "bitnet": Format({"quant_method": "bitnet", "linear_class": "autobitlinear"}, _bitnet),
    "bitnet-online": Format(
        {"quant_method": "bitnet", "quantization_mode": "online"},
        lambda w_OD: ({"weight": w_OD.clone()}, _bitnet(w_OD)[1]),
    ),
    "mxfp4": Format({"quant_method": "mxfp4"}, minifloats.mxfp4),
    "compressed-mxfp4": Format(
        _compressed(
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        ),
        minifloats.packed_minifloats("mxfp4", "weight_packed"),
    ),
    "compressed-nvfp4": Format(
        _compressed(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        ),
        minifloats.packed_minifloats("nvfp4", "weight_packed"),
    ),
    "modelopt-nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        minifloats.packed_minifloats("nvfp4", "weight"),
    ),
    "modelopt-mixed": Format(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.mixer.in_proj": {"quant_algo": "FP8"},
                "model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
            },
        },
        _mixed_precision,
    ),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _awq),
    "gptq": Format(
        _gptq_config(4, sym=True, desc_act=False), _gptq(4, symmetric=True, act_order=False)
    ),
    "gptq-asymmetric": Format(
        _gptq_config(4, sym=False, desc_act=False), _gptq(4, symmetric=False, act_order=False)
    ),
    "gptq-act-order": Format(
        _gptq_config(4, sym=False, desc_act=True), _gptq(4, symmetric=False, act_order=True)
    ),
    "gptq-8": Format(
        _gptq_config(8, sym=True, checkpoint_format="gptq_v2"),
        _gptq(8, symmetric=True, act_order=False, v2=True),
    ),
    **{
        f"gptq-{bits}": Format(
            _gptq_config(bits, sym=False), _gptq(bits, symmetric=False, act_order=False)
        )
        for bits in (2, 3)
    },
    "auto-round": Format(
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8}},
        },
        _auto_round,
    ),
    "auto-round-mxfp4": Format(
        _AUTO_ROUND_MX | {"bits": 4}, minifloats.packed_minifloats("mxfp4", "weight_packed")
    ),
    "auto-round-mxfp8": Format(_AUTO_ROUND_MX | {"bits": 8}, minifloats.mxfp8_exponents),
    "hqq": Format({"quant_method": "hqq"}, torchao.hqq(4, 1)),
    "hqq-8": Format({"quant_method": "hqq"}, torchao.hqq(8, 1)),
    "hqq-columns": Format({"quant_method": "hqq"}, torchao.hqq(2, 0)),
    "modelopt-blocks": Format({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, _block_grid),
    "torchao-int4": Format(_TORCHAO, torchao.four_bits, "Int4Tensor"),
    "torchao-awq": Format(_TORCHAO, torchao.with_input_factors, "Int4Tensor"),
    "torchao-tiles": Format(_TORCHAO, torchao.tiles, "Int4TilePackedTo4dTensor"),
    "torchao-intx": Format(
        _TORCHAO,
        torchao.integers,
        "IntxUnpackedToInt8Tensor",
        {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}},
    ),
    "torchao-float8": Format(_TORCHAO, torchao.float8, "Float8Tensor", {"block_size": []}),
    **{
        f"quark-{name}": Format(
            {
                "quant_method": "quark",
                "export": {"pack_method": "order" if is_signed else "reorder"},
                "global_quant_config": {
                    "weight": {
                        "dtype": name,
                        "qscheme": "per_group",
                        "group_size": GROUP,
                        "symmetric": is_signed,
                    }
                },
            },
            _quark_integers(is_signed=is_signed),
        )
        for name, is_signed in (("int4", True), ("uint4", False))
    },
    "quark": Format(
        {
            "quant_method": "quark",
            "export": {"pack_method": "reorder", "kv_cache_group": []},
            "global_quant_config": {
                "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32},
                "input_tensors": {"dtype": "fp4", "qscheme": "per_group", "is_dynamic": True},
            },
            "layer_quant_config": {
                "*down_proj": {
                    "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
                    "input_tensors": {"dtype": "fp8_e4m3", "is_dynamic": True},
                }
            },
        },
        _quark,
    ),
    "mxfp8": Format(
        {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}, minifloats.mxfp8_exponents
    ),
    "fp8": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        _float8(lambda w_OD: w_OD.abs().max() / 448),
    ),
    "fp8-static": Format(
        {"quant_method": "fp8", "activation_scheme": "static"},
        _float8(lambda w_OD: w_OD.abs().max().reshape(1) / 448, input_scale=torch.tensor([0.02])),
    ),
    "fp8-powers": Format(_FLOAT8_POWERS, _float8_powers),
    "fp8-mxfp8": Format(_FLOAT8_POWERS | {"weight_block_size": [1, 32]}, minifloats.mxfp8),
    "fp8-four-bits": Format(_FLOAT8_POWERS, minifloats.four_bits_beside_float8),
    "fp8-blocks": Format(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
        },
        _float8_blocks,
    ),
    "fp8-mxfp4": Format(
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "store_dtype": "mxfp4"},
        minifloats.packed_minifloats("mxfp4", "weight"),
    ),
    "compressed-fp8": Format(
        _compressed(
            "float-quantized",
            {**_E4M3, "strategy": "channel"},
            {**_E4M3, "strategy": "token", "dynamic": True},
        ),
        _float8(lambda w_OD: w_OD.abs().amax(1, keepdim=True) / 448),
    ),
    "compressed-mixed": Format(
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "group_0": {
                    "format": "pack-quantized",
                    "targets": [r"re:.*\.[kv]_proj$", "model.layers.0.mlp.up_proj"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "strategy": "group",
                        "group_size": GROUP,
                    },
                },
                "group_1": {
                    "format": "naive-quantized",
                    "targets": ["Linear"],
                    "weights": {**_E4M3, "strategy": "channel"},
                },
            },
            "ignore": ["lm_head"],
        },
        _mixed_groups,
    ),
    "compressed-int8": Format(
        _compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}), _int8
    ),
    "compressed-int4": Format(
        _compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
        ),
        _packed_integers,
    ),
}
