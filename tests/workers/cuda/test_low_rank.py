"""The kernels of LoRA adapters give the sums of torch, whatever shares the step."""

import pytest
import torch
from engine.workers.layers.low_rank import Factors, TorchLowRank
from support.gpu.triton_interpreter import interpret_without_gpu

pytestmark = pytest.mark.slow

DEVICE = interpret_without_gpu()

HEIGHTS = (48, 80, 16)
NUM_INPUTS = 200
RANKS = (3, 16, 20)


class Numbers:
    """The adapters of tokens."""

    def __init__(self, numbers: list[int]) -> None:
        self.device_number_T = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    def rows_by_adapter(self) -> list[tuple[int, torch.Tensor]]:
        number_T = self.device_number_T
        return [
            (n, (number_T == n).nonzero().flatten()) for n in number_T.unique().tolist() if n >= 0
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 9, 40])
def test_low_rank_kernels_apply_the_adapter_of_each_token(
    dtype: torch.dtype, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.workers.cuda import low_rank

    # Both ways to divide tokens into tiles.
    monkeypatch.setattr(low_rank, "_SINGLE_TOKENS", 16)
    torch.manual_seed(5)
    arguments = (HEIGHTS, NUM_INPUTS, len(RANKS), max(RANKS), dtype, DEVICE)
    changes = low_rank.TritonLowRank(*arguments)

    def linear(weight_OI: torch.Tensor, bias_O: None):
        return lambda x_TI: x_TI.float() @ weight_OI.to(DEVICE).float().T

    exact = TorchLowRank(HEIGHTS, dtype, linear)
    for number, rank in enumerate(RANKS):
        factors = [
            None
            if (number, part) == (1, 1)
            else Factors(torch.randn(rank, NUM_INPUTS) / 14, torch.randn(height, rank) / 4)
            for part, height in enumerate(HEIGHTS)
        ]
        changes.install(number, changes.pack(factors))
        exact.install(number, exact.pack(factors))
    numbers = Numbers([(index * 7) % 4 - 1 for index in range(num_tokens)])
    x = torch.randn(num_tokens, NUM_INPUTS, device=DEVICE).to(dtype)
    before = torch.randn(num_tokens, sum(HEIGHTS), device=DEVICE).to(dtype)
    found, expected = before.clone(), before.clone().float()
    changes.add(found, x, numbers)
    exact.add(expected, x, numbers)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    base = numbers.device_number_T < 0
    assert torch.equal(found[base], before[base])
    # The bits of a row do not depend on the other rows, nor on the tiles. Each adapter has some of these rows.
    for row in range(0, num_tokens, 5):
        alone = before[row : row + 1].clone()
        changes.add(
            alone, x[row : row + 1], Numbers(numbers.device_number_T[row : row + 1].tolist())
        )
        if DEVICE.type == "cuda":
            assert torch.equal(alone[0], found[row])
        # The interpreter multiplies with numpy, whose sums depend on the place of a row.
        torch.testing.assert_close(alone[0], found[row], rtol=tolerance, atol=tolerance)
    changes.install(0, None)
    changes.add(again := before.clone(), x, numbers)
    left = numbers.device_number_T == 0
    assert torch.equal(again[left], before[left])
