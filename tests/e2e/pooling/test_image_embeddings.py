"""Models that embed images beside texts (CLIP, SigLIP), over HTTP and offline."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine.frontend.offline.llm import LLM
from engine.protocol.errors import ParameterError
from PIL import Image
from safetensors.torch import save_file
from support.checkpoints.words_bert import bert_directory
from support.media.image_processors import image_processor
from support.media.image_requests import data_url, picture
from support.servers.server import DEVICE, Server, assert_nothing_is_held
from support.vision.models import Model
from support.vision.qwen import END, IMAGE, START, UNIT, qwen_directory, qwen_image_processor

pytestmark = pytest.mark.sampled

TEXTS = ["seven wizards", "the quick brown fox jumps over the lazy dog", "tea"]
IMAGES = [picture(1, 60, 40), picture(2, 32, 32), picture(3, 33, 90)]
SIDE = 32


def pair_directory(path: Path, kind: str) -> tuple[Any, Any]:
    """Write a random CLIP or SigLIP. Return transformers' model and image processor."""
    bert_directory(path, 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    sizes = {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = sizes | {"vocab_size": len(tokenizer), "hidden_size": 64, "eos_token_id": 3}
    text |= {"max_position_embeddings": 24, "projection_size": 48}
    vision = sizes | {"hidden_size": 48, "image_size": SIDE, "patch_size": 8}
    names = {"clip": "CLIP", "siglip": "Siglip"}
    config_class = getattr(transformers, f"{names[kind]}Config")
    # The vectors of both have another size than the hidden states of texts.
    config = config_class(text_config=text, vision_config=vision, projection_dim=40)
    torch.manual_seed(4)
    model = getattr(transformers, f"{names[kind]}Model")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    model.save_pretrained(path)
    size = {"shortest_edge": SIDE} if kind == "clip" else {"height": SIDE, "width": SIDE}
    fields: dict[str, Any] = {"size": size, "resample": 3}
    if kind == "clip":
        fields["crop_size"] = {"height": SIDE, "width": SIDE}
    name = f"{names[kind]}ImageProcessor"
    module = import_module(f"transformers.models.{kind}.image_processing_pil_{kind}")
    processor = getattr(module, f"{name}Pil")(**fields)
    fields["image_processor_type"] = name
    (path / "preprocessor_config.json").write_text(json.dumps(fields))
    return model, processor


def expected_vectors(
    model: Any, processor: Any, path: Path, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the normalized vectors of transformers for the texts and the images."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    options = {"padding": "max_length", "max_length": 24} if kind == "siglip" else {}
    pixels = processor(IMAGES, return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        texts = [
            model.get_text_features(tokenizer(text, return_tensors="pt", **options)["input_ids"])
            for text in TEXTS
        ]
        images = model.get_image_features(pixels)
    of_texts = torch.cat([each.pooler_output for each in texts])
    normalize = torch.nn.functional.normalize
    return normalize(of_texts).numpy(), normalize(images.pooler_output).numpy()


def image_part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


@pytest.mark.parametrize(("kind", "backend"), [("clip", "native"), ("siglip", "torch")])
def test_texts_and_images_have_the_vectors_of_transformers(
    tmp_path: Path, kind: str, backend: str
) -> None:
    model, processor = pair_directory(tmp_path, kind)
    texts, images = expected_vectors(model, processor, tmp_path, kind)
    flags = ("--served-model-name", "pair", "--cpu-backend", backend, "-tp", "2")
    with Server(str(tmp_path), *flags) as server:

        def embed(**body: Any) -> list[list[float]]:
            status, answer = server.post("/v1/embeddings", body)
            assert status == 200, answer
            return [entry["embedding"] for entry in answer["data"]]

        np.testing.assert_allclose(embed(input=TEXTS), texts, atol=1e-4)
        messages = [[{"role": "user", "content": [image_part(each)]}] for each in IMAGES]
        found = embed(messages=messages)
        np.testing.assert_allclose(found, images, atol=1e-4)
        body_of_sglang = {"text": ["<image>", TEXTS[1]], "image_data": [data_url(IMAGES[0]), None]}
        file = data_url(IMAGES[0]).partition(",")[2]
        given = [{"prompt_string": "<__media__>", "multimodal_data": [file]}, TEXTS[1]]
        parts = [{"content": [image_part(IMAGES[0])]}, TEXTS[1]]
        for path, body in (
            ("/encode", body_of_sglang),
            ("/embedding", {"content": given}),
            ("/embedding", {"content": parts}),
        ):
            status, answer = server.post(path, body)
            assert status == 200, answer
            own = [np.ravel(entry["embedding"]) for entry in answer]
            np.testing.assert_allclose(own, [images[0], texts[1]], atol=1e-4)
        mixed = [messages[0], [{"role": "user", "content": TEXTS[1]}]]
        np.testing.assert_allclose(embed(messages=mixed), [images[0], texts[1]], atol=1e-4)
        assert server.capabilities() == (["embedding", "multimodal"], ["embedding", "vision"])
        server.child("worker 0").kill()
        assert embed(messages=messages[:1]) == found[:1]
        content = [image_part(IMAGES[0]), {"type": "text", "text": "tea"}]
        for body, words in (
            ({"messages": [{"role": "user", "content": content}]}, "must have one image or a text"),
            ({"messages": [{"role": "user", "content": content[:1] * 2}]}, "one image or a text"),
            ({"input": "tea " * 40}, "reads at most 24"),
        ):
            status, answer = server.post("/v1/embeddings", body)
            assert status == 400 and words in answer["error"]["message"], answer
        pairs = {"text_1": TEXTS[0], "text_2": [{"content": [image_part(each)]} for each in IMAGES]}
        status, answer = server.post("/v1/score", pairs)
        assert status == 200, answer
        scores = [entry["score"] for entry in answer["data"]]
        np.testing.assert_allclose(scores, images @ texts[0], atol=1e-4)
        documents = [TEXTS[1], {"content": [image_part(IMAGES[0])]}, {"text": TEXTS[2]}]
        body = {"query": {"content": [image_part(IMAGES[1])]}, "documents": documents}
        status, answer = server.post("/v1/rerank", body)
        assert status == 200, answer
        expected = {0: images[1] @ texts[1], 1: images[1] @ images[0], 2: images[1] @ texts[2]}
        for result in answer["results"]:
            index = result["index"]
            assert abs(result["relevance_score"] - expected[index]) < 1e-4
            assert result["document"] in (
                {"text": documents[0]},
                {"multi_modal": documents[1]["content"]},
                documents[2],
            )
        bad = {"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
        status, answer = server.post("/v1/score", {"text_1": "tea", "text_2": [bad]})
        assert status == 400, answer
        assert answer["error"]["param"] == "text_2[0].content[0].image_url.url"
        status, answer = server.post("/v1/completions", {"prompt": "tea"})
        assert status == 400 and "only embeds text" in answer["error"]["message"]
        assert_nothing_is_held(server)
    with LLM(str(tmp_path), cpu_backend=backend) as llm:
        prompts = [{"prompt": "", "multi_modal_data": {"image": each}} for each in IMAGES]
        outputs = llm.embed([*TEXTS, *prompts])
        vectors = [output.outputs.embedding for output in outputs]
        np.testing.assert_allclose(vectors, [*texts, *images], atol=1e-4)
        given = [{"content": [{"type": "image_pil", "image_pil": each}]} for each in IMAGES]
        scores = [output.outputs.score for output in llm.score(TEXTS[0], given)]
        np.testing.assert_allclose(scores, images @ texts[0], atol=1e-4)
        with pytest.raises(ParameterError, match="must have one image or a text"):
            llm.embed({"prompt": "tea", "multi_modal_data": {"image": IMAGES[0]}})


PAIR = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}{% endif %}"
    "{{ ' | ' }}{% endfor %}answer:"
)


def test_a_decoder_that_answers_yes_or_no_reads_images_in_documents(tmp_path: Path) -> None:
    model = Model(tmp_path, "smolvlm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.path)
    ids = [20, 21]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    overrides = json.dumps({"classifier_from_token": tokens})
    flags = ("--dtype", "float32", "--device", DEVICE, "--hf-overrides", overrides)
    image = picture(4, 90, 210)
    documents: list[Any] = [
        "brew tea",
        {"content": [image_part(image), {"type": "text", "text": "fox"}]},
    ]
    with Server(str(model.path), *flags, "--chat-template", PAIR) as server:
        body = {"text_1": "the quick", "text_2": documents, "use_activation": False}
        status, answer = server.post("/v1/score", body)
        assert status == 200, answer
        scores = [entry["score"] for entry in answer["data"]]
        message = {"role": "user", "content": [image_part(image)]}
        status, shown = server.post("/tokenize", {"messages": [message]})
        assert status == 200, shown
        assert_nothing_is_held(server)
    given = {"content": [{"type": "image_pil", "image_pil": image}, documents[1]["content"][1]]}
    keywords: dict[str, Any] = {"hf_overrides": json.loads(overrides), "dtype": "float32"}
    with LLM(str(model.path), **keywords) as llm:
        [output] = llm.score("the quick", given, chat_template=PAIR, use_activation=False)
        assert abs(output.outputs.score - scores[1]) < 1e-4
        with pytest.raises(ParameterError, match="chat_template is required to score images"):
            llm.score("the quick", given)
    fake = tokenizer.convert_tokens_to_ids("<fake_token_around_image>")
    first, last = shown["tokens"].index(fake), shown["tokens"][::-1].index(fake)
    of_image = shown["tokens"][first : len(shown["tokens"]) - last]
    pixels = image_processor(model.path, "smolvlm")([[image]], return_tensors="pt")
    read: dict[str, Any] = {"pixel_values": pixels["pixel_values"]}

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    start = "query: the quick | document: "
    for prompt, inputs, found in (
        (encode(f"{start}brew tea | answer:"), {}, scores[0]),
        ([*encode(start), *of_image, *encode("fox | answer:")], read, scores[1]),
    ):
        with torch.inference_mode():
            logits = model.model(input_ids=torch.tensor([prompt]), **inputs).logits[0, -1]
        assert abs(found - float(logits[ids[1]] - logits[ids[0]])) < 1e-4


def test_jina_reranker_m0_scores_documents_with_images(tmp_path: Path) -> None:
    _, model = qwen_directory(tmp_path, "qwen2_vl")
    fields = json.loads((tmp_path / "config.json").read_text())
    # The published config has the decoder's fields beside the tower.
    fields |= fields.pop("text_config") | {"architectures": ["JinaVLForRanking"]}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": "qwen2_vl"}))
    torch.manual_seed(3)
    head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5)
    body = {f"model.{name}": x for name, x in model.model.language_model.state_dict().items()}
    tower = {f"visual.{name}": x for name, x in model.model.visual.state_dict().items()}
    last = {f"score.{name}": x for name, x in head.state_dict().items()}
    tensors = {name: x.contiguous() for name, x in (body | tower | last).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    images = [picture(5, 60, 90), picture(6, 40, 26)]
    parts = [image_part(each) for each in images]
    texts: list[Any] = ["brew tea", {"content": parts[:1]}]
    texts.append({"content": [{"type": "text", "text": "fox"}, *parts]})
    queries = ["the quick", {"content": parts[1:]}]
    of_documents, of_queries = [[], images[:1], images], [[], images[1:]]

    def shown(text: str, images: list[Image.Image]) -> str:
        counts = [round(image.width / UNIT) * round(image.height / UNIT) for image in images]
        return text + "".join(f"{START}{IMAGE * count}{END}" for count in counts)

    @torch.inference_mode()
    def expected(document: str, query: str, images: list[Image.Image]) -> float:
        prompt = f"**Document**:\n{document}\n**Query**:\n{query}"
        ids = torch.tensor([[*tokenizer(prompt, add_special_tokens=False)["input_ids"], 100]])
        inputs: dict[str, Any] = {}
        if images:
            inputs = dict(qwen_image_processor(tmp_path)(images, return_tensors="pt"))
            inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        hidden = model.model(input_ids=ids, **inputs).last_hidden_state[0, -1]
        return head(hidden).item() - 2.65

    scores = [
        expected(shown(text, first), shown(query, second), [*first, *second])
        for query, second in zip(("the quick", ""), of_queries, strict=True)
        for text, first in zip(("brew tea", "", "fox"), of_documents, strict=True)
    ]
    assert min(np.diff(sorted(scores))) > 1e-3
    flags = ("--dtype", "float32", "--max-num-batched-tokens", "24", "--max-num-seqs", "8")
    with Server(str(tmp_path), *flags, "-tp", "2") as server:
        for query, wanted in zip(queries, (scores[:3], scores[3:]), strict=True):
            body = {"text_1": query, "text_2": texts, "use_activation": False}
            status, answer = server.post("/v1/score", body)
            assert status == 200, answer
            found = [entry["score"] for entry in answer["data"]]
            np.testing.assert_allclose(found, wanted, atol=1e-4)
            server.child("worker 0").kill()
            status, answer = server.post("/v1/rerank", {"query": query, "documents": texts})
            assert status == 200, answer
            ordered = sorted(1 / (1 + np.exp(-np.array(wanted))), reverse=True)
            found = [result["relevance_score"] for result in answer["results"]]
            np.testing.assert_allclose(found, ordered, atol=1e-4)
        assert_nothing_is_held(server)
    with LLM(str(tmp_path), dtype="float32", cpu_backend="torch") as llm:
        content = [{"type": "image_pil", "image_pil": each} for each in images]
        given = ["brew tea", {"content": content[:1]}]
        outputs = llm.score("the quick", given, use_activation=False)
        found = [output.outputs.score for output in outputs]
        np.testing.assert_allclose(found, scores[:2], atol=1e-4)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_jina_embeddings_v4_has_the_vectors_of_tokens_of_texts_and_images(
    tmp_path: Path, backend: str
) -> None:
    _, model = qwen_directory(tmp_path, "qwen2_5_vl")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    page = f"user\n{START}{IMAGE}{END}Describe the image.\n"
    prompts: list[Any] = ["Query: brew tea"]
    prompts += [
        {"prompt": page, "multi_modal_data": {"image": image}}
        for image in (picture(5, 60, 90), picture(6, 40, 26))
    ]
    sizes: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 8}
    with LLM(str(tmp_path), dtype="float32", cpu_backend=backend, **sizes) as llm:
        outputs = llm.encode(prompts, pooling_task="token_embed", use_activation=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        text, inputs = prompt, {}
        if not isinstance(prompt, str):
            image = prompt["multi_modal_data"]["image"]
            inputs = dict(qwen_image_processor(tmp_path)([image], return_tensors="pt"))
            count = int(inputs["image_grid_thw"].prod()) // 4
            text = page.replace(IMAGE, IMAGE * count)
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        if inputs:
            inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        with torch.inference_mode():
            expected = model.model(input_ids=ids, **inputs).last_hidden_state[0]
        assert list(output.prompt_token_ids) == ids[0].tolist()
        np.testing.assert_allclose(output.outputs.data, expected, atol=1e-4)
