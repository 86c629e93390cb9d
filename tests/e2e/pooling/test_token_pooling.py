"""Vectors and classes of tokens, rewards of steps, late interaction and texts in parts, over HTTP and offline."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine.frontend.client.engine_client import EngineDead
from engine.frontend.model_source.pooler import change_classifier, change_pooler
from engine.frontend.offline.llm import LLM
from engine.protocol.config.model import Activation, ClassifierConfig, PoolerConfig
from engine.protocol.errors import CheckpointError, ConfigError, ParameterError
from safetensors.torch import save_file
from support.checkpoints.tiny import QWEN3, qwen3_directory, random_model, sentencepiece_tokenizer
from support.checkpoints.words_bert import bert_directory
from support.servers.server import Server, assert_nothing_is_held

pytestmark = pytest.mark.sampled

BACKENDS = ("native", "torch")
STEP = 7
PROMPTS = [[5, 6, STEP, 9], [*range(10, 70), STEP, 3, 4, STEP], [STEP]]


def pool(server: Server, **body: Any) -> list[np.ndarray]:
    status, answer = server.post("/pooling", body)
    assert status == 200 and answer["id"].startswith("pooling-"), answer
    return [np.array(entry["data"], np.float32) for entry in answer["data"]]


def token_classifier(path: Path) -> Any:
    """Write a BERT that classifies tokens, and return transformers' model."""
    bert_directory(path, 3)
    config = transformers.BertConfig.from_pretrained(path)
    torch.manual_seed(3)
    model = transformers.BertForTokenClassification(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5)
    model.save_pretrained(path)
    return model


