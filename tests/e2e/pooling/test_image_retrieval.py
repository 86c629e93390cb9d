"""Models for late interaction over images (ColPali and others), which embed each token of a query or a page."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from engine.frontend.offline.llm import LLM
from safetensors.torch import save_file
from support.audio.checkpoints import PARTS, reference_inputs
from support.audio.gemma import IMAGE_PROCESSOR, gemma4_config
from support.checkpoints.tiny import sentencepiece_tokenizer
from support.media.image_marks import GEMMA_MARKS
from support.media.image_processors import image_processor
from support.media.image_requests import data_url, picture
from support.servers.server import Server, assert_nothing_is_held
from support.vision.checkpoints import TEXT_SIZES, TOWER_SIZES, vision_directory
from support.vision.qwen import qwen_directory, qwen_image_processor
from tokenizers.processors import TemplateProcessing

pytestmark = pytest.mark.sampled

ADDED = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<pad>", "<|begin_of_text|>", "[CLS]"]
QUERIES = {
    "colpali": "Question: {}" + "<pad>" * 10 + "\n",
    "colqwen2": "Query: {}" + "<|endoftext|>" * 10 + "\n",
    "colqwen2-2.5": "Search: {}" + "<|endoftext|>" * 10 + "\n",
    "colmodernvbert": "{}" + "<end_of_utterance>" * 10,
    "ColIdefics3": "{}" + "<end_of_utterance>" * 10,
    "ColQwen3": "{}" + "<|endoftext|>" * 10,
    "ColQwen3_5": "{}" + "<|endoftext|>" * 10,
    "ColQwen3-tomoro": "{}" + "<|endoftext|>" * 10,
    "OpsColQwen3Model": "Query: {}" + "<|endoftext|>" * 10,
    "ModernVBertModel": "{}" + "<end_of_utterance>" * 10,
    "Qwen3VLNemotronEmbedModel": "{}",
}
"""Model -> its form of a query. The names of others than transformers' models begin with their architectures."""
BASES = {"colpali": "paligemma", "colqwen2": "qwen2_vl", "colqwen2-2.5": "qwen2_5_vl"}
BASES |= {"ColQwen3": "qwen3_vl", "ColQwen3_5": "qwen3_5"}
BASES |= {"ColQwen3-tomoro": "qwen3_vl", "OpsColQwen3Model": "qwen3_vl"}
BASES |= {"Qwen3VLNemotronEmbedModel": "qwen3_vl"}
MODERN = ("colmodernvbert", "ModernVBertModel")
MATRICES = {
    "ColIdefics3": ("model.", "linear", 128),
    "ColQwen3": ("", "custom_text_proj", 320),
    "ColQwen3_5": ("", "custom_text_proj", 128),
    "ColQwen3-tomoro": ("vlm.model.", "embedding_proj_layer", 24),
    "ModernVBertModel": ("model.", "model.custom_text_proj", 16),
    "OpsColQwen3Model": ("", "custom_text_proj", 64),
    "Qwen3VLNemotronEmbedModel": ("", "", 0),
}
"""Other model -> the prefix of its tensors, and the name and the size of its matrix, if it has one."""
FIELDS = {
    "ColQwen3-tomoro": {"model_type": "colqwen3", "embed_dim": 24},
    "ModernVBertModel": {"embedding_dim": 16},
    "OpsColQwen3Model": {"model_type": "ops_colqwen3", "dims": 64},
    "Qwen3VLNemotronEmbedModel": {"model_type": "qwen3_vl_nemotron_embed"},
}


