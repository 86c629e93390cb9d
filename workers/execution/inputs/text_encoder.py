"""Encode texts with a model that transformers computes, each text as a whole.

Shapes: T tokens of a text, D elements of a hidden state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch

from ....protocol.arrays import int32_view
from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.pooling.foreign_encoders import ForeignEncoder
from ....protocol.config import EngineConfig, LoadFormat
from ....protocol.errors import ConfigError
from ....protocol.pooling_params import PoolingKind
from ....protocol.worker_messages import NewRequestData, SchedulerOutput
from ...device.device import usable_cores
from ...device.dtypes import HostDevice, configured_dtype, torch_device, torch_dtype
from ...device.errors import explaining_device_errors
from ...models.dense_layers import DenseLayers
from ...models.foreign.encoder import TransformersEncoder
from ..outputs.pooling import NOT_FINITE

_NUM_WARM_UP_TOKENS: Final = 16


class TextEncoder:
    """An encoder of requests that have a text.

    Raises:
        CheckpointError: transformers cannot load the model.
        ConfigError: transformers is missing, or an option needs Engine's own layers.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device | HostDevice,
        fields: ConfigFields,
        family: ForeignEncoder,
    ) -> None:
        model = config.model
        if model.quantization is not None:
            raise ConfigError(
                f"--quantization {model.quantization} needs Engine's own layers; remove the flag"
            )
        on = torch_device(device)
        if on.type == "cpu":
            num_workers = config.parallel.num_workers
            torch.set_num_threads(config.device.threads or max(1, usable_cores() // num_workers))
        self._dense = DenseLayers.read(model, on)
        self._encoder = TransformersEncoder(
            Path(model.path),
            fields,
            family,
            model.hf_overrides,
            dtype=torch_dtype(configured_dtype(model.dtype)),
            device=on,
            is_dummy=model.load_format is LoadFormat.DUMMY,
        )
        self._num_warm_up_tokens = min(_NUM_WARM_UP_TOKENS, model.max_model_len)

    def warm_up(self) -> None:
        """Compute a dummy text, because kernels are prepared on first use."""
        self._encoder(np.ones(self._num_warm_up_tokens, np.int32))

    def apply(self, output: SchedulerOutput) -> None:
        """Do nothing, because a request contains its whole text."""

    def result(self, request: NewRequestData) -> torch.Tensor | str:
        """Return the vectors or scores of a request's text, or the reason why it fails."""
        assert request.pooling_params is not None
        params, token_ids = request.pooling_params, int32_view(request.token_ids)
        try:
            # A GPU that has failed computes no other text either, so its errors end the worker.
            with explaining_device_errors(f"in a text of {len(token_ids)} tokens"):
                found = self._encoder(token_ids, params.second_segment)
        except (IndexError, RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            return f"transformers cannot compute this text of {len(token_ids)} tokens: {reason}"
        if not self._encoder.classifies:
            pooled = _pool(found, params.kind)
            found = pooled if self._dense is None else self._dense(pooled, params.kind)
        return found.flatten() if bool(found.isfinite().all()) else NOT_FINITE

    def clear(self) -> None:
        """Do nothing, because texts are not kept."""


def _pool(hidden_TD: torch.Tensor, kind: PoolingKind) -> torch.Tensor:
    """Return the vector of a text, or those of its tokens."""
    match kind:
        case PoolingKind.CLS:
            return hidden_TD[0]
        case PoolingKind.LAST:
            return hidden_TD[-1]
        case PoolingKind.MEAN:
            return hidden_TD.double().mean(0).float()
    return hidden_TD
