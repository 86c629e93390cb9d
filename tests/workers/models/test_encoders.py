"""Every encoder gives the hidden states of transformers, whatever shares the step."""

import functools
import json
import random
import re

import pytest
import torch
import transformers
from engine.workers.cpu.library import NotSupportedNatively
from gguf import PoolingType
from support.checkpoints.published_encoders import PUBLISHED_ENCODERS, save_encoder, write_encoder
from support.gguf.bert import write_bert, write_embedding_gemma, write_rotary_encoder
from support.gguf.t5 import write_t5
from support.workers.decoders import Runner, load_decoder, load_native_decoder

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 1200,
}
T5 = {"d_kv": 8, "d_ff": 80, "n_positions": 1200, "relative_attention_num_buckets": 8}
MODELS = {
    "t5": ("T5EncoderModel", T5),
    "umt5": ("UMT5EncoderModel", T5),
    "bert": ("BertModel", {}),
    "bert-generation": ("BertGenerationEncoder", {}),
    "dpr": ("DPRQuestionEncoder", {}),
    "splinter": ("SplinterModel", {}),
    "bert-masked-lm": ("BertForMaskedLM", {"hidden_act": "gelu_new"}),
    "distilbert": (
        "DistilBertModel",
        {"dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 6},
    ),
    "albert": ("AlbertForMaskedLM", {"embedding_size": 32}),
    "albert-groups": ("AlbertModel", {"embedding_size": 48, "num_hidden_groups": 2}),
    "deberta-v2": (
        "DebertaV2Model",
        {"relative_attention": True, "position_buckets": 32, "norm_rel_ebd": "layer_norm"}
        | {"share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False}
        | {"max_relative_positions": 90, "conv_kernel_size": 3, "conv_act": "gelu"},
    ),
    "deberta-v2-own-projections": (
        "DebertaV2ForMaskedLM",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 2},
    ),
    "deberta": (
        "DebertaModel",
        {"relative_attention": True, "pos_att_type": "c2p|p2c", "position_biased_input": False}
        | {"max_relative_positions": 90},
    ),
    "ernie": ("ErnieModel", {"use_task_id": True, "type_vocab_size": 4}),
    "esm": (
        "EsmForMaskedLM",
        {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 5}
        | {"pad_token_id": 1},
    ),
    "esm-absolute": (
        "EsmModel",
        {"emb_layer_norm_before": True, "pad_token_id": 1, "mask_token_id": 0},
    ),
    "esm-1b": (
        "EsmModel",
        {"emb_layer_norm_before": True, "token_dropout": True, "mask_token_id": 5}
        | {"pad_token_id": 1},
    ),
    "megatron-bert": ("MegatronBertForMaskedLM", {}),
    "convbert": ("ConvBertModel", {"embedding_size": 32, "conv_kernel_size": 5}),
    "esmc": ("EsmcForMaskedLM", {"pad_token_id": 1}),
    "mobilebert": (
        "MobileBertForMaskedLM",
        {"hidden_size": 64, "intra_bottleneck_size": 48, "embedding_size": 32}
        | {"num_feedforward_networks": 3},
    ),
    "rembert": ("RemBertModel", {"input_embedding_size": 32}),
    "roberta-prelayernorm": ("RobertaPreLayerNormModel", {"pad_token_id": 1}),
    "roformer": ("RoFormerModel", {}),
    "roformer-small": ("RoFormerForMaskedLM", {"embedding_size": 32}),
    "ultrabert": ("UltrabertForMaskedLM", {"num_key_value_heads": 2, "sliding_window": 21}),
    "xlm-roberta-xl": ("XLMRobertaXLModel", {"pad_token_id": 1}),
    "electra": ("ElectraForPreTraining", {"embedding_size": 48}),
    "electra-small": ("ElectraModel", {"embedding_size": 32}),
    "roberta": ("RobertaModel", {"pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaModel", {"pad_token_id": 1}),
    "mpnet": ("MPNetModel", {"pad_token_id": 1}),
    "modernbert": (
        "ModernBertModel",
        {"local_attention": 32, "num_hidden_layers": 4, "pad_token_id": 1},
    ),
    "modernbert-biases": (
        "ModernBertForMaskedLM",
        {"norm_bias": True, "mlp_bias": True, "attention_bias": True, "local_attention": 6}
        | {"pad_token_id": 1},
    ),
    "nomic-bert": ("NomicBertModel", {"pad_token_id": 1}),
    "gte": ("GteModel", {"pad_token_id": 1, "type_vocab_size": 1}),
    "gte-without-types": ("GteForMaskedLM", {"pad_token_id": 1, "type_vocab_size": 0}),
    "jina-embeddings-v3": ("JinaEmbeddingsV3Model", {"pad_token_id": 1}),
    "eurobert": ("EuroBertModel", {"num_key_value_heads": 2, "pad_token_id": 1}),
    "qwen2-without-causal-mask": ("Qwen2Model", {"is_causal": False, "num_key_value_heads": 2}),
    "deepseek-v3-bidirectional": (
        "DeepseekV3Model",
        {"is_causal": False, "num_key_value_heads": 6, "first_k_dense_replace": 3}
        | {"q_lora_rank": 20, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        | {"v_head_dim": 12, "head_dim": 8, "rope_interleave": True},
    ),
    "lfm2-bidirectional": (
        "Lfm2Model",
        {"is_causal": False, "num_key_value_heads": 2, "block_auto_adjust_ff_dim": False}
        | {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    ),
    "voyage": ("Qwen3Model", {"is_causal": False, "num_key_value_heads": 2, "head_dim": 16}),
    "embedding-gemma": (
        "Gemma3TextModel",
        {"use_bidirectional_attention": True, "sliding_window": 64, "head_dim": 8}
        | {"num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"num_hidden_layers": 4, "query_pre_attn_scalar": 8},
    ),
    "embedding-gemma-2": (
        "EmbeddingGemma2Model",
        {"sliding_window": 31, "head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 2}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
        | {"hidden_size_per_layer_input": 32, "embedding_dim": 40},
    ),
}


PUBLISHED_AS = {
    "deepseek-v3-bidirectional": "DeepseekV3BidirectionalModel",
    "embedding-gemma": "EmbeddingGemmaModel",
    "lfm2-bidirectional": "Lfm2BidirectionalModel",
    "voyage": "VoyageQwen3BidirectionalEmbedModel",
}
"""The architecture of published files, by the name of a family; by default that of transformers."""

WITH_KNOWN_PARTS = (
    *(
        "deberta",
        "ernie",
        "esm",
        "esm-1b",
        "esm-absolute",
        "megatron-bert",
        "mobilebert",
        "rembert",
    ),
    *("convbert", "esmc", "roberta-prelayernorm", "roformer", "roformer-small", "ultrabert"),
    "xlm-roberta-xl",
)
"""The families whose parts other families have, too, so that short texts are enough."""

IN_TORCH = {
    *("albert", "albert-groups", "convbert", "deberta", "deberta-v2", "deberta-v2-own-projections"),
    *("electra-small", "esm-1b", "lfm2-bidirectional", "mobilebert", "rembert", "roformer-small"),
}
"""The families that native programs do not compute."""


def _convolve_neighbors(module, hidden_states, **_others):
    gate, output_gate, x = module.in_proj(hidden_states).mT.chunk(3, -2)
    convolved = torch.nn.functional.conv1d(
        gate * x, module.conv.weight, module.conv.bias, padding=1, groups=len(module.conv.weight)
    )
    return module.out_proj((output_gate * convolved).mT)


@pytest.fixture(
    scope="module", params=[*MODELS, *(f"{name} native" for name in MODELS if name not in IN_TORCH)]
)
def models(request, tmp_path_factory):
    """Engine's encoder and the model of transformers."""
    key, *native = request.param.split()
    name, differences = MODELS[key]
    path = tmp_path_factory.mktemp(key)
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    fields = SMALL | differences
    if key == "embedding-gemma-2":
        fields = {"text_config": fields, "vision_config": None, "audio_config": None}
    config = model_class.config_class(**fields)
    reference = model_class._from_config(config, attn_implementation="eager")
    for parameter_name, parameter in reference.named_parameters():
        if re.search(r"[Nn]orm|bias$", parameter_name):
            torch.nn.init.normal_(parameter, 0.8, 0.3)
        elif parameter.requires_grad:
            torch.nn.init.normal_(parameter, 0, 0.15)
    reference.save_pretrained(path)
    # The config of a saved Gemma has a smaller window.
    reference = model_class.from_pretrained(path, attn_implementation="eager")
    for layer in reference.layers if key == "lfm2-bidirectional" else ():
        if hasattr(layer, "conv"):
            layer.conv.forward = functools.partial(_convolve_neighbors, layer.conv)
    if key in PUBLISHED_AS:
        config = json.loads((path / "config.json").read_text())
        config = {k: v for k, v in config.items() if k not in ("is_causal", "architectures")}
        config |= {"architectures": [PUBLISHED_AS[key]], "num_labels": 32}
        (path / "config.json").write_text(json.dumps(config))
    load = load_native_decoder if native else load_decoder
    if key == "embedding-gemma-2":
        # It is a part of the pooler.
        reference.language_model.embedding_projection = torch.nn.Identity()
    # The base model of a T5 is its encoder without the embedding's name.
    compared = reference if key.endswith("t5") else reference.base_model
    compared = getattr(compared, "bert_model", compared)
    lengths = (1, 7, 100) if key in WITH_KNOWN_PARTS else (1, 7, 190, 64, 1100, 300)
    return load(path, max_model_len=1100), compared.eval(), lengths


def test_hidden_states_equal_those_of_transformers(models):
    encoder, reference, lengths = models
    runner = Runner(encoder, num_requests=6, max_tokens=1100)
    rng = random.Random(1)
    prompts = {
        request: [rng.randrange(2, SMALL["vocab_size"]) for _ in range(length)]
        for request, length in enumerate(lengths)
    }
    # Some of the tokens of an ESM are masked.
    prompts[len(lengths) - 1][3:6] = [5, 5, 5]
    hidden = runner.hidden(prompts).split([len(prompt) for prompt in prompts.values()])
    for prompt, found in zip(prompts.values(), hidden, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).last_hidden_state[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


SIZES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}
"""The names that nomic-embed-text uses."""


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize("family", ["nomic", "gte", "modernbert", "ultrabert"])
def test_configs_are_read_as_published(family, load, tmp_path):
    """The authors' checkpoints have other configs than those that transformers writes."""
    names = {"nomic": "NomicBertModel", "gte": "GteModel", "modernbert": "ModernBertModel"}
    names["ultrabert"] = "UltrabertModel"
    model_class = getattr(transformers, names[family])
    torch.manual_seed(1)
    own = {"pad_token_id": 1, "layer_norm_eps": 1e-12}
    if family == "gte":
        # Scaling by 8 as published: a base of 8 * 20,000, and frequencies divided by 8^(2 / 8).
        theta, factor = 160_000.0, 8 ** (2 / 8)
        own["rope_parameters"] = {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if family == "modernbert":
        own |= {"local_attention": 16, "global_attn_every_n_layers": 2, "norm_eps": 1e-5}
    if family == "ultrabert":
        own = {"sliding_window": 8, "layer_types": ["full_attention", *["sliding_attention"] * 2]}
    config = model_class.config_class(**SMALL | own)
    reference = model_class._from_config(config, attn_implementation="eager").eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    reference.save_pretrained(tmp_path)
    published = SMALL | {"layer_norm_eps": 1e-12}
    if family == "nomic":
        published = {SIZES.get(name, name): value for name, value in published.items()}
        published |= {
            "activation_function": "swiglu",
            "rotary_emb_base": 1000,
            "type_vocab_size": 2,
        }
        published |= {"architectures": ["NomicBertModel"], "model_type": "nomic_bert"}
        published |= {"rotary_emb_fraction": 1.0, "rotary_scaling_factor": None, "prenorm": False}
    elif family == "gte":
        published |= {"architectures": ["NewModel"], "model_type": "new", "hidden_act": "gelu"}
        published |= {"rope_theta": 20_000, "rope_scaling": {"type": "ntk", "factor": 8.0}}
        published |= {"position_embedding_type": "rope", "type_vocab_size": config.type_vocab_size}
    elif family == "ultrabert":
        published |= {"architectures": ["UltrabertModel"], "model_type": "ultrabert"}
        published |= {"attention_windows": [0, 8, 8], "rope_theta": [2.56e6, 1e4, 1e4]}
        del published["layer_norm_eps"]
    else:
        published |= {"architectures": ["ModernBertForMaskedLM"], "model_type": "modernbert"}
        published |= {"local_attention": 16, "global_attn_every_n_layers": 2, "norm_eps": 1e-5}
        published |= {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0}
        del published["layer_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(published))
    prompt = list(range(2, 90))
    found = Runner(load(tmp_path, max_model_len=200), 1).hidden({0: prompt})
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).last_hidden_state[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize(
    "key",
    ["bert", "nomic-bert", "jina-bert-v3", "modern-bert", "gemma-embedding", "t5", "umt5"],
)
def test_gguf_encoders_give_the_hidden_states_of_transformers(key, load, tmp_path):
    same = {"jina-bert-v3": "jina-embeddings-v3", "modern-bert": "modernbert"}
    same |= {"gemma-embedding": "embedding-gemma"}
    name, differences = MODELS[same.get(key, key)]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    reference = model_class(model_class.config_class(**SMALL | differences)).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    path = tmp_path / "tiny.gguf"
    if key == "gemma-embedding":
        write_embedding_gemma(path, reference, [])
    elif key.endswith("t5"):
        write_t5(path, reference)
    elif key in same:
        write_rotary_encoder(path, reference, key)
    else:
        write_bert(path, reference, None, PoolingType.MEAN)
    tokens = [random.Random(1).randrange(4, 97) for _ in range(30)]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).last_hidden_state[0]
    found = Runner(load(path)).hidden({0: tokens})
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize("name", PUBLISHED_ENCODERS)
def test_encoders_without_a_class_in_transformers(name, load, tmp_path):
    reference = save_encoder(name, tmp_path)
    tokens = [random.Random(1).randrange(4, 97) for _ in range(130)]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).last_hidden_state[0]
    if name == "nomic-bert-moe" and load is load_native_decoder:
        with pytest.raises(NotSupportedNatively, match="sum of experts"):
            load(tmp_path)
    else:
        found = Runner(load(tmp_path)).hidden({0: tokens})
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    if name == "nomic-bert-moe":
        # The converter leaves this bias out.
        for layer in reference.layers[1::2]:
            torch.nn.init.zeros_(layer.mlp.bias)
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).last_hidden_state[0]
    for splits_gates in (False, True):
        path = write_encoder(tmp_path, name, splits_gates=splits_gates)
        found = Runner(load(path)).hidden({0: tokens})
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
