"""Kernels of mixtures of experts compute what torch computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.workers.cuda.experts.choosing import router_logits
from engine.workers.cuda.experts.ordering import order_choices
from engine.workers.cuda.layers import TritonKernels
from engine.workers.layers.expert_order import order_by_expert
from support.families import make_reference, save_reference
from support.gpu.triton_interpreter import interpret_without_gpu
from support.workers.decoders import CPU, Runner, load_decoder

pytestmark = pytest.mark.slow

DEVICE = interpret_without_gpu()


@pytest.mark.parametrize("shape", [(1, 8), (37, 3), (0, 2)])
def test_choices_are_ordered_by_expert_and_then_by_token(shape: tuple[int, int]) -> None:
    num_experts = 40
    random = torch.Generator().manual_seed(sum(shape))
    # The number after the last expert's means no expert.
    experts_TC = torch.randint(0, num_experts + 1, shape, generator=random)
    expected = order_by_expert(experts_TC, num_experts)
    found = order_choices(experts_TC.to(DEVICE), num_experts)
    for name, wanted, got in zip(expected._fields, expected, found, strict=True):
        assert got.tolist() == wanted.tolist(), name
    experts_A = experts_TC.flatten()[expected.choice_A].tolist()
    assert experts_A == sorted(experts_A)
    assert expected.token_A.tolist() == [choice // shape[1] for choice in expected.choice_A]


@pytest.mark.parametrize("num_tokens", [0, 1, 32, 33])
def test_logits_of_a_router_are_products_in_float32(num_tokens: int) -> None:
    x_TD = torch.randn(num_tokens, 700).bfloat16()
    weight_ED = torch.randn(13, 700)
    found = router_logits(x_TD.to(DEVICE), weight_ED.to(DEVICE))
    torch.testing.assert_close(found.cpu(), x_TD.float() @ weight_ED.T, atol=1e-4, rtol=1e-5)


BY_BEST = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3-moe", {}),
        ("gpt-oss", {}),
        ("longcat", {}),
        ("kolibri", {}),
        ("deepseek-v2", BY_BEST),
        ("deepseek-v3", {}),
        ("deepseek-v4", {}),
    ],
)
def test_chosen_experts_give_the_logits_of_torch(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Every scoring, biases, corrections of scores and logits, and groups by their best and by their best two."""
    save_reference(make_reference(family), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def logits(kernels: TritonKernels | None, device: torch.device) -> torch.Tensor:
        runner = Runner(load_decoder(tmp_path, kernels=kernels, device=device))
        return torch.cat([runner.step({0: chunk})[0] for chunk in ([5, 9, 7], [8])]).cpu()

    expected = logits(None, CPU)
    found = logits(TritonKernels(torch.float32, has_float8=True), DEVICE)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
