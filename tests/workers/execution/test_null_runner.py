"""The worker without a model generates repeatable tokens and does not need torch."""

import subprocess
import sys
import time

import numpy as np
import pytest
from engine.protocol.arrays import int32_bytes
from engine.protocol.config import DeviceConfig, EngineConfig, ModelConfig
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import NewRequestData, SchedulerOutput
from engine.workers.execution.null_runner import NullRunner, made_up_tokens, ordinary_token_ids


def test_tokens_depend_only_on_the_seed_and_the_position() -> None:
    candidates = ordinary_token_ids(1000, (7,))
    seeds = np.repeat(np.array([1, 2, 2**63 - 1], np.int64), 100)
    positions = np.tile(np.arange(100, dtype=np.int32), 3)
    whole = made_up_tokens(seeds, positions, candidates)
    order = np.random.default_rng(0).permutation(300)
    assert (made_up_tokens(seeds[order], positions[order], candidates) == whole[order]).all()
    assert 7 not in candidates
    # Two of the same 300 draws from 999 tokens agree about 45 times; a constant would give 300.
    assert len(np.unique(whole)) > 220


@pytest.mark.parametrize(
    "modules",
    [
        "engine.workers.worker, engine.workers.execution.runner, engine.workers.execution.null_runner",
        "engine.workers.preloaded",
    ],
    ids=["null", "native"],
)
def test_modules_of_a_worker_are_imported_without_torch(modules: str) -> None:
    program = f"import sys\nimport {modules}\nassert 'torch' not in sys.modules\n"
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_step_times_add_up_without_blocking_the_host() -> None:
    model = ModelConfig("m", "", "", ("m",), "", 100, 64, (1,))
    runner = NullRunner(EngineConfig("/run", 1, model, device=DeviceConfig(null_step_ms=30)))
    new = NewRequestData(
        slot=0,
        request_id=(0, 0),
        token_ids=int32_bytes([5, 6]),
        num_prompt_tokens=2,
        num_computed_tokens=0,
        block_ids=(int32_bytes([1]),),
        sampling_params=SamplingParams(seed=3),
    )
    began = time.monotonic()
    first = runner.execute(
        SchedulerOutput(
            1, new_requests=[new], slots=int32_bytes([0]), chunks=int32_bytes([[0, 2]])
        ),
        lambda step: None,
    )
    second = runner.execute(SchedulerOutput(2), lambda step: None)
    outputs = [second.output(), first.output()]
    assert time.monotonic() - began >= 0.06
    assert first.is_ready() and second.is_ready()
    assert [len(output.sampled_token_ids) for output in outputs] == [4, 4]
