"""Servers of chat models that transcribe: their texts are those of transformers."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import torch
import transformers
from engine.frontend.offline.llm import LLM
from engine.frontend.tokenizer.load import load_tokenizer
from support.audio.checkpoints import MARKS, audio_directory, reference_inputs
from support.checkpoints.lora_adapters import write_adapter
from support.requests import realtime
from support.servers.server import DEVICE, Server, assert_nothing_is_held
from websockets.sync.client import connect

torch.set_num_threads(1)
pytestmark = pytest.mark.sampled

MAX_MODEL_LEN = 200
GEMMA_LEN = 270
FLAGS = (
    *("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny"),
    *("--max-model-len", str(MAX_MODEL_LEN)),
)


def clip(seed: int, seconds: float, rate: int = 16_000) -> tuple[np.ndarray, tuple[str, bytes]]:
    """Return noise, and the file of it."""
    samples = 0.3 * np.random.default_rng(seed).standard_normal(int(rate * seconds))
    file = io.BytesIO()
    soundfile.write(file, samples.astype(np.float32), rate, format="WAV", subtype="FLOAT")
    return samples.astype(np.float32), ("sound.wav", file.getvalue())


class Reference:
    """Transformers' model of a checkpoint, and the conversations in which it transcribes."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.kind = kind
        self.path, self.model = audio_directory(directory, kind)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(self.path)

    def prompt(self, question: str) -> str:
        """Return the prompt with a message."""
        messages = [{"role": "user", "content": question}]
        found: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return found

    @torch.inference_mode()
    def text(
        self,
        samples: np.ndarray,
        num_tokens: int,
        *,
        before: str = "",
        text: str = "",
        answer: str = "",
        prompt: str = "",
    ) -> str:
        """Return the transcript in a conversation whose clip has `num_tokens` embeddings, or after a `prompt`."""
        content: Any = [{"type": "audio"}, *([{"type": "text", "text": text}] if text else [])]
        if self.kind == "granite_speech":
            content = MARKS[self.kind] + text
        if self.kind == "gemma3n":
            content = f"{text}\n\n<start_of_audio>{MARKS[self.kind]}<end_of_audio>\n\n"
        messages: list[Any] = [{"role": "user", "content": content}]
        if before:
            messages.insert(0, {"role": "system", "content": before})
        prompt = prompt or self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        tokens = MARKS[self.kind] * num_tokens
        if self.kind == "moss_transcribe_diarize":
            # A time follows every 12 embeddings, of which a second has 12.5.
            part, num_times = MARKS[self.kind] * 12, int(num_tokens / 12.5)
            tokens = "".join(f"{part}{number}" for number in range(1, num_times + 1))
            tokens += MARKS[self.kind] * (num_tokens - 12 * num_times)
        prompt = prompt.replace("<|AUDIO_DURATION|>", f"{len(samples) / 24_000:.2f}")
        prompt = prompt.replace(MARKS[self.kind], tokens) + answer
        ids = self._tokenizer.encode(prompt, add_special_tokens=False, return_tensors="pt")
        inputs = reference_inputs(self.kind, [samples])
        if self.kind in ("gemma3n", "fireredasr2", "funasr", "meralion2"):
            # This reference is no model of transformers, but a module with its parts.
            found, most = ids, GEMMA_LEN if self.kind == "gemma3n" else MAX_MODEL_LEN
            while found.shape[1] < most and int(found[0, -1]) != self._tokenizer.eos_token_id:
                logits = self.model(found, **inputs).logits[0, -1]
                found = torch.cat((found, logits.argmax()[None, None]), 1)
        else:
            found = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **inputs,
                do_sample=False,
                max_new_tokens=MAX_MODEL_LEN - ids.shape[1],
            )
        # Random models write invalid UTF-8, for which transformers has other replacement characters.
        transcript = found[0, ids.shape[1] :].tolist()
        tokenizer = load_tokenizer(str(self.path))
        return tokenizer.decode(transcript, skip_special_tokens=True).strip()


def transcriptions(server: Server) -> Any:
    url = server.url + "/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60).audio


