"""Helpers that drive a model runner like a core, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    HiddenStatesConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from engine.protocol.config.audio.processor import AudioProcessorConfig
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.pooling_params import PoolingParams
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import (
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from engine.workers.device.accelerator import Accelerator
from engine.workers.execution.model_runner import ModelRunner
from engine.workers.execution.runner import StepResult
from engine.workers.loaders import open_checkpoint

GREEDY = SamplingParams(temperature=0)


def output_of(result: StepResult) -> ModelRunnerOutput:
    """Return the output of a step, after waiting for it if necessary."""
    return result if isinstance(result, ModelRunnerOutput) else result.output()


class Steps:
    """A sender of steps to a runner; requests own fixed, disjoint blocks."""

    def __init__(
        self,
        path: Path,
        vocab_size: int,
        block_size: int = 4,
        device: DeviceConfig | None = None,
        accelerator: Accelerator | None = None,
        max_model_len: int = 128,
        speculative: SpeculativeConfig | None = None,
        audio: AudioProcessorConfig | None = None,
        num_slots: int = 4,
        hidden_states: HiddenStatesConfig | None = None,
        transfer: KVTransferConfig | None = None,
    ) -> None:
        name = str(path)
        model = ModelConfig(
            "m", name, name, ("m",), "qwen3", vocab_size, max_model_len, (1,), dtype="float32"
        )
        model = msgspec.structs.replace(model, audio=audio)
        config = EngineConfig(
            "/run",
            1,
            model,
            CacheConfig(block_size=block_size),
            SchedulerConfig(
                max_num_seqs=num_slots,
                max_num_batched_tokens=64,
                speculative=speculative,
                hidden_states=hidden_states,
            ),
            device=device or DeviceConfig(),
            kv_transfer=transfer,
        )
        self.runner = ModelRunner(
            config,
            torch.device("cpu"),
            open_checkpoint(path),
            lambda done, total: None,
            accelerator=accelerator,
        )
        self.runner.profile_memory(0.9)
        self.blocks_per_row = max_model_len // block_size
        self.num_groups = len(self.runner.kv_cache_groups)
        self.runner.allocate_kv_cache(
            1 + num_slots * self.blocks_per_row * self.num_groups, num_host_blocks=8
        )
        self.runner.warm_up()
        self.step = 0

    def new(
        self,
        slot: int,
        tokens: list[int],
        params: SamplingParams = GREEDY,
        prompt: int = 0,
        inputs: Sequence[EncoderInput] = (),
        pooling: PoolingParams | None = None,
    ):
        count = self.blocks_per_row
        first = 1 + slot * count * self.num_groups
        blocks = [range(first + count * g, first + count * (g + 1)) for g in range(self.num_groups)]
        return NewRequestData(
            slot=slot,
            request_id=(0, slot),
            token_ids=int32_bytes(tokens),
            num_prompt_tokens=prompt or len(tokens),
            num_computed_tokens=0,
            block_ids=tuple(int32_bytes(ids) for ids in blocks),
            sampling_params=params,
            eos_token_ids=(1,),
            encoder_inputs=list(inputs),
            pooling_params=pooling,
        )

    def run(self, **step) -> ModelRunnerOutput:
        return output_of(self.begin(**step))

    def begin(
        self, slots=None, chunks=(), new=(), removed=(), grammar=None, **copies
    ) -> StepResult:
        self.step += 1
        output = SchedulerOutput(
            self.step,
            removed_slots=int32_bytes(list(removed)),
            new_requests=list(new),
            slots=None if slots is None else int32_bytes(slots),
            chunks=int32_bytes(list(chunks)),
            grammar_slots=int32_bytes(grammar[0]) if grammar else b"",
            **copies,
        )

        def bitmask(step: int) -> GrammarOutput:
            assert step == self.step
            return GrammarOutput(step, int32_bytes(grammar[1]), *grammar[2:])

        return self.runner.execute(output, bitmask)

    def tokens(self, **step) -> list[int]:
        return int32_view(self.run(**step).sampled_token_ids).tolist()
