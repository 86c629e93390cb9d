"""Test how settings become an EngineConfig, and which ones do not go together."""

import json
import sys
from pathlib import Path

import pytest
from engine.frontend.cli import engine_config
from engine.frontend.cli.arguments import parse_settings
from engine.frontend.cli.engine_config import make_engine_config
from engine.frontend.cli.machine import gpus
from engine.frontend.cli.options import cpu_defaults
from engine.frontend.model_source.options import ResolvedModel
from engine.protocol.checkpoint.model_dimensions import ModelDimensions
from engine.protocol.config import Device, EngineConfig, ModelConfig, PrefixHash
from engine.protocol.config.images.settings import SpanKind
from engine.protocol.errors import ConfigError

pytestmark = pytest.mark.slow


def configure(
    *argv: str, max_model_len: int = 8192, dimensions: ModelDimensions | None = None
) -> EngineConfig:
    model = ModelConfig("m", "/m", "/m", ("m",), "llama", 32, max_model_len, (0,))
    resolved = ResolvedModel(model, {"top_p": 0.9}, 0, dimensions)
    return make_engine_config(parse_settings(argv, {}), resolved, "/run")


def test_settings_become_engine_config(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure("--device", "cpu", "--port", "1", "--block-size", "32", "--threads", "2")
    assert config.device.device is Device.CPU
    assert config.device.threads == 2
    defaults = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "prefill_step_ms": 150}
    assert {name: getattr(config.scheduler, name) for name in defaults} == defaults
    assert cpu_defaults("scheduler") == defaults
    assert (config.frontend.port, config.cache.block_size) == (1, 32)
    assert config.frontend.default_sampling == {"top_p": 0.9}
    for gib, limits in ((0, (256, 2048)), (24, (256, 2048)), (79, (1024, 8192))):
        monkeypatch.setattr(engine_config, "smallest_gpu_memory", lambda gib=gib: gib << 30)
        gpu = configure("--device", "cuda").scheduler
        assert (gpu.max_num_seqs, gpu.max_num_batched_tokens) == limits


def test_weights_are_packed_at_each_start_if_the_user_can_write_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_CACHE", str(tmp_path))
    assert configure("--device=cpu").device.packed_weights_path == str(tmp_path / "packed")
    off = configure("--device=cpu", "--packed-weights-gib", "0")
    assert off.device.packed_weights_path == ""
    monkeypatch.delenv("ENGINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")
    assert configure("--device=cpu").device.packed_weights_path == ""


def test_xxh3_without_its_package_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match=r"--prefix-hash xxh3 needs .* pip install xxhash"):
        configure("--prefix-hash", "xxh3")
    assert configure("--prefix-hash", "sha256").cache.prefix_hash is PrefixHash.SHA256


def test_step_limits_are_checked_against_each_other() -> None:
    assert configure("--device=cpu", "-np", "700").scheduler.max_num_batched_tokens == 700
    whole = configure("--device=cpu", "--no-enable-chunked-prefill", max_model_len=4096)
    assert whole.scheduler.max_num_batched_tokens == 4096
    with pytest.raises(
        ConfigError, match=r"--max-num-batched-tokens 8 .* --max-num-seqs, which is 9"
    ):
        configure("-np", "9", "--max-num-batched-tokens", "8")
    with pytest.raises(ConfigError, match=r"512 .*--max-model-len, which is 1000"):
        configure(
            *["--no-enable-chunked-prefill", "--max-num-batched-tokens", "512"], max_model_len=1000
        )
    whole_model = ModelConfig(
        *("m", "/m", "/m", ("m",), "llama", 32, 1000, (0,)), span_kind=SpanKind.PROMPT
    )
    settings = parse_settings(["--max-num-batched-tokens", "512"], {})
    with pytest.raises(ConfigError, match=r"1000, because this model reads a whole text"):
        make_engine_config(settings, ResolvedModel(whole_model, {}, 0, None), "/run")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            ["-tp", "5"],
            ["--tensor-parallel-size 5", "12 attention heads", "use 1, 2, 3, 6 or 12"],
        ),
        (["-tp", "8"], ["--tensor-parallel-size 8", "12 attention heads"]),
        (["-pp", "8"], ["--pipeline-parallel-size 8", "7 layers", "use at most 7"]),
        (["-tp", "2", "-ep"], ["--enable-expert-parallel", "no experts"]),
        (
            ["-dp", "2", "-pp", "2", "-ep"],
            ["--enable-expert-parallel", "--data-parallel-size 2", "--pipeline-parallel-size 2"],
        ),
    ],
)
def test_indivisible_model_is_rejected_with_valid_sizes(argv, parts) -> None:
    dimensions = ModelDimensions(7, 12, 6, 768, 320)
    with pytest.raises(ConfigError) as caught:
        configure(*argv, dimensions=dimensions)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    ("ranks", "dimensions", "part"),
    [
        (4, ModelDimensions(7, 12, 6, 768, 320), "6 key/value heads .* use 1, 2, 3, 6 or 12"),
        (3, ModelDimensions(7, 12, 12, 100, 320), r"100 elements of the MLP .* use 1, 2 or 4"),
        (4, ModelDimensions(7, 12, 1, 768, 3), "only 3 tokens"),
    ],
)
def test_indivisible_dimension_is_named(ranks: int, dimensions: ModelDimensions, part: str) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {ranks}: .*{part}"):
        configure("-tp", str(ranks), dimensions=dimensions)


def test_divisible_model_is_accepted() -> None:
    dimensions = ModelDimensions(8, 12, 2, 768, 320)
    config = configure("-tp", "4", "--pp-size", "8", "--device=cpu", dimensions=dimensions)
    assert config.parallel.workers_per_core == 32
    assert config.scheduler.num_micro_batches == 8
    # The workers check what depends on the model family.
    assert configure("-tp", "7", "--device=cpu").parallel.tensor_parallel_size == 7


@pytest.mark.parametrize(("visible", "count"), [(None, 2), ("0", 1), ("1,-1,0", 1)])
def test_each_worker_requires_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, count: int
) -> None:
    for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpus, "DEVICE_FILES", tmp_path)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert configure("-tp", str(count)).parallel.num_workers == count
    with pytest.raises(ConfigError, match=rf"size 3 x .* needs 3 GPUs.* there are {count}; "):
        configure("-tp", "3")
    assert configure("-tp", "3", "--device", "cpu").parallel.num_workers == 3


def test_saved_config_loads_unchanged(tmp_path: Path) -> None:
    from engine.protocol.config import load_config
    from msgspec.structs import replace

    config = replace(
        configure("--hf-overrides", json.dumps({"a": [1, {"b": None}]})), run_dir=str(tmp_path)
    )
    assert load_config(config.save()) == config


def test_offload_memory_is_per_worker_or_per_replica() -> None:
    workers = ["--device=cpu", "-tp=2", "-pp=2", "-dp=2"]
    for flag, host_gib in (
        ("--kv-host-gib=8", 8),
        ("--swap-space=8", 8),
        ("--kv-offloading-size=8", 2),
    ):
        assert configure(*workers, flag).cache.host_gib == host_gib
    last_wins = [*workers, "--kv-offloading-size=8", "--kv-host-gib=8"]
    assert configure(*last_wins).cache.host_gib == 8
