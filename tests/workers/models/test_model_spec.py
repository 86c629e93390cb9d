"""Reading of model configs, and rejection of unsupported ones."""

import pytest
import transformers
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.field_names import (
    read_text_config,
    with_common_names,
    with_known_names,
)
from engine.protocol.checkpoint.recurrent_layers import KimiDeltaAttention
from engine.protocol.errors import CheckpointError, ConfigError
from engine.workers.layers.parallel.shard import ModelShard
from engine.workers.layers.parallel.tensor_parallel import TensorParallel
from engine.workers.layers.rope import LinearScaling
from engine.workers.layers.specs.experts import ExpertsSpec
from engine.workers.models.families import model_spec
from support.families import SMALL
from support.vision.grid_configs import nemotron_omni_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
}
LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
MIXTURE = {
    "architectures": ["Glm4MoeForCausalLM"],
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "d_model": 64,
    "d_ff": 96,
    "d_kv": 16,
    "num_heads": 4,
    "num_layers": 2,
}
V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "head_dim": 16,
    "moe_intermediate_size": 16,
}
# As published: everything else is the default of transformers' class.
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "model_type": "siglip_vision_model",
        "patch_size": 14,
    },
}


def test_missing_fields_of_a_llama_have_its_defaults():
    spec = model_spec(LLAMA, "model")
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 2, 8)
    assert spec.attention_scale == 8**-0.5
    assert len(spec.layers) == 4
    assert spec.layers[0].rope.theta == 10_000.0
    assert not spec.tie_word_embeddings
    assert spec.windows_by_group == (frozenset({None}),)


def test_rope_of_transformers_4_and_5_read_alike():
    old = LLAMA | {"rope_theta": 500_000.0, "rope_scaling": LLAMA3_SCALING}
    new = LLAMA | {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 500_000.0}}
    older = LLAMA | {
        "rope_theta": 500_000.0,
        "rope_scaling": {"type": "llama3"}
        | {k: v for k, v in LLAMA3_SCALING.items() if k != "rope_type"},
    }
    assert model_spec(old, "model") == model_spec(new, "model") == model_spec(older, "model")


def test_an_olmo_hybrid_rotates_if_its_config_has_a_base_in_either_spelling():
    hybrid = {"architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid"}
    hybrid |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    bases = ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}, {})
    ropes = [model_spec(LLAMA | hybrid | base, "model").layers[3].rope for base in bases]
    assert ropes[0] == ropes[1] and ropes[0].theta == 5e5 and ropes[2] is None


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_an_override_extends_a_model_saved_by_transformers_5(kind):
    saved = LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
    scaling = {kind: "linear", "factor": 4.0}
    rope = model_spec(saved | {"rope_scaling": scaling}, "model").layers[0].rope
    assert (rope.theta, rope.scaling) == (500_000.0, LinearScaling(4.0))
    for none in ({}, None):
        unscaled = model_spec(saved | {"rope_scaling": none}, "model").layers[0].rope
        assert (unscaled.theta, unscaled.scaling) == (500_000.0, None)


def test_an_override_extends_the_full_attention_of_a_gemma3_saved_by_transformers_5():
    text_config = GEMMA3_4B["text_config"] | {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    }
    spec = model_spec(GEMMA3_4B | {"text_config": text_config}, "model")
    local, everywhere = spec.layers[0].rope, spec.layers[5].rope
    assert (local.theta, local.scaling) == (2e4, None)
    assert (everywhere.theta, everywhere.scaling) == (2e6, LinearScaling(8.0))


def test_a_published_gemma3_config_is_read():
    spec = model_spec(GEMMA3_4B, "model")
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads) == (262_208, 8, 4)
    assert (spec.head_dim, spec.tie_word_embeddings) == (256, True)
    assert [layer.window for layer in spec.layers[:7]] == [1024] * 5 + [None, 1024]
    local, everywhere = spec.layers[0].rope, spec.layers[5].rope
    assert (local.theta, local.scaling) == (10_000.0, None)
    assert (everywhere.theta, everywhere.scaling) == (1_000_000.0, LinearScaling(8.0))


def test_gemma3_reads_the_same_after_a_round_trip_through_transformers_5():
    config = transformers.Gemma3TextConfig(**GEMMA3_4B["text_config"]).to_dict()
    config["architectures"] = ["Gemma3ForCausalLM"]
    expected = model_spec(GEMMA3_4B, "model")
    assert model_spec(config, "model").layers == expected.layers


