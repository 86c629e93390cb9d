"""Execute steps: the model, KV cache and requests of one worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import torch

from ...protocol.arrays import int32_view
from ...protocol.config import EngineConfig, ProposerMethod
from ...protocol.kv_cache_groups import KVCacheGroup
from ...protocol.kv_transfer.multi import needs_checks
from ...protocol.worker_messages import HeldRequest, ModelRunnerOutput, SchedulerOutput
from ..cpu.decoder import NativeDecoder
from ..device.dtypes import HostDevice, configured_dtype, torch_device, torch_dtype
from ..device.errors import explaining_device_errors
from ..kv_transfer.block_regions import BlockRegions
from ..kv_transfer.checked_connector import CheckedConnector
from ..kv_transfer.connector import ConnectorContext, KVConnector, create_connector
from ..kv_transfer.fingerprint import cache_fingerprint, divided_fingerprint
from ..loaders import Checkpoint
from ..loaders.stored.packed_file import PackedFile
from ..models.lora.lora_loader import LoraLoader
from .denoising.denoiser import Denoiser
from .denoising.denoising import Denoising
from .host_execution import HostExecution
from .kv_cache import KVCache
from .model_loader import Model, load_model
from .parallel_state import ParallelState
from .request_states import RequestStates
from .runner import GrammarSource, ReportedOutput, StepResult

if TYPE_CHECKING:
    from ..device.accelerator import Accelerator
    from ..device.memory_profile import MemoryProfile
    from .device_execution import DeviceExecution
    from .drafting.draft_head import DraftHead
    from .drafting.draft_model import DraftModel
    from .inputs.image_sources import ImageSources
    from .inputs.sources import Sources


class ModelRunner:
    """Executes steps with a model, which the constructor loads. Call `allocate_kv_cache` before `execute`."""

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device | HostDevice,
        checkpoint: Checkpoint,
        on_progress: Callable[[int, int], None],
        parallel: ParallelState | None = None,
        accelerator: Accelerator | None = None,
        *,
        core_index: int = 0,
        rank: int = 0,
        packed: PackedFile | None = None,
    ) -> None:
        self._config, self._core_index, self._rank = config, core_index, rank
        self._to_settle = packed
        self.connector: KVConnector | None = None
        if device.type == "cuda":
            from ..device.accelerator import Accelerator

            accelerator = accelerator or Accelerator(torch_device(device))
        parallel = parallel or ParallelState()
        pipeline = self._pipeline = parallel.pipeline
        self._expert_group = parallel.expert_group
        if self._expert_group is not None:
            # The size of an exchange between replicas is known only on the host, for which a captured graph cannot
            # wait.
            config = _without_graphs(config)
        model = load_model(config, device, checkpoint, on_progress, parallel, packed=packed)
        if model.is_foreign:
            # A module of transformers may wait for the device, which a captured graph cannot.
            config = _without_graphs(config)
        if not isinstance(model, NativeDecoder):
            device = torch_device(device)
        kv_cache = KVCache(model, config.model.max_model_len, device)
        speculative = config.scheduler.speculative
        requests = RequestStates(
            config,
            model,
            pipeline,
            len(kv_cache.groups),
            device,
            keeps_tokens_on_host=accelerator is not None
            and not (speculative is None and config.scheduler.diffusion is None),
        )
        self._model, self.kv_cache, self._requests = model, kv_cache, requests
        self._sources: Sources | ImageSources | None = None
        if model.spec.source is not None and model.spec.source.are_images:
            from .inputs.image_sources import ImageSources

            assert requests.encoders is not None
            self._sources = ImageSources(model, requests.batch, kv_cache, requests.encoders)
        elif model.spec.source is not None and requests.encoders is not None:
            from .inputs.alignment import Alignments
            from .inputs.sources import Sources

            alignments = Alignments.from_config(config, model, checkpoint, torch_device(device))
            requests.pooling.alignments = alignments
            self._sources = Sources(model, requests.batch, kv_cache, requests.encoders, alignments)
        self.loras: LoraLoader | None = None
        if model.loras is not None:
            self.loras = LoraLoader(model.loras.load, model.loras.install)
        self._execution: HostExecution | DeviceExecution
        self._draft_model: DraftModel | DraftHead | None = None
        if speculative is None or not model.shard.is_last:
            pass
        elif speculative.method is ProposerMethod.DRAFT_MODEL:
            from .drafting.draft_model import DraftModel

            self._draft_model = DraftModel(
                config, model, kv_cache, device, on_progress, accelerator
            )
        elif speculative.method.reads_hidden_states:
            from .drafting.heads import load_head

            dtype = torch_dtype(configured_dtype(config.model.dtype))
            self._draft_model = load_head(
                config,
                model,
                kv_cache,
                checkpoint,
                dtype,
                on_progress,
                in_torch=accelerator is not None,
            )
        denoising: Denoiser | None = None
        if (diffusion := config.scheduler.diffusion) is None:
            pass
        elif diffusion.renoising is None:
            denoising = Denoising(config.scheduler, diffusion, model, requests)
        else:
            from ..models.decoder import Decoder
            from .denoising.canvases import CanvasDenoising

            assert isinstance(model, Decoder)
            denoising = CanvasDenoising(diffusion, diffusion.renoising, model, requests)
        if accelerator is None:
            self._execution = HostExecution(
                model, requests, kv_cache, pipeline, speculative, self._draft_model, denoising
            )
        else:
            from ..models.torch_decoder import TorchDecoder
            from .device_execution import DeviceExecution

            assert isinstance(model, TorchDecoder), "a native program runs on the host"
            self._execution = DeviceExecution(
                config,
                model,
                requests,
                kv_cache,
                pipeline,
                accelerator,
                speculative,
                self._draft_model,
                denoising,
            )

    @property
    def model(self) -> Model:
        """The model."""
        return self._model

    @property
    def kv_cache_groups(self) -> tuple[KVCacheGroup, ...]:
        """The KV-cache groups of the whole model."""
        return self.kv_cache.groups

    @property
    def block_bytes(self) -> int:
        """Size of one block in bytes, over all layers of a group in this worker, including a draft model."""
        drafting = 0 if self._draft_model is None else self._draft_model.block_bytes
        return self.kv_cache.block_bytes + drafting

    def profile_memory(self, utilization: float) -> MemoryProfile | None:
        """Return the memory that the device needs in addition to the KV cache; None on the CPU."""
        return self._execution.profile_memory(utilization)

    def allocate_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate the KV cache and the CPU offload."""
        self.kv_cache.allocate(num_blocks, num_host_blocks)
        self._execution.use_kv_cache()
        transfer, memory = self._config.kv_transfer, self.kv_cache.memory
        if transfer is not None and memory is not None:
            fingerprint = cache_fingerprint(self._config, self._model, self._rank)
            tensor_parallel = self._model.shard.tensor_parallel
            regions = BlockRegions(
                self.kv_cache.regions(),
                tensor_parallel.rank,
                tensor_parallel.size,
                divided_fingerprint(self._config, self._model, self._rank),
            )
            context = ConnectorContext(
                self._config, transfer, self._core_index, self._rank, memory, fingerprint, regions
            )
            self.connector = create_connector(context)
            if needs_checks(transfer):
                self.connector = CheckedConnector(self.connector, memory, regions)

    def warm_up(self) -> None:
        """Do all preparations that would otherwise delay the first step."""
        self._execution.warm_up()

    def release_requests(self) -> list[HeldRequest]:
        """Free every slot.

        Return the requests that were in the slots, with the tokens and blocks that the KV cache holds.
        """
        if self.loras is not None:
            self.loras.cancel()
        self._execution.release_requests()
        return self._requests.release_requests()

    def execute(self, output: SchedulerOutput, await_grammar: GrammarSource) -> StepResult:
        """Apply the step's changes, run the model and sample. Every step has one output, even an empty one.

        Only the last pipeline stage has tokens in its output; all of its ranks sample the same tokens.
        """
        with explaining_device_errors(f"in step {output.step}"):
            for load in output.lora_loads:
                assert self.loras is not None
                self.loras.begin(load)
            if self._to_settle is not None:
                # Not earlier, because it would delay the start.
                self._to_settle.settle()
                self._to_settle = None
            self.kv_cache.announce_blocks(output)
            self.kv_cache.copy_out(output)
            if output.cleared_blocks:
                memory = self.kv_cache.memory
                assert memory is not None
                memory.clear(int32_view(output.cleared_blocks).tolist(), memory.fence())
            if self.connector is not None:
                self.connector.begin_step(output.kv_connector_metadata)
                self.connector.start_loads()
                self.connector.check_loads(output.checked_loads)
            self.kv_cache.copy_in(output)
            self._execution.release_slots(output)
            self._requests.apply_output(output)
            if self._sources is not None:
                self._sources.store(output)
            result = self._execution.execute(output, await_grammar)
        report = None if self.connector is None else self.connector.end_step()
        if report is None:
            return result
        if not isinstance(result, ModelRunnerOutput):
            return ReportedOutput(result, report)
        result.kv_connector_output = report
        return result

    @property
    def invitations_fd(self) -> int | None:
        """File descriptor that is readable when another replica needs this worker's experts; None if never."""
        return None if self._expert_group is None else self._expert_group.fd

    def join_rounds(self) -> None:
        """Compute rows of other replicas, which chose experts of this rank, until no replica asks for more."""
        assert self._expert_group is not None
        self._expert_group.join_rounds(self._model.join_round)

    def close(self) -> None:
        """Complete all transfers that other workers of the replica wait for."""
        if self.connector is not None:
            self.connector.close()
        self._requests.close()
        self._pipeline.close()
        self._execution.close()


def _without_graphs(config: EngineConfig) -> EngineConfig:
    """Return the configuration without captured graphs, for a model that waits for the device."""
    eager = msgspec.structs.replace(config.device, enforce_eager=True)
    return msgspec.structs.replace(config, device=eager)
