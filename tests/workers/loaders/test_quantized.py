"""Checkpoints that were quantized by other tools have the values of their definition, whole and in parts."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.protocol.errors import CheckpointError
from engine.workers.loaders import open_checkpoint
from engine.workers.loaders.quantization.matrix import log_dequantized
from safetensors.torch import load_file, save_file
from support.checkpoints.quantized import BLOCK, FORMATS, GROUP, quantize_directory
from torch import Tensor

torch.set_num_threads(1)

ROWS, COLUMNS = 64, 96
NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(5)
    tensors = {
        NAME: torch.randn(ROWS, COLUMNS, generator=generator),
        "model.layers.0.mlp.down_proj.weight": torch.randn(COLUMNS, ROWS, generator=generator)[
            :, :64
        ].contiguous(),
        "model.embed_tokens.weight": torch.randn(8, 16, generator=generator),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_module_reads_as_one_dequantized_tensor(directory: Path, name: str) -> None:
    meaning = quantize_directory(directory, name)
    checkpoint = open_checkpoint(directory)
    assert set(checkpoint.names()) == set(meaning)
    for tensor, expected in meaning.items():
        assert checkpoint.shape(tensor) == tuple(expected.shape)
        assert close(checkpoint.tensor(tensor), expected)
    assert checkpoint.quantized(NAME) is not None
    assert checkpoint.quantized("model.embed_tokens.weight") is None


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": GROUP, "sym": True}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": GROUP, "version": "GEMM"}),
        ("modelopt-nvfp4", "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}),
        ("mxfp8", "hf_quant_config.json", {"quantization": {"quant_algo": "MXFP8"}}),
        ("fp8", "config.json", {"text_config": {"quantization_config": FORMATS["fp8"].config}}),
        ("compressed-fp8", "config.json", {"quantization_config": {"quant_method": "fbgemm_fp8"}}),
    ],
)
def test_quantization_is_found_outside_its_usual_place(
    directory: Path, name: str, file: str, content: dict[str, Any]
) -> None:
    meaning = quantize_directory(directory, name)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (directory / file).write_text(json.dumps({"model_type": "llama"} | content))
    checkpoint = open_checkpoint(directory)
    assert close(checkpoint.tensor(NAME), meaning[NAME])
    assert checkpoint.quantized(NAME) is not None


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("dim", "start", "stop"), [(0, 8, 48), (0, 3, 21), (1, 32, 64), (1, 24, 80)]
)
def test_a_part_of_a_tensor_equals_that_part_of_the_whole(
    directory: Path, name: str, dim: int, start: int, stop: int
) -> None:
    expected = quantize_directory(directory, name)[NAME].narrow(dim, start, stop - start)
    found = open_checkpoint(directory).tensor(NAME, part=range(start, stop), dim=dim)
    assert close(found, expected)


# A byte of BitNet or HQQ has rows from all parts of the matrix, or a scale depends on all of it.
@pytest.mark.parametrize(
    "name", sorted(FORMATS.keys() - {"bitnet", "bitnet-online", "hqq", "hqq-8", "hqq-columns"})
)
def test_reading_half_a_tensor_reads_half_its_bytes(directory: Path, name: str) -> None:
    quantize_directory(directory, name)
    whole, half = open_checkpoint(directory), open_checkpoint(directory)
    whole.tensor(NAME)
    half.tensor(NAME, part=range(ROWS // 2))
    # The order of the columns and one number of a module are read in any case.
    codebook = 4 * 256 if name == "bnb-nf4-nested" else 0
    assert half.bytes_read <= whole.bytes_read / 2 + 4 * COLUMNS + BLOCK + codebook


def test_groups_split_by_a_part_become_smaller(directory: Path) -> None:
    quantize_directory(directory, "gptq")
    matrix = open_checkpoint(directory).quantized(NAME, part=range(16, 80), dim=1)
    assert matrix is not None
    assert (GROUP, matrix.group_size, matrix.scale_OG.shape) == (32, 16, (ROWS, 4))


@pytest.mark.parametrize(
    ("name", "order", "words"),
    [("compressed-int4", "weight_g_idx", "weight_packed"), ("gptq", "g_idx", "qweight")],
)
def test_an_invalid_group_order_is_rejected(
    directory: Path, name: str, order: str, words: str
) -> None:
    meaning = quantize_directory(directory, name)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    assert NAME.replace("weight", words) in tensors

    def read(groups_D: Tensor) -> Tensor:
        tensors[NAME.replace("weight", order)] = groups_D.int()
        save_file(tensors, file)
        return open_checkpoint(directory).tensor(NAME)

    in_order = torch.arange(COLUMNS) // GROUP
    assert close(read(in_order), meaning[NAME])
    # Tools write -1 if the order is not used.
    assert close(read(torch.full((COLUMNS,), -1)), meaning[NAME])
    for column, group in ((0, -1), (40, COLUMNS // GROUP), (95, 1 << 20)):
        out_of_range = in_order.clone()
        out_of_range[column] = group
        with pytest.raises(CheckpointError, match=rf"{order}' has groups .*{group}.*there are 3"):
            read(out_of_range)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes without load_in_4bit or load_in_8bit"),
        ({"bits": 4}, "an unnamed method"),
        ({"quant_method": "gptq", "bits": 5}, "gptq with bits 5"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
            "packing_format 'llm_compressor'",
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "uint4"}}},
            "quark with weights of dtype 'uint4'",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size 128"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24",
             "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}}},
            "format 'marlin-24'",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "without config_groups"),
        (
            FORMATS["compressed-int4"].config | {"transform_config": {"config_groups": {"R4": {
                "apply": [{"location": "weight_input"}, {"location": "input"}]}}}},
            "with transforms of location 'input'",
        ),
        (
            FORMATS["compressed-int4"].config
            | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format 'sparse-24-bitmask'",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "naive-quantized",
             "config_groups": {"group_0": {"targets": ["re:.*["], "weights": {
                 "num_bits": 8, "type": "float", "strategy": "tensor"}}}},
            "invalid target 're:.*['",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
             "quantized_layers": {"lm_head": {"quant_algo": "W4A8_AWQ"}}},
            "quant_algo 'W4A8_AWQ' of lm_head",
        ),
    ],
)  # fmt: skip
def test_an_unsupported_scheme_is_named(
    directory: Path, config: dict[str, Any], problem: str
) -> None:
    content = {"model_type": "llama", "quantization_config": config}
    (directory / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(directory)
    message = str(refusal.value)
    assert problem in message
    assert "compressed-tensors" in message, "what is supported"


def test_a_config_that_contradicts_the_weights_is_rejected(directory: Path) -> None:
    content = {"quantization_config": FORMATS["awq"].config}
    (directory / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="no module has a tensor 'qweight' of type I32"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("awq", "qzeros"),
        ("gptq", "qzeros"),
        ("fp8-blocks", "weight_scale_inv"),
        ("bnb-nf4", "weight.absmax"),
        ("bnb-nf4-nested", "weight.nested_quant_map"),
        ("bnb-int8", "SCB"),
    ],
)
def test_an_inconsistent_module_is_rejected(directory: Path, name: str, tensor: str) -> None:
    quantize_directory(directory, name)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    broken = NAME.replace("weight", tensor)
    tensors[broken] = tensors[broken][:1].contiguous()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"'{broken}' has shape \[1(, \d+)?\], expected"):
        open_checkpoint(directory).tensor(NAME)
    del tensors[broken]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"{tensor.removesuffix('_inv')}.* is missing"):
        open_checkpoint(directory).tensor(NAME)


@pytest.mark.parametrize(
    ("name", "stored_as"),
    [("bnb-nf4", "bitsandbytes in 4 bits"), ("hqq-columns", "HQQ with groups across rows")],
)
def test_dequantized_weights_are_logged_once(
    directory: Path, caplog: pytest.LogCaptureFixture, name: str, stored_as: str
) -> None:
    quantize_directory(directory, name)
    log_dequantized.cache_clear()
    checkpoint = open_checkpoint(directory)
    for _ in range(2):
        checkpoint.quantized(NAME)
    assert [record.getMessage() for record in caplog.records] == [
        f"no kernel reads weights of {stored_as}, so they are dequantized at load"
    ]


def test_a_damaged_state_of_bitsandbytes_is_rejected(directory: Path) -> None:
    quantize_directory(directory, "bnb-nf4")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    state = NAME + ".quant_state.bitsandbytes__nf4"
    tensors[state] = tensors[state][:-5].clone()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=f"'{state}' does not describe a matrix"):
        open_checkpoint(directory).tensor(NAME)


@pytest.mark.parametrize(
    ("name", "found", "problem"),
    [
        ("torchao-int4", "", "the header does not describe"),
        ("torchao-int4", '{"_type": "NF4Tensor", "_data": {}}', "is a NF4Tensor of torchao"),
        ("torchao-int4", '{"_type": "Int4Tensor", "_data": {"block_size": 7}}', "has block_size 7"),
        (
            "torchao-intx",
            '{"_type": "Int8Tensor", "_data": {"target_dtype": {"_data": "uint4"}}}',
            "has target_dtype 'uint4'",
        ),
        (
            "torchao-tiles",
            '{"_type": "Int4TilePackedTo4dTensor", "_data": {"shape": [99, 96], "block_size": [1, 32]}}',
            "does not have the tiles of a matrix of 99 x 96",
        ),
    ],
)
def test_wrong_headers_of_torchao_are_rejected(
    directory: Path, name: str, found: str, problem: str
) -> None:
    quantize_directory(directory, name)
    file = directory / "model.safetensors"
    save_file(load_file(file), file, {NAME: found})
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(directory).tensor(NAME)


@pytest.mark.parametrize(("tensor", "value"), [("group_size", 7), ("nbits", 5), ("axis", 2)])
def test_wrong_numbers_of_hqq_are_rejected(directory: Path, tensor: str, value: int) -> None:
    quantize_directory(directory, "hqq")
    file = directory / "model.safetensors"
    name = NAME.replace("weight", tensor)
    save_file(load_file(file) | {name: torch.tensor(value, dtype=torch.int32)}, file)
    with pytest.raises(CheckpointError, match=str(value)):
        open_checkpoint(directory).tensor(NAME)


def test_groups_of_hqq_may_cross_rows(directory: Path) -> None:
    file = directory / "model.safetensors"
    save_file(load_file(file) | {NAME: torch.randn(ROWS, 3 * GROUP // 2)}, file)
    expected = quantize_directory(directory, "hqq")[NAME]
    checkpoint = open_checkpoint(directory)
    parts = ({}, expected), ({"part": range(5, 21)}, expected[5:21])
    for part, values in (*parts, ({"part": range(8, 40), "dim": 1}, expected[:, 8:40])):
        torch.testing.assert_close(checkpoint.tensor(NAME, **part), values, atol=1e-5, rtol=1e-5)


def test_the_name_of_a_module_takes_precedence_over_its_class(directory: Path) -> None:
    meaning = quantize_directory(directory, "compressed-int4")
    of_four_bits = FORMATS["compressed-int4"].config
    of_eight_bits: dict[str, Any] = copy.deepcopy(of_four_bits)["config_groups"]["group_0"]
    of_eight_bits["weights"]["num_bits"] = 8
    named = of_four_bits["config_groups"]["group_0"] | {"targets": ["re:.*up_proj"]}
    config = of_four_bits | {"config_groups": {"group_0": of_eight_bits, "group_1": named}}
    content = {"model_type": "llama", "quantization_config": config}
    (directory / "config.json").write_text(json.dumps(content))
    checkpoint = open_checkpoint(directory)
    assert close(checkpoint.tensor(NAME), meaning[NAME])
    with pytest.raises(CheckpointError, match="weight_shape"):
        checkpoint.tensor("model.layers.0.mlp.down_proj.weight")