def test_deepseek_ocr_2_has_the_sizes_of_its_authors_code():
    text = {
        "hidden_size": 1280,
        "intermediate_size": 6848,
        "num_hidden_layers": 12,
        "num_attention_heads": 10,
        "num_key_value_heads": 10,
        "vocab_size": 129_280,
        "moe_intermediate_size": 896,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 8192,
    }
    latent = {"use_mla": False, "kv_lora_rank": None, "qk_rope_head_dim": 0, "v_head_dim": 0}
    published = {
        "architectures": ["DeepseekOCR2ForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "language_config": text | latent | {"topk_method": "greedy"},
        "projector_config": {"input_dim": 896, "n_embed": 1280, "projector_type": "linear"},
        "vision_config": {"width": {"qwen2-0-5b": {"dim": 896}}},
    }
    reader = transformers.Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    config = transformers.DeepseekOcr2Config(
        text_config=text | {"mlp_layer_types": ["dense"] + ["sparse"] * 11},
        vision_config={"encoder_config": reader.to_dict()},
    ).to_dict()
    config["architectures"] = ["DeepseekOcr2ForConditionalGeneration"]
    known = with_known_names(ConfigFields(published, "c.json"))
    assert model_spec(known.config, "c.json") == model_spec(config, "c.json")
    assert known.integer("image_token_id") == config["image_token_id"]


def test_published_intern_s2_has_the_spec_of_qwen3_5():
    config = transformers.Qwen3_5MoeConfig().to_dict()
    config["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    config["vision_config"]["out_hidden_size"] = config["text_config"]["hidden_size"]
    published = config | {
        "architectures": ["InternS2PreviewForConditionalGeneration"],
        "model_type": "interns2_preview",
        "text_config": config["text_config"] | {"model_type": "interns2_preview_text"},
        "ts_config": {"model_type": "interns1_time_series"},
    }
    known = with_known_names(ConfigFields(published, "c.json"))
    assert model_spec(known.config, "c.json") == model_spec(config, "c.json")


def test_published_nemotron_omni_has_the_spec_of_its_names_in_transformers():
    config = nemotron_omni_config(SMALL, 96).to_dict() | {"audio_token_id": 95}
    config["architectures"] = ["NemotronH_Omni_Reasoning_V3"]
    names = {"text_config": "llm_config", "audio_config": "sound_config"}
    names |= {"audio_token_id": "sound_context_token_id", "image_token_id": "img_context_token_id"}
    names |= {"vision_hidden_size": "vit_hidden_size"}
    published = {names.get(name, name): value for name, value in config.items()}
    published |= dict.fromkeys(("architectures", "model_type"), "NemotronH_Nano_Omni_Reasoning_V3")
    published["architectures"] = [published["architectures"]]
    known = with_known_names(ConfigFields(published, "c.json"))
    spec = model_spec(known.config, "c.json")
    assert spec == model_spec(config, "c.json")
    assert spec.encoder is not None and spec.audio_encoder is not None
    ids = [known.integer(f"{name}_token_id") for name in ("image", "audio")]
    assert ids == [96, 95]


@pytest.mark.parametrize(
    "kind",
    [
        *("aria_text", "cohere", "cohere2", "emu3_text_model", "ernie4_5", "exaone4", "gemma"),
        *("gemma2", "gemma3_text", "glm4v_text", "glm_ocr_text", "gpt_oss", "granite", "lfm2"),
        *("llama", "ministral3", "mistral", "mllama_text_model", "olmo2", "paddleocr_vl_text"),
        *("persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen2_vl_text", "qwen3"),
        *("qwen3_5_text", "qwen3_moe", "qwen3_vl_text", "siglip_text_model", "smollm3"),
    ],
)
def test_a_nested_decoder_may_omit_the_sizes_that_are_defaults_in_transformers(kind):
    """Transformers saves only what differs from the defaults."""
    whole = ConfigFields({"text_config": {"model_type": kind}}, "c.json")
    text = read_text_config(whole)
    expected = transformers.AutoConfig.for_model(kind).to_dict()
    assert text is not None
    assert text.integer("hidden_size") and text.integer("num_hidden_layers")
    assert text.config == {name: expected[name] for name in text.config}


@pytest.mark.parametrize(
    ("differences", "message"),
    [
        (
            {"architectures": ["BltForCausalLM"]},
            "model: the architecture BltForCausalLM is not supported; all ",
        ),
        ({"architectures": ["BltForSequenceClassification"]}, "BltForSequenceClassification"),
        (
            {"architectures": ["Wav2Vec2ForPreTraining"]},
            "not supported; similar ones are Wav2Vec2ForCTC",
        ),
        ({"architectures": ["BambaForCausalLM"]}, "model_type 'llama' does not match the"),
        (
            {"architectures": None, "model_type": "blt"},
            "architecture of model_type 'blt' is not supported",
        ),
        (
            {"architectures": None, "model_type": None},
            "architecture of model_type None is not supported",
        ),
        (
            {"architectures": None, "model_type": "solar", "bskcn_3": [1]},
            "an earlier layer kept before layer 1, got ",
        ),
        (
            {"architectures": None, "model_type": "solar", "bskcn_tv": [1.0, 1.5]},
            "bskcn_tv must be a second number above 0 and at most 1, got 1.5",
        ),
        ({"rope_scaling": {"rope_type": "cubic"}}, "rope_type 'cubic' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"hidden_act": "prelu"}, "hidden_act 'prelu' is not supported"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer, got 0"),
        (
            {"num_hidden_layers": 2**30},
            "num_hidden_layers must be a positive integer, at most 10000, got 1073741824",
        ),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_key_value_heads": 3}, "8 must be a multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number that is not negative"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"head_dim": 7}, "even number of dimensions"),
        (
            {"architectures": ["BambaForCausalLM"], "model_type": "bamba", "hidden_act": "gelu"},
            "hidden_act 'gelu' is not supported in recurrent layers",
        ),
        (
            {"architectures": ["GptOssForCausalLM"], "swiglu_limit": 9.5},
            "swiglu_limit must be 7.0, got 9.5",
        ),
        (
            {"architectures": ["HYV4ForCausalLM"], "hidden_act": "gelu"},
            "hidden_act must be 'silu', got 'gelu'",
        ),
        (V4 | {"mlp_bias": True}, "mlp_bias must be false, got True"),
        (V4 | {"o_groups": 7}, "num_attention_heads 8 must be a multiple of o_groups 7"),
        (V4 | {"compress_ratios": [0, 8, 4, 4]}, "compress_ratios must be 0, 4 or 128 for each"),
        (V4 | {"compress_ratios": [4]}, "compress_ratios must be 0, 4 or 128 for each"),
        (V4 | {"layer_types": ["full_attention"] * 4}, "layer_types has 'full_attention'"),
        (V4 | {"partial_rotary_factor": 0.01}, "partial_rotary_factor gives 0 rotated elements"),
        (V4 | {"rope_scaling": {"type": "dynamic", "factor": 2}}, "only the rope types default"),
        (MIXTURE | {"num_experts": 8, "n_group": 3}, "n_group 3 must divide 8 experts"),
        (
            T5 | {"relative_attention_num_buckets": 64, "relative_attention_max_distance": 9},
            "relative_attention_max_distance must be an integer of at least 33, at most 65536, got 9",
        ),
        (
            MIXTURE | {"num_experts": 8, "n_group": 4, "topk_group": 5},
            "topk_group must be at most n_group 4, got 5",
        ),
        (
            MIXTURE | {"num_experts": 8, "n_group": 4, "num_experts_per_tok": 3},
            "num_experts_per_tok must be at most 2, the experts in topk_group 1 groups, got 3",
        ),
    ],
)
def test_unsupported_configs_are_rejected(differences, message):
    with pytest.raises(CheckpointError) as caught:
        model_spec(LLAMA | differences, "model")
    assert message in str(caught.value)


def test_a_published_kimi_linear_config_is_read():
    """Its layers are numbered from 1, and several fields have different names."""
    config = LLAMA | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "model_max_length": 4096,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "full_attn_layers": [3],
            "kda_layers": [1, 2, 4],
            "head_dim": 24,
            "num_heads": 2,
            "short_conv_kernel_size": 3,
        },
        "num_experts": 6,
        "num_experts_per_token": 3,
        "num_expert_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 20,
        "moe_renormalize": False,
        "num_shared_experts": 2,
    }
    del config["max_position_embeddings"]
    spec = model_spec(config, "model")
    assert spec.max_position_embeddings == 4096
    assert [layer.attends for layer in spec.layers] == [False, False, True, False]
    assert [layer.experts is not None for layer in spec.layers] == [False, True, True, True]
    assert spec.layers[0].recurrent == KimiDeltaAttention(2, 24, 3)
    experts = spec.layers[1].experts
    assert (experts.num_experts, experts.num_experts_per_token, experts.num_groups) == (6, 3, 2)
    assert (experts.shared_intermediate_size, experts.renormalizes) == (40, False)
    with pytest.raises(CheckpointError, match="mla_use_nope"):
        model_spec(config | {"mla_use_nope": False}, "model")


