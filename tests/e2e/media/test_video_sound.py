"""A server of models that read the sound of videos."""

from __future__ import annotations

import base64
import concurrent.futures
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from engine.frontend.media.frame_sampling import Sampling
from engine.frontend.media.layouts.frames import fit_frames
from engine.frontend.media.video_files import open_video
from engine.frontend.model_source.images.videos import read_video_processor
from engine.frontend.offline.llm import LLM
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.sampling_params import SamplingParams
from support.audio.checkpoints import OMNI_MODELS, audio_directory, reference_inputs
from support.media.video_files import write_video
from support.servers.server import DEVICE, Server, assert_nothing_is_held
from support.vision.qwen import video_patches

torch.set_num_threads(1)
FLAGS = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
NUM_TOKENS = 8
NO_SOUND = {"use_audio_in_video": False}
WITH_SOUND = {"mm_processor_kwargs": {"use_audio_in_video": True}}
SIZE = (64, 128)
pytestmark = pytest.mark.sampled


def clip(seed: int, seconds: float) -> np.ndarray:
    samples = 0.3 * np.random.default_rng(seed).standard_normal(int(16_000 * seconds))
    return (samples.clip(-1, 1) * 32767).astype(np.int16)


def movie(seconds: float, sound: np.ndarray | None) -> bytes:
    return write_video("mp4", "mpeg4", int(10 * seconds), SIZE, sound=sound)


def part(kind: str, data: bytes, **fields: Any) -> dict[str, Any]:
    url = f"data:{kind}/x;base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url, **fields}}


