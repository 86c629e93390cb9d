"""A classification head on pooled hidden states.

Shapes: D hidden size, L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ..layers.activations import ACTIVATIONS
from ..layers.layers import LayerNorm
from ..layers.spec import ModelSpec
from ..loaders.peft_adapter import Change, LowRank
from .lora.adapters import LoraAdapters
from .lora.matrices import HEAD, AdaptedMatrix, AdaptedRows
from .weights import WeightReader

_NAMES: Final = ("dense", "norm", "output")
_ROWS_AT_ONCE: Final = 256

_Layer = tuple[Tensor, Tensor | None]
"""A weight, and a bias or None."""


class ScoreHead:
    """The classification head of `spec`, in float32.

    It reads one vector at a time, or those of the tokens of one prompt, so that scores do not depend on the batch. LoRA
    adapters may change or replace its layers.
    """

    def __init__(
        self, spec: ModelSpec, weights: WeightReader, loras: LoraAdapters | None = None
    ) -> None:
        assert spec.score_head is not None
        head, size = spec.score_head, spec.hidden_size
        reads_rows = bool(head.token_ids) or head.scores_vocabulary
        num_rows = 2 if head.takes_difference else head.num_labels
        self._layers: dict[str, _Layer] = {}
        parts: dict[str, AdaptedMatrix] = {}
        wanted = (
            ("dense", head.has_dense, size, size, head.dense_bias),
            ("norm", head.has_norm, size, None, spec.norm_bias),
            ("output", not reads_rows, num_rows, size, head.output_bias),
        )
        for name, is_there, rows, columns, has_bias in wanted:
            if not is_there:
                continue
            shape = (rows,) if columns is None else (rows, columns)
            weight = weights.read_score_head(f"{name}.weight", *shape)
            bias = weights.read_score_head(f"{name}.bias", rows) if has_bias else None
            self._layers[name] = weight, bias
            replaceable = ("weight", "bias") if has_bias else ("weight",)
            module = AdaptedRows(f"score_head.{name}", rows, lambda x: x)
            parts[name] = AdaptedMatrix(module, columns, replaceable=replaceable)
        # The row of yes follows that of no in a list of tokens, but precedes it in a GGUF file.
        is_pair = head.takes_difference or len(head.token_ids) == 2
        self._yes = int(bool(head.token_ids)) if is_pair else None
        if reads_rows:
            rows_LD = weights.read_token_rows(
                head.token_ids, spec.vocab_size, size, of_embedding=head.reads_embedding
            )
            bias = None
            if head.output_bias:
                bias = weights.read_score_head("output.bias", head.num_labels)
            self._layers["output"] = rows_LD, bias
            chosen = [*head.token_ids] or slice(None)
            module = AdaptedRows(HEAD, spec.vocab_size, lambda x: x[chosen])
            parts["output"] = AdaptedMatrix(module, size, replaceable=("weight",))
        self._reduction, self._num_logarithms = head.reduction, head.num_logarithms
        self._activation = ACTIVATIONS[head.activation]
        self._eps, self._offset = spec.norm_eps, head.offset
        self.parts: Sequence[AdaptedMatrix] = [parts[name] for name in _NAMES if name in parts]
        self._installed: dict[int, dict[str, _Layer]] = {}
        if loras is not None:
            loras.add_product(self)

    @classmethod
    def read(
        cls, spec: ModelSpec, weights: WeightReader, loras: LoraAdapters | None = None
    ) -> ScoreHead | None:
        """Return the head of a model, or None if it has none."""
        return None if spec.score_head is None else cls(spec, weights, loras)

    def pack(self, changes: Sequence[Change | None]) -> dict[str, _Layer]:
        """Return the head's layers as changed by an adapter."""
        names = [name for name in _NAMES if name in self._layers]
        layers = dict(self._layers)
        for name, change in zip(names, changes, strict=True):
            weight, bias = layers[name]
            if isinstance(change, LowRank):
                if change.bias_O is not None:
                    grown = change.bias_O.to(weight.device)
                    bias = grown if bias is None else bias + grown
                layers[name] = weight + (change.up_OR @ change.down_RI).to(weight.device), bias
            elif change is not None:
                new_bias = bias if change.bias is None else change.bias.to(weight.device)
                layers[name] = change.weight.to(weight.device), new_bias
        return layers

    def install(self, number: int, packed: dict[str, _Layer] | None) -> None:
        """Replace the adapter with this number. Pass None if the new one does not change the head."""
        self._installed.pop(number, None)
        if packed is not None:
            self._installed[number] = packed

    @torch.inference_mode()
    def __call__(self, vector_D: Tensor, adapter: int = -1) -> Tensor:
        """Return the scores [L] of the classes for a vector, or [T, L] for vectors [T, D] unless the head reduces them.

        `adapter` is the number of the adapter that changes the head, or -1 for none.
        """
        layers = self._installed.get(adapter, self._layers)
        return (
            self._scores(vector_D, layers)
            if self._reduction is None
            else self._reduced(vector_D, layers)
        )

    def _reduced(self, vectors_TD: Tensor, layers: dict[str, _Layer]) -> Tensor:
        """Return the scores of a prompt, reduced over its tokens."""
        parts: list[Tensor] = []
        # The scores of all tokens of a long text for a whole vocabulary may take gigabytes.
        for part_TD in vectors_TD.split(_ROWS_AT_ONCE):
            scores_TL = self._scores(part_TD, layers)
            for _ in range(self._num_logarithms):
                scores_TL = scores_TL.relu().log1p()
            parts.append(scores_TL.amax(0) if self._reduction == "max" else scores_TL.sum(0))
        parts_NL = torch.stack(parts)
        if self._reduction == "max":
            return parts_NL.amax(0)
        return parts_NL.sum(0) / (len(vectors_TD) if self._reduction == "mean" else 1)

    def _scores(self, vector_D: Tensor, layers: dict[str, _Layer]) -> Tensor:
        if "dense" in layers:
            vector_D = self._activation(F.linear(vector_D, *layers["dense"]))
        if "norm" in layers:
            weight, bias = layers["norm"]
            vector_D = LayerNorm(weight, self._eps, bias)(vector_D)
        rows_LD, bias_L = layers["output"]
        weight_LD = rows_LD
        if self._yes is not None:
            weight_LD = (rows_LD[self._yes] - rows_LD[1 - self._yes])[None]
        return F.linear(vector_D, weight_LD, bias_L) + self._offset
