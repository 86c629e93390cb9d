"""Quantize matrices into microscaling formats (MXFP4, MXFP8, NVFP4), by plain rounding.

O output features, D input features, G groups of a row of N elements.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Stored = tuple[dict[str, Tensor], Tensor]

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def mxfp4(w_OD: Tensor) -> Stored:
    groups_OGN = w_OD.unflatten(1, (-1, 32))
    exponent_OG1 = (groups_OGN.abs().amax(2, keepdim=True).clamp(min=1e-9) / 6).log2().ceil()
    scale_OG1 = 2**exponent_OG1
    codes_OGN = ((groups_OGN / scale_OG1).abs().unsqueeze(-1) - _E2M1).abs().argmin(-1)
    is_negative = groups_OGN < 0
    meaning = torch.where(is_negative, -1, 1) * _E2M1[codes_OGN] * scale_OG1
    codes_OGN = (codes_OGN | is_negative.long() << 3).to(torch.uint8)
    blocks = codes_OGN[..., ::2] | codes_OGN[..., 1::2] << 4
    scales = (exponent_OG1.squeeze(2) + 127).to(torch.uint8)
    return {"blocks": blocks, "scales": scales}, meaning.flatten(1)


def packed_minifloats(kind: str, stored_as: str) -> Callable[[Tensor], Stored]:
    """Store MXFP4 or NVFP4 as compressed-tensors, ModelOpt or MiMo-V2.6 do."""

    def store(w_OD: Tensor) -> Stored:
        groups_OGN = w_OD.unflatten(1, (-1, 32 if kind == "mxfp4" else 16))
        amax_OG1 = groups_OGN.abs().amax(2, keepdim=True).clamp(min=1e-9)
        factor = w_OD.abs().max() / (6 * 448) if kind == "nvfp4" else torch.tensor(1.0)
        if kind == "mxfp4":
            exponent_OG1 = (amax_OG1 / 6).log2().ceil()
            stored_OG1, scale_OG1 = (exponent_OG1 + 127).to(torch.uint8), 2**exponent_OG1
        else:
            stored_OG1 = (amax_OG1 / 6 / factor).to(torch.float8_e4m3fn)
            scale_OG1 = stored_OG1.float().clamp(min=2**-9) * factor
        codes_OGN = ((groups_OGN / scale_OG1).abs().unsqueeze(-1) - _E2M1).abs().argmin(-1)
        sign_OGN = torch.where(groups_OGN < 0, -1, 1)
        meaning = (
            sign_OGN
            * _E2M1[codes_OGN]
            * (scale_OG1 if kind == "mxfp4" else stored_OG1.float() * factor)
        )
        codes_OD = (codes_OGN | (groups_OGN < 0).long() << 3).to(torch.uint8).flatten(1)
        tensors = {
            stored_as: codes_OD[:, ::2] | codes_OD[:, 1::2] << 4,
            "weight_scale": stored_OG1.squeeze(2),
        }
        if kind == "nvfp4" and stored_as == "weight":
            tensors |= {"weight_scale_2": factor, "input_scale": torch.tensor(0.02)}
        elif kind == "nvfp4":
            tensors["weight_global_scale"] = (1 / factor).reshape(1)
        return tensors, meaning.flatten(1)

    return store


def mxfp8(w_OD: Tensor) -> Stored:
    """Store float8 groups of 32 whose scales are exponents, as transformers does."""
    groups_OGK = w_OD.unflatten(1, (-1, 32))
    exponents = (groups_OGK.abs().amax(-1) / 448).log2().ceil().clamp(-127)
    q_OGK = (groups_OGK / 2 ** exponents.unsqueeze(-1)).to(torch.float8_e4m3fn)
    meaning_OD = (q_OGK.float() * 2 ** exponents.unsqueeze(-1)).flatten(1)
    scales = (exponents + 127).to(torch.uint8)
    return {"weight": q_OGK.flatten(1), "weight_scale_inv": scales}, meaning_OD


def four_bits_beside_float8(w_OD: Tensor) -> Stored:
    """Store an expert of DeepSeek-V4."""
    tensors, meaning_OD = mxfp4(w_OD)
    codes, scales = tensors["blocks"].flatten(1), tensors["scales"]
    return {
        "weight": codes.view(torch.int8),
        "scale": scales.view(torch.float8_e8m0fnu),
    }, meaning_OD


def mxfp8_exponents(w_OD: Tensor) -> Stored:
    """Store MXFP8 as compressed-tensors and ModelOpt do."""
    tensors, meaning_OD = mxfp8(w_OD)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, meaning_OD
