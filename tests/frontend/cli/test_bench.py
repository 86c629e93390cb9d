from __future__ import annotations

import json
import math
import statistics
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from engine.frontend.cli.bench.arrivals import arrival_times
from engine.frontend.cli.bench.client import Answer
from engine.frontend.cli.bench.command import main, make_parser
from engine.frontend.cli.bench.compare import median_of, ratios_of
from engine.frontend.cli.bench.datasets import DatasetOptions, make_sessions
from engine.frontend.cli.bench.figures import summarize
from engine.frontend.cli.bench.options import Workload, parse_goodput
from engine.frontend.cli.bench.report import format_figures, write_comparison, write_plot
from engine.protocol.errors import ConfigError


def sessions_of(count: int | None, as_text: bool = False, **options: object) -> list:
    return make_sessions(msgspec.convert(options, DatasetOptions), count, as_text=as_text)


def test_random_prompts_have_the_given_lengths_and_share_only_the_given_prefix() -> None:
    prompts = [
        session.turns[0].prompt
        for session in sessions_of(20, random_input_len=50, random_prefix_len=10)
    ]
    assert {len(prompt) for prompt in prompts} == {60}
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 1
    assert len({tuple(prompt[10:14]) for prompt in prompts}) == 20
    assert prompts == [
        s.turns[0].prompt for s in sessions_of(20, random_input_len=50, random_prefix_len=10)
    ]
    others = sessions_of(20, random_input_len=50, random_prefix_len=10, seed=1)
    assert prompts[0] != others[0].turns[0].prompt


def test_range_ratio_varies_lengths_within_its_limits() -> None:
    turns = [
        session.turns[0]
        for session in sessions_of(
            300, random_input_len=100, random_output_len=40, random_range_ratio=0.5
        )
    ]
    lengths = {len(turn.prompt) for turn in turns}
    assert min(lengths) >= 50 and max(lengths) <= 150 and len(lengths) > 30
    assert {turn.max_tokens for turn in turns} <= set(range(20, 61))


def test_prefix_repetition_dataset_cycles_through_its_prefixes() -> None:
    sessions = sessions_of(
        6,
        dataset_name="prefix_repetition",
        prefix_repetition_prefix_len=8,
        prefix_repetition_suffix_len=4,
        prefix_repetition_num_prefixes=2,
    )
    prefixes = [tuple(session.turns[0].prompt[:8]) for session in sessions]
    assert prefixes[0] == prefixes[2] == prefixes[4] != prefixes[1] == prefixes[3]
    assert len({tuple(session.turns[0].prompt[8:]) for session in sessions}) == 6


def test_agents_share_a_system_prompt_and_have_several_turns() -> None:
    sessions = sessions_of(
        3, True, dataset_name="agent", agent_turns=4, agent_system_len=20, agent_input_len=5
    )
    assert len({session.system for session in sessions}) == 1
    assert len(sessions[0].system.split()) == 20
    assert [len(turn.prompt.split()) for turn in sessions[1].turns] == [5, 5, 5, 5]


def test_sharegpt_file_gives_first_questions_and_recorded_lengths(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    entry = {
        "conversations": [
            {"from": "system", "value": "Be kind."},
            {"from": "human", "value": "A question of some length?"},
            {"from": "gpt", "value": "x" * 80},
            {"from": "human", "value": "Another one of some length?"},
            {"from": "gpt", "value": "y" * 40},
        ]
    }
    short = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hi"}]}
    path.write_text(json.dumps([short, entry]))
    one, two = sessions_of(2, dataset_name="sharegpt", dataset_path=str(path))
    assert one == two and len(one.turns) == 1 and one.turns[0].max_tokens == 20
    limited = sessions_of(1, dataset_name="sharegpt", dataset_path=str(path), sharegpt_output_len=7)
    assert limited[0].turns[0].max_tokens == 7
    agents = sessions_of(2, dataset_name="agent", dataset_path=str(path))
    assert {len(session.turns) for session in agents} == {1, 2}
    assert "Be kind." in {session.system for session in agents}


def test_messages_in_lines_of_json_are_conversations(tmp_path: Path) -> None:
    path = tmp_path / "agent.jsonl"
    messages = [
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": "Looking."},
        {"role": "tool", "content": "error: 1"},
        {"role": "assistant", "content": "Done."},
    ]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    (session,) = sessions_of(1, dataset_name="agent", dataset_path=str(path))
    assert [turn.prompt for turn in session.turns] == ["Fix it.", "error: 1"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [("[1]", "must be an object"), ("{", "invalid JSON"), ("[]", "no usable conversation")],
)
def test_unusable_file_is_named(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"--dataset-path .*{problem}"):
        sessions_of(1, dataset_name="sharegpt", dataset_path=str(path))


def test_poisson_arrivals_have_the_given_rate_and_variance() -> None:
    times = arrival_times(4000, 10.0, 1.0, 3)
    gaps = [b - a for a, b in pairwise(times)]
    assert times == sorted(times) and times[0] == 0
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.1)
    even = arrival_times(4000, 10.0, 100.0, 3)
    assert statistics.stdev(b - a for a, b in pairwise(even)) < 0.02
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="--request-rate 0"):
        arrival_times(3, 0, 1.0, 0)
    with pytest.raises(ConfigError, match="--burstiness -1"):
        arrival_times(3, 1, -1, 0)


def answer(start: float, chunks: list[float], tokens: int, error: str | None = None) -> Answer:
    end = chunks[-1] if chunks else start
    return Answer(start, end, chunks, tokens, 10, 4, "", error)


