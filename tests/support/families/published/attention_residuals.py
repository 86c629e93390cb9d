"""Attention residuals for models of transformers that lack them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

GROUP_SIZE = 2


def new_linear(inputs: int, outputs: int) -> nn.Linear:
    module = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(module.weight, 0, 0.15)
    return module


def new_norm(width: int, eps: float) -> nn.Module:
    module = kimi_linear.KimiLinearRMSNorm(width, eps)
    nn.init.normal_(module.weight, 0.8, 0.3)
    return module


class Residuals:
    """The outputs of blocks, summed by groups, and the means of them that blocks read."""

    def __init__(self, config: Any) -> None:
        self._sums: list[Tensor] = []
        self._config = config

    def begin(self, embedding: Tensor) -> None:
        self._sums = [embedding]

    def add_mean(self, module: nn.Module, name: str) -> Callable[[], Tensor]:
        """Give a module a query, and return the function that computes the mean with it."""
        size = self._config.hidden_size
        projection, norm = new_linear(size, 1), new_norm(size, self._config.rms_norm_eps)
        module.add_module(f"{name}_res_proj", projection)
        module.add_module(f"{name}_res_norm", norm)
        return partial(self._mean, projection, norm)

    def replace_forward(
        self, layer: nn.Module, attention: nn.Module, index: int, name: str
    ) -> None:
        """Make a layer read means, with the query `name` for its attention."""
        means = [self.add_mean(layer, name), self.add_mean(layer, "mlp")]
        layer.forward = partial(self._forward, layer, attention, index, means)

    def install(self, model: nn.Module, name: str) -> None:
        """Let the model's embedding begin, and its final norm read a mean with the query `name`."""
        last = self.add_mean(model, name)
        model.norm.register_forward_pre_hook(lambda _module, _args: (last(),))
        model.embed_tokens.register_forward_hook(lambda _m, _args, output: self.begin(output))

    def _forward(
        self,
        layer: Any,
        attention: nn.Module,
        index: int,
        means: list[Callable[[], Tensor]],
        hidden_states: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        output = attention(hidden_states=layer.input_layernorm(means[0]()), **kwargs)
        self._add(
            output[0] if isinstance(output, tuple) else output, begins=index % GROUP_SIZE == 0
        )
        self._add(layer.mlp(layer.post_attention_layernorm(means[1]())), begins=False)
        return self._sums[-1]

    def _add(self, output: Tensor, *, begins: bool) -> None:
        if begins:
            self._sums.append(output)
        else:
            self._sums[-1] = self._sums[-1] + output

    def _mean(self, projection: nn.Linear, norm: nn.Module) -> Tensor:
        values = torch.stack(self._sums, -2)
        return (projection(norm(values)).softmax(-2) * values).sum(-2)