def privacy_filter(path: Path) -> Any:
    """Write a Privacy Filter of OpenAI with few experts, and return transformers' model."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.save_pretrained(path)
    sizes = {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6}
    config = transformers.OpenAIPrivacyFilterConfig(
        **QWEN3 | sizes, num_labels=4, vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1
    )
    torch.manual_seed(3)
    model = transformers.OpenAIPrivacyFilterForTokenClassification._from_config(
        config, attn_implementation="eager"
    ).eval()
    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("make", [token_classifier, privacy_filter])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_encoder_classifies_each_token_of_a_text(
    tmp_path: Path, backend: str, make: Any
) -> None:
    model = make(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["seven wizards", "the quick brown fox jumps over the lazy dog", "tea"]
    flags = ("--cpu-backend", backend, "--dtype", "float32")
    with Server(str(tmp_path), *flags) as server:
        found = pool(server, input=texts)
        scores = pool(server, input=texts, task="token_classify", use_activation=False)
        assert np.array_equal(pool(server, input=texts[1])[0], found[1])
        for path, body, words in (
            ("/classify", {"input": "tea"}, "classifies each token"),
            ("/v1/score", {"text_1": "a", "text_2": "b"}, "classifies each token"),
            ("/pooling", {"input": "tea", "task": "classify"}, 'must be "token_classify"'),
            ("/pooling", {"messages": [{"role": "user", "content": "a"}]}, "use /pooling with"),
        ):
            status, answer = server.post(path, body)
            assert status == 400 and words in answer["error"]["message"], answer
        assert_nothing_is_held(server)
    with LLM(str(tmp_path), cpu_backend=backend, dtype="float32") as llm:
        outputs = llm.encode(texts)
        assert [output.outputs.data for output in outputs] == [each.tolist() for each in found]
        with pytest.raises(ParameterError, match="classifies each token"):
            llm.classify("tea")
    for text, probabilities, logits in zip(texts, found, scores, strict=True):
        names = {"input_ids", "token_type_ids"} if make is token_classifier else {"input_ids"}
        encoded = tokenizer(text, return_tensors="pt", return_token_type_ids=True)
        with torch.inference_mode():
            expected = model(**{name: encoded[name] for name in names}).logits[0]
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        np.testing.assert_allclose(probabilities, expected.softmax(-1), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decoder_embeds_each_token_whatever_the_chunks(tmp_path: Path, backend: str) -> None:
    path, model = qwen3_directory(tmp_path)
    found = []
    for budget in ("16", "512"):
        flags = ("--cpu-backend", backend, "--max-num-batched-tokens", budget)
        flags += ("--max-num-seqs", "8", "--dtype", "float32")
        with Server(str(path), "--served-model-name", "tiny", *flags) as server:
            # The second time, the prompts are in the prefix cache, which has no hidden states.
            found += [pool(server, input=PROMPTS, task="token_embed") for _ in range(2)]
            status, answer = server.post("/v1/embeddings", {"input": PROMPTS})
            assert status == 200
            lasts = [entry["embedding"] for entry in answer["data"]]
            assert_nothing_is_held(server)
    for other in found[1:]:
        assert all(map(np.array_equal, other, found[0]))
    for prompt, vectors, last in zip(PROMPTS, found[0], lasts, strict=True):
        with torch.inference_mode():
            hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
        np.testing.assert_allclose(vectors, torch.nn.functional.normalize(hidden), atol=1e-4)
        np.testing.assert_allclose(vectors[-1], last, atol=1e-5)


def test_a_process_reward_model_scores_the_ends_of_steps(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer()
    model = random_model("Qwen2Config", "Qwen2ForCausalLM", QWEN3, tokenizer)
    size = model.config.hidden_size
    torch.manual_seed(4)
    head = torch.nn.Sequential(
        torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, 2)
    )
    tensors = {f"model.{name}": tensor for name, tensor in model.model.state_dict().items()}
    tensors |= {f"score.{name}": tensor for name, tensor in head.state_dict().items()}
    tokenizer.save_pretrained(tmp_path)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    config = model.config.to_dict() | {"architectures": ["Qwen2ForProcessRewardModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(ConfigError, match="step_tag_id is missing"):
        LLM(str(tmp_path), pooler_config={"pooling_type": "STEP"})
    with LLM(str(tmp_path), pooler_config={"pooling_type": "STEP", "step_tag_id": STEP}) as llm:
        found = [output.outputs.data for output in llm.encode(PROMPTS)]
    config = {"pooling_type": "STEP", "step_tag_id": STEP, "use_activation": False}
    with LLM(str(tmp_path), pooler_config=config) as llm:
        raw = [output.outputs.data for output in llm.encode(PROMPTS)]
    for rewards, scores in zip(found, raw, strict=True):
        np.testing.assert_allclose(torch.tensor(scores).softmax(-1), rewards, atol=1e-5)
    for prompt, rewards in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            scores = head(model.model(torch.tensor([prompt])).last_hidden_state[0]).softmax(-1)
        ends = [i for i, token in enumerate(prompt) if token == STEP]
        np.testing.assert_allclose(rewards, scores[ends], atol=1e-4)


def test_a_decoder_that_writes_one_of_two_tokens_scores_the_ends_of_steps(tmp_path: Path) -> None:
    path, model = qwen3_directory(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    no, yes = 20, 21
    tokens = tokenizer.convert_ids_to_tokens([no, yes])
    keywords: dict[str, Any] = {"hf_overrides": {"classifier_from_token": tokens}}
    keywords["pooler_config"] = {"pooling_type": "STEP", "step_tag_id": STEP}
    with LLM(str(path), dtype="float32", **keywords) as llm:
        found = [output.outputs.data for output in llm.encode(PROMPTS)]
    for prompt, scores in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0]
        expected = (logits[:, yes] - logits[:, no]).sigmoid()
        ends = [i for i, token in enumerate(prompt) if token == STEP]
        np.testing.assert_allclose(np.array(scores)[:, 0], expected[ends], atol=1e-4)


@pytest.mark.parametrize(
    "extra", [{}, {"normalize": False}, {"dimensions": 16}], ids=["default", "raw", "short"]
)
def test_a_longer_text_is_embedded_as_the_mean_of_its_parts(
    long_texts: Server, extra: dict[str, Any]
) -> None:
    def embed(given: Any, **body: Any) -> list[list[float]]:
        status, answer = long_texts.post("/v1/embeddings", {"input": given} | extra | body)
        assert status == 200, answer
        return [entry["embedding"] for entry in answer["data"]]

    def mean(prompt: list[int]) -> Any:
        parts = [prompt[begin : begin + 63] for begin in range(0, len(prompt), 63)]
        result = np.average(embed(parts), 0, [len(part) for part in parts])
        return result if "normalize" in extra else result / np.linalg.norm(result)

    long, short = [*range(3, 140)], [5, 6, 7]
    found = embed([short, long, short])
    np.testing.assert_allclose(found[1], mean(long), atol=1e-6)
    assert found[0] == found[2] == embed(short)[0]
    cut = embed([[*range(3, 180)]], truncate_prompt_tokens=-1)
    np.testing.assert_allclose(cut[0], mean([*range(3, 153)]), atol=1e-6)
    text = "hello world " * 10
    status, answer = long_texts.post("/encode", {"text": [text, "hello"]})
    assert status == 200, answer
    lengths = [each["meta_info"]["prompt_tokens"] for each in answer]
    assert lengths[0] > 63 > lengths[1]
    if not extra:
        np.testing.assert_allclose([each["embedding"] for each in answer], embed([text, "hello"]))
    for path, body, limit in (
        ("/v1/embeddings", {"input": [5] * 151}, 150),
        ("/v1/score", {"text_1": "hello", "text_2": text}, 63),
        ("/pooling", {"input": [5] * 64, "task": "token_embed"}, 63),
    ):
        status, answer = long_texts.post(path, body)
        assert status == 400 and f"at most {limit}" in answer["error"]["message"], answer


@pytest.fixture(scope="module")
def long_texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path, _ = qwen3_directory(tmp_path_factory.mktemp("long"))
    config = {"enable_chunked_processing": True, "max_embed_len": 150}
    args = ("--dtype", "float32", "--max-model-len", "64", "--pooler-config", json.dumps(config))
    with Server(str(path), *args) as server:
        yield server
        assert_nothing_is_held(server)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_embed_len": 700}, "needs enable_chunked_processing"),
        ({"enable_chunked_processing": 1}, "must be true or false, got 1"),
        ({"enable_chunked_processing": True, "max_embed_len": 0}, "got 0"),
        ({"enable_chunked_processing": True, "pooling_type": "ALL"}, "one vector of a text"),
        ({"dimensions": 17}, "between 1 and 16, got 17"),
        ({"task": "plugin"}, "must be one of embed, .*'plugin'"),
        ({"task": "embed", "pooling_type": "ALL"}, "use 'token_embed'"),
        ({"logit_sigma": 0}, "logit_sigma .* must not be 0"),
        ({"logit_mean": "1"}, "must be a number, got '1'"),
    ],
)
def test_senseless_fields_of_the_pooler_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        change_pooler(PoolerConfig(hidden_size=16), config)
        change_classifier(ClassifierConfig(("a",), Activation.SIGMOID), config)


LAYOUTS = {
    "pylate": False,
    "sentence-transformers": True,
    "first": False,
    "jina": False,
    "windows": False,
}
"""Layout of a ColBERT -> whether tokens attend to those that fill a query."""


def in_flash_format(encoder: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of Jina's XLM-RoBERTa with the names of jina-colbert-v2."""
    names = {
        r"embeddings\.LayerNorm": "emb_ln",
        r"layers\.(\d+)\.post_attention_layernorm": r"encoder.layers.\1.norm1",
        r"layers\.(\d+)\.post_mlp_layernorm": r"encoder.layers.\1.norm2",
        r"layers\.(\d+)\.self_attn\.o_proj": r"encoder.layers.\1.mixer.out_proj",
        r"layers\.(\d+)\.mlp": r"encoder.layers.\1.mlp",
    }
    tensors: dict[str, torch.Tensor] = {}
    stored = encoder.state_dict()
    for name, tensor in stored.items():
        if name.endswith((".q_proj.weight", ".q_proj.bias")):
            parts = [stored[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            start, kind = name.split(".self_attn.q_proj.")
            tensors[f"roberta.encoder.{start}.mixer.Wqkv.{kind}"] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            for pattern, replacement in names.items():
                name = re.sub(f"^{pattern}", replacement, name)
            tensors[f"roberta.{name}"] = tensor
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def colbert_directory(path: Path, layout: str, size: int) -> tuple[Any, torch.nn.Linear]:
    """Write a ColBERT whose queries have 12 tokens and documents 20. Return the encoder and the last layer.

    With windows, tokens at the end of a query see none of its words.
    """
    _, model = bert_directory(path, 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["[Q] ", "[D] ", ".", "!"])
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    tokenizer.save_pretrained(path)
    bert, dense = model.bert, torch.nn.Linear(size, 16, bias=False)
    if layout == "windows":
        sizes = {"hidden_size": size, "intermediate_size": 96, "num_hidden_layers": 4}
        sizes |= {"num_attention_heads": 4, "local_attention": 6, "vocab_size": len(tokenizer)}
        names = ("pad_token_id", "cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id")
        config = transformers.ModernBertConfig(**sizes | dict.fromkeys(names, 3))
        bert = transformers.ModernBertModel(config).eval()
    if layout == "jina":
        sizes = {"hidden_size": size, "intermediate_size": 96, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "vocab_size": len(tokenizer), "pad_token_id": 3}
        config = transformers.JinaEmbeddingsV3Config(**sizes)
        bert = transformers.JinaEmbeddingsV3Model(config).eval()
    bert.resize_token_embeddings(len(tokenizer))
    if layout in ("first", "jina"):
        tensors = {f"bert.{name}": tensor for name, tensor in bert.state_dict().items()}
        fields = bert.config.to_dict() | {"architectures": ["HF_ColBERT"]}
        if layout == "jina":
            tensors = in_flash_format(bert)
            fields |= {"model_type": "xlm-roberta", "position_embedding_type": "rotary"}
            fields |= {"rotary_emb_base": fields.pop("rope_parameters")["rope_theta"]}
        tensors["linear.weight"] = dense.weight.detach()
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(fields, default=str))
        metadata = {"query_token_id": "[Q] ", "doc_token_id": "[D] ", "query_maxlen": 12}
        metadata |= {"doc_maxlen": 20, "dim": 16, "attend_to_mask_tokens": False}
        (path / "artifact.metadata").write_text(json.dumps(metadata))
        return bert, dense
    bert.save_pretrained(path)
    kinds = ["sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"]
    settings = {"in_features": size, "out_features": 16, "bias": False}
    settings["activation_function"] = "torch.nn.modules.linear.Identity"
    files: dict[str, dict[str, Any]] = {"1/config.json": settings}
    if layout != "sentence-transformers":
        colbert = {"model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] "}
        colbert |= {"query_length": 12, "document_length": 20, "skiplist_words": [".", "!"]}
        files["sentence_bert_config.json"] = {"max_seq_length": 11}
    else:
        colbert = {"model_type": "MultiVectorEncoder"}
        colbert["prompts"] = {"query": "[Q] ", "document": "[D] "}
        expansion = {"strategy": "fixed", "attend": True, "token": None, "length": 12}
        files["sentence_bert_config.json"] = {"document_length": 20, "query_expansion": expansion}
        files["2/config.json"] = {"skiplist_words": [".", "!"], "skiplist_tasks": ["document"]}
        kinds.append("sentence_transformers.multi_vector_encoder.modules.MultiVectorMask")
    modules = [{"path": str(i or ""), "type": kind} for i, kind in enumerate(kinds)]
    (path / "modules.json").write_text(json.dumps(modules))
    for name, content in (files | {"config_sentence_transformers.json": colbert}).items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(json.dumps(content))
    save_file({"linear.weight": dense.weight.detach()}, path / "1" / "model.safetensors")
    return bert, dense


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_for_late_interaction_reranks_by_maxsim(tmp_path: Path, layout: str) -> None:
    """Queries are filled with mask tokens, documents are cut, and their punctuation has no vectors."""
    bert, dense = colbert_directory(tmp_path, layout, 64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    query = "seven wizards"
    documents = ["the lazy fox.", "wizards brew tea!", "tea in the old tower. " * 9]
    marks = tokenizer.convert_tokens_to_ids(["[Q] ", "[D] ", ".", "!", "[MASK]"])

    def vectors(text: str, is_query: bool) -> torch.Tensor:
        ids = tokenizer(text, truncation=True, max_length=11 if is_query else 19)["input_ids"]
        ids.insert(1, marks[0] if is_query else marks[1])
        num_visible = len(ids)
        keeps = torch.tensor([is_query or id_ not in marks[2:4] for id_ in ids])
        if is_query:
            ids += [marks[4]] * (12 - len(ids))
            keeps = torch.ones(12, dtype=torch.bool)
            num_visible = 12 if LAYOUTS[layout] else num_visible
        mask = torch.arange(len(ids)) < num_visible
        with torch.inference_mode():
            hidden = bert(torch.tensor([ids]), attention_mask=mask[None].long())
            projected = dense(hidden.last_hidden_state[0])
        return torch.nn.functional.normalize(projected[keeps])

    expected = [
        float((vectors(query, True) @ vectors(text, False).T).amax(1).sum()) for text in documents
    ]
    backend = "torch" if layout in ("first", "jina") else "native"
    flags = ("--served-model-name", "colbert", "--cpu-backend", backend)
    with Server(str(tmp_path), *flags) as server:
        status, answer = server.post("/v1/rerank", {"query": query, "documents": documents})
        assert status == 200, answer
        order = sorted(range(3), key=lambda i: -expected[i])
        assert [each["index"] for each in answer["results"]] == order
        scores = [each["relevance_score"] for each in answer["results"]]
        np.testing.assert_allclose(scores, sorted(expected, reverse=True), atol=1e-4)
        for role, text in (("query", query), ("document", documents[2])):
            [found] = pool(server, input=text, prompt_name=role)
            np.testing.assert_allclose(found, vectors(text, role == "query"), atol=1e-4)
        # Texts that are neither have no other tokens.
        [plain] = pool(server, input=query)
        assert len(plain) == len(tokenizer(query)["input_ids"])
        status, answer = server.post("/v1/embeddings", {"input": query})
        assert status == 200
        np.testing.assert_allclose(answer["data"][0]["embedding"], plain, atol=1e-4)
        many = ["tea " * 110] * 2400
        status, answer = server.post("/pooling", {"input": many})
        assert status == 400 and "4194304" in answer["error"]["message"], answer
        assert_nothing_is_held(server)
    if layout == "pylate":
        with LLM(str(tmp_path)) as llm:
            outputs = llm.score(query, documents)
        np.testing.assert_allclose([each.outputs.score for each in outputs], expected, atol=1e-4)


def test_a_sparse_model_weighs_the_tokens_of_the_vocabulary(tmp_path: Path) -> None:
    """Sentence-transformers' files add the sparse head to a masked language model."""
    bert_directory(tmp_path, 1)
    torch.manual_seed(5)
    config = transformers.BertConfig.from_pretrained(tmp_path)
    model = transformers.BertForMaskedLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    model.save_pretrained(tmp_path)
    kind = "sentence_transformers.sparse_encoder.models"
    modules = [
        {"path": "", "type": f"{kind}.MLMTransformer"},
        {"path": "1_SpladePooling", "type": f"{kind}.SpladePooling"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_SpladePooling").mkdir()
    settings = {"pooling_strategy": "max", "activation_function": "relu"}
    file = tmp_path / "1_SpladePooling" / "config.json"
    file.write_text(json.dumps(settings))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["seven wizards", "the quick brown fox", "tea in the old tower"]
    expected = []
    for text in texts:
        with torch.inference_mode():
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
        expected.append(logits.relu().log1p().amax(0).numpy())
    with Server(str(tmp_path), "--served-model-name", "splade") as server:
        status, answer = server.post("/v1/embeddings", {"input": texts})
        assert status == 200, answer
        found = [entry["embedding"] for entry in answer["data"]]
        np.testing.assert_allclose(found, expected, atol=1e-4)
        pairs = {"text_1": texts[0], "text_2": texts[1:]}
        status, answer = server.post("/v1/score", pairs)
        scores = [entry["score"] for entry in answer["data"]]
        wanted = [float(expected[0] @ each) for each in expected[1:]]
        np.testing.assert_allclose(scores, wanted, rtol=1e-4)
        status, answer = server.post("/pooling", {"input": "tea", "task": "token_embed"})
        assert status == 400 and 'must be "embed"' in answer["error"]["message"], answer
        assert_nothing_is_held(server)
    file.write_text(json.dumps(settings | {"activation_function": "tanh"}))
    with pytest.raises(CheckpointError, match="activation_function"):
        LLM(str(tmp_path))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_embeds_texts_and_tokens_and_weighs_tokens(tmp_path: Path, backend: str) -> None:
    """BGE-M3 has three kinds of results, of which two have heads in files of their own."""
    bert_directory(tmp_path, 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "vocab_size": len(tokenizer), "type_vocab_size": 1}
    ids = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
    torch.manual_seed(6)
    model = transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**sizes, **ids)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    model.save_pretrained(tmp_path)
    heads = {
        "colbert_linear.pt": torch.nn.Linear(64, 64),
        "sparse_linear.pt": torch.nn.Linear(64, 1),
    }
    for name, head in heads.items():
        torch.save(head.half().state_dict(), tmp_path / name)
        head.float()
    texts = ["seven wizards", "the quick brown fox jumps over the lazy dog"]
    overrides = {"architectures": ["BgeM3EmbeddingModel"]}
    flags = ("--cpu-backend", backend, "--hf-overrides", json.dumps(overrides))
    with Server(str(tmp_path), *flags) as server:
        found = {
            task: pool(server, input=texts, task=task)
            for task in ("embed", "token_embed", "token_classify")
        }
        for padding in ({}, {"padding": True}, {"padding": "max_length"}):
            assert all(map(np.array_equal, pool(server, input=texts, **padding), found["embed"]))
        half = {"encoding_format": "base64", "embed_dtype": "float16", "endianness": "big"}
        _, answer = server.post("/v1/embeddings", half | {"input": texts})
        for each, vector in zip(answer["data"], found["embed"], strict=True):
            encoded = np.frombuffer(base64.b64decode(each["embedding"]), ">f2")
            assert encoded.tolist() == np.float16(vector).tolist()
        raw = pool(server, input=texts, use_activation=False)
        assert all(map(np.array_equal, raw, pool(server, input=texts, normalize=False)))
        assert not np.array_equal(raw[0], found["embed"][0])
        for name, value in (("dimensions", 1), ("padding", "both")):
            body = {"input": "tea", "task": "token_classify", name: value}
            status, answer = server.post("/pooling", body)
            assert status == 400 and answer["error"]["param"] == name, answer
        assert_nothing_is_held(server)
    for i, text in enumerate(texts):
        with torch.inference_mode():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            vectors, weights = (head(hidden) for head in heads.values())
        normalize = torch.nn.functional.normalize
        np.testing.assert_allclose(found["embed"][i], normalize(hidden[0], dim=0), atol=1e-5)
        np.testing.assert_allclose(found["token_embed"][i], normalize(vectors[1:]), atol=1e-5)
        np.testing.assert_allclose(found["token_classify"][i], weights[1:-1].relu(), atol=1e-4)
    if backend == "torch":
        torch.save({"weight": torch.ones(2, 64).T}, tmp_path / "sparse_linear.pt")
        with pytest.raises(EngineDead, match="weight does not contain floats in the order"):
            LLM(str(tmp_path), hf_overrides=overrides)
        (tmp_path / "sparse_linear.pt").unlink()
        with pytest.raises(CheckpointError, match=r"sparse_linear\.pt: is missing"):
            LLM(str(tmp_path), hf_overrides=overrides)