class Retriever:
    """A random checkpoint, and transformers' vectors."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        self.base = BASES.get(kind, "smolvlm")
        self.is_qwen = self.base.startswith("qwen")
        (qwen_directory if self.is_qwen else vision_directory)(path, self.base)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.tokenizer.add_special_tokens({"additional_special_tokens": ADDED})
        if kind in MODERN:
            cls = ("[CLS]", self.tokenizer.convert_tokens_to_ids("[CLS]"))
            self.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single="[CLS] $A", special_tokens=[cls]
            )
        self.tokenizer.save_pretrained(path)
        config = transformers.AutoConfig.from_pretrained(path)
        config.get_text_config().vocab_size = len(self.tokenizer)
        if kind in MODERN:
            config = transformers.ModernVBertConfig(
                vision_config=TOWER_SIZES | {"model_type": "siglip_vision_model"},
                text_config=TEXT_SIZES
                | {"model_type": "modernbert", "vocab_size": len(self.tokenizer)}
                | {"num_hidden_layers": 4, "local_attention": 12, "pad_token_id": 3}
                | {"num_key_value_heads": None},
                image_token_id=config.image_token_id,
                pixel_shuffle_factor=2,
            )
        torch.manual_seed(6)
        if kind in MATRICES:
            model = transformers.AutoModel.from_config(config)
            prefix, matrix, size = MATRICES[kind]
            linear = torch.nn.Identity()
            if matrix:
                has_bias = kind in MODERN or kind not in FIELDS
                linear = torch.nn.Linear(TEXT_SIZES["hidden_size"], size, bias=has_bias)
        else:
            name = {"colpali": "ColPali", "colmodernvbert": "ColModernVBert"}.get(kind, "ColQwen2")
            whole = getattr(transformers, f"{name}Config")(vlm_config=config, embedding_dim=16)
            model = getattr(transformers, f"{name}ForRetrieval")(whole).eval()
            linear = model.embedding_proj_layer
        for parameter in (*model.parameters(), *linear.parameters()):
            torch.nn.init.normal_(parameter, 0, 0.15)
        self.linear, self.vlm = linear, getattr(model, "vlm", model).float().eval()
        model.save_pretrained(path)
        if kind in MATRICES:
            tensors = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
            tensors |= {f"{matrix}.{name}": tensor for name, tensor in linear.state_dict().items()}
            save_file(
                {name: x.contiguous() for name, x in tensors.items()}, path / "model.safetensors"
            )
            fields = json.loads((path / "config.json").read_text()) | FIELDS.get(kind, {})
            fields["architectures"] = [kind.partition("-")[0]]
            (path / "config.json").write_text(json.dumps(fields))
        if kind == "colqwen2-2.5":
            file = path / "processor_config.json"
            fields = json.loads(file.read_text()) if file.is_file() else {}
            file.write_text(json.dumps(fields | {"query_prefix": "Search: "}))

    @torch.inference_mode()
    def vectors(self, ids: list[int], image: Any = None) -> np.ndarray:
        """Return the normalized vector of each token of a prompt."""
        inputs: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        if image is not None and self.is_qwen:
            inputs |= qwen_image_processor(self.path)([image], return_tensors="pt")
            inputs["mm_token_type_ids"] = (
                inputs["input_ids"] == self.vlm.config.image_token_id
            ).int()
        elif image is not None:
            images = [image] if self.base == "paligemma" else [[image]]
            processed = image_processor(self.path, self.base)(images, return_tensors="pt")
            inputs["pixel_values"] = processed["pixel_values"]
        if self.base == "paligemma":
            inputs["token_type_ids"] = torch.zeros(1, len(ids), dtype=torch.long)
        hidden = self.vlm(**inputs).last_hidden_state[0]
        return torch.nn.functional.normalize(self.linear(hidden)).numpy()

    def query(self, text: str) -> np.ndarray:
        return self.vectors(self.tokenizer(QUERIES[self.kind].format(text))["input_ids"])


@pytest.mark.parametrize(("kind", "backend"), zip(QUERIES, ("native", "torch") * 6, strict=False))
def test_queries_and_pages_have_the_vectors_of_transformers(
    tmp_path: Path, kind: str, backend: str
) -> None:
    model = Retriever(tmp_path, kind)
    image, query = picture(3, 60, 90), "seven wizards"
    part = {"type": "image_url", "image_url": {"url": data_url(image)}}
    flags = ("--served-model-name", "pages", "--cpu-backend", backend, "--dtype", "float32")
    if model.is_qwen:
        flags += ("--max-num-batched-tokens", "24", "--max-num-seqs", "8")
    with Server(str(tmp_path), *flags, "-tp", "2") as server:

        def pool(**body: Any) -> np.ndarray:
            status, answer = server.post("/pooling", body)
            assert status == 200, answer
            return np.array(answer["data"][0]["data"], np.float32)

        messages = [{"role": "user", "content": [part]}]
        status, shown = server.post(
            "/tokenize",
            {
                "messages": messages,
                "add_generation_prompt": False,
                "add_special_tokens": kind in MODERN,
            },
        )
        assert status == 200, shown
        assert (model.tokenizer.decode(shown["tokens"][:1]) == "[CLS]") is (kind in MODERN)
        page = model.vectors(shown["tokens"], image)
        np.testing.assert_allclose(pool(messages=messages), page, atol=1e-4)
        text = pool(input="brew tea")
        np.testing.assert_allclose(
            text, model.vectors(model.tokenizer("brew tea")["input_ids"]), atol=1e-4
        )
        found = pool(input=query, prompt_name="query")
        np.testing.assert_allclose(found, model.query(query), atol=1e-4)
        server.child("worker 0").kill()
        documents: list[str | Mapping[str, Any]] = ["brew tea", {"content": [part]}]
        status, answer = server.post("/v1/score", {"text_1": query, "text_2": documents})
        assert status == 200, answer
        scores = [entry["score"] for entry in answer["data"]]
        expected = [float((found @ each.T).max(1).sum()) for each in (text, page)]
        np.testing.assert_allclose(scores, expected, atol=1e-3)
        assert_nothing_is_held(server)
    with LLM(str(tmp_path), dtype="float32", cpu_backend=backend) as llm:
        given = {"content": [{"type": "image_pil", "image_pil": image}]}
        outputs = llm.score(query, ["brew tea", given])
        np.testing.assert_allclose([each.outputs.score for each in outputs], expected, atol=1e-3)


def write_embedding_gemma2(path: Path) -> tuple[Any, Any]:
    """Write a random EmbeddingGemma 2. Return its tokenizer and transformers' model."""
    tokenizer = sentencepiece_tokenizer()
    names = dict(zip(("boa", "audio", "eoa"), PARTS["gemma4"], strict=True)) | GEMMA_MARKS
    tokenizer.add_special_tokens({"additional_special_tokens": [*names.values()]})
    tokenizer.init_kwargs |= {f"{name}_token": mark for name, mark in names.items()}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(names[name]) for name in names}
    ids["eoa_token_index"] = ids.pop("eoa_token_id")
    towers = gemma4_config({"vocab_size": len(tokenizer)} | TEXT_SIZES, 16, **ids)
    text = TEXT_SIZES | {"model_type": "embedding_gemma2_text", "vocab_size": len(tokenizer)}
    text |= {"num_hidden_layers": 3, "head_dim": 16, "global_head_dim": 32, "sliding_window": 9}
    text |= {"hidden_size_per_layer_input": 32, "embedding_dim": 48}
    text["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"]
    config = transformers.EmbeddingGemma2Config(
        text_config=text,
        vision_config=towers.vision_config.to_dict(),
        audio_config=towers.audio_config.to_dict(),
        video_token_id=1,
        **ids,
    )
    model = transformers.EmbeddingGemma2Model(config).float().eval()
    torch.manual_seed(8)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.15)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR))
    return tokenizer, model


