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
from support.image_requests import data_url, picture
from support.server import Server, assert_nothing_is_held
from support.words_bert import bert_directory

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
        mixed = [messages[0], [{"role": "user", "content": TEXTS[1]}]]
        np.testing.assert_allclose(embed(messages=mixed), [images[0], texts[1]], atol=1e-4)
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
        status, answer = server.post("/v1/completions", {"prompt": "tea"})
        assert status == 400 and "only embeds text" in answer["error"]["message"]
        assert_nothing_is_held(server)
    with LLM(str(tmp_path), cpu_backend=backend) as llm:
        prompts = [{"prompt": "", "multi_modal_data": {"image": each}} for each in IMAGES]
        outputs = llm.embed([*TEXTS, *prompts])
        vectors = [output.outputs.embedding for output in outputs]
        np.testing.assert_allclose(vectors, [*texts, *images], atol=1e-4)
        with pytest.raises(ParameterError, match="must have one image or a text"):
            llm.embed({"prompt": "tea", "multi_modal_data": {"image": IMAGES[0]}})
