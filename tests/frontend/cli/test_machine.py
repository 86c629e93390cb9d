from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine.frontend.cli.machine.checks import Check, run_checks
from engine.frontend.cli.machine.doctor import Diagnosis, FittingModel, format_diagnosis
from engine.frontend.cli.machine.models import main as models

pytestmark = pytest.mark.slow


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def checked(root: Path, environ: dict[str, str]) -> dict[str, Check]:
    return {check.name: check for check in run_checks(root, environ)}


def test_misconfigured_machine_gets_advice_for_each_setting(tmp_path: Path) -> None:
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    write(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "150000 100000\n")
    environ = {
        "OMP_WAIT_POLICY": "ACTIVE",
        "OMP_NUM_THREADS": "100000",
        "ENGINE_MAX_MODEL_LENGTH": "1",
    }
    found = checked(tmp_path, environ)
    names = {"huge pages", "CPU governor", "CPU limit", "OpenMP", "OMP_NUM_THREADS", "environment"}
    bad = {name for name, check in found.items() if not check.is_good}
    assert bad >= names
    assert all(found[name].advice for name in names)
    assert "1.5 cores" in found["CPU limit"].value
    assert "OMP_WAIT_POLICY" in found["OpenMP"].value


def test_doctor_gives_no_advice_on_a_well_configured_machine(tmp_path: Path) -> None:
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    write(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    found = checked(tmp_path, {})
    assert found["huge pages"].is_good and found["CPU governor"].is_good
    assert not {"CPU limit", "OpenMP", "OMP_NUM_THREADS", "environment"} & set(found)


def test_diagnosis_is_one_screen_with_models_and_advice() -> None:
    diagnosis = Diagnosis(
        *("0.1", "Linux", "Some CPU", 4, "AVX2", None, "2.11", [], 16 * 10**9, 8 * 10**9, 20e9),
        largest_parameters={"4-bit": 11e9},
        models=[FittingModel("tiny", 10**8, True, 200.0), FittingModel("big", 10**10, False, 2.0)],
        checks=[Check("CPU governor", False, "powersave", "use performance")],
    )
    lines = format_diagnosis(diagnosis).splitlines()
    assert len(lines) < 24
    rows = {
        line.split()[0]: line.split()[3:6] for line in lines if line.startswith(("tiny", "big"))
    }
    assert rows == {"tiny": ["yes", "about", "200.0"], "big": ["no", "about", "2.0"]}
    assert any(line.startswith("BAD CPU governor") for line in lines)
    assert any("20.0 GB/s" in line for line in lines)


def test_models_are_listed_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "engine"
    write(cache, "models/small.gguf", "x" * 1000)
    write(cache, "tokenizers/abc/tokenizer.json", "{}")
    write(cache, "packed/abc.packed", "x")
    monkeypatch.setenv("ENGINE_CACHE", str(cache))
    hub = tmp_path / "hub"
    blob = hub / "models--org--name/blobs/b1"
    write(hub, "models--org--name/blobs/b1", "w" * 5000)
    snapshot = hub / "models--org--name/snapshots/c1"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blob)
    write(hub, "models--org--name/refs/main", "c1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))

    def listed() -> dict[str, int]:
        assert models(["--json"]) == 0
        entries = map(json.loads, capsys.readouterr().out.splitlines())
        return {e["name"]: e["weight_bytes"] for e in entries if e["kind"] != "package"}

    shared = {"converted tokenizers": 0, "packed weights": 0}
    assert listed() == {"org/name": 5000, "small": 1000, **shared}
    assert models(["rm", "small"]) == 1
    assert "--yes" in capsys.readouterr().err
    assert models(["rm", "small", "org/name", "--yes"]) == 0
    capsys.readouterr()
    assert listed() == shared
    assert models(["rm", "packed weights", "--yes"]) == 0
    assert not (cache / "packed").exists()
    assert models(["rm", "absent", "--yes"]) == 1
    assert "absent is not in any cache" in capsys.readouterr().err
