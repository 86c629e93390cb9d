"""The benchmark of a GPU runs to its end where there is none, so that time on one is not spent on its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "scripts" / "bench" / "gpu.py"


def test_it_measures_a_toy_model_and_its_server_on_a_cpu(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    subprocess.run(
        [sys.executable, PROGRAM, "--device", "cpu", "--tiny", "--json", figures],
        check=True,
        timeout=120,
    )
    report = json.loads(figures.read_text())
    assert report["limits"]["copy_bytes_per_s"] > 0
    assert report["tiny"]["decode 2 x 16"]["tokens_per_s"] > 0
    assert report["tiny"]["prefill 24"]["step_ms"] > 0
    assert report["tiny, attention"]["decode"]["ms"] > 0
    assert report["tiny, served"]["ready_s"] > 0
