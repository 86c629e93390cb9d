"""Models that read images, with the greedy answers of transformers to the prompts that a server made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from support.media.image_processors import image_processor
from support.media.image_requests import NUM_TOKENS, ask_together, chat, data_url, picture
from support.servers.server import Server
from support.vision.checkpoints import vision_directory

TOKEN_TYPES = {
    "gemma3": "token_type_ids",
    "gemma4": "mm_token_type_ids",
    "gemma4_unified": "mm_token_type_ids",
}
PUBLISHED_MODELS = ("llava_next-published", "llava_onevision-published")
CHATS = [
    ("the quick", picture(1, 200, 150), "brown fox", picture(2, 64, 64), "jumps"),
    ("the quick", picture(1, 200, 150), "brown fox", picture(3, 64, 64), "jumps"),
    (picture(4, 90, 210), "over the lazy dog"),
    ("seven wizards", picture(5, 64, 64), picture(5, 64, 64)),
    ("brew tea",),
]


class Model:
    """A checkpoint, and transformers' greedy answers to the prompts that the server made."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.kind = kind.removesuffix("-published")
        self.path, self.model = vision_directory(directory, kind)
        self._answers: dict[int, list[int]] = {}

    def check(self, index: int, answer: dict[str, Any]) -> None:
        """Compare the server's answer to `CHATS[index]` with that of transformers."""
        if index not in self._answers:
            self._answers[index] = self._generate(CHATS[index], answer["prompt_token_ids"])
        assert answer["choices"][0]["token_ids"] == self._answers[index], CHATS[index]

    def find_beams(self, index: int, prompt: list[int], num_beams: int) -> list[list[int]]:
        """Return the tokens of transformers' beams for `CHATS[index]`, the best first."""
        config = transformers.GenerationConfig(
            do_sample=False,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            max_new_tokens=NUM_TOKENS,
            pad_token_id=0,
            early_stopping="never",
        )
        config.eos_token_id = self.model.generation_config.eos_token_id = None
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            found = self.model.generate(
                ids, config, attention_mask=torch.ones_like(ids), **self._inputs(CHATS[index])
            )
        return [row[len(prompt) :].tolist() for row in found]

    def _generate(self, parts: tuple[str | Image.Image, ...], prompt: list[int]) -> list[int]:
        return self._continue(prompt, self._inputs(parts))

    def _inputs(self, parts: tuple[str | Image.Image, ...]) -> dict[str, Any]:
        """Return what transformers' processor makes of the images of a conversation."""
        images = [part for part in parts if isinstance(part, Image.Image)]
        inputs: dict[str, Any] = {}
        if images:
            nests = self.kind in ("idefics3", "smolvlm", "llava_onevision")
            batch = [images] if nests else images
            options = {"patch_size": 16} if self.kind.startswith("mistral") else {}
            processed = image_processor(self.path, self.kind)(batch, return_tensors="pt", **options)
            names = ("pixel_values", "image_sizes", "image_position_ids", "batch_num_images")
            inputs = {name: processed[name] for name in names if name in processed}
        return inputs

    @torch.inference_mode()
    def _continue(self, prompt: list[int], inputs: dict[str, Any]) -> list[int]:
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            types = {}
            if self.kind in TOKEN_TYPES:
                ids = torch.tensor([tokens])
                kinds = (ids == self.model.config.image_token_id).long()
                if "pixel_values_videos" in inputs:
                    kinds += 2 * (ids == self.model.config.video_token_id)
                types[TOKEN_TYPES[self.kind]] = kinds
            if self.kind.startswith("paligemma"):
                num_generated = len(tokens) - len(prompt)
                types["token_type_ids"] = torch.tensor([[0] * len(prompt) + [1] * num_generated])
            logits = self.model(input_ids=torch.tensor([tokens]), **inputs, **types).logits[0, -1]
            tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]

    def check_video(self, server: Server) -> None:
        """Compare the server's answer to a video with that of transformers."""
        frames = [picture(seed, 64, 64) for seed in (31, 32, 33)]
        part = {"type": "video", "video": [data_url(frame) for frame in frames], "fps": 1.0}
        status, answer = server.post("/v1/chat/completions", chat("a", part, "b"))
        assert status == 200, answer
        # Each frame is read as one tile, as images of a prompt with several are by LLaVA-OneVision.
        if self.kind.startswith("gemma4"):
            found = image_processor(self.path, self.kind)(frames, return_tensors="pt")
            inputs = {"pixel_values_videos": found["pixel_values"]}
            inputs["video_position_ids"] = found["image_position_ids"]
            inputs["num_frames_per_video"] = torch.tensor([len(frames)])
            expected = self._continue(answer["prompt_token_ids"], inputs)
            assert answer["choices"][0]["token_ids"] == expected
            return
        options = {"do_image_splitting": False} if self.kind == "smolvlm" else {}
        pixels = image_processor(self.path, self.kind, **options)([frames], return_tensors="pt")[
            "pixel_values"
        ]
        inputs = {"pixel_values": pixels}
        if self.kind == "llava_onevision":
            inputs = {"pixel_values_videos": pixels.view(1, 3, 3, 64, 64)}
        expected = self._continue(answer["prompt_token_ids"], inputs)
        assert answer["choices"][0]["token_ids"] == expected

    def check_all(self, server: Server, indices: list[int]) -> None:
        """Send conversations at the same time, and compare all answers."""
        answers = ask_together(server, [chat(*CHATS[index]) for index in indices])
        for index, answer in zip(indices, answers, strict=True):
            self.check(index, answer)
