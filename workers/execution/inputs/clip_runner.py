"""Execute steps of an encoder of audio: the tokens that it writes are a request's pooled result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ....protocol.arrays import int32_view
from ....protocol.config import EngineConfig
from ....protocol.worker_messages import HeldRequest, NewRequestData, SchedulerOutput
from ...device.dtypes import HostDevice, configured_dtype, torch_device, torch_dtype
from ...models.families import model_spec
from .encoder_loader import load_towers
from .encoder_runner import EncoderRunner
from .encoders import Encoders

if TYPE_CHECKING:
    from ...loaders import Checkpoint


class ClipRunner(EncoderRunner):
    """A runner whose requests have one audio clip and a prompt of one token.

    Raises:
        CheckpointError: The encoder is unknown, or its files are damaged.
        ConfigError: LoRA adapters are enabled.
    """

    def __init__(
        self, config: EngineConfig, device: torch.device | HostDevice, checkpoint: Checkpoint
    ) -> None:
        super().__init__(config)
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

    def release_requests(self) -> list[HeldRequest]:
        """Free every slot. Return no requests, because there is no KV cache."""
        self._encoders.clear()
        return super().release_requests()

    def _apply(self, output: SchedulerOutput) -> None:
        """Encode the clips of a step."""
        for slot in int32_view(output.removed_slots).tolist():
            self._encoders.remove_request(slot)
        self._encoders.add_requests(output.new_requests)
        if output.encoders is not None:
            self._encoders.apply_work(output.encoders)

    def _result(self, request: NewRequestData) -> torch.Tensor | str:
        tokens = self._encoders.find_result(request.slot)
        return torch.empty(0) if tokens is None else tokens