def test_a_wrong_number_of_layer_types_is_rejected():
    config = LLAMA | {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "layer_types": ["full_attention"] * 3,
    }
    with pytest.raises(CheckpointError, match="layer_types must have 4 entries"):
        model_spec(config, "model")


def test_longrope_needs_a_factor_for_each_frequency():
    config = LLAMA | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]},
    }
    with pytest.raises(CheckpointError, match="short_factor must be a list of 4 positive numbers"):
        model_spec(config, "model")


def test_settings_of_numbered_layers_are_read():
    """Config files of transformers pad the numbers of layers with zeros."""
    config = transformers.AutoConfig.for_model("gemma4_text").to_dict()
    assert "05" in config["per_layer_config"]
    spec = model_spec(config | {"architectures": ["Gemma4ForCausalLM"]}, "config.json")
    assert [i for i, layer in enumerate(spec.layers) if layer.head_dim == 512] == [
        5,
        11,
        17,
        23,
        29,
    ]
    wrong = config | {"per_layer_config": {"30": {"head_dim": 512}}}
    with pytest.raises(CheckpointError, match="per_layer_config has '30'"):
        model_spec(wrong | {"architectures": ["Gemma4ForCausalLM"]}, "config.json")


@pytest.mark.parametrize(
    ("model_type", "family", "absent"),
    [
        ("deepseek_v3", "DeepseekV3", ("n_group", "q_lora_rank", "routed_scaling_factor")),
        ("gemma", "Gemma", ("head_dim",)),
        ("glm_moe_dsa", "GlmMoeDsa", ("rms_norm_eps",)),
        ("granite_swa", "GraniteSWA", ("tie_word_embeddings",)),
        ("mimo_v2_flash", "MiMoV2Flash", ("attention_value_scale",)),
        ("minicpm3", "MiniCPM3", ("dim_model_base", "scale_depth")),
        ("ministral3", "Ministral3", ("rope_parameters",)),
        ("phimoe", "Phimoe", ("rope_parameters",)),
        ("starcoder2", "Starcoder2", ("intermediate_size", "num_key_value_heads")),
    ],
)
def test_absent_fields_have_the_defaults_of_transformers(model_type, family, absent):
    config = transformers.AutoConfig.for_model(model_type).to_dict()
    config |= {"architectures": [f"{family}ForCausalLM"]}
    spec = model_spec(config, "model")
    for name in absent:
        others = {key: value for key, value in config.items() if key != name}
        assert model_spec(others, "model") == spec, name