def test_benchmark_figures_follow_their_definitions() -> None:
    answers = [
        answer(0.0, [0.1, 0.2, 0.4], 3),
        answer(0.5, [0.8, 1.0], 5),
        answer(0.1, [], 0, "HTTP 500"),
    ]
    limits = parse_goodput(["ttft:200", "e2el:1000"])
    figures = summarize(answers, 2.0, goodput=limits, percentiles=[50, 99])
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert figures["first_error"] == "HTTP 500"
    assert figures["request_throughput"] == 1.0
    assert figures["request_goodput"] == 0.5
    assert figures["output_throughput"] == 4.0
    assert figures["total_token_throughput"] == 14.0
    assert figures["cached_tokens"] == 8
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    # Tokens may share a piece: the time per token counts tokens, the latency between pieces counts pieces.
    assert figures["mean_tpot_ms"] == pytest.approx((300 / 2 + 200 / 4) / 2)
    assert figures["median_itl_ms"] == pytest.approx(200)
    assert figures["p50_e2el_ms"] == pytest.approx(450)
    assert figures["max_concurrent_requests"] == 1
    text = format_figures("Result", figures)
    assert "Mean TTFT (ms):" in text and "P99 E2EL (ms):" in text and "HTTP 500" in text


def test_figures_without_completed_requests_are_none() -> None:
    figures = summarize([answer(0.0, [], 0, "refused")], 1.0)
    assert figures["completed"] == 0 and figures["mean_ttft_ms"] is None
    assert "refused" in format_figures("Result", figures)


@pytest.mark.parametrize("limit", ["ttft", "ttft:x", "itl:5", "tpot:-1", "ttft:nan"])
def test_invalid_goodput_is_rejected_by_value(limit: str) -> None:
    with pytest.raises(ConfigError, match=f"--goodput {limit}"):
        parse_goodput([limit])


def test_medians_and_ratios_ignore_what_a_round_has_not() -> None:
    rounds = [{"date": "d", "output_throughput": v, "mean_ttft_ms": None} for v in (1.0, 4.0, 3.0)]
    first = median_of(rounds)
    assert first["output_throughput"] == 3.0 and first["mean_ttft_ms"] is None
    ratios = ratios_of([first, {**first, "output_throughput": 6.0}])
    assert ratios == {"output_throughput": [1.0, 2.0]}


def test_plots_are_svg_with_every_point(tmp_path: Path) -> None:
    figures = summarize([answer(0.0, [0.1, 0.2], 2)], 1.0)
    figures |= {"model_id": "a & b", "date": "today"}
    write_plot(str(tmp_path / "serve.svg"), [("1 at once", figures), ("<4>", figures)])
    text = "".join(ET.parse(tmp_path / "serve.svg").getroot().itertext())
    assert "1 at once" in text and "<4>" in text and "a & b" in text
    write_comparison(str(tmp_path / "two.svg"), ["http://a", "http://b"], [figures, figures])
    text = "".join(ET.parse(tmp_path / "two.svg").getroot().itertext())
    assert "http://a" in text and "median ttft" in text


def workload(*argv: str) -> Workload:
    return Workload(make_parser().parse_args(["serve", *argv]))


TRACE_LINES = (
    '{"arrival": 7, "prompt_tokens": 8, "output_tokens": 2, "prefix": "a", "prefix_tokens": 4}\n'
    '{"arrival": 5.5, "prompt_tokens": 6, "output_tokens": 1, "prefix": "a", "prefix_tokens": 9}\n'
)


def test_a_trace_gives_requests_with_its_lengths_times_and_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE_LINES)
    options = {"dataset_name": "trace", "dataset_path": str(path)}
    one, two = sessions_of(None, **options)
    assert [one.start, two.start] == [5.5, 7.0]
    assert [len(one.turns[0].prompt), one.turns[0].max_tokens] == [6, 1]
    assert [len(two.turns[0].prompt), two.turns[0].max_tokens] == [8, 2]
    assert one.turns[0].prompt[:4] == two.turns[0].prompt[:4]
    assert one.turns[0].prompt[4] != two.turns[0].prompt[4]
    assert sessions_of(None, **options, seed=1)[0].turns[0].prompt != one.turns[0].prompt
    assert len(sessions_of(1, **options)) == 1
    with pytest.raises(ConfigError, match="--random-vocab-size 9: must be above 1000"):
        sessions_of(None, **options, random_vocab_size=9)
    with pytest.raises(ConfigError, match="--dataset-name trace needs --dataset-path FILE"):
        workload("--dataset-name", "trace")
    with pytest.raises(ConfigError, match="--dataset-path nowhere: No such file"):
        workload("--dataset-name", "trace", "--dataset-path", "nowhere")
    path.write_text(TRACE_LINES.replace("8", "0"))
    with pytest.raises(ConfigError, match=r"--dataset-path .*, line 1: Expected `int` >= 1"):
        sessions_of(None, **options)


def test_chats_and_ends_of_answers_follow_the_dataset() -> None:
    assert not workload().is_chat and workload().fields["ignore_eos"] is True
    assert workload("--dataset-name", "agent").is_chat
    given = workload(
        "--dataset-name", "sharegpt", "--dataset-path", __file__, "--backend", "openai-chat"
    )
    assert given.is_chat and "ignore_eos" not in given.fields
    assert "ignore_eos" not in workload("--no-ignore-eos").fields


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--num-prompts", "0"], ["--num-prompts 0", ">= 1"]),
        (["serve", "--random-range-ratio", "1.5"], ["--random-range-ratio 1.5", "< 1"]),
        (["serve", "--metric-percentiles", "101"], ["--metric-percentiles 101"]),
        (["latency", "--batch-size", "0"], ["--batch-size 0", "at least 1"]),
        (["compare", "http://a"], ["http://a", "at least two"]),
        (["compare", "http://a", "http://b", "--rounds", "0"], ["--rounds 0"]),
    ],
)
def test_invalid_arguments_name_flag_value_and_limit(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
