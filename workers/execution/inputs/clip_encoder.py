"""Encode audio clips into the tokens that are the results of their requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ....protocol.arrays import int32_view
from ....protocol.config import EngineConfig
from ....protocol.worker_messages import NewRequestData, SchedulerOutput
from ...device.dtypes import HostDevice, configured_dtype, torch_device, torch_dtype
from ...models.families import model_spec
from .encoder_loader import load_towers
from .encoders import Encoders

if TYPE_CHECKING:
    from ...loaders import Checkpoint


class ClipEncoder:
    """An encoder of requests that have one audio clip and a prompt of one token.

    Raises:
        CheckpointError: The encoder is unknown, or its files are damaged.
    """

    def __init__(
        self, config: EngineConfig, device: torch.device | HostDevice, checkpoint: Checkpoint
    ) -> None:
        spec = model_spec(
            {**checkpoint.config, **config.model.hf_overrides}, checkpoint.config_path
        )
        on = torch_device(device)
        dtype = torch_dtype(configured_dtype(config.model.dtype))
        tower = load_towers(config, spec, checkpoint, on, dtype)
        self._encoders = Encoders(tower, spec, device)

    def warm_up(self) -> None:
        """Encode a dummy input, because kernels are prepared on first use."""
        self._encoders.warm_up()

    def apply(self, output: SchedulerOutput) -> None:
        """Encode the clips of a step."""
        for slot in int32_view(output.removed_slots).tolist():
            self._encoders.remove_request(slot)
        self._encoders.add_requests(output.new_requests)
        if output.encoders is not None:
            self._encoders.apply_work(output.encoders)

    def result(self, request: NewRequestData) -> torch.Tensor | str:
        """Return the tokens of a request's clip."""
        tokens = self._encoders.find_result(request.slot)
        return torch.empty(0) if tokens is None else tokens

    def clear(self) -> None:
        """Discard all clips and their outputs."""
        self._encoders.clear()
