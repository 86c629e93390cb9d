"""Mixtures of experts: the native decoder computes what the torch decoder does, whatever shares the step."""

import pytest
import torch
from engine.protocol.checkpoint.gguf import GGMLQuantizationType
from engine.protocol.errors import CheckpointError
from engine.workers.cpu.library import NotSupportedNatively
from engine.workers.layers.layer_spec import LayerSpec
from engine.workers.layers.spec import ModelSpec
from engine.workers.layers.specs.experts import ExpertsSpec
from engine.workers.layers.specs.norm_names import NormNames
from engine.workers.loaders.open_checkpoint import open_checkpoint
from engine.workers.models.families import model_spec
from msgspec.structs import replace
from support.checkpoints.random import random_checkpoint
from support.checkpoints.tiny import random_model, sentencepiece_tokenizer
from support.gguf.writer import write_gguf
from support.workers.decoders import Runner
from support.workers.isas import ISAS, select_isa
from support.workers.native_decoders import ROPE, native_decoder, small_spec, torch_decoder

pytestmark = pytest.mark.slow

torch.set_num_threads(1)


def mixture(experts: ExpertsSpec, **differences) -> ModelSpec:
    """A model with experts in the first and the last of three layers."""
    layer = LayerSpec(ROPE, experts=experts)
    return small_spec(layers=(layer, LayerSpec(ROPE), layer), **differences)


