"""Quantize matrices as bitsandbytes does, by plain rounding: the tensors of a module, and the matrix that they mean."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

_NF4 = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0]
)  # fmt: skip
_FP4 = torch.tensor([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4])


def four_bits(
    kind: str, *, is_nested: bool
) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    """Store blocks of 64 codes, whose factors may be bytes in blocks of 256."""

    def store(w_OD: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codebook = _NF4 if kind == "nf4" else torch.cat((_FP4, -_FP4))
        blocks = torch.nn.functional.pad(w_OD.flatten(), (0, -w_OD.numel() % 64)).view(-1, 64)
        absmax = blocks.abs().amax(1)
        state = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": [*w_OD.shape]}
        tensors = {"weight.quant_map": codebook, "weight.absmax": absmax}
        if is_nested:
            offset = float(absmax.mean())
            nested = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
            largest, levels = nested.abs().amax(1), torch.linspace(-1, 1, 256)
            indices = (nested.unsqueeze(2) / largest[:, None, None] - levels).abs().argmin(2)
            factors = levels[indices] * largest.unsqueeze(1) + offset
            absmax = factors.flatten()[: len(absmax)]
            tensors |= {
                "weight.absmax": indices.flatten()[: len(absmax)].to(torch.uint8),
                "weight.nested_absmax": largest,
                "weight.nested_quant_map": levels,
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        codes = (blocks.unsqueeze(2) / absmax[:, None, None] - codebook).abs().argmin(2)
        meaning = (codebook[codes] * absmax.unsqueeze(1)).flatten()[: w_OD.numel()]
        codes = codes.flatten()[: w_OD.numel()].to(torch.uint8)
        tensors["weight"] = (codes[::2] << 4 | codes[1::2]).unsqueeze(1)
        text = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text)).byte()
        return tensors, meaning.view_as(w_OD)

    return store


def eight_bits(w_OD: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    largest_O = w_OD.abs().amax(1)
    q_OD = (w_OD * 127 / largest_O.unsqueeze(1)).round()
    row_layout = torch.tensor(0, dtype=torch.uint8)
    tensors = {"weight": q_OD.to(torch.int8), "SCB": largest_O, "weight_format": row_layout}
    return tensors, q_OD * largest_O.unsqueeze(1) / 127