@pytest.mark.parametrize("flags", [("-tp", "2"), ("--cpu-backend", "torch")])
def test_texts_images_and_audio_have_the_vectors_of_embedding_gemma_2(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    tokenizer, model = write_embedding_gemma2(tmp_path)
    image = picture(3, 60, 90)
    samples = np.random.default_rng(4).integers(-9000, 9000, 11_200, np.int16)
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV")
    found = image_processor(tmp_path, "gemma4")([image], return_tensors="pt")
    inputs = {name: found[name] for name in ("pixel_values", "image_position_ids")}
    columns, rows = (int(count) + 1 for count in found["image_position_ids"][0].max(0).values)
    boi, eoi, mark = GEMMA_MARKS.values()
    heard = reference_inputs("gemma4", [samples / np.float32(32768)])
    count = -(-int(heard["input_features_mask"].sum()) // 4)
    boa, audio, eoa = PARTS["gemma4"]
    texts = [
        "seven wizards brew tea " * 9,
        f"look at {boi}{mark * (rows * columns // 4)}{eoi}",
        f"{boa}{audio * count}{eoa}",
    ]
    part = {"type": "image_url", "image_url": {"url": data_url(image)}}
    data = base64.b64encode(file.getvalue()).decode()
    sound = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    contents: list[list[Any]] = [[{"type": "text", "text": "look at "}, part], [sound]]
    with Server(str(tmp_path), "--dtype", "float32", *flags) as server:
        answers = [server.post("/v1/embeddings", {"input": texts[0]})]
        for content in contents:
            body = {"messages": [{"role": "user", "content": content}]}
            answers.append(server.post("/v1/embeddings", body))
        assert_nothing_is_held(server)
    for text, more, (status, answer) in zip(texts, ({}, inputs, heard), answers, strict=True):
        assert status == 200, answer
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.inference_mode():
            mean = model(input_ids=ids, **more).last_hidden_state[0].mean(0)
        expected = torch.nn.functional.normalize(mean, dim=0)
        vector = answer["data"][0]["embedding"]
        np.testing.assert_allclose(vector, expected, atol=1e-4)
