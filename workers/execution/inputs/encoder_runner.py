"""Execute steps of a model that is an encoder alone: the tokens that it writes are a request's pooled result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ....protocol.arrays import int32_bytes, int32_view
from ....protocol.config import EngineConfig
from ....protocol.errors import ConfigError
from ....protocol.worker_messages import HeldRequest, ModelRunnerOutput, RowVector, SchedulerOutput
from ...device.dtypes import HostDevice, configured_dtype, torch_device, torch_dtype
from ...loaders import Checkpoint
from ...models.families import model_spec
from ..runner import GrammarSource
from .encoder_loader import load_towers
from .encoders import Encoders

if TYPE_CHECKING:
    from ...kv_transfer.connector import KVConnector
    from ...models.lora.lora_loader import LoraLoader


class EncoderRunner:
    """A runner that replaces `ModelRunner`. Its requests have one audio clip and a prompt of one token.

    Every rank computes the same, and there is no KV cache.

    Raises:
        CheckpointError: The encoder is unknown, or its files are damaged.
        ConfigError: LoRA adapters are enabled.
    """

    connector: KVConnector | None = None
    loras: LoraLoader | None = None

    def __init__(
        self, config: EngineConfig, device: torch.device | HostDevice, checkpoint: Checkpoint
    ) -> None:
        if config.model.enable_lora:
            raise ConfigError("--enable-lora needs a model with a decoder; remove the flag")
        spec = model_spec(
            {**checkpoint.config, **config.model.hf_overrides}, checkpoint.config_path
        )
        on = torch_device(device)
        dtype = torch_dtype(configured_dtype(config.model.dtype))
        tower = load_towers(config, spec, checkpoint, on, dtype)
        self._encoders = Encoders(tower, spec, device)
        self._waiting: set[int] = set()
        """The slots of requests without a result."""
        self._slots_S = np.zeros(0, np.int32)

    def allocate_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Do nothing, because there is no KV cache."""

    def warm_up(self) -> None:
        """Encode a dummy input, because kernels are prepared on first use."""
        self._encoders.warm_up()

    def release_requests(self) -> list[HeldRequest]:
        """Free every slot. Return no requests, because there is no KV cache."""
        self._waiting.clear()
        self._encoders.clear()
        self._slots_S = np.zeros(0, np.int32)
        return []

    def execute(self, output: SchedulerOutput, await_grammar: GrammarSource) -> ModelRunnerOutput:
        """Encode the clips of a step, and return the tokens of its requests."""
        for slot in int32_view(output.removed_slots).tolist():
            self._encoders.remove_request(slot)
            self._waiting.discard(slot)
        self._encoders.add_requests(output.new_requests)
        self._waiting |= {new.slot for new in output.new_requests}
        if output.encoders is not None:
            self._encoders.apply_work(output.encoders)
        if output.slots is not None:
            self._slots_S = int32_view(output.slots)
        result = ModelRunnerOutput(output.step)
        ended = [slot for slot in self._slots_S.tolist() if slot in self._waiting]
        for slot in ended:
            tokens = self._encoders.find_result(slot)
            data = b"" if tokens is None else tokens.float().cpu().numpy().tobytes()
            result.pooled.append(RowVector(slot, data))
        self._waiting.difference_update(ended)
        result.sampled_token_ids = int32_bytes(np.zeros(len(ended), np.int32))
        return result

    @property
    def invitations_fd(self) -> None:
        """Return None, because this worker has no experts."""

    def join_rounds(self) -> None:
        """Do nothing, because this worker has no experts."""

    def close(self) -> None:
        """Do nothing, because no other worker waits for this one."""
