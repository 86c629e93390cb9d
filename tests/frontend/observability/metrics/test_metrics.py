import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine.frontend.client.engine_client import EngineDraining, SequenceRequest
from engine.frontend.client.replicas.core_load import Overloaded
from engine.frontend.observability.metrics.histogram import Histogram, decimal_bounds
from engine.frontend.observability.metrics.metrics import Metrics
from engine.protocol.arrays import float32_bytes, int32_bytes
from engine.protocol.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from engine.protocol.messages import SchedulerStats, SpecDecodingStats
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.supervisor_messages import EngineStatus, ProcessInfo, Stage
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from support.servers.engine_fixtures import (
    MAX_MODEL_LEN,
    connected,
    drive,
    engine_config,
    on_event_loop,
    smollm2_tokenizer,
)

PROMPT = smollm2_tokenizer().encode("Ten words make a prompt, or so it seems.")

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def scrape(metrics: Metrics) -> Samples:
    """Return the values by sample name and sorted labels."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    samples: Samples = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in samples.setdefault(sample.name, {})
            samples[sample.name][labels] = sample.value
    return samples


def value(samples: Samples, name: str, engine: str = "0", **labels: str) -> float:
    wanted = {"model_name": "smollm2", "engine": engine, **labels}
    return samples[name][tuple(sorted(wanted.items()))]


def with_compat(config: EngineConfig) -> EngineConfig:
    frontend = msgspec.structs.replace(
        config.frontend, metrics_compat=("vllm", "sglang", "llama.cpp")
    )
    return msgspec.structs.replace(config, frontend=frontend)


@on_event_loop
async def test_a_request_is_counted_in_all_its_metrics(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        wanted = SequenceRequest(PROMPT, SamplingParams(max_tokens=8))
        group = await client.submit([wanted, wanted], request_id="r")
        await drive(core, group.result())
        samples = scrape(client.metrics)
        assert value(samples, "engine:prompt_tokens_total") == 2 * len(PROMPT)
        assert value(samples, "engine:generation_tokens_total") == 16
        assert value(samples, "engine:request_success_total", finished_reason="length") == 2
        assert value(samples, "engine:request_success_total", finished_reason="stop") == 0
        assert value(samples, "engine:inter_token_latency_seconds_count") == 14
        assert value(samples, "engine:request_generation_tokens_sum") == 16
        assert value(samples, "engine:request_num_preemptions_bucket", le="0.0") == 2
        assert value(samples, "engine:request_params_max_tokens_bucket", le="5.0") == 0
        assert value(samples, "engine:request_params_max_tokens_bucket", le="10.0") == 2
        assert value(samples, "engine:request_params_n_count") == 1
        assert value(samples, "engine:request_params_n_sum") == 2
        assert value(samples, "engine:request_max_num_generation_tokens_count") == 1
        assert value(samples, "engine:request_max_num_generation_tokens_sum") == 8
        assert value(samples, "engine:iteration_tokens_total_count") >= 8
        assert value(samples, "engine:iteration_tokens_total_sum") == 16
        for name in (
            "time_to_first_token_seconds",
            "request_time_per_output_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
            "request_prompt_tokens",
        ):
            assert value(samples, f"engine:{name}_count") == 2, name
        [info] = samples["engine:cache_config_info"]
        assert {("block_size", "16"), ("num_gpu_blocks", "64"), ("engine", "0")} <= {*info}


@on_event_loop
async def test_a_deadline_after_the_first_token_counts_as_expired(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        late = time.monotonic() + 1.0
        wanted = SequenceRequest(PROMPT, SamplingParams(max_tokens=100), deadline=late)
        group = await client.submit([wanted], request_id="r")
        await drive(core, group.wait_for_updates())
        [delta] = await group.result()
        assert (delta.finish_reason, delta.stop_reason) == ("length", "deadline")
        samples = scrape(client.metrics)
        assert value(samples, "engine:request_success_total", finished_reason="expired") == 1
        assert value(samples, "engine:request_success_total", finished_reason="length") == 0


@on_event_loop
async def test_each_prompt_of_a_batch_is_a_request_with_its_longest_output(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        prompts = [PROMPT, PROMPT[:5], list(PROMPT)]
        wanted = [
            SequenceRequest(prompts[prompt], SamplingParams(max_tokens=length))
            for prompt, length in ((0, 3), (0, 9), (1, 4), (2, 6), (2, 2))
        ]
        await drive(core, (await client.submit(wanted, request_id="r")).result())
        samples = scrape(client.metrics)
        assert value(samples, "engine:request_params_n_sum") == 5
        assert value(samples, "engine:request_params_n_count") == 3
        assert value(samples, "engine:request_max_num_generation_tokens_count") == 3
        assert value(samples, "engine:request_max_num_generation_tokens_sum") == 9 + 4 + 6


@on_event_loop
async def test_queue_prefill_and_decode_times_add_up(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        wanted = SequenceRequest(PROMPT, SamplingParams(max_tokens=5))
        await drive(core, (await client.submit([wanted], request_id="r")).result())
        samples = scrape(client.metrics)

        def seconds(name: str) -> float:
            return value(samples, f"engine:{name}_sum")

        inference = seconds("request_prefill_time_seconds") + seconds("request_decode_time_seconds")
        assert seconds("request_inference_time_seconds") == pytest.approx(inference)
        decode = seconds("request_decode_time_seconds")
        assert seconds("inter_token_latency_seconds") == pytest.approx(decode)
        assert seconds("request_time_per_output_token_seconds") == pytest.approx(decode / 4)
        assert 0 < seconds("time_to_first_token_seconds") < seconds("e2e_request_latency_seconds")


@on_event_loop
async def test_3_9_lifetimes_of_blocks_are_histograms(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, _):
        stats = SchedulerStats(
            block_lifetimes=float32_bytes([3.0, 40.0]),
            block_idle_times=float32_bytes([0.5, 8.0]),
            block_reuse_gaps=float32_bytes([1.5]),
        )
        client.metrics.record_stats(0, stats, time.monotonic())
        client.metrics.record_stats(0, SchedulerStats(), time.monotonic())
        samples = scrape(client.metrics)
        for name, count, total in (
            ("kv_block_lifetime_seconds", 2, 43.0),
            ("kv_block_idle_before_evict_seconds", 2, 8.5),
            ("kv_block_reuse_gap_seconds", 1, 1.5),
        ):
            assert value(samples, f"engine:{name}_count") == count
            assert value(samples, f"engine:{name}_sum") == total
        assert value(samples, "engine:kv_block_lifetime_seconds_bucket", le="5.0") == 1


@on_event_loop
async def test_rejections_are_counted_by_reason(tmp_path: Path) -> None:
    limits = SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=1)
    async with connected(engine_config(tmp_path, scheduler=limits)) as (client, _):
        wanted = SequenceRequest(PROMPT, SamplingParams(max_tokens=5))
        with pytest.raises(Overloaded):
            await client.submit([wanted] * 3, request_id="r")
        client.draining = True
        with pytest.raises(EngineDraining):
            await client.submit([wanted], request_id="r")
        samples = scrape(client.metrics)
        for reason in ("queue_full", "draining"):
            assert value(samples, "engine:admission_rejections_total", reason=reason) == 1


def test_gauges_show_the_latest_value_of_each_core_and_counters_add_up(tmp_path: Path) -> None:
    config = with_compat(engine_config(tmp_path, parallel=ParallelConfig(data_parallel_size=2)))
    metrics = Metrics(config)
    metrics.record_stats(
        0, SchedulerStats(num_running=3, num_waiting=9, kv_cache_usage=0.25), time.monotonic()
    )
    metrics.record_stats(1, SchedulerStats(num_running=1), time.monotonic())
    for _ in range(2):
        stats = SchedulerStats(
            num_running=2,
            num_waiting=4,
            num_deferred=1,
            kv_cache_usage=0.5,
            prefix_cache_queries=100,
            prefix_cache_hits=32,
            num_preemptions=1,
            num_steps=2,
            num_scheduled_tokens=20,
            step_tokens=int32_bytes([9, 16]),
            spec_decoding=SpecDecodingStats(3, 12, 7, [4, 2, 1]),
        )
        metrics.record_stats(0, stats, time.monotonic())
    samples = scrape(metrics)
    for name, number in {
        "sglang:num_running_reqs": 2,
        "sglang:num_queue_reqs": 4,
        "sglang:token_usage": 0.5,
        "sglang:cache_hit_rate": 0.32,
        "sglang:cached_tokens_total": 64,
        "sglang:num_retracted_requests_total": 2,
        "sglang:spec_accept_rate": 7 / 12,
        "sglang:queue_time_seconds_count": 0,
        "llamacpp:requests_processing": 2,
        "llamacpp:requests_deferred": 4,
        "llamacpp:n_decode_total": 4,
        "llamacpp:spec_decode_num_draft_tokens_total": 24,
        "llamacpp:predicted_tokens_seconds": 0,
    }.items():
        assert value(samples, name) == pytest.approx(number), name
    for prefix in ("engine", "vllm"):
        assert value(samples, f"{prefix}:num_requests_running") == 2
        assert value(samples, f"{prefix}:num_requests_running", engine="1") == 1
        assert value(samples, f"{prefix}:num_requests_waiting") == 4
        for reason, number in (("capacity", 3), ("deferred", 1)):
            name = f"{prefix}:num_requests_waiting_by_reason"
            assert value(samples, name, reason=reason) == number
        assert value(samples, f"{prefix}:kv_cache_usage_perc") == 0.5
        assert value(samples, f"{prefix}:prefix_cache_queries_total") == 200
        assert value(samples, f"{prefix}:prefix_cache_hits_total") == 64
        assert value(samples, f"{prefix}:num_preemptions_total") == 2
        assert value(samples, f"{prefix}:spec_decode_num_drafts_total") == 6
        assert value(samples, f"{prefix}:spec_decode_num_draft_tokens_total") == 24
        assert value(samples, f"{prefix}:spec_decode_num_accepted_tokens_total") == 14
        assert value(samples, f"{prefix}:iteration_tokens_total_bucket", le="8.0") == 0
        assert value(samples, f"{prefix}:iteration_tokens_total_bucket", le="16.0") == 4
        accepted = f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total"
        for position, number in enumerate((8, 4, 2)):
            assert value(samples, accepted, position=str(position)) == number
    assert value(samples, "engine:scheduler_steps_total") == 4


def test_any_frontend_exports_the_counts_of_all(tmp_path: Path) -> None:
    config = engine_config(tmp_path, parallel=ParallelConfig(api_server_count=3))
    first, second, _ = frontends = [Metrics(config, index) for index in range(3)]
    first.record_stats(
        0, SchedulerStats(num_running=3, prefix_cache_queries=100, num_steps=2), time.monotonic()
    )
    for metrics, accepted in ((first, [3, 2]), (second, [1])):
        drafts = SpecDecodingStats(4, 8, sum(accepted), accepted)
        metrics.record_stats(
            0, SchedulerStats(num_running=3, spec_decoding=drafts), time.monotonic()
        )
    first.record_tokens(0, 5, [0.1])
    second.record_tokens(0, 7, [0.1, 200.0])
    second.record_rejection(0, "queue_full")
    second.watch_dropped_frames(0, lambda: 4)
    for metrics in frontends:
        metrics.publish()
    for metrics in frontends * 2:
        samples = scrape(metrics)
        assert value(samples, "engine:num_requests_running") == 3
        assert value(samples, "engine:prefix_cache_queries_total") == 100
        assert value(samples, "engine:generation_tokens_total") == 12
        for position, number in (("0", 4), ("1", 2)):
            name = "engine:spec_decode_num_accepted_tokens_per_pos_total"
            assert value(samples, name, position=position) == number
        assert value(samples, "engine:inter_token_latency_seconds_count") == 3
        assert value(samples, "engine:inter_token_latency_seconds_bucket", le="80.0") == 2
        assert value(samples, "engine:admission_rejections_total", reason="queue_full") == 1
        assert value(samples, "engine:dropped_frames_total", process="frontend") == 4
    sent_time = time.monotonic()
    first.record_stats(0, SchedulerStats(num_running=1), sent_time)
    second.record_stats(0, SchedulerStats(num_running=2), sent_time - 0.1)
    for metrics in (first, *frontends):
        assert value(scrape(metrics), "engine:num_requests_running") == 1


def test_frames_dropped_by_other_processes_are_exported(tmp_path: Path) -> None:
    metrics = Metrics(engine_config(tmp_path))
    infos = [
        ProcessInfo(name, 1, Stage.READY, "", 1, 0, 0.0, 0.0, 0.0, 0, 0, 0.0, replica, num_dropped)
        for name, replica, num_dropped in (
            *(("worker 0", 0, 2), ("worker 1", 0, 3), ("core 0", 0, 0)),
            *(("frontend 0", None, 4), ("frontend 1", None, 1)),
        )
    ]
    metrics.watch_status(lambda: EngineStatus(infos, [], 7))
    samples = scrape(metrics)
    name = "engine:dropped_frames_total"
    assert value(samples, name, process="worker") == 5
    assert value(samples, name, engine="", process="frontend") == 5
    assert value(samples, name, engine="", process="supervisor") == 7


def test_metrics_are_exported_even_if_their_file_cannot_be_written(tmp_path: Path) -> None:
    config = engine_config(tmp_path, parallel=ParallelConfig(api_server_count=2))
    first, second = Metrics(config, 0), Metrics(config, 1)
    in_the_way = tmp_path / "frontend0.new"
    in_the_way.mkdir()
    first.record_tokens(0, 5, [0.1])
    first.publish()
    assert value(scrape(first), "engine:generation_tokens_total") == 5
    in_the_way.rmdir()
    first.publish()
    assert value(scrape(second), "engine:generation_tokens_total") == 5


def test_a_restarted_frontend_continues_the_counters(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    first = Metrics(config)
    first.record_tokens(0, 5, [0.1, 0.2])
    first.watch_dropped_frames(0, lambda: 3)
    first.publish()
    second = Metrics(config)
    second.record_tokens(0, 2, [0.1])
    second.watch_dropped_frames(0, lambda: 1)
    samples = scrape(second)
    assert value(samples, "engine:generation_tokens_total") == 7
    assert value(samples, "engine:inter_token_latency_seconds_count") == 3
    assert value(samples, "engine:dropped_frames_total", process="frontend") == 4


def test_a_frontend_continues_the_counters_of_another_version(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    first = Metrics(config)
    first.record_tokens(0, 5, [0.1])
    first.publish()
    (published,) = tmp_path.glob("*.metrics")
    (core,) = msgspec.msgpack.decode(published.read_bytes())
    del core["counters"]["scheduler_steps"], core["histograms"]["iteration_tokens_total"]
    core["counters"]["of_another_version"] = 1
    core["histograms"]["inter_token_latency_seconds"]["bounds"][0] = 0.5
    published.write_bytes(msgspec.msgpack.encode([core]))
    second = Metrics(config)
    second.record_stats(0, SchedulerStats(num_steps=2), time.monotonic())
    samples = scrape(second)
    assert value(samples, "engine:generation_tokens_total") == 5
    assert value(samples, "engine:scheduler_steps_total") == 2
    assert value(samples, "engine:iteration_tokens_total_count") == 0
    assert value(samples, "engine:inter_token_latency_seconds_count") == 0


def test_old_names_of_vllm_metrics_are_exported(tmp_path: Path) -> None:
    metrics = Metrics(with_compat(engine_config(tmp_path)))
    metrics.record_stats(0, SchedulerStats(kv_cache_usage=0.5), time.monotonic())
    metrics.record_tokens(0, 2, [0.1, 0.3])
    samples = scrape(metrics)
    assert value(samples, "vllm:gpu_cache_usage_perc") == 0.5
    assert value(samples, "vllm:time_per_output_token_seconds_count") == 2
    assert value(samples, "vllm:time_per_output_token_seconds_bucket", le="0.2") == 1
    assert "engine:gpu_cache_usage_perc" not in samples


def test_cpu_offload_hits_are_external_hits_in_vllm_metrics(tmp_path: Path) -> None:
    stats = SchedulerStats(prefix_cache_queries=100, prefix_cache_hits=60, cpu_offload_hits=40)
    without, with_tier = tmp_path / "without", tmp_path / "with"
    without.mkdir()
    with_tier.mkdir()
    metrics = Metrics(with_compat(engine_config(without)))
    metrics.record_stats(0, msgspec.structs.replace(stats, cpu_offload_hits=0), time.monotonic())
    samples = scrape(metrics)
    for name in ("prefix_cache", "gpu_prefix_cache"):
        assert value(samples, f"vllm:{name}_queries_total") == 100
        assert value(samples, f"vllm:{name}_hits_total") == 60
    assert "vllm:external_prefix_cache_hits_total" not in samples
    metrics = Metrics(with_compat(engine_config(with_tier, cache=CacheConfig(host_gib=1.0))))
    metrics.record_stats(0, stats, time.monotonic())
    samples = scrape(metrics)
    assert value(samples, "engine:prefix_cache_hits_total") == 60
    assert value(samples, "engine:cpu_offload_hits_total") == 40
    for name in ("prefix_cache", "gpu_prefix_cache"):
        assert value(samples, f"vllm:{name}_queries_total") == 100
        assert value(samples, f"vllm:{name}_hits_total") == 20
    assert value(samples, "vllm:external_prefix_cache_queries_total") == 80
    assert value(samples, "vllm:external_prefix_cache_hits_total") == 40


def test_vllm_names_are_exported_only_on_request(tmp_path: Path) -> None:
    assert not any(name.startswith("vllm") for name in scrape(Metrics(engine_config(tmp_path))))


def test_process_metrics_are_exported(tmp_path: Path) -> None:
    samples = scrape(Metrics(engine_config(tmp_path)))
    assert samples["process_resident_memory_bytes"][()] > 1e6


def test_openmetrics_output_is_valid(tmp_path: Path) -> None:
    metrics = Metrics(with_compat(engine_config(tmp_path)))
    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert len(list(parse_openmetrics(body.decode()))) > 40


@given(
    st.lists(st.floats(0, 200), min_size=1),
    st.lists(st.integers(0, 100), min_size=1, unique=True).map(sorted),
)
def test_a_histogram_counts_values_at_or_below_each_bound(
    values: list[float], bounds: list[int]
) -> None:
    one_by_one, together = (Histogram.with_bounds(tuple(map(float, bounds))) for _ in range(2))
    for each in values:
        one_by_one.observe(each)
    together.observe_all(values)
    expected: list[Any] = [(str(float(b)), sum(v <= b for v in values)) for b in bounds]
    expected.append(("+Inf", len(values)))
    assert one_by_one.cumulative_buckets() == together.cumulative_buckets() == expected
    assert one_by_one.sum == pytest.approx(sum(values)) == pytest.approx(together.sum)


def test_length_buckets_end_at_max_model_len() -> None:
    assert decimal_bounds(MAX_MODEL_LEN) == (1, 2, 5, 10, 20, 50, 100, 200, 500)


def test_unfinished_sequences_of_all_frontends_are_counted(tmp_path: Path) -> None:
    config = engine_config(tmp_path, parallel=ParallelConfig(api_server_count=2))
    first, second = Metrics(config, 0), Metrics(config, 1)
    first.watch_unfinished(lambda: 3)
    second.watch_unfinished(lambda: 4)
    first.publish()
    assert second.count_unfinished() == 7
    second.watch_unfinished(int)
    second.publish()
    assert first.count_unfinished() == 3


def test_load_is_the_sum_of_replicas_and_the_fullest_cache(tmp_path: Path) -> None:
    metrics = Metrics(engine_config(tmp_path, parallel=ParallelConfig(data_parallel_size=2)))
    metrics.record_stats(
        0, SchedulerStats(num_running=1, num_waiting=2, kv_cache_usage=0.25), time.monotonic()
    )
    metrics.record_stats(
        1, SchedulerStats(num_running=3, num_waiting=4, kv_cache_usage=0.5), time.monotonic()
    )
    assert metrics.read_load() == {
        "kv_cache_usage_perc": 0.5,
        "num_requests_running": 4.0,
        "num_requests_waiting": 6.0,
    }


def test_restarts_are_counted_by_kind_of_process(tmp_path: Path) -> None:
    metrics = Metrics(engine_config(tmp_path))
    infos = [
        ProcessInfo(name, 1, Stage.READY, "", 1, restarts, 0.0, 0.0, 0.0, 0, 0, 0.0, replica)
        for name, replica, restarts in (
            *(("worker 0", 0, 2), ("worker 1", 0, 3), ("core 0", 0, 1), ("store", None, 0)),
            *(("frontend 0", None, 4), ("frontend 1", None, 1)),
        )
    ]
    metrics.watch_status(lambda: EngineStatus(infos, []))
    samples = scrape(metrics)
    name = "engine:process_restarts_total"
    assert value(samples, name, process="worker") == 5
    assert value(samples, name, process="core") == 1
    assert value(samples, name, engine="", process="frontend") == 5
    assert value(samples, name, engine="", process="store") == 0
