"""An encoder of texts that transformers computes, with or without a classification head.

Shapes: T tokens of a text, D elements of a hidden state, L classes.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.pooling.classification import classifies_tokens, is_classifier
from ....protocol.checkpoint.pooling.foreign_encoders import ForeignEncoder
from ....protocol.errors import CheckpointError, ConfigError, counted
from .decoder import has_transformers
from .mra import use_block_products

_MASKED = 1e30
_SEED = 0
"""The seed of random numbers that a model draws, such as the hashes of Reformer."""


class TransformersEncoder:
    """A module of transformers that computes one text at a time, so that results do not depend on others.

    Args:
        path: The directory of the checkpoint.
        fields: The content of its config.json, with the overrides.
        family: The facts about the family.
        overrides: The fields that replace those of the checkpoint.
        dtype: The type of weights and activations.
        device: The device.
        is_dummy: If true, the weights are random.

    Raises:
        CheckpointError: transformers does not have the model, or its files are damaged.
        ConfigError: transformers is not installed.
    """

    def __init__(
        self,
        path: Path,
        fields: ConfigFields,
        family: ForeignEncoder,
        overrides: dict[str, object],
        *,
        dtype: torch.dtype,
        device: torch.device,
        is_dummy: bool = False,
    ) -> None:
        if not has_transformers():
            raise ConfigError(
                f"the family {fields.get('model_type')!r} needs the package transformers: "
                "pip install 'engine-serve[transformers]'"
            )
        # Imported here, because importing transformers takes seconds that other models should not spend.
        transformers: Any = importlib.import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        self._family, self._device = family, device
        if fields.get("model_type") == "mra":
            use_block_products()
        self.classifies = is_classifier(fields)
        auto = transformers.AutoModel
        if self.classifies:
            auto = transformers.AutoModelForSequenceClassification
        if classifies_tokens(fields):
            auto = transformers.AutoModelForTokenClassification
        missing: list[str] = []
        try:
            config = transformers.AutoConfig.from_pretrained(path, **overrides)
            if is_dummy:
                torch.manual_seed(_SEED)
                module = auto.from_config(config, dtype=dtype)
            else:
                module, report = auto.from_pretrained(
                    path, config=config, dtype=dtype, output_loading_info=True
                )
                missing = sorted(report["missing_keys"])
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(path, f"transformers cannot load the model: {reason}") from error
        # Embeddings do not read what a pooler would make of the first token.
        if missing := [name for name in missing if self.classifies or "pooler." not in name]:
            raise CheckpointError(
                path,
                f"{counted(len(missing), 'tensor')} of the model are missing, such as {missing[0]!r}; download the "
                "whole checkpoint",
            )
        self._module = module.to(device).eval()
        self._length = family.filled_length(fields)
        self._reads_types = "token_type_ids" in inspect.signature(self._module.forward).parameters

    @torch.inference_mode()
    def __call__(self, token_ids: Any, second_segment: int = 0) -> Tensor:
        """Return the scores [L] of a text, or for each token its scores [T, L] or its hidden state [T, D], in float32.

        Args:
            token_ids: An array of the tokens, int32 [T].
            second_segment: The index of the first token of the second text; 0 for one text.
        """
        num_tokens = len(token_ids)
        ids_T = torch.tensor(token_ids, dtype=torch.long, device=self._device)
        inputs = {"input_ids": ids_T[None]}
        if self._family.token_types is not None and self._reads_types:
            types_T = torch.zeros_like(ids_T)
            if second_segment:
                types_T[second_segment:] = 1
            first, last = self._family.token_types
            types_T[0] = first or types_T[0]
            types_T[-1] = last or types_T[-1]
            inputs["token_type_ids"] = types_T[None]
        if self._length is not None:
            _fill(inputs, self._length)
            if self._family.adds_mask:
                # All queries have the same mask, also those that stand for several tokens.
                mask_1T = inputs["attention_mask"].float()
                inputs["attention_mask"] = ((mask_1T - 1) * _MASKED)[None, None]
        elif num_tokens < self._family.min_tokens:
            _fill(inputs, self._family.min_tokens)
        module = self._copy() if self._family.keeps_state else self._module
        torch.manual_seed(_SEED)
        output = module(**inputs, return_dict=True)
        found: Tensor = (output.logits if self.classifies else output.last_hidden_state)[0]
        return (found[:num_tokens] if found.ndim == 2 else found).float()

    def _copy(self) -> Any:
        """Return a copy of the module that shares its weights, because a text would change the module."""
        tensors = (*self._module.parameters(), *self._module.buffers())
        return copy.deepcopy(self._module, {id(tensor): tensor for tensor in tensors})


def _fill(inputs: dict[str, Tensor], length: int) -> None:
    """Fill a text up to a length with tokens that no other token reads."""
    ids_1T = inputs["input_ids"]
    rest = (0, length - ids_1T.shape[1])
    inputs["attention_mask"] = torch.ones_like(ids_1T)
    for name, tensor_1T in list(inputs.items()):
        inputs[name] = functional.pad(tensor_1T, rest)