def test_qwen3_asr_transcribes_across_a_crash_of_a_worker(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "qwen3_asr")
    samples, file = clip(1, 1.7)
    with Server(str(reference.path), *FLAGS, "-tp", "2") as server:
        audio = transcriptions(server)
        create = audio.transcriptions.create
        # Texts of streams are not decoded again at other temperatures.
        events = iter(create(model="tiny", file=file, language="en", stream=True))
        parts = [next(events)]
        server.child("worker 0").kill()
        *more, done = events
        expected = reference.text(samples, 22, answer="language English<asr_text>")
        assert done.text == "".join(part.delta for part in parts + more).strip() == expected != ""
        server.wait_until_whole()
        *_, done = create(model="tiny", file=file, prompt="the quick", stream=True)
        assert done.text == reference.text(samples, 22, before="the quick", answer="")
        long = clip(2, 31.5)[1]
        # Without a seed, a random model sometimes writes nothing for a window, which then has no segment.
        body = {"language": "fr", "response_format": "verbose_json", "extra_body": {"seed": 1}}
        verbose = create(model="tiny", file=long, **body)
        assert verbose.language == "french"
        # A window has at most half of the context's 200 tokens, which are 13 a second.
        assert len(verbose.segments) >= 5
        times = [time for each in verbose.segments for time in (each.start, each.end)]
        assert times == sorted(times) and max(np.diff(times)) < 100 / 13
        assert verbose.duration == 31.5
        assert "-->" in create(model="tiny", file=file, language="Greek", response_format="srt")
        for fields, named in (
            ({"language": "la"}, "must be one of the model's languages"),
            ({"languages": ["de", "en"]}, "cannot choose among 2 languages"),
            (
                {"response_format": "verbose_json", "timestamp_granularities": ["word"]},
                "writes text without times",
            ),
        ):
            with pytest.raises(openai.BadRequestError, match=named):
                create(model="tiny", file=file, **fields)
        with pytest.raises(openai.BadRequestError, match="cannot translate"):
            audio.translations.create(model="tiny", file=file)
        assert_nothing_is_held(server)


def test_vllms_realtime_clients_get_text_while_audio_arrives_across_a_crash(
    tmp_path: Path,
) -> None:
    reference = Reference(tmp_path, "qwen3_asr")
    pcm = realtime.to_pcm(clip(4, 21.0)[0])
    names = ("--hf-overrides", '{"architectures": ["Qwen3ASRRealtimeGeneration"]}')
    with (
        Server(str(reference.path), *FLAGS, *names, "-tp", "2") as server,
        connect(server.url.replace("http", "ws", 1) + "/v1/realtime") as socket,
    ):
        assert json.loads(socket.recv(20))["type"] == "session.created"

        def send(**event: Any) -> None:
            socket.send(json.dumps(event))

        def run(*, is_killed: bool) -> tuple[str, str]:
            send(type="input_audio_buffer.commit")
            for start in range(0, len(pcm), 8192):
                audio = base64.b64encode(pcm[start : start + 8192]).decode()
                send(type="input_audio_buffer.append", audio=audio)
            # The first parts are transcribed before the utterance ends.
            found = [json.loads(socket.recv(60))]
            if is_killed:
                server.child("worker 0").kill()
            send(type="input_audio_buffer.commit", final=True)
            while found[-1]["type"] == "transcription.delta":
                found.append(json.loads(socket.recv(60)))
            assert found[-1]["type"] == "transcription.done"
            usage = found[-1]["usage"]
            # Three windows of at most 100 embeddings.
            assert usage["prompt_tokens"] > 270
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            return "".join(each["delta"] for each in found[:-1]), found[-1]["text"]

        send(type="session.update", model="tiny", language="en")
        text, whole = run(is_killed=False)
        assert whole == text.strip() != ""
        assert run(is_killed=True) == (text, whole)
        send(type="input_audio_buffer.commit", final=True)
        assert json.loads(socket.recv(20))["code"] == "input_audio_buffer_commit_empty"
        server.wait_until_whole()
        assert_nothing_is_held(server)


