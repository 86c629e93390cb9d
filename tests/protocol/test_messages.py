"""Encoding of messages: nothing is lost, and an unchanged decode step takes four bytes per slot."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from engine.protocol.arrays import float32_bytes, float32_view, int32_bytes, int32_view
from engine.protocol.config import PROTOCOL_VERSION, EngineConfig, ModelConfig, load_config
from engine.protocol.messages import EngineCoreOutputs, FinishReason
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import (
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    WorkerCommand,
)


def test_arrays_are_little_endian_views() -> None:
    data = int32_bytes([[1, -2], [3, 2**31 - 1]])
    assert data[:4] == b"\x01\0\0\0"
    assert int32_view(data).tolist() == [1, -2, 3, 2**31 - 1]
    assert not int32_view(data).flags.writeable
    assert float32_view(float32_bytes([0.5, -1.0])).tolist() == [0.5, -1.0]
    with pytest.raises(ValueError, match="multiple"):
        int32_view(b"\0\0\0")


def test_a_decoded_scheduler_output_equals_the_original() -> None:
    request = NewRequestData(
        slot=3,
        request_id=(0, 17),
        token_ids=int32_bytes([1, 2, 3]),
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_ids=(int32_bytes([4]),),
        sampling_params=SamplingParams(max_tokens=5, logit_bias={7: 1.5}, stop_token_ids=(2,)),
        eos_token_ids=(2, 0),
    )
    output = SchedulerOutput(
        9, int32_bytes([1]), [request], int32_bytes([[0, 3, 0, 4]]), int32_bytes([3]), b"", b""
    )
    encoded = msgspec.msgpack.encode(output)
    assert msgspec.msgpack.decode(encoded, type=WorkerCommand) == output


@pytest.mark.parametrize("rows", [1, 64, 1024])
def test_an_unchanged_decode_step_takes_few_bytes(rows: int) -> None:
    slots = int32_bytes(np.arange(rows))
    changed = msgspec.msgpack.encode(SchedulerOutput(1_000_000, slots=slots))
    assert len(changed) <= 100 + 4 * rows
    assert len(msgspec.msgpack.encode(SchedulerOutput(1_000_000))) <= 44
    assert len(msgspec.msgpack.encode(ModelRunnerOutput(1_000_000, slots))) <= 100 + 4 * rows
    outputs = EngineCoreOutputs(0, 1_000_000, 1.0, request_indices=slots, token_ids=slots)
    assert len(msgspec.msgpack.encode(outputs)) <= 100 + 8 * rows


def test_finish_reasons_are_named_as_in_the_openai_api() -> None:
    assert [str(r) for r in FinishReason] == [
        "stop",
        "length",
        "abort",
        "ignored",
        "expired",
        "error",
        "rejected",
        "throttled",
        "moved",
        "repetition",
    ]


def test_a_configuration_of_another_version_is_rejected(tmp_path) -> None:
    model = ModelConfig("m", "p", "t", ("m",), "llama", 9, 9, (2,))
    path = EngineConfig(str(tmp_path), 1, model).save()
    assert load_config(path).model == model
    assert path.stat().st_mode & 0o777 == 0o600
    path = EngineConfig(str(tmp_path), 1, model, version=PROTOCOL_VERSION + 1).save()
    with pytest.raises(msgspec.ValidationError, match="version"):
        load_config(path)
