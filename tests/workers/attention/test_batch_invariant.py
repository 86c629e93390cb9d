"""The batch-invariant kernel gives a token the same correct result in a prompt and in a decode."""

import pytest
import torch
from engine.protocol.errors import ConfigError
from engine.workers.attention import AttentionLayer, AttentionSpec, DeviceBatch, attention_backend
from support.gpu.triton_interpreter import interpret_without_gpu
from support.workers.paged_attention import OneSequence, PagedCase

DEVICE = interpret_without_gpu()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.mark.parametrize("window", [None, 40])
def test_a_decoded_token_has_the_same_bits_as_in_a_prompt(window):
    sequence = OneSequence(
        "triton_batch_invariant", num_heads=4, num_kv_heads=2, window=window, device=DEVICE
    )
    prompt = sequence.attend(0, 150)
    # The interpreter uses numpy's matrix products, whose sums depend on a row's place among the others. So only the
    # first token of a tile is the same there.
    queries_per_tile = sequence.backend.prefill_tile.rows // 2
    tokens = range(0, 150, queries_per_tile if DEVICE.type == "cpu" else 1)
    for token in tokens:
        assert torch.equal(sequence.attend(token, token + 1)[0], prompt[token])


@pytest.mark.parametrize("window", [None, 70])
def test_prompts_and_decodes_agree_with_plain_attention(window):
    case = PagedCase(
        [(300, 1), (20, 1), (60, 40), (0, 5)],
        num_kv_heads=2,
        repeats=3,
        head_dim=16,
        block_size=16,
        layer=AttentionLayer(scale=0.3, window=window),
        dtype=torch.float32,
        backend_name="triton_batch_invariant",
        device=DEVICE,
    )
    torch.testing.assert_close(case.forward().double(), case.expected(), atol=3e-5, rtol=1e-5)


def test_latent_attention_is_rejected():
    """The products with each head's matrices, which torch computes, depend on the batch."""
    spec = AttentionSpec(
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        latent_rank=16,
        block_size=16,
        dtype=torch.float32,
        device=DEVICE,
    )
    with pytest.raises(ConfigError, match="latent attention is not supported with --batch-inv"):
        attention_backend(spec, "triton_batch_invariant")


def test_biases_that_the_kernels_do_not_add_are_rejected():
    spec = AttentionSpec(
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        has_distance_biases=True,
        block_size=16,
        dtype=torch.float32,
        device=DEVICE,
    )
    with pytest.raises(ConfigError, match=r"distances or queries.*--batch-invariant"):
        attention_backend(spec, "triton_batch_invariant")


def test_decodes_in_a_graph_equal_those_of_any_step():
    """A captured step has a row of padding."""
    case = PagedCase(
        [(300, 1), (20, 1)],
        num_kv_heads=1,
        repeats=2,
        head_dim=16,
        block_size=16,
        layer=AttentionLayer(scale=0.3),
        dtype=torch.float32,
        backend_name="triton_batch_invariant",
        device=DEVICE,
    )
    expected, batch = case.forward(), case.batch()

    def padded(array, value):
        row = torch.full_like(torch.from_numpy(array[-1:]), value)
        return torch.cat((torch.from_numpy(array), row)).to(DEVICE)

    device_batch = DeviceBatch(
        query_start_loc=padded(batch.query_start_loc, 2),
        seq_lens=padded(batch.seq_lens, 0),
        block_table=padded(batch.block_table, 0),
        slot_mapping=padded(batch.slot_mapping, -1),
    )
    metadata = case.backend.build_captured(device_batch, {None}, 1)
    qkv = (torch.cat((x, x[-1:])) for x in (case.q_THK, case.k_TGK, case.v_TGK))
    found = case.backend.forward(*qkv, case.kv_cache, metadata, case.layer)
    assert torch.equal(found[:2], expected)
