"""The activation functions of MLPs, by Engine's names and by those in configs.

Native programs have the same functions by the same names; see `workers/cpu/recording/model_shape.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Activation = Literal[
    "silu",
    "gelu_tanh",
    "gelu",
    "relu",
    "relu2",
    "quick_gelu",
    "clipped_gelu",
    "mish",
    "tanh",
    "sigmoid",
    "relu6",
    "leaky_relu",
    "hardswish",
    "laplace",
    "linear",
    "xielu",
    "poly_norm",
    "clamped_swiglu",
]
"""`xielu` and `poly_norm` have trained parameters, and `clamped_swiglu` has a gate.

All others are functions of each element.
"""

NAMES_IN_CONFIGS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "gelu_10": "clipped_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sqrelu": "relu2",
    "relu6": "relu6",
    "leaky_relu": "leaky_relu",
    "mish": "mish",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "hardswish": "hardswish",
    "laplace": "laplace",
    "linear": "linear",
    "xielu": "xielu",
}
"""Engine's names of the activations that configs name, as in transformers or flash-linear-attention."""


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _clipped_gelu(x: Tensor) -> Tensor:
    return F.gelu(x).clamp_(-10, 10)


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square_()


def _laplace(x: Tensor) -> Tensor:
    """Return the cumulative Laplace approximation of a squared ReLU (Mega, arXiv 2209.10655)."""
    return 0.5 * (1 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2))))


def _copy(x: Tensor) -> Tensor:
    return x.clone()


# A function of the module torch itself would import torch here, which native programs do not need.
ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "clipped_gelu": _clipped_gelu,
    "relu": F.relu,
    "relu2": _relu_squared,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "mish": F.mish,
    "tanh": F.tanh,
    "sigmoid": F.sigmoid,
    "hardswish": F.hardswish,
    "laplace": _laplace,
    "linear": _copy,
}
"""The functions of each element. Each returns a new tensor."""


def normal_quantile(share: float) -> float:
    """Return how many standard deviations above the mean the given share of a normal distribution lies below."""
    # Few models need this, and the module takes 0.4 MiB of every worker.
    from statistics import NormalDist

    return NormalDist().inv_cdf(share)
