"""The files of docs/deploy are valid for Kubernetes and for the command line."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from engine.frontend.cli.arguments import parse_settings
from engine.protocol.cluster_key import ClusterKey

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "docs" / "deploy"
KUBERNETES_VERSION = "1.31"
VARIABLES = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader"}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def templates(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    spec = document["spec"]
    if document["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        yield group["leaderTemplate"]
        yield group["workerTemplate"]
    elif document["kind"] == "Deployment":
        yield spec["template"]


def validate(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("name", ["deployment.yaml", "leader-worker-set.yaml"])
def test_manifests_are_valid(name: str) -> None:
    for document in documents(name):
        if document["kind"] == "LeaderWorkerSet":
            # Kubernetes has no schema for it, but for all its long parts.
            for template in templates(document):
                metadata = template["metadata"] | {"name": "template"}
                validate({"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata})
        else:
            validate(document)


@pytest.mark.parametrize("name", ["deployment.yaml", "leader-worker-set.yaml"])
def test_the_grace_period_of_a_pod_covers_the_shutdown_timeout(name: str, tmp_path: Path) -> None:
    for document in documents(name):
        for template in templates(document):
            (container,) = template["spec"]["containers"]
            settings = settings_of(container["args"], tmp_path)
            drain_s = settings["frontend"].get("shutdown_timeout_s", 0)
            drain_s += container["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert drain_s < template["spec"]["terminationGracePeriodSeconds"]
            if not settings["launch"].get("headless"):
                ports = {port["name"]: port["containerPort"] for port in container["ports"]}
                assert ports["http"] == settings["frontend"]["port"]
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    assert container[probe]["httpGet"]["path"] in ("/readyz", "/livez")


@pytest.mark.parametrize("name", ["deployment.yaml", "leader-worker-set.yaml"])
def test_a_pod_has_a_writable_home(name: str) -> None:
    for document in documents(name):
        for template in templates(document):
            (container,) = template["spec"]["containers"]
            home = next(e["value"] for e in container["env"] if e["name"] == "HOME")
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            assert not mounts[home].get("readOnly", False)


def test_a_systemd_service_has_a_writable_home() -> None:
    unit = (DEPLOY / "engine.service").read_text()
    (cache,) = re.findall(r"^CacheDirectory=(.*)", unit, re.MULTILINE)
    assert re.search(rf"^Environment=.*\bHOME=/var/cache/{cache}$", unit, re.MULTILINE)


def settings_of(args: list[str], directory: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of a command line in a file, with a key where the file has a placeholder for one."""
    key = directory / "cluster.key"
    if not key.exists():
        ClusterKey.generate().save(str(key))
    line = [re.sub(r"\$\((\w+)\)", lambda name: VARIABLES[name[1]], arg) for arg in args]
    line = [arg.replace("/keys/cluster.key", str(key)) for arg in line]
    assert line[0] == "serve"
    return parse_settings(line[1:], {})


def test_the_slurm_script_has_a_valid_command_line(tmp_path: Path) -> None:
    script = (DEPLOY / "engine.sbatch").read_text()
    values = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "MASTER_HOST": "n1", "MODEL": "m"}
    values["KEY"] = "/keys/cluster.key"
    script = re.sub(r"\$(\w+)", lambda name: values.get(name[1], name[0]), script)
    (common,) = re.findall(r"common=\((.*)\)", script)
    lines = re.findall(r"exec engine (serve .*)", script)
    assert len(lines) == 2
    for line in lines:
        args = shlex.split(line.replace('"${common[@]}"', common))
        assert settings_of(args, tmp_path)["parallel"]["nnodes"] == 2


def test_reference_names_every_environment_variable() -> None:
    page = (DEPLOY.parent / "reference" / "cli.md").read_text()
    source = "".join(
        path.read_text()
        for part in ("frontend", "core", "workers", "protocol")
        for path in (ROOT / part).rglob("*.py")
    )
    variables = re.findall(r'environ(?:\.get\(|\.setdefault\(|\[)"([A-Z_]+)"', source)
    variables += re.findall(r'_variable\("([A-Z_]+)"', source)
    # The first three are set for libraries, and systemd sets the last one.
    foreign = {
        "TOKENIZERS_PARALLELISM",
        "OMP_WAIT_POLICY",
        "OPENBLAS_NUM_THREADS",
        "JOURNAL_STREAM",
    }
    assert {name for name in variables if f"`{name}`" not in page} == foreign


def test_the_image_copies_only_existing_files() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [extras] = [found[1] for line in lines if (found := re.search(r"whl\)\[(.*)\]", line))]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert lines[-1] == f'ENTRYPOINT ["{next(iter(project["scripts"]))}"]'