@pytest.mark.parametrize("sizes", [(3, 0), (8, 2)])
def test_more_ranks_than_elements_of_experts_are_refused(sizes):
    size, shared = sizes
    experts = ExpertsSpec(4, 2, size, shared_intermediate_size=shared)
    shard = ModelShard(range(1), 1, TensorParallel(1, 4))
    with pytest.raises(ConfigError, match=f"only {min(filter(None, sizes))} intermediate elements"):
        shard.placement(experts)


@pytest.mark.parametrize("field", ["output_vocab_size", "unpadded_vocab_size"])
def test_frontends_accept_only_tokens_that_the_model_can_write(field: str) -> None:
    fields = ConfigFields({"vocab_size": 120, field: 97}, "config.json")
    found = with_common_names(fields)
    assert (found.get("vocab_size"), found.get("num_unused_embeddings")) == (97, 23)


@pytest.mark.parametrize("start", ["Transformers", "TransformersMoE", "TransformersMultiModal"])
def test_names_that_vllm_gives_to_all_models_mean_the_family_of_the_type(start):
    """They say what the model is for, as the names of families do."""
    for end, own in (
        ("ForCausalLM", "LlamaForCausalLM"),
        ("EmbeddingModel", "LlamaModel"),
        ("ForSequenceClassification", "LlamaForSequenceClassification"),
    ):
        found, expected = (
            model_spec(LLAMA | {"architectures": [name]}, "config.json")
            for name in (f"{start}{end}", own)
        )
        assert found == expected