def test_glm_asr_transcribes_on_request(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "glmasr")
    samples, file = clip(3, 3.3)
    with Server(str(reference.path), *FLAGS) as server:
        create = transcriptions(server).transcriptions.create
        *_, done = create(model="tiny", file=file, stream=True)
        instruction = "Please transcribe this audio into text"
        # Eight frames become one embedding.
        expected = reference.text(samples, 25 + 16, text=instruction, answer="")
        assert done.text == expected != ""
        for name in ("language", "prompt"):
            with pytest.raises(openai.BadRequestError, match=f"{name} is not supported"):
                create(model="tiny", file=file, **{name: "en"})
        assert_nothing_is_held(server)


def test_moss_names_speakers_across_a_crash_of_a_worker(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "moss_transcribe_diarize")
    samples, file = clip(3, 3.3)
    with Server(str(reference.path), *FLAGS, "-tp", "2") as server:
        create = transcriptions(server).transcriptions.create
        events = iter(create(model="tiny", file=file, stream=True, response_format="diarized_json"))
        parts = [next(events)]
        server.child("worker 0").kill()
        *more, segment, done = events
        # Four rows become one embedding, also the last one of a window.
        expected = reference.text(samples, 25 + 17, answer="")
        assert done.text == expected != ""
        # At its end is half of a character.
        shown = "".join(part.delta for part in parts + more)
        assert done.text.startswith(shown[:-4])
        assert (segment.type, segment.speaker) == ("transcript.text.segment", "A")
        assert (segment.start, segment.end, segment.text) == (0.0, 3.3, shown)
        server.wait_until_whole()
        whole = create(model="tiny", file=file, response_format="diarized_json", keywords=["fox"])
        assert whole.duration == 3.3
        for fields, named in (
            ({"prompt": "names"}, "prompt is not supported"),
            ({"include": ["logprobs"]}, "include is not supported by models that name speakers"),
            (
                {"response_format": "diarized_json", "file": clip(2, 20.0)[1]},
                "knows a speaker again only within 8 s",
            ),
        ):
            with pytest.raises(openai.BadRequestError, match=named):
                create(**{"model": "tiny", "file": file} | fields)
        assert_nothing_is_held(server)


def test_vibevoice_asr_reads_the_duration_across_a_crash_of_a_worker(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "vibevoice_asr")
    samples, file = clip(3, 0.95, 24_000)
    with Server(str(reference.path), *FLAGS, "-tp", "2") as server:
        create = transcriptions(server).transcriptions.create
        events = iter(create(model="tiny", file=file, stream=True))
        parts = [next(events)]
        server.child("worker 0").kill()
        *_, done = [*parts, *events]
        assert done.text == reference.text(samples, 72, answer="") != ""
        server.wait_until_whole()
        *_, done = create(model="tiny", file=file, prompt="quick", keywords=["fox"], stream=True)
        assert done.text == reference.text(samples, 72, text="quick fox", answer="")
        found = create(model="tiny", file=file, response_format="diarized_json")
        assert found.duration == 0.95
        assert found.segments[0].speaker == "A"
        assert_nothing_is_held(server)


def test_fun_asr_nano_gets_the_language_as_a_part_across_a_crash_of_a_worker(
    tmp_path: Path,
) -> None:
    reference = Reference(tmp_path, "fun_asr_nano")
    samples, file = clip(3, 3.3)
    with Server(str(reference.path), *FLAGS, "-tp", "2") as server:
        create = transcriptions(server).transcriptions.create
        events = iter(create(model="tiny", file=file, stream=True, language="english"))
        parts = [next(events)]
        server.child("worker 0").kill()
        *_, done = [*parts, *events]
        # Six of 328 frames become one embedding.
        assert done.text == reference.text(samples, 55, text="\u82f1\u6587", answer="") != ""
        server.wait_until_whole()
        *_, done = create(model="tiny", file=file, prompt="quick", stream=True)
        assert done.text == reference.text(samples, 55, text="quick", answer="")
        verbose = create(model="tiny", file=clip(2, 12.0)[1], response_format="verbose_json")
        # Half of the context has 100 embeddings.
        assert len(verbose.segments) >= 2
        with pytest.raises(openai.BadRequestError, match="is too short"):
            create(model="tiny", file=clip(2, 0.02)[1])
        assert_nothing_is_held(server)