def body(*content: Any, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": x} if isinstance(x, str) else x for x in content]
    return {
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


class Reference:
    """A Qwen-Omni, and transformers' answers to videos with sound."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.kind, self.is_third = kind, kind == "qwen3_omni"
        self.path, self.model = audio_directory(directory, kind)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.path)
        config = ConfigFields.read(self.path / "config.json").section("thinker_config")
        self.videos = read_video_processor(self.path, config, config.section("text_config"), {})
        name = "Qwen3OmniMoeProcessor" if self.is_third else "Qwen2_5OmniProcessor"
        self.processor = getattr(transformers, name)

    def frames(self, data: bytes, fps: float | None) -> list[Any]:
        config = self.videos
        found = open_video(
            data, Sampling(fps), "v", config, lambda *x: fit_frames(*x, config, 10_000)
        )
        return found.frames

    def text(self, num_grids: int, seconds_per_grid: float, num_sounds: int) -> str:
        """Return the text of a video, as transformers' processor writes it."""
        marks = ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>")
        begin, of_sound, end = marks
        token = self.model.config
        video = getattr(token, "video_token_id", None) or token.video_token_index
        state = SimpleNamespace(
            video_processor=SimpleNamespace(merge_size=2),
            audio_bos_token=begin,
            audio_token=of_sound,
            audio_eos_token=end,
            video_token=self.tokenizer.convert_ids_to_tokens(video),
            get_chunked_index=lambda *x: self.processor.get_chunked_index(None, *x),
        )
        inputs = {
            "video_grid_thw": torch.tensor([[num_grids, 32, 16]]),
            "video_second_per_grid": [seconds_per_grid],
        }
        return self.processor.replace_video_with_audio_token(
            state,
            inputs,
            0,
            {"num_audio_tokens": [num_sounds]},
            0,
            position_id_per_seconds=token.position_id_per_seconds,
            seconds_per_chunk=2.0,
        )

    @torch.inference_mode()
    def check(
        self, answer: dict[str, Any], data: bytes, clips: list[np.ndarray], fps: float | None = None
    ) -> None:
        frames = self.frames(data, fps)
        inputs = reference_inputs(self.kind, [each / np.float32(32768) for each in clips])
        inputs["pixel_values_videos"] = video_patches(frames, [0.5] * 3, [0.5] * 3)
        num_grids = -(-len(frames) // 2)
        seconds = 2 / (fps or (1.0 if self.is_third else 2.0))
        inputs["video_grid_thw"] = torch.tensor([[num_grids, 32, 16]])
        inputs["video_second_per_grid"] = torch.tensor([seconds])
        inputs["use_audio_in_video"] = True
        prompt = answer["prompt_token_ids"]
        decoded = self.tokenizer.decode(prompt)
        counts = decoded.split("<|audio_start|>")[-1].count("<|audio_pad|>")
        assert self.text(num_grids, seconds, counts) in decoded
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            ids = torch.tensor([tokens])
            # Without a mask, transformers places images like text.
            logits = self.model(input_ids=ids, attention_mask=ids * 0 + 1, **inputs).logits[0, -1]
            tokens.append(int(logits.argmax()))
        assert answer["choices"][0]["token_ids"] == tokens[len(prompt) :]


@pytest.mark.parametrize("kind", OMNI_MODELS)
def test_sound_is_read_among_the_frames_of_a_video_across_a_crash(
    tmp_path: Path, kind: str
) -> None:
    reference = Reference(tmp_path, kind)
    sound, other = clip(1, 5.35), clip(2, 1.2)
    video, short = movie(5.3, sound), movie(4.1, other)
    small = ("--max-num-batched-tokens", "100", "--max-num-seqs", "4", "--max-model-len", "2048")
    # Three prompts do not fit at a time.
    blocks = ("--num-gpu-blocks-override", "160", "--encoder-cache-size", "300")
    with Server(str(reference.path), *FLAGS, *small, *blocks, "-tp", "2") as server:

        def ask(*content: Any, **fields: Any) -> dict[str, Any]:
            status, answer = server.post("/v1/chat/completions", body(*content, **fields))
            assert status == 200, answer
            return answer

        def check_all() -> None:
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                first = pool.submit(ask, "the quick", part("video", video), "fox", **WITH_SOUND)
                both = pool.submit(
                    ask,
                    part("audio", _wave(other)),
                    part("video", video),
                    "over",
                    **WITH_SOUND,
                )
                odd = pool.submit(
                    ask, part("video", short, fps=0.7), "dog", use_audio_in_video=True
                )
                reference.check(first.result(), video, [sound])
                reference.check(both.result(), video, [other, sound])
                reference.check(odd.result(), short, [other], 0.7)

        check_all()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answers = pool.submit(check_all)
            server.child("worker 0").kill()
            answers.result()
        server.wait_until_whole()
        # A video without an audio track has none to read.
        silent = part("video", movie(1.0, None))
        assert ask(silent, **WITH_SOUND)["prompt_token_ids"] == ask(silent)["prompt_token_ids"]
        assert_nothing_is_held(server)


def _wave(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV")
    return file.getvalue()


def test_sound_follows_a_video_in_models_that_read_both_separately(tmp_path: Path) -> None:
    path, model = audio_directory(tmp_path, "gemma4")
    video_id = model.config.video_token_id
    token = transformers.AutoTokenizer.from_pretrained(path).convert_ids_to_tokens(video_id)
    template = path / "chat_template.jinja"
    shown = f"{{% elif p.type == 'video' %}}{token}{{% elif p.type == 'image' %}}"
    template.write_text(template.read_text().replace("{% elif p.type == 'image' %}", shown))
    limits = ("--mm-processor-kwargs", '{"max_soft_tokens": 70, "use_audio_in_video": true}')
    sound = clip(3, 1.0)
    video = part("video", movie(2.0, sound))
    with Server(str(path), *FLAGS, *limits) as server:

        def ask(*content: Any, **fields: Any) -> dict[str, Any]:
            status, answer = server.post("/v1/chat/completions", body(*content, **fields))
            assert status == 200, answer
            return answer

        both = ask(video, part("audio", _wave(sound)), "fox", **NO_SOUND)
        for fields in (WITH_SOUND, {}):  # It is the server's default.
            joint = ask(video, "fox", **fields)
            assert joint["prompt_token_ids"] == both["prompt_token_ids"]
            assert joint["choices"][0]["token_ids"] == both["choices"][0]["token_ids"]
        frames = {"num_frames": 3}
        for fields in (
            {"mm_processor_kwargs": frames},
            {"media_io_kwargs": {"video": frames}},
        ):
            few = ask(video, "fox", **fields, **NO_SOUND)
            chosen = part("video", movie(2.0, sound), **frames)
            assert few["prompt_token_ids"] == ask(chosen, "fox", **NO_SOUND)["prompt_token_ids"]


def test_sound_is_read_without_a_server(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "qwen3_omni")
    sound = clip(3, 2.5)
    video = movie(2.0, sound)
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    kwargs = WITH_SOUND["mm_processor_kwargs"]
    with LLM(str(reference.path), dtype="float32", device=DEVICE) as llm:
        [chat] = llm.chat(
            [{"role": "user", "content": [part("video", video)]}],
            greedy,
            mm_processor_kwargs=kwargs,
        )
        prompt = {"prompt": chat.prompt.split("<|audio_start|>")[0], "multi_modal_data": {}}
        prompt["prompt"] += "<|video_pad|>" + chat.prompt.split("<|audio_end|>")[1]
        clips = (sound / np.float32(32768), 16_000)
        for data in ({"video": video}, {"video": reference.frames(video, None), "audio": clips}):
            prompt |= {"multi_modal_data": data, "mm_processor_kwargs": kwargs}
            [given] = llm.generate([prompt], greedy)
            assert given.prompt_token_ids == chat.prompt_token_ids
            assert given.outputs[0].token_ids == chat.outputs[0].token_ids
