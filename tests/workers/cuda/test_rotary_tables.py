"""The rotary tables of a step, computed by one kernel."""

import pytest
import torch
from engine.workers.cuda.rotary_tables import rotary_tables
from engine.workers.layers.rope import RopeSpec, RotaryEmbedding, YarnScaling
from support.gpu.triton_interpreter import interpret_without_gpu

DEVICE = interpret_without_gpu()


@pytest.mark.parametrize("scaling", [None, YarnScaling(4.0, 32768, 1.14)])
@pytest.mark.parametrize("rotary_dim", [10, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_axes", [False, True])
def test_rotary_tables_equal_those_of_torch(
    scaling, rotary_dim: int, dtype: torch.dtype, has_axes: bool
) -> None:
    axes = tuple(i % 3 for i in range(rotary_dim // 2)) if has_axes else ()
    spec = RopeSpec(1e6, rotary_dim, scaling, axes)
    rope = RotaryEmbedding(spec, max_model_len=200_000, dtype=dtype, device=DEVICE)
    positions = torch.tensor([0, 1, 17, 4095, 131_071, 199_999], dtype=torch.int32, device=DEVICE)
    if has_axes:
        positions = torch.stack((positions, positions // 2, positions // 7), 1)
    for found, expected in zip(rotary_tables(rope, positions), rope.tables(positions), strict=True):
        assert found.shape == expected.shape == (6, 1, rotary_dim)
        tolerance = 5e-7 if dtype == torch.float32 else 1e-3
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
