"""Torch's kernels compute long prompts, and Triton's the other requests; without a GPU, plain torch computes all."""

import pytest
import torch
from engine.workers.attention import AttentionLayer, AttentionSpec
from engine.workers.attention.library_prompts import LibraryPrompts, find_fault, library_prompts
from engine.workers.attention.long_prompts import LongPromptAttention, LongPromptMetadata
from support.gpu.triton_interpreter import interpret_without_gpu
from support.workers.paged_attention import PagedCase
from torch.nn.attention import SDPBackend

DEVICE = interpret_without_gpu()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


class WrongScale(LibraryPrompts):
    """A library with a fault."""

    def attend(self, q_THK, kv_cache, blocks_B, scale):
        return super().attend(q_THK, kv_cache, blocks_B, 2 * scale)


def paged_case(layer: AttentionLayer) -> PagedCase:
    case = PagedCase(
        [(30, 1), (0, 40), (20, 30), (0, 3), (0, 17)],
        num_kv_heads=2,
        repeats=3,
        head_dim=16,
        block_size=16,
        layer=layer,
        dtype=torch.float32,
        backend_name="triton_paged",
        device=DEVICE,
    )
    library = LibraryPrompts(case.backend.spec, [SDPBackend.MATH])
    case.backend = LongPromptAttention(case.backend.spec, library, fewest_tokens=16)
    return case


@pytest.mark.parametrize("softcap", [None, 8.0], ids=["plain", "special scores"])
def test_long_prompts_beside_other_requests_agree_with_plain_attention(softcap) -> None:
    """Torch computes two of the requests, unless the layer has special scores."""
    case = paged_case(AttentionLayer(scale=0.3, softcap=softcap))
    metadata = case.backend.build(case.batch(), {None})
    assert isinstance(metadata, LongPromptMetadata)
    assert [tokens.stop - tokens.start for tokens, _ in metadata.prompts] == [40, 17]
    torch.testing.assert_close(case.forward().double(), case.expected(), atol=3e-5, rtol=1e-5)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (8, 8, 80)], ids=str)
def test_a_kernel_of_torch_is_right_on_this_gpu(heads) -> None:
    num_heads, num_kv_heads, head_dim = heads
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=16,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    assert find_fault(LibraryPrompts(spec), spec) is None


def test_a_library_is_used_only_if_its_numbers_are_right() -> None:
    spec = paged_case(AttentionLayer(scale=0.3)).backend.spec
    assert find_fault(LibraryPrompts(spec, [SDPBackend.MATH]), spec) is None
    assert "its error is" in find_fault(WrongScale(spec, [SDPBackend.MATH]), spec)
    if DEVICE.type == "cpu":
        assert find_fault(LibraryPrompts(spec, [SDPBackend.CUDNN_ATTENTION]), spec)
        assert library_prompts(spec) is None
