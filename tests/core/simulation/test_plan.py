"""`engine plan` finds the cheapest fleet that meets its objectives."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from engine.core.simulation.plan import main
from engine.protocol.config import SchedulerConfig

pytestmark = pytest.mark.slow

SECOND_A_STEP = ["--step-time", "1,0,0,0", "--num-blocks", "1000", "--max-num-seqs", "1"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Return a file with 8 simultaneous requests, each of which takes 4 steps."""
    path = tmp_path / "trace.jsonl"
    line = '{"arrival": 0, "prompt_tokens": 8, "output_tokens": 4}\n'
    path.write_text(line * 8)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert main([*arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_fewest_replicas_that_meet_the_objective_are_found(trace, capsys):
    # With one request at a time, a replica's second request waits for 4 steps.
    for limit, num_replicas in (("1s", 8), ("6s", 4), ("14s", 2), ("100s", 1)):
        arguments = ["--trace", trace, "--slo", f"ttft_p100={limit}", *SECOND_A_STEP]
        first, *others = run(capsys, *arguments)
        assert (first["replicas"], first["meets"]) == (num_replicas, True)
        assert not any(other["meets"] and other["replicas"] < num_replicas for other in others)


def test_larger_batches_are_preferred_to_more_replicas(trace, capsys):
    arguments = ["--trace", trace, "--slo", "ttft_p100=3s", *SECOND_A_STEP[:-1], "1,4,8"]
    best = run(capsys, *arguments)[0]
    assert (best["replicas"], best["max_num_seqs"], best["ttft_p100_ms"]) == (1, 8, 3000.0)


def test_long_prompts_are_cut_to_keep_streams_steady(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 40}\n'
        '{"arrival": 1, "prompt_tokens": 900, "output_tokens": 1}\n'
    )
    arguments = ["--trace", str(path), "--slo", "itl_p100=2s", "--max-replicas", "1"]
    arguments += ["--num-blocks", "100", "--step-time", "0.1,0.01,0,0"]
    best = run(capsys, *arguments, "--long-prefill-token-threshold", "0,128")[0]
    assert (best["long_prefill_token_threshold"], best["meets"]) == (128, True)
    best = run(capsys, *arguments, "--prefill-step-ms", "0,1500")[0]
    assert (best["prefill_step_ms"], best["meets"]) == (1500, True)


def test_prefill_replicas_keep_streams_steady(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    stream = '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 40}\n'
    prompt = '{"arrival": 1, "prompt_tokens": 900, "output_tokens": 2}\n'
    path.write_text(4 * stream + prompt)
    arguments = ["--trace", str(path), "--slo", "itl_p100=200ms", "--max-replicas", "2"]
    arguments += ["--num-blocks", "100", "--step-time", "0.1,0.01,0,0"]
    best = run(capsys, *arguments, "--prefill-share", "0,0.5", "--max-num-seqs", "8")[0]
    assert (best["replicas"], best["prefill_replicas"], best["meets"]) == (2, 1, True)
    arguments[3] = "ttft_p100=11s,itl_p100=200ms"
    assert main([*arguments, "--prefill-share", "0.5", "--transfer-rate", "1000"]) == 0
    assert "--replica-roles prefill=1,decode=1 " in capsys.readouterr().out
    assert main([*arguments, "--prefill-share", "0.5", "--transfer-rate", "100"]) == 1


def test_the_table_ends_with_the_flags_of_the_best_server(trace, tmp_path, capsys):
    picture = tmp_path / "frontier.svg"
    arguments = ["--trace", trace, "--slo", "ttft_p95=6s,itl_p95=2s", *SECOND_A_STEP]
    assert main([*arguments, "--plot", str(picture)]) == 0
    *table, conclusion = capsys.readouterr().out.splitlines()
    assert table[0].split()[:2] == ["replicas", "prefill"] and table[1].split()[0] == "4"
    assert conclusion.startswith("fewest replicas: engine serve --data-parallel-size 4 ")
    root = ElementTree.fromstring(picture.read_text())
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 1
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) >= 4


def test_equal_latencies_prefer_the_recorded_limits(trace, capsys):
    arguments = ["--trace", trace, "--slo", "ttft_p100=3s", *SECOND_A_STEP[:-2]]
    assert main(arguments) == 0
    *table, note, _, conclusion = capsys.readouterr().out.splitlines()
    assert note.endswith("other fleets are worse or equal; --json prints all")
    limit = str(SchedulerConfig().max_num_seqs)
    assert {row.split()[3] for row in table[1:]} == {limit}
    assert f"--max-num-seqs {limit} " in conclusion
    with pytest.raises(SystemExit):
        main([*arguments, "--prefill-step-ms", "-1"])


def test_a_plot_that_cannot_be_written_is_reported_after_the_table(trace, tmp_path, capsys):
    arguments = ["--trace", trace, "--slo", "ttft_p95=6s", *SECOND_A_STEP]
    assert main([*arguments, "--plot", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert "fewest replicas: " in printed.out
    assert printed.err == f"engine plan: --plot {tmp_path}: Is a directory\n"


def test_objectives_that_nothing_meets_are_reported(trace, capsys):
    assert main(["--trace", trace, "--slo", "itl_p50=1ms", *SECOND_A_STEP]) == 1
    assert "nothing meets the objectives" in capsys.readouterr().out


@pytest.mark.parametrize("slo", ["ttft=1s", "ttft_p95=1", "x_p95=1s", "ttft_p101=1s", "itl_p9=0s"])
def test_an_invalid_objective_is_named(slo, trace, capsys):
    assert main(["--trace", trace, "--slo", slo, *SECOND_A_STEP]) == 2
    assert f"--slo {slo}: must be" in capsys.readouterr().err
