"""The GPU benchmark runs without a GPU, so that its own errors are found before time on a GPU is spent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

DIRECTORY = Path(__file__).parents[1] / "scripts" / "bench"


@pytest.fixture
def gpu(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(DIRECTORY))
    import gpu

    return gpu


def test_each_call_of_the_plan_ends_within_its_time(gpu) -> None:
    from on_gpu.plan import CALL_SECONDS, SETUP_SECONDS, plan

    for call, parts in plan().items():
        assert sum(part.seconds for part in parts.values()) + SETUP_SECONDS < CALL_SECONDS[call]


def check_results(report: dict[str, Any]) -> None:
    assert report["agreement"]["float32"]["same_tokens"] == 1
    assert report["agreement"]["float32, sampled"]["same_tokens"] == 1
    assert report["agreement"]["float32, drafts"]["same_tokens"] == 1
    assert report["agreement"]["bfloat16"]["logprobs_apart"] > 0
    for quantization in ("4 bits", "float8", "static float8"):
        quantized = report["agreement"][f"bfloat16, {quantization}"]
        assert quantized["same_tokens"] > 0.3 and 0 < quantized["logprobs_apart"] < 0.5
    assert report["repeats"]["graphs"]["num_different"] == 0
    assert report["tests"]["kernels"]["passed"] > 0
    # A machine may lack this program.
    assert report["sanitizer"]["memcheck"]


def check_speed(report: dict[str, Any]) -> None:
    assert report["limits"]["copy"]["bytes_per_s"] > 0
    toy = report["tiny"]
    assert toy["decode 2 x 16"]["of_roofline"] > 0 and toy["decode 2 x 16"]["host_us"] > 0
    assert toy["sampled 2 x 16"]["over_greedy"] > 0 and toy["mixed 2 + 8"]["of_parts"] > 0
    assert toy["prefill 24"]["of_matmul"] > 0
    assert report["again"]["tiny, first case"]["drift"] >= 0
    assert report["attention"]["decode"]["ms"] > 0
    assert report["attention"]["decode"]["of_torch"] > 0


def check_explanation(report: dict[str, Any]) -> None:
    # A machine may lack this program.
    assert report["profiles"]["norm"]
    served = report["tiny, served"]
    assert served["start"]["s"] > 0 and served["start"]["written_bytes"] > 200_000
    assert served["2 clients, 8 + 4 tokens"]
    assert report["prefill tiles"]["prefill, (64, 64, 4, 2)"]["ms"] > 0
    assert report["kernels"]["fp8 x 1"]["roofline"] > 0
    assert len(report["kernels"]) > 20
    for name, case in report["kernels"].items():
        assert case["error"] < (0.2 if "float8" in name else 1e-5)


def check_families(report: dict[str, Any]) -> None:
    assert all(family["logprobs_apart"] < 1e-4 for family in report["families"].values())


def check_requests(report: dict[str, Any]) -> None:
    assert report["requests"]["kinds of requests"]["passed"] > 0
    assert report["tiny with experts"]["mixed 2 + 8"]["step_ms"] > 0


CALLS = {
    "A": (check_results, "agreement, float32 "),
    "B": (check_speed, "tiny, decode 1 x 8 "),
    "C": (check_explanation, "tiny, served, start "),
    "D": (check_families, "families, "),
    "E": (check_requests, "tiny with experts, decode 2 x 16 "),
}
"""The function that checks the figures of each call, and a part of the output."""


@pytest.mark.parametrize("call", CALLS)
def test_benchmark_measures_a_toy_model_and_its_server_on_a_cpu(tmp_path: Path, call: str) -> None:
    figures = tmp_path / "figures.json"
    said = subprocess.run(
        [
            *(sys.executable, DIRECTORY / "gpu.py", "--device", "cpu", "--tiny"),
            *("--call", call, "--json", figures),
        ],
        check=True,
        timeout=1200,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    report = json.loads(figures.read_text())
    check, line = CALLS[call]
    check(report)
    failed = {
        name: part.get("failed") or figures
        for name, part in report.items()
        for case, figures in part.items()
        if case == "failed" or "failed" in figures
    }
    assert not failed
    # A machine may keep only the end of the output.
    end = said[-4000:]
    assert line in end and "FAILED" not in end


def test_what_does_not_fit_is_skipped_and_the_rest_is_measured(gpu, capsys) -> None:
    from on_gpu.reporting import Reporter, Skipped

    def skip() -> None:
        raise Skipped("the KV cache is too small")

    reporter = Reporter(share_state=True)
    reporter.say("large", skip)
    reporter.say("small", lambda: {"x": 1})
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said[1] == {"case": "large", "skipped": "the KV cache is too small"}
    assert said[3] == {"case": "small", "x": 1}


def test_first_call_runs_without_network_and_without_engine_installed(tmp_path: Path) -> None:
    """Only the packages of this environment exist; a module that cannot be imported ends the call early."""
    (tmp_path / "llguidance.py").write_text("raise ImportError('built for another machine')")
    environment = os.environ | {
        "PYTHON": sys.executable,
        "WHEELS": str(tmp_path / "none"),
        "OUT": str(tmp_path / "out"),
        "PYTHONPATH": str(tmp_path),
    }
    said = subprocess.run(
        [DIRECTORY / "on_gpu" / "first.sh", "A", "--dry"],
        check=True,
        timeout=600,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ).stdout
    report = json.loads((tmp_path / "out" / "A.json").read_text())
    assert list(report) == ["imports"]
    assert "failed" not in report["imports"]["torch"]
    assert "FAILED imports, llguidance: ImportError: built for another machine" in said
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "A.json",
        "A.log",
        "A.txt",
    ]


def test_results_of_a_part_that_crashes_or_hangs_are_kept(gpu, tmp_path: Path) -> None:
    says = 'print(\'{"case": "a", "x": 1}\', flush=True); print("[1]\\n7"); '
    for then, reason in (
        ("raise SystemExit('lost')", "lost"),
        ("import time; time.sleep(99)", "s"),
    ):
        found: dict[str, Any] = {}
        gpu.run_part(["-c", says + then], 4, found, lambda: None, tmp_path / "log")
        assert found["a"] == {"x": 1}
        assert reason in found[gpu.FAILED]
    # Where it hung.
    assert 'File "<string>", line 1 in <module>' in (tmp_path / "log").read_text()


DIES_IN_THE_SECOND = """
import sys
sys.path.insert(0, {directory!r})
from on_gpu.reporting import Reporter

