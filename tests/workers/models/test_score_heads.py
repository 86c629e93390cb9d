"""Every classification head gives the logits of transformers, for texts and for pairs of texts."""

import json
import random

import pytest
import torch
import transformers
from engine.workers.cpu.library import NotSupportedNatively
from gguf import PoolingType
from safetensors.torch import load_file, save_file
from support.gguf.bert import write_bert, write_rotary_encoder
from support.workers.decoders import Runner, load_decoder, load_native_decoder

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "num_labels": 3,
    "pad_token_id": 1,
}
DISTILBERT = {"dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 6}
GPT2 = {"n_embd": 48, "n_inner": 80, "n_layer": 2, "n_head": 6, "n_positions": 256}
MODELS = {
    "BertForSequenceClassification": ({}, 0),
    "RobertaForSequenceClassification": ({}, 0),
    "XLMRobertaForSequenceClassification": ({"num_labels": 1}, 0),
    "DistilBertForSequenceClassification": (DISTILBERT, 0),
    "GPT2ForSequenceClassification": (GPT2, -1),
    "AlbertForSequenceClassification": ({"embedding_size": 32}, 0),
    "ConvBertForSequenceClassification": ({"embedding_size": 48, "hidden_act": "mish"}, 0),
    "DebertaForSequenceClassification": (
        {"relative_attention": True, "pos_att_type": "c2p|p2c"},
        0,
    ),
    "ErnieForSequenceClassification": ({"use_task_id": True}, 0),
    "EsmcForSequenceClassification": ({}, 0),
    "EsmForSequenceClassification": ({"position_embedding_type": "rotary"}, 0),
    "IBertForSequenceClassification": ({}, 0),
    "LukeForSequenceClassification": (
        {"entity_vocab_size": 9, "entity_emb_size": 16, "type_vocab_size": 1},
        0,
    ),
    "MegatronBertForSequenceClassification": ({}, 0),
    "MobileBertForSequenceClassification": (
        {"intra_bottleneck_size": 24, "embedding_size": 32, "num_attention_heads": 2},
        0,
    ),
    "RoFormerForSequenceClassification": ({"hidden_act": "relu"}, 0),
    "UltrabertForSequenceClassification": ({}, 0),
    "DebertaV2ForSequenceClassification": (
        {"relative_attention": True, "pos_att_type": "c2p", "position_buckets": 16}
        | {"pooler_hidden_act": "sigmoid"},
        0,
    ),
    "ElectraForSequenceClassification": ({"embedding_size": 32}, 0),
    "Data2VecTextForSequenceClassification": ({}, 0),
    "MPNetForSequenceClassification": ({}, 0),
    "ModernBertForSequenceClassification": (
        {"classifier_pooling": "mean", "norm_bias": True, "classifier_activation": "silu"},
        "mean",
    ),
    "GteForSequenceClassification": ({"type_vocab_size": 1}, 0),
    "JinaEmbeddingsV3ForSequenceClassification": ({"num_labels": 1}, 0),
    "NomicBertForSequenceClassification": ({"type_vocab_size": 2}, 0),
    "EuroBertForSequenceClassification": ({"num_key_value_heads": 2}, slice(None)),
    "ModernBertDecoderForSequenceClassification": ({"classifier_bias": True}, -1),
    "LlamaForSequenceClassification": ({"num_labels": 1}, -1),
    "JambaForSequenceClassification": (
        {"num_key_value_heads": 2, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
        | {"mamba_d_state": 4, "use_mamba_kernels": False},
        -1,
    ),
    "Qwen2ForSequenceClassification": ({"num_key_value_heads": 2}, -1),
    "Qwen3ForSequenceClassification": ({"head_dim": 8, "num_key_value_heads": 2}, -1),
    "BertForTokenClassification": ({}, slice(None)),
    "DistilBertForTokenClassification": (DISTILBERT, slice(None)),
    "AlbertForTokenClassification": ({"embedding_size": 48}, slice(None)),
    "IBertForTokenClassification": ({}, slice(None)),
    "LukeForTokenClassification": ({"entity_vocab_size": 9, "entity_emb_size": 16}, slice(None)),
    "ElectraForTokenClassification": ({"embedding_size": 48}, slice(None)),
    "ModernBertForTokenClassification": ({"norm_bias": True}, slice(None)),
    "NomicBertForTokenClassification": ({"type_vocab_size": 2}, slice(None)),
    "LlamaForTokenClassification": ({"num_labels": 1}, slice(None)),
    "GPT2ForTokenClassification": (GPT2, slice(None)),
    "RobertaForTokenClassification": ({}, slice(None)),
    "OpenAIPrivacyFilterForTokenClassification": (
        {"head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 5, "sliding_window": 6},
        slice(None),
    ),
}
"""Architecture -> differences of its config, and the rows of the hidden states that the head reads."""


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize("name", MODELS)
def test_scores_equal_those_of_transformers(name, load, tmp_path):
    differences, row = MODELS[name]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    config = model_class.config_class(**SMALL | differences)
    reference = model_class._from_config(config, attn_implementation="eager").eval()
    for parameter in filter(lambda each: each.requires_grad, reference.parameters()):
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    reference.save_pretrained(tmp_path)
    try:
        model = load(tmp_path, max_model_len=200)
    except NotSupportedNatively:
        model = load_decoder(tmp_path, max_model_len=200)
    rng = random.Random(1)
    for request, (first, second) in enumerate(((1, 0), (7, 5), (90, 63))):
        prompt = [rng.randrange(2, SMALL["vocab_size"]) for _ in range(first + second)]
        types = [0] * first + [1] * second
        ids, options = prompt, {}
        if model.spec.tells_segments:
            ids = [i + SMALL["vocab_size"] * t for i, t in zip(prompt, types, strict=True)]
            options = {"token_type_ids": torch.tensor([types])}
        hidden = Runner(model, 3).hidden({request: ids})
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt]), **options).logits[0]
        pooled = hidden.float().mean(0) if row == "mean" else hidden[row].float()
        found = model.score_head(pooled)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize(
    "name",
    [
        "XLMRobertaForSequenceClassification",
        "ModernBertForSequenceClassification",
        "BertForSequenceClassification",
    ],
)
def test_heads_in_gguf_files_give_the_scores_of_transformers(name, load, tmp_path):
    model_class = getattr(transformers, name)
    is_modern = name.startswith("Modern")
    differences = {"classifier_pooling": "mean"} if is_modern else {"type_vocab_size": 1}
    # The files of Jina's first rerankers have a projection for one class, called like a dense layer.
    differences |= {"num_labels": 1 if name.startswith("Bert") else 3}
    torch.manual_seed(0)
    reference = model_class(model_class.config_class(**SMALL | differences)).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    path = tmp_path / "tiny.gguf"
    if is_modern:
        write_rotary_encoder(path, reference, "modern-bert")
    else:
        write_bert(path, reference, None, PoolingType.RANK)
    model = load(path, max_model_len=200)
    prompt = [random.Random(1).randrange(2, SMALL["vocab_size"]) for _ in range(30)]
    hidden = Runner(model, 1).hidden({0: prompt}).float()
    found = model.score_head(hidden.mean(0) if is_modern else hidden[0])
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
        if name.startswith("Bert"):
            # The converter drops the pooler.
            expected = reference.classifier(hidden[0])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_a_llama_for_classification_has_its_own_names(load, tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL)
    reference = transformers.LlamaForSequenceClassification(config).eval()
    reference.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields = {name: value for name, value in fields.items() if "label" not in name}
    fields |= {"architectures": ["LlamaForClassification"], "classification_out_size": 3}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["classification_head.weight"] = tensors.pop("score.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    model = load(tmp_path, max_model_len=200)
    prompt = [random.Random(1).randrange(2, SMALL["vocab_size"]) for _ in range(30)]
    found = model.score_head(Runner(model, 1).hidden({0: prompt})[-1].float())
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


SPARSE = {
    "Bert": ({"hidden_act": "relu"}, "max", 1),
    "DistilBert": (DISTILBERT | {"activation": "relu"}, "sum", 1),
    "Roberta": ({"hidden_act": "relu"}, "max", 2),
    "ModernBert": (
        {"norm_bias": True, "decoder_bias": False, "classifier_activation": "tanh"},
        "sum",
        2,
    ),
}
"""Family -> differences of its config, and how the weights of a text's tokens are combined."""


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_heads_combine_the_logits_of_all_tokens(name, tmp_path):
    differences, reduction, num_logarithms = SPARSE[name]
    model_class = getattr(transformers, f"{name}ForMaskedLM")
    torch.manual_seed(0)
    reference = model_class(model_class.config_class(**SMALL | differences)).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    reference.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields |= {"architectures": [f"{name}SpladeSparseEmbeddingModel"], "splade_pooling": reduction}
    fields |= {"splade_num_logarithms": num_logarithms}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = load_native_decoder(tmp_path, max_model_len=254)
    # The head reads 256 tokens at once.
    prompt = [random.Random(1).randrange(2, SMALL["vocab_size"]) for _ in range(250)]
    found = model.score_head(Runner(model, 1).hidden({0: prompt}).float().repeat(2, 1))
    with torch.inference_mode():
        weights = reference(torch.tensor([prompt])).logits[0]
    for _ in range(num_logarithms):
        weights = weights.relu().log1p()
    expected = weights.amax(0) if reduction == "max" else 2 * weights.sum(0)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokens", [[5], [9, 7], [9, 7, 11]])
def test_the_logits_of_tokens_are_scores(tied, tokens, load, tmp_path):
    config = transformers.Qwen3Config(
        **SMALL | {"head_dim": 8, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    )
    torch.manual_seed(0)
    reference = transformers.Qwen3ForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    names = [f"token {i}" for i in tokens]
    fields |= {"classifier_from_token": names, "classifier_token_ids": tokens}
    file.write_text(json.dumps(fields))
    model = load(tmp_path, max_model_len=200)
    prompt = list(range(2, 60))
    found = model.score_head(Runner(model, 1).hidden({0: prompt})[-1].float())
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt])).logits[0, -1][tokens]
    expected = logits[1:] - logits[:1] if len(tokens) == 2 else logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
