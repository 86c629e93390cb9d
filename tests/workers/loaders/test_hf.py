import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.protocol.errors import CheckpointError
from engine.workers.loaders import open_checkpoint
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture
def sharded(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def write_model(path: Path, tensors: dict[str, torch.Tensor], config: Any = None) -> Path:
    (path / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    save_file(tensors, path / "model.safetensors")
    return path


def divide_among_ranks(path: Path) -> None:
    """Store the parts of matrices that three ranks have in files of their own, as those of Grok 2 are."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    divided = {name: x for name, x in tensors.items() if ".mlp." in name or "self_attn.q_" in name}
    for rank in range(3):
        save_file(
            {
                name: x.tensor_split(3, int("down_proj" in name))[rank].contiguous()
                for name, x in divided.items()
            },
            path / f"pytorch_model-00001-TP-{rank:03}.safetensors",
        )
    common = {name: x for name, x in tensors.items() if name not in divided}
    save_file(common, path / "pytorch_model-00000-TP-common.safetensors")


@pytest.mark.parametrize("layout", ["single", "sharded", "no index", "ranks"])
def test_every_tensor_and_the_config_are_read(
    model: LlamaForCausalLM, tmp_path: Path, layout: str
) -> None:
    is_one = layout in ("single", "ranks")
    model.save_pretrained(tmp_path, max_shard_size="1GB" if is_one else "20KB")
    if layout == "ranks":
        divide_among_ranks(tmp_path)
    if layout == "no index":
        (tmp_path / "model.safetensors.index.json").unlink()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == json.loads((tmp_path / "config.json").read_text())
    expected = model.state_dict()
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.tensor(name), tensor)
    assert checkpoint.bytes_read == sum(t.nbytes for t in expected.values())


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("module", ["mlp.up_proj", "mlp.down_proj"])
def test_a_part_of_ranks_parts_equals_that_part_of_the_whole(
    model: LlamaForCausalLM, tmp_path: Path, module: str, dim: int
) -> None:
    model.save_pretrained(tmp_path)
    divide_among_ranks(tmp_path)
    name = f"model.layers.1.{module}.weight"
    found = open_checkpoint(tmp_path).tensor(name, part=range(9, 30), dim=dim)
    assert torch.equal(found, model.state_dict()[name].narrow(dim, 9, 21))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("start", "stop"), [(0, 8), (5, 17), (31, 32), (0, 9), (7, 32), (4, 4)])
def test_a_part_of_a_tensor_equals_that_part_of_the_whole(
    sharded: Path, model: LlamaForCausalLM, dim: int, start: int, stop: int
) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    checkpoint = open_checkpoint(sharded)
    part = checkpoint.tensor(name, torch.bfloat16, part=range(start, stop), dim=dim)
    whole = model.state_dict()[name].bfloat16()
    expected = whole[start:stop] if dim == 0 else whole[:, start:stop]
    assert torch.equal(part, expected)
    assert part.is_contiguous()
    assert checkpoint.bytes_read == 4 * part.numel()


@pytest.mark.parametrize(
    ("part", "dim"), [(range(-1, 32), 0), (range(33), 0), (range(9, 8), 0), (None, 2)]
)
def test_a_part_outside_of_the_tensor_is_an_error(
    sharded: Path, part: range | None, dim: int
) -> None:
    with pytest.raises(ValueError, match=r"part|dim"):
        open_checkpoint(sharded).tensor(
            "model.layers.0.self_attn.q_proj.weight", part=part, dim=dim
        )


def test_scalar_tensor_is_read(tmp_path: Path) -> None:
    path = write_model(tmp_path, {"scale": torch.tensor(3.5, dtype=torch.float16)})
    scale = open_checkpoint(path).tensor("scale", torch.float32)
    assert scale.shape == () and scale.item() == 3.5


def test_tensors_outlive_the_file(tmp_path: Path) -> None:
    path = write_model(tmp_path, {"w": torch.ones(4096, 8)})
    weight = open_checkpoint(path).tensor("w")
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(0)
    assert weight.sum() == 4096 * 8


def test_consolidated_weights_and_adapters_next_to_a_model_are_ignored(tmp_path: Path) -> None:
    write_model(tmp_path, {"a": torch.ones(2)})
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    save_file({"lora": torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.names()) == {"a"}
    assert checkpoint.tensor("a").tolist() == [1, 1]


def refused(path: Path, *mentioned: str) -> None:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    for text in mentioned:
        assert text in str(error.value)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refused(sharded, str(shard), "missing", "download")


@pytest.mark.parametrize("size", [0, 4, 100, -8])
def test_a_truncated_shard_is_rejected(sharded: Path, size: int) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:size])
    refused(sharded, str(shard), "truncated or damaged", "download it again")


def test_a_missing_tensor_is_named(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    for read in (checkpoint.tensor, checkpoint.shape):
        with pytest.raises(CheckpointError, match=r"no tensor 'model\.absent\.weight'"):
            read("model.absent.weight")


def test_an_invalid_index_is_rejected(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    some_file = next(iter(content["weight_map"].values()))
    content["weight_map"]["model.extra.weight"] = some_file
    index.write_text(json.dumps(content))
    refused(sharded, some_file, "model.extra.weight")
    content["weight_map"]["model.extra.weight"] = "../other.safetensors"
    index.write_text(json.dumps(content))
    refused(sharded, str(index), "../other.safetensors")
    index.write_text("{}")
    refused(sharded, str(index), "weight_map")


def test_a_tensor_in_two_shards_is_rejected(tmp_path: Path) -> None:
    write_model(tmp_path, {"a": torch.ones(2)})
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "two.safetensors")
    refused(tmp_path, "two.safetensors", "'a'")


@pytest.mark.parametrize("content", [None, "", "{", "[1]"])
def test_an_invalid_config_is_rejected(sharded: Path, content: str | None) -> None:
    config = sharded / "config.json"
    config.unlink()
    if content is not None:
        config.write_text(content)
    refused(sharded, str(config), "download it")


def test_an_8_bit_tensor_is_rejected(tmp_path: Path) -> None:
    write_model(tmp_path, {"a": torch.ones(2).to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match=r"tensor 'a' is F8_E4M3"):
        open_checkpoint(tmp_path).tensor("a", torch.float32)


def test_pickled_weights_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "pytorch_model.bin", "pickled", "convert them to safetensors")


def test_a_directory_without_weights_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "no safetensors files")
    (tmp_path / "model.Q4_0.gguf").touch()
    refused(tmp_path, "pass the path of model.Q4_0.gguf")


def test_a_path_to_one_file_of_a_directory_is_rejected(sharded: Path) -> None:
    refused(next(sharded.glob("*.safetensors")), "pass the directory")


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "No such file")
