from __future__ import annotations

import pytest
from engine.frontend.cli.watch.samples import quantile, rates_between, read_sample
from engine.frontend.cli.watch.sparkline import sparkline

SERIES = """\
# TYPE engine:num_requests_running gauge
engine:num_requests_running{{engine="0"}} 3
engine:num_requests_running{{engine="1"}} 2
# TYPE engine:num_requests_waiting gauge
engine:num_requests_waiting{{engine="0"}} 1
# TYPE engine:kv_cache_usage_perc gauge
engine:kv_cache_usage_perc{{engine="0"}} 0.5
engine:kv_cache_usage_perc{{engine="1"}} 0.1
# TYPE engine:generation_tokens counter
engine:generation_tokens_total{{engine="0"}} {tokens}
# TYPE engine:prefix_cache_queries counter
engine:prefix_cache_queries_total{{engine="0"}} {tokens}
# TYPE engine:prefix_cache_hits counter
engine:prefix_cache_hits_total{{engine="0"}} {hits}
# TYPE engine:time_to_first_token_seconds histogram
engine:time_to_first_token_seconds_bucket{{engine="0",le="0.1"}} {early}
engine:time_to_first_token_seconds_bucket{{engine="0",le="0.2"}} {all}
engine:time_to_first_token_seconds_bucket{{engine="0",le="+Inf"}} {all}
engine:time_to_first_token_seconds_sum{{engine="0"}} 1
engine:time_to_first_token_seconds_count{{engine="0"}} {all}
"""


def sample(at: float, tokens: int, hits: int, early: int, total: int):  # type: ignore[no-untyped-def]
    text = SERIES.format(tokens=tokens, hits=hits, early=early, all=total)
    return read_sample(text, at)


def test_rates_are_those_between_two_readings_of_all_replicas() -> None:
    before, after = sample(10.0, 100, 10, 5, 5), sample(12.0, 300, 60, 5, 15)
    rates = rates_between(before, after, before)
    assert rates.generated_tokens_s == 100.0
    assert (rates.running, rates.waiting) == (5, 1)
    assert rates.kv_use == pytest.approx(0.3)
    assert rates.hit_rate == 0.25
    assert rates.accepted is None
    # All ten new requests took 100 to 200 ms.
    assert rates.latencies_ms["ttft"] == pytest.approx((150.0, 199.0))
    assert rates.latencies_ms["itl"] is None


def test_counters_of_a_restarted_server_begin_again() -> None:
    rates = rates_between(
        sample(0.0, 500, 100, 9, 9), sample(1.0, 30, 3, 1, 1), sample(0.0, 500, 100, 9, 9)
    )
    assert rates.generated_tokens_s == 30.0
    assert rates.hit_rate == pytest.approx(0.1)
    assert rates.latencies_ms["ttft"] == pytest.approx((50.0, 99.0))


def test_series_of_vllm_are_read_and_others_are_rejected() -> None:
    text = SERIES.format(tokens=1, hits=1, early=1, all=1).replace("engine:", "vllm:")
    assert read_sample(text).values["num_requests_running"] == 5
    with pytest.raises(ValueError, match="no metrics"):
        read_sample("up 1\n")


def test_quantile_interpolates_within_a_bucket() -> None:
    counts = {1.0: 0.0, 2.0: 10.0, float("inf"): 20.0}
    assert quantile(counts, 0.25) == 1.5
    assert quantile(counts, 0.99) == 2.0
    assert quantile({}, 0.5) is None
    assert quantile({1.0: 0.0}, 0.5) is None


def test_sparkline_has_a_bar_for_each_value() -> None:
    assert sparkline([0, 1, 2, 4]) == "▁▃▅█"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([0.5], 1.0) == "▅"
    assert sparkline([]) == ""