def test_omniasr_reads_the_token_of_a_language_across_a_crash_of_a_worker(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "omniasr")
    samples, file = clip(5, 1.7)
    with Server(str(reference.path), *FLAGS, "-tp", "2") as server:
        create = transcriptions(server).transcriptions.create
        events = iter(create(model="tiny", file=file, stream=True, language="French"))
        parts = [next(events)]
        server.child("worker 0").kill()
        *_, done = [*parts, *events]
        assert done.text == reference.text(samples, 85, text="<|lang:fra_latn|>") != ""
        server.wait_until_whole()
        for language, text in (("ABC_Latn", "<|lang:abc_latn|>"), (openai.omit, "")):
            *_, done = create(model="tiny", file=file, stream=True, language=language)
            assert done.text == reference.text(samples, 85, text=text)
        with pytest.raises(openai.BadRequestError, match=r"\(fr, abc_latn, fra_latn\), got .en."):
            create(model="tiny", file=file, language="en")
        assert_nothing_is_held(server)


@pytest.mark.parametrize(
    ("kind", "question", "num_tokens"),
    [
        # Four of 328 frames become a row, and two rows an embedding.
        ("fireredasr2", "user\n<|AUDIO|>\u8bf7\u8f6c\u5199\u97f3\u9891\u4e3a\u6587\u5b57", 41),
        # Six of 328 frames become a row, and the first eighth of the rows are read.
        (
            "funasr",
            "system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n\u8bed\u97f3\u8f6c\u5199\uff1a<|AUDIO|>",
            7,
        ),
    ],
)
def test_models_transcribe_in_prompts_of_their_own_across_a_crash_of_a_worker(
    tmp_path: Path, kind: str, question: str, num_tokens: int
) -> None:
    reference = Reference(tmp_path, kind)
    samples, file = clip(3, 3.3)
    # The server needs no chat template for it.
    (reference.path / "chat_template.jinja").unlink()
    prompt = f"<|im_start|>{question}<|im_end|>\n<|im_start|>assistant\n"
    expected = reference.text(samples, num_tokens, prompt=prompt)
    with Server(str(reference.path), *FLAGS, "-tp", "2") as server:
        create = transcriptions(server).transcriptions.create
        limit = {"max_completion_tokens": 24}
        events = iter(create(model="tiny", file=file, stream=True, extra_body=limit))
        parts = [next(events)]
        server.child("worker 0").kill()
        *_, done = [*parts, *events]
        # Later tokens of this text are almost equally probable.
        assert (done.text, len(done.text) > 30) == (expected[: len(done.text)], True)
        server.wait_until_whole()
        with pytest.raises(openai.BadRequestError, match="detects the language itself"):
            create(model="tiny", file=file, language="zh")
        assert_nothing_is_held(server)


def test_voxtral_transcribes_after_its_transcribe_token(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "voxtral")
    samples, file = clip(6, 3.3)
    with Server(str(reference.path), *FLAGS, "-tp", "2") as server:
        audio = transcriptions(server)
        create = audio.transcriptions.create
        # Each window of two seconds becomes 25 embeddings.
        expected = [
            reference.text(samples, 50, answer=answer)
            for answer in ("[TRANSCRIBE]", "lang:fr[TRANSCRIBE]")
        ]
        assert expected[0] != expected[1]
        events = iter(create(model="tiny", file=file, stream=True))
        parts = [next(events)]
        server.child("worker 0").kill()
        *more, done = events
        assert done.text == "".join(part.delta for part in parts + more).strip() == expected[0]
        server.wait_until_whole()
        *_, done = create(model="tiny", file=file, language="french", stream=True)
        assert done.text == expected[1]
        rounded = realtime.to_file(samples)
        *_, done = create(model="tiny", file=rounded, language="french", stream=True)
        assert realtime.transcribe(server.url, samples, language="french") == done.text
        for fields, named in (
            ({"language": "yue"}, "must be one of the model's languages"),
            ({"prompt": "names"}, "prompt is not supported"),
        ):
            with pytest.raises(openai.BadRequestError, match=named):
                create(model="tiny", file=file, **fields)
        with pytest.raises(openai.BadRequestError, match="cannot translate"):
            audio.translations.create(model="tiny", file=file)
        assert_nothing_is_held(server)