PLAIN = ExpertsSpec(8, 3, 96)
SHARED = replace(PLAIN, shared_intermediate_size=160, has_shared_gate=True)
SPECS = {
    "plain": mixture(PLAIN),
    "one expert chosen, not renormalized": mixture(ExpertsSpec(5, 1, 64, renormalizes=False)),
    "all experts chosen": mixture(ExpertsSpec(3, 3, 64)),
    "more experts than tokens": mixture(ExpertsSpec(200, 4, 32)),
    "odd sizes": mixture(
        ExpertsSpec(7, 2, 44, shared_intermediate_size=20), hidden_size=50, intermediate_size=80
    ),
    "best groups": mixture(
        replace(PLAIN, scoring="sigmoid", scale=2.5, num_groups=4, num_groups_per_token=2)
    ),
    "groups by their two best": mixture(
        replace(
            PLAIN,
            scoring="sigmoid",
            has_correction_bias=True,
            num_groups=2,
            num_groups_per_token=1,
            group_score="best two",
        )
    ),
    "biases": mixture(
        replace(PLAIN, has_router_bias=True, has_biases=True, shared_intermediate_size=64),
        mlp_bias=True,
    ),
    "shared experts": mixture(replace(PLAIN, shared_intermediate_size=160)),
    "shared experts with a gate": mixture(SHARED, residual_multiplier=0.3),
    "norms of outputs": mixture(
        SHARED,
        norms=NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        activation="gelu_tanh",
    ),
}


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(97, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_the_torch_decoder(name, fused, tmp_path):
    spec = SPECS[name]
    checkpoint = random_checkpoint(tmp_path, spec, fused=fused)
    native = Runner(native_decoder(spec, checkpoint, num_threads=2), 2)
    reference = Runner(torch_decoder(spec, checkpoint), 2)
    first, second = prompts(150, 40)
    for chunks in ({0: first[:1]}, {0: first[1:100]}, {0: first[100:103], 1: second[:1]}):
        logits, expected = native.step(chunks), reference.step(chunks)
        for request in chunks:
            torch.testing.assert_close(logits[request], expected[request], atol=2e-4, rtol=1e-4)


FORMATS = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16, "cache_dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}


@pytest.mark.parametrize(
    ("name", "bound"), [("bfloat16", 0.03), ("float16", 0.01), ("int8", 0.05), ("int4", 0.4)]
)
def test_logits_of_narrow_experts_are_close_to_torch(name, bound, tmp_path):
    """With all experts chosen, because rounding may change a choice."""
    experts = ExpertsSpec(4, 4, 96, shared_intermediate_size=160, has_shared_gate=True)
    spec = mixture(experts)
    checkpoint = random_checkpoint(tmp_path, spec)
    (tokens,) = prompts(60)
    expected = Runner(torch_decoder(spec, checkpoint)).step({0: tokens})[0]
    logits = Runner(native_decoder(spec, checkpoint, **FORMATS[name])).step({0: tokens})[0]
    assert torch.linalg.norm(logits - expected) < bound * torch.linalg.norm(expected)


def test_experts_of_a_gguf_file_stay_quantized(tmp_path):
    """In several formats, as llama.cpp stores them. All experts are chosen, because rounding may change a choice."""
    sizes = {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 512,
    }
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 3, "num_experts_per_tok": 3}
    model = random_model(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        sizes | heads | experts,
        sentencepiece_tokenizer(),
    )
    types = {"down_proj": GGMLQuantizationType.Q6_K, "v_proj": GGMLQuantizationType.Q6_K}
    path = write_gguf(
        tmp_path / "m.gguf", model, ggml_type=GGMLQuantizationType.Q4_K, ggml_types=types
    )
    checkpoint = open_checkpoint(path)
    spec = model_spec(checkpoint.config, path)
    (tokens,) = prompts(60)
    expected = Runner(torch_decoder(spec, checkpoint)).step({0: tokens})[0]
    checkpoint.bytes_read = 0
    logits = Runner(native_decoder(spec, checkpoint)).step({0: tokens})[0]
    assert checkpoint.bytes_read < 1.1 * path.stat().st_size
    assert torch.linalg.norm(logits - expected) < 0.05 * torch.linalg.norm(expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_logits_do_not_depend_on_the_step_nor_on_the_number_of_threads(name, isa, tmp_path):
    select_isa(isa)
    spec = mixture(replace(SHARED, intermediate_size=160))
    checkpoint = random_checkpoint(tmp_path, spec)
    # More than a slice of a step, but without vector instructions that would take half a minute.
    longest = 700 if isa else 200
    texts = prompts(longest, 90, 33, 20)
    alone = native_decoder(spec, checkpoint, num_threads=1, **FORMATS[name])
    expected = [Runner(alone, 1, 720).step({0: text})[0] for text in texts]
    for num_threads in (2, 5):
        decoder = native_decoder(spec, checkpoint, num_threads=num_threads, **FORMATS[name])
        runner = Runner(decoder, len(texts), 720)
        for sizes in (
            [1, 20, 0, 1],
            [40, 0, 10, 1],
            [1, 1, 1, 1],
            [longest - 50, 30, 7, 0],
            [8, 39, 15, 17],
        ):
            starts = list(runner.computed)
            chunks = {
                i: texts[i][start : start + size]
                for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
                if size
            }
            for i, logits in runner.step(chunks).items():
                of_chunk = expected[i][starts[i] : runner.computed[i]]
                assert torch.equal(logits.view(torch.int32), of_chunk.view(torch.int32))


@pytest.mark.parametrize(
    "name",
    [
        "layers.2.mlp.gate.weight",
        "layers.2.mlp.gate.bias",
        "layers.2.mlp.gate.e_score_correction_bias",
        "layers.0.mlp.experts.1.gate_proj.weight",
        "layers.0.mlp.experts.2.down_proj.weight",
        "layers.0.mlp.experts.2.down_proj.bias",
        "layers.2.mlp.shared_expert_gate.weight",
        "layers.2.mlp.shared_experts.up_proj.weight",
    ],
)
def test_a_damaged_number_makes_all_logits_nan(name, tmp_path):
    def spoil(tensors):
        tensors[name].view(-1)[1] = torch.nan

    experts = ExpertsSpec(
        3,
        3,
        64,
        scoring="sigmoid",
        has_correction_bias=True,
        has_router_bias=True,
        has_biases=True,
        shared_intermediate_size=32,
        has_shared_gate=True,
    )
    spec = mixture(experts, tie_word_embeddings=False)
    checkpoint = random_checkpoint(tmp_path, spec, edit=spoil)
    logits = Runner(native_decoder(spec, checkpoint)).step({0: [1, 2, 3]})[0]
    assert logits.isnan().all()


def test_quantization_rejects_damaged_experts(tmp_path):
    def spoil(tensors):
        tensors["layers.2.mlp.experts.7.down_proj.weight"][3, 5] = torch.nan

    spec = mixture(PLAIN)
    checkpoint = random_checkpoint(tmp_path, spec, edit=spoil)
    with pytest.raises(
        CheckpointError, match=r"layers\.2\.mlp\.experts\.7\.down_proj\.weight.*NaN"
    ):
        native_decoder(spec, checkpoint, quantization="int4")


def test_groups_with_too_few_experts_are_not_supported(tmp_path):
    spec = mixture(ExpertsSpec(8, 3, 64, num_groups=4, num_groups_per_token=1))
    with pytest.raises(NotSupportedNatively, match="are too few for 3 experts per token"):
        native_decoder(spec, tmp_path)
