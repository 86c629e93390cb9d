"""Quantize matrices into the formats of torchao and HQQ, each written from its definition, by plain rounding.

O output features, D input features, G groups of a row.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

GROUP = 32
_PLACES = {8: [0], 4: [4, 0], 2: [6, 4, 2, 0]}


def header(kind: str, w_OD: Tensor, **fields: Any) -> str:
    """Return the text about a matrix in the header of a file."""
    fields = {"block_size": [1, GROUP], "shape": list(w_OD.shape)} | fields
    return json.dumps({"_type": kind, "_data": fields})


def _affine(w_OD: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return unsigned values [O, D], scales [O, G] and smallest elements [O, G]."""
    groups_OGK = w_OD.unflatten(1, (-1, GROUP))
    low_OG1, high_OG1 = groups_OGK.amin(2, keepdim=True), groups_OGK.amax(2, keepdim=True)
    scale_OG1 = ((high_OG1 - low_OG1) / (2**bits - 1)).bfloat16().float()
    low_OG1 = low_OG1.bfloat16().float()
    values = ((groups_OGK - low_OG1) / scale_OG1).round().clamp(0, 2**bits - 1)
    return values.flatten(1).to(torch.uint8), scale_OG1.squeeze(2), low_OG1.squeeze(2)


def _spread(x_OG: Tensor) -> Tensor:
    return x_OG.repeat_interleave(GROUP, 1)


def four_bits(w_OD: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Store pairs of columns as signed integers."""
    values_OD, scale_OG, low_OG = _affine(w_OD, 4)
    zero_OG = (low_OG + 8 * scale_OG).bfloat16()
    signed_OD = values_OD ^ 8
    tensors = {
        "_weight_qdata": signed_OD[:, ::2] | signed_OD[:, 1::2] << 4,
        "_weight_scale": scale_OG.T.bfloat16(),
        "_weight_zero_point": zero_OG.T,
    }
    return tensors, (values_OD.float() - 8) * _spread(scale_OG) + _spread(zero_OG.float())


def with_input_factors(w_OD: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Store the same beside factors of the inputs."""
    tensors, meaning_OD = four_bits(w_OD)
    factor_D = torch.linspace(0.5, 2, w_OD.shape[1]).bfloat16()
    return tensors | {"_weight_act_pre_scale": factor_D}, meaning_OD * factor_D.float()


def tiles(w_OD: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Store eight rows of 128 columns as the operands of tensor cores, of a matrix that is padded with zeros."""
    values_OD, scale_OG, low_OG = _affine(w_OD, 4)
    zero_OG = (low_OG + 8 * scale_OG).bfloat16()
    padded = torch.nn.functional.pad(values_OD, (0, -w_OD.shape[1] % 1024)).long()
    words = torch.zeros(len(padded) // 8, padded.shape[1] // 128, 32, 4, dtype=torch.long)
    for lane in range(32):
        for word in range(4):
            first = 32 * word + lane % 4 * 2
            columns = [first + place for place in (0, 8, 16, 24, 1, 9, 17, 25)]
            for i, column in enumerate(columns):
                words[:, :, lane, word] |= padded[lane // 4 :: 8, column::128] << 4 * i
    missing = padded.shape[1] // GROUP - scale_OG.shape[1]
    both = torch.stack((scale_OG.bfloat16(), zero_OG), 2).transpose(0, 1)
    tensors = {
        "_weight_qdata": words.to(torch.uint32).view(torch.int32),
        "_weight_scale_and_zero": torch.cat((both, both.new_ones(missing, *both.shape[1:]))),
    }
    return tensors, (values_OD.float() - 8) * _spread(scale_OG) + _spread(zero_OG.float())


def integers(w_OD: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Store signed integers of four bits as bytes."""
    groups_OGK = w_OD.unflatten(1, (-1, GROUP))
    scale_OG = groups_OGK.abs().amax(2) / 7.5
    zero_OG = torch.arange(scale_OG.numel()).view(scale_OG.shape) % 3 - 1
    q_OD = ((w_OD / _spread(scale_OG)).round() + _spread(zero_OG)).clamp(-8, 7)
    tensors = {
        "_weight_qdata": q_OD.to(torch.int8),
        "_weight_scale": scale_OG,
        "_weight_zero_point": zero_OG.to(torch.int8),
    }
    return tensors, (q_OD - _spread(zero_OG)) * _spread(scale_OG)


def float8(w_OD: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Store float8 rows."""
    scale_O1 = w_OD.abs().amax(1, keepdim=True) / 448
    q_OD = (w_OD / scale_O1).to(torch.float8_e4m3fn)
    return {"_weight_qdata": q_OD, "_weight_scale": scale_O1}, q_OD.float() * scale_O1


def hqq(bits: int, axis: int) -> Any:
    """Return a function that stores integers with float zeros, several blocks of rows in the bits of one."""

    def store(w_OD: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = w_OD.reshape((-1, GROUP) if axis else (GROUP, -1))
        low, high = groups.amin(axis, keepdim=True), groups.amax(axis, keepdim=True)
        scale = (high - low) / (2**bits - 1)
        zero = -low / scale
        q = (groups / scale + zero).round().clamp(0, 2**bits - 1)
        places = _PLACES[bits]
        blocks = q.to(torch.uint8).unflatten(0, (len(places), -1))
        packed = sum(block << place for block, place in zip(blocks, places, strict=True))
        tensors = {
            "W_q": packed,
            "nbits": torch.tensor(bits, dtype=torch.int32),
            "group_size": torch.tensor(GROUP, dtype=torch.int32),
            "shape": torch.tensor(w_OD.shape),
            "axis": torch.tensor(axis, dtype=torch.int32),
            "scale": scale,
            "zero": zero,
            "packing": torch.tensor([ord(x) for x in f"{bits}bit_u8"], dtype=torch.uint8),
        }
        return tensors, (q * scale - zero * scale).reshape(w_OD.shape)

    return store