def test_meralion_2_transcribes_on_request_across_a_crash_of_a_worker(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "meralion2")
    samples, file = clip(8, 3.3)
    with Server(str(reference.path), *FLAGS, "-tp", "2") as server:
        audio = transcriptions(server)
        create = audio.transcriptions.create
        events = iter(create(model="tiny", file=file, stream=True))
        parts = [next(events)]
        server.child("worker 0").kill()
        *more, done = events
        # A clip is filled up to windows of two seconds, of which each has 20 embeddings.
        question = "Instruction: Please transcribe this speech. \n"
        question += "Follow the text instruction based on the following audio: <SpeechHere>"
        prompt = reference.prompt(question)
        assert done.text == reference.text(samples, 40, prompt=prompt) != ""
        # At its end may be half of a character.
        assert done.text.startswith("".join(part.delta for part in parts + more).strip()[:-4])
        server.wait_until_whole()
        assert create(model="tiny", file=file, extra_body={"seed": 1}).text
        for name in ("language", "prompt"):
            with pytest.raises(openai.BadRequestError, match=f"{name} is not supported"):
                create(model="tiny", file=file, **{name: "en"})
        with pytest.raises(openai.BadRequestError, match="cannot translate"):
            audio.translations.create(model="tiny", file=file)
        assert_nothing_is_held(server)


def test_gemma_3n_reads_the_language_in_its_instruction(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "gemma3n")
    samples, file = clip(8, 2.2)
    with Server(str(reference.path), *FLAGS, "--max-model-len", str(GEMMA_LEN)) as server:
        audio = transcriptions(server)
        *_, done = audio.transcriptions.create(model="tiny", file=file, language="fr", stream=True)
        text = "Transcribe this audio into French: "
        assert done.text == reference.text(samples, 188, text=text, answer="") != ""
        assert audio.translations.create(model="tiny", file=file, extra_body={"seed": "1"}).text
        assert_nothing_is_held(server)


@pytest.mark.parametrize("is_own", [False, True])
def test_granite_speech_translates_and_uses_its_adapter_for_audio(
    tmp_path: Path, is_own: bool
) -> None:
    reference = Reference(tmp_path / "model", "granite_speech")
    base = reference.model
    adapted = write_adapter(tmp_path / "audio", base, 1, r".*language_model.*_proj", r=20)
    samples, file = clip(5, 2.2)
    given = json.dumps({"audio": str(tmp_path / "audio")})
    flags = ["--enable-lora", "--max-lora-rank", "20", "--default-mm-loras", given]
    if is_own:
        # transformers also finds it in the directory of the checkpoint.
        flags = []
        for each in (tmp_path / "audio").iterdir():
            each.rename(reference.path / each.name)
        path = reference.path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"has_lora_adapter": True}))
    with Server(str(reference.path), *FLAGS, *flags) as server:
        audio = transcriptions(server)
        *_, done = audio.transcriptions.create(model="tiny", file=file, stream=True)
        instruction = "can you transcribe the speech into a written format?"
        # 15 pairs of frames become three embeddings.
        texts = []
        for reference.model in (adapted, base):
            texts.append(reference.text(samples, 24, text=instruction, answer=""))
        assert done.text == texts[0] != texts[1]
        # The most likely text is repetitive, so another one is sampled, which without a seed may be empty.
        create, options = audio.translations.create, {"extra_body": {"seed": "1"}}
        translated = create(model="tiny", file=file, **options).text
        assert translated == create(model="tiny", file=file, **options).text != ""
        assert_nothing_is_held(server)


def test_offline_transcription_needs_no_server(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "qwen3_asr thinker")
    samples, _ = clip(4, 0.9)
    flags = {"device": "cpu", "dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    with LLM(str(reference.path), **flags) as llm:
        [found] = llm.transcribe((samples, 16_000), language="de", temperature=0.0)
        assert found.language == "de"
        assert found.text
