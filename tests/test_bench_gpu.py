"""The benchmark of a GPU runs to its end where there is none, so that time on one is not spent on its errors."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

DIRECTORY = Path(__file__).parents[1] / "scripts" / "bench"


@pytest.fixture
def gpu(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(DIRECTORY))
    import gpu

    return gpu


def test_it_measures_a_toy_model_and_its_server_on_a_cpu(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    subprocess.run(
        [sys.executable, DIRECTORY / "gpu.py", "--device", "cpu", "--tiny", "--json", figures],
        check=True,
        timeout=280,
    )
    report = json.loads(figures.read_text())
    assert report["limits"]["copy"]["bytes_per_s"] > 0
    assert report["agreement"]["float32"]["same_tokens"] == 1
    assert report["agreement"]["float32, sampled"]["same_tokens"] == 1
    assert report["agreement"]["bfloat16"]["logprobs_apart"] > 0
    quantized = report["agreement"]["bfloat16, 4 bits"]
    assert quantized["same_tokens"] > 0.3 and 0 < quantized["logprobs_apart"] < 0.5
    assert report["tiny"]["decode 2 x 16"]["of_roofline"] > 0
    assert report["tiny"]["prefill 24"]["of_matmul"] > 0
    assert report["attention"]["decode"]["ms"] > 0
    assert report["tiny, served"]["first start"]["s"] > 0
    assert report["kernels"]["fp8 x 1"]["roofline"] > 0
    assert len(report["kernels"]) > 20
    for name, case in report["kernels"].items():
        assert case["error"] < (0.2 if "float8" in name else 1e-5)
    failed = [name for part in report.values() for name in part if name == "failed"]
    failed += [name for part in report.values() for name in part if "failed" in part[name]]
    assert not failed


def test_a_part_that_dies_or_hangs_leaves_what_it_has_found(gpu) -> None:
    says = 'print(\'{"case": "a", "x": 1}\', flush=True); '
    for then, reason in (
        ("raise SystemExit('lost')", "lost"),
        ("import time; time.sleep(99)", "2 s"),
    ):
        found: dict[str, Any] = {}
        began = time.monotonic()
        gpu.run_part(["-c", says + then], 2, found, lambda: None)
        assert time.monotonic() - began < 60
        assert found["a"] == {"x": 1}
        assert reason in found[gpu.FAILED]


def test_idle_time_is_what_lies_between_spans_that_may_overlap(gpu) -> None:
    from on_gpu.trace import Span, summary

    spans = [Span("b", 20, 30), Span("a", 0, 10), Span("copy", 5, 12), Span("a", 30, 40)]
    found = summary(spans, 2)
    assert found["idle"] == found["idle in gaps over 5 us"] == 8 / 40
    assert (found["launches"], found["step_us"]) == (2, 20)
    assert next(iter(found["us"].items())) == ("a", "10.0 in 1")
    with pytest.raises(ValueError, match="nothing"):
        summary([], 1)