def die():
    print("a kernel failed", file=sys.stderr)
    raise SystemExit("lost")

reporter = Reporter(sys.argv[2:])
reporter.say("first", lambda: {{"x": 1}})
reporter.say("second", die)
reporter.say("third", lambda: 1 / 0)
reporter.say("fourth", lambda: {{"x": 4}})
"""


def test_another_process_continues_after_a_measurement_that_crashes(gpu, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    program = DIES_IN_THE_SECOND.format(directory=str(DIRECTORY))
    gpu.run_part(["-c", program], 60, found, lambda: None, tmp_path / "log")
    assert found == {
        "first": {"x": 1},
        "second": {"failed": "began, and did not end"},
        "third": {"failed": "ZeroDivisionError: division by zero"},
        "fourth": {"x": 4},
    }
    log = (tmp_path / "log").read_text()
    assert "a kernel failed" in log and "Traceback" in log


def test_a_measurement_that_breaks_the_gpu_is_the_last_of_its_process(
    gpu, monkeypatch, capsys
) -> None:
    import torch
    from on_gpu.reporting import Reporter, Spoiled

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    reporter = Reporter()
    reporter.say("before", fail)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    reporter.say("out of memory", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(Spoiled) as spoiled:
        reporter.say("illegal", fail)
    assert spoiled.value.case == "illegal"
    with pytest.raises(Spoiled):
        Reporter(share_state=True).say("half done", lambda: {}["x"])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["case"] for line in said[1::2]] == [
        "before",
        "out of memory",
        "illegal",
        "half done",
    ]
    assert all("illegal memory access" in line["failed"] for line in said[1:6:2])


def test_idle_time_excludes_overlapping_spans(gpu) -> None:
    from on_gpu.trace import Span, summary

    spans = [Span("b", 20, 30), Span("a", 0, 10), Span("copy", 5, 12), Span("a", 30, 40)]
    found = summary(spans, 2)
    assert found["idle"] == found["idle in gaps over 5 us"] == 8 / 40
    assert "idle between steps" not in found
    assert (found["launches"], found["step_us"]) == (2, 20)
    assert next(iter(found["us"].items())) == ("a", "10.0 in 1")
    with pytest.raises(ValueError, match="no activity"):
        summary([], 1)


def test_time_between_steps_excludes_replays(gpu) -> None:
    from on_gpu.trace import Span, summary

    first = [Span("a", 0, 10, launch=7), Span("b", 12, 20, launch=7)]
    copied = [Span("copy", 21, 24, launch=8)]
    second = [Span("a", 26, 30, launch=9), Span("b", 33, 40, launch=9)]
    found = summary([*first, *copied, *second], 2)
    assert found["idle"] == (2 + 1 + 2 + 3) / 40
    assert found["idle between steps"] == (1 + 2) / 40
    assert found["replays"] == 1
    # Before the measured step, there was a step that the profiler delayed.
    assert summary([*first, *copied, *second], 1)["idle"] == 3 / 14
