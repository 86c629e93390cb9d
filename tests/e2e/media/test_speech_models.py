"""Servers of small random speech models: their texts are those of transformers."""

from __future__ import annotations

import concurrent.futures
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import soundfile
import torch
import transformers
from support.checkpoints.source import (
    EXTRACTORS,
    LANGUAGES,
    WINDOW_S,
    conformer_directory,
    greedy,
    moonshine_directory,
    multilingual_whisper,
    realtime_directory,
    realtime_features,
    whisper_text,
)
from support.checkpoints.token_writers import CTC_KINDS, LETTER_KINDS, features, writer_directory
from support.requests import realtime
from support.requests.all_kinds import answers, speech_requests
from support.servers.server import DEVICE, Server, assert_nothing_is_held

torch.set_num_threads(1)
pytestmark = pytest.mark.sampled

FLAGS = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
NAMES = {"en": "english", "de": "german", "fr": "french"}


class Reference(NamedTuple):
    """Transformers' model of the checkpoint in a directory."""

    path: Path
    model: Any
    tokenizer: Any
    extractor: Any

    def features(self, samples: np.ndarray) -> torch.Tensor:
        extracted = self.extractor(samples, sampling_rate=16_000, return_tensors="pt")
        return extracted.input_features[0]

    def language(self, samples: np.ndarray) -> str:
        found = self.model.detect_language(self.features(samples)[None])
        return self.tokenizer.convert_ids_to_tokens(int(found))[2:-2]

    def text(
        self,
        samples: np.ndarray,
        language: str,
        task: str,
        before: str = "",
        *,
        timed: bool = False,
    ) -> str:
        generation, encode = self.model.generation_config, self.tokenizer.encode
        prompt = [generation.prev_sot_token_id, *encode(f" {before}")] if before else []
        prompt += [generation.decoder_start_token_id, generation.lang_to_id[f"<|{language}|>"]]
        prompt.append(generation.task_to_id[task])
        if not timed:
            prompt.append(generation.no_timestamps_token_id)
        features = self.features(samples)[None]
        tokens = whisper_text(self.model, features, prompt, has_timestamps=timed)
        first_time = generation.no_timestamps_token_id + 1
        return self.tokenizer.decode([token for token in tokens if token < first_time]).strip()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    path, model = multilingual_whisper(tmp_path_factory.mktemp("whisper"))
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(path)
    return Reference(path, model, transformers.AutoTokenizer.from_pretrained(path), extractor)


@pytest.fixture(scope="module")
def server(reference: Reference) -> Iterator[Server]:
    with Server(str(reference.path), *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def audio(server: Server) -> Any:
    return client(server)


def client(server: Server) -> Any:
    url = server.url + "/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60).audio


def clip(seed: int, seconds: float = 1.8) -> tuple[np.ndarray, tuple[str, bytes]]:
    """Return samples of random tones, and the file of them."""
    random = np.random.default_rng(seed)
    times = np.arange(int(16_000 * seconds / 9)) / 16_000
    tones = [np.sin(2 * np.pi * hz * times) for hz in random.uniform(100, 4000, 9)]
    samples = (0.3 * np.concatenate(tones)).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV", subtype="FLOAT")
    return samples, ("sound.wav", file.getvalue())


def test_languages_are_detected_and_reported(audio: Any, reference: Reference) -> None:
    found = set()
    for seed in (0, 1, 3, 4):
        samples, file = clip(seed)
        language = reference.language(samples)
        answer = audio.transcriptions.create(
            model="tiny", file=file, response_format="verbose_json"
        )
        assert answer.language == NAMES[language]
        assert answer.text == reference.text(samples, language, "transcribe", timed=True)
        assert {segment.temperature for segment in answer.segments} == {0.0}
        found.add(language)
    assert len(found) > 1


@pytest.mark.parametrize("language", [*LANGUAGES, "French"])
def test_a_given_language_is_not_detected(audio: Any, reference: Reference, language: str) -> None:
    samples, file = clip(7)
    answer = audio.transcriptions.create(model="tiny", file=file, language=language)
    code = language[:2].lower()
    assert answer.text == reference.text(samples, code, "transcribe")


def test_possible_languages_and_keywords_guide_the_text(audio: Any, reference: Reference) -> None:
    samples, file = clip(7)
    create = audio.transcriptions.create
    detected = reference.language(samples)
    others = [code for code in LANGUAGES if code != detected]
    ids = reference.model.generation_config.lang_to_id
    start = torch.tensor([[reference.model.config.decoder_start_token_id]])
    row = reference.model(reference.features(samples)[None], decoder_input_ids=start).logits[0, -1]
    best = max(others, key=lambda code: row[ids[f"<|{code}|>"]])
    text = create(model="tiny", file=file, languages=others).text
    assert text == reference.text(samples, best, "transcribe")
    text = create(model="tiny", file=file, languages=["German"], keywords=["tea", "tower"]).text
    assert text == reference.text(samples, "de", "transcribe", "tea, tower")
    german = {"model": "tiny", "language": "de"}
    assert create(**german, file=file, extra_body={"hotwords": "tea, tower"}).text == text
    with pytest.raises(openai.BadRequestError, match=r"top_p must be in \[0, 1\], got 2"):
        create(**german, file=file, extra_body={"top_p": 2})
    with pytest.raises(openai.BadRequestError, match="use_beam_search is not supported for speech"):
        create(**german, file=file, extra_body={"use_beam_search": "true"})
    with pytest.raises(openai.BadRequestError, match="together with language"):
        create(model="tiny", file=file, languages=["de"], language="de")
    with pytest.raises(openai.BadRequestError, match="languages must be one of the model's"):
        create(model="tiny", file=file, languages=["de", "it"])


def test_translations_use_the_translate_task(audio: Any, reference: Reference) -> None:
    samples, file = clip(8)
    language = reference.language(samples)
    texts = [reference.text(samples, language, task) for task in ("translate", "transcribe")]
    assert texts[0] != texts[1]
    translated = audio.translations.create(model="tiny", file=file, extra_body={"seed": "1"})
    assert translated.text == texts[0]
    assert audio.transcriptions.create(model="tiny", file=file).text == texts[1]
    with_target = audio.translations.create(
        model="tiny", file=file, extra_body={"to_language": "en"}
    )
    assert with_target.text == texts[0]
    options = {"extra_body": {"max_completion_tokens": 3, "seed": 1}}
    short = audio.translations.create(model="tiny", file=file, **options).text
    assert len(short) < len(texts[0]) and short
    for create in (audio.translations.create, audio.transcriptions.create):
        with pytest.raises(openai.BadRequestError, match="to_language must be en in /v1/audio"):
            create(model="tiny", file=file, extra_body={"to_language": "de"})


def test_transcription_prompt_precedes_the_audio(audio: Any, reference: Reference) -> None:
    samples, file = clip(9)
    create = audio.transcriptions.create
    text = create(model="tiny", file=file, language="de", prompt="names of men").text
    assert text == reference.text(samples, "de", "transcribe", "names of men")
    assert text != create(model="tiny", file=file, language="de").text


def test_word_times_and_streams_contain_the_whole_text(audio: Any, server: Server) -> None:
    _, file = clip(10, 3 * WINDOW_S)
    create = audio.transcriptions.create
    text = create(model="tiny", file=file).text
    events = list(create(model="tiny", file=file, stream=True))
    assert events[-1].text == text
    verbose = create(
        model="tiny", file=file, response_format="verbose_json", timestamp_granularities=["word"]
    )
    # These texts end only at the end of the context. With word times, some of the context is reserved for the
    # alignment.
    assert "".join(word.word for word in verbose.words) == verbose.text.replace(" ", "")
    assert verbose.text[:26] == text[:26] and len(verbose.text) < len(text)
    times = [time for word in verbose.words for time in (word.start, word.end)]
    assert times == sorted(times) and times[-1] <= 3 * WINDOW_S
    assert_nothing_is_held(server)


def test_word_times_are_refused_if_layers_are_divided_into_stages(reference: Reference) -> None:
    with Server(str(reference.path), *FLAGS, "-pp", "2") as server:
        create = client(server).transcriptions.create
        words: Any = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
        with pytest.raises(openai.BadRequestError, match="--pipeline-parallel-size 2"):
            create(model="tiny", file=clip(1)[1], **words)
        assert create(model="tiny", file=clip(1)[1]).text


def test_unknown_languages_are_refused(audio: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape('(de, en, fr), got "it"')):
        audio.transcriptions.create(model="tiny", file=clip(1)[1], language="it")


def test_a_speech_model_with_a_decoder_transcribes(server: Server) -> None:
    transcription = ["transcription", "multimodal"], ["transcription", "audio"]
    assert server.capabilities() == transcription


@pytest.mark.parametrize(
    "kind",
    [
        *("moonshine", "moonshine_streaming", "speech_to_text"),
        *("wav2vec2-mbart", "sew-bert", "w2v-bert-mbart", "speecht5"),
    ],
)
def test_output_is_limited_by_the_length_of_the_audio_or_the_context(
    tmp_path: Path, kind: str
) -> None:
    path, model = moonshine_directory(tmp_path, kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    samples, file = clip(3, 2.5)
    prompt = [model.config.decoder_start_token_id]
    inputs, count = torch.from_numpy(samples)[None], int(6.5 * 2.5)
    if kind == "speech_to_text":
        extractor = transformers.Speech2TextFeatureExtractor(feature_size=16, num_mel_bins=16)
        inputs = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features
        count = 15
    elif model.config.model_type == "speech-encoder-decoder":
        extractor = transformers.Wav2Vec2FeatureExtractor()
        if kind == "w2v-bert-mbart":
            extractor = transformers.SeamlessM4TFeatureExtractor(feature_size=16, num_mel_bins=16)
        extractor.save_pretrained(path)
        inputs = extractor(samples, sampling_rate=16_000, return_tensors="pt")
        inputs = inputs[extractor.model_input_names[0]]
        prompt.append(model.generation_config.forced_bos_token_id)
        count = 15
    elif kind == "speecht5":
        count = 15
    tokens = greedy(model, inputs, prompt, count)
    flags = ("-tp", "2", "--inject-preemption", "0.1")
    with Server(str(path), *FLAGS, *flags) as server:
        create = client(server).transcriptions.create
        # Texts of streams are not decoded again.
        events = list(create(model="tiny", file=file, stream=True))
        expected = tokenizer.decode(tokens, skip_special_tokens=True)
        assert events[-1].text == expected.strip() != ""
        *_, done = create(model="tiny", file=realtime.to_file(samples), stream=True)
        assert realtime.transcribe(server.url, samples) == done.text
        with pytest.raises(openai.BadRequestError, match="accepts only audio"):
            create(model="tiny", file=file, prompt="names")
        with pytest.raises(openai.BadRequestError, match="cannot translate"):
            client(server).translations.create(model="tiny", file=file)
        assert_nothing_is_held(server)


@pytest.mark.parametrize("kind", EXTRACTORS)
def test_a_fast_conformer_needs_the_language(tmp_path: Path, kind: str) -> None:
    """Cohere Transcribe and Canary do not detect the language. Canary also translates to English."""
    path, model = conformer_directory(tmp_path, kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    extractor = EXTRACTORS[kind].from_pretrained(path)
    # Longer texts of this Canary repeat themselves, and would be decoded again.
    length = 26 if kind == "canary" else 128
    samples, file = clip(5, 2.2)
    features = extractor(samples, sampling_rate=16_000, return_tensors="pt")["input_features"]
    before = ["▁"] * (kind == "cohere_asr")
    before += ["<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>"]
    after = ["<|pnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>"]

    def text_in(language: str) -> str:
        start = [*before, "<|fr|>", f"<|{language}|>", *after]
        prompt = tokenizer.convert_tokens_to_ids(start)
        found = greedy(model, features[:, : len(samples) // 160], prompt, length - len(prompt))
        end = model.config.eos_token_id
        return str(tokenizer.decode(found[: (*found, end).index(end)])).strip()

    with Server(str(path), *FLAGS, "-tp", "2", "--max-model-len", str(length)) as server:
        create = client(server).transcriptions.create
        events = iter(create(model="tiny", file=file, language="French", stream=True))
        parts = [next(events)]
        server.child("worker 0").kill()
        *more, done = events
        text = "".join(part.delta for part in parts + more).strip()
        assert done.text == text == text_in("fr") != ""
        server.wait_until_whole()
        for fields, named in (
            ({}, "is required, because this model does not detect it"),
            ({"language": "tr"}, "must be one of the model's languages"),
            ({"language": "fr", "prompt": "names"}, "accepts only audio"),
        ):
            with pytest.raises(openai.BadRequestError, match=named):
                create(model="tiny", file=file, **fields)
        translate = client(server).translations.create
        if kind == "canary":
            form = {"language": "fr"}
            assert translate(model="tiny", file=file, extra_body=form).text == text_in("en") != text
        else:
            with pytest.raises(openai.BadRequestError, match="cannot translate"):
                translate(model="tiny", file=file)
        assert_nothing_is_held(server)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["RNNT", "TDT", *CTC_KINDS])
def test_an_encoder_writes_tokens_and_their_times(tmp_path: Path, kind: str) -> None:
    path, model = writer_directory(tmp_path, kind)
    has_ctc, has_letters = kind in CTC_KINDS, kind in LETTER_KINDS
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)

    def text_of(samples: np.ndarray) -> str:
        if has_letters:
            ids = model(**features(kind, samples)).logits[0].argmax(-1)
            return str(tokenizer.decode(ids))
        found = model.generate(**features(kind, samples))
        ids = found[0].unique_consecutive() if has_ctc else found.sequences[0]
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    clips = [clip(seed, 4) for seed in range(6)]
    expected = [text_of(samples).strip() for samples, _ in clips]
    assert len(set(expected)) > 3
    flags = ("-tp", "2", "--inject-preemption", "0.2")
    with Server(str(path), *FLAGS, *flags) as server:
        create = client(server).transcriptions.create

        def ask(file: tuple[str, bytes]) -> str:
            return str(create(model="tiny", file=file).text)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            answers = [pool.submit(ask, file) for _, file in clips]
            server.child("worker 1").kill()
            assert [each.result() for each in answers] == expected
        server.wait_until_whole()
        events = list(create(model="tiny", file=clips[0][1], stream=True, include=["logprobs"]))
        assert "".join(part.delta for part in events[:-1]).strip() == events[-1].text == expected[0]
        if has_ctc:
            best, ids = model(**features(kind, clips[0][0])).logits[0].log_softmax(1).max(1)
            changes = torch.nn.functional.pad(ids[1:] != ids[:-1], (1, 0), value=True)
            # The first token, or the last two, are special.
            is_text = ids > 0 if has_letters else ids < model.config.vocab_size - 2
            best = best[changes & is_text].tolist()
            assert [x.logprob for x in events[-1].logprobs] == pytest.approx(best, abs=1e-4)
        timed = create(
            model="tiny",
            file=clips[1][1],
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
            language="en",
        )
        assert timed.language == "english"
        assert " ".join(each.word for each in timed.words).split() == expected[1].split()
        transcription = ["transcription", "multimodal"], ["transcription", "audio"]
        assert server.capabilities() == transcription
        times = [time for each in timed.words for time in (each.start, each.end)]
        assert times == sorted(times)
        assert 0 <= times[0] < times[-1] <= 4
        assert [each.text.strip() for each in timed.segments] == [expected[1]]
        assert "<" not in create(model="tiny", file=clip(0, 0.01)[1]).text
        for fields, named in (
            ({"temperature": 0.5}, "temperature must be omitted"),
            ({"prompt": "names"}, "accepts only audio"),
            ({"language": "hh"}, "must be one of the model's languages"),
        ):
            with pytest.raises(openai.BadRequestError, match=named):
                create(model="tiny", file=clips[0][1], **fields)
        for route, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            status, answer = server.post(route, {"model": "tiny", **body})
            assert status == 400
            assert "use /v1/audio/transcriptions" in answer["error"]["message"]
        assert_nothing_is_held(server)


@pytest.mark.parametrize("parallel", [("-tp", "2"), ("-pp", "2", "--inject-preemption", "0.1")])
def test_audio_is_added_to_every_token(tmp_path: Path, parallel: tuple[str, ...]) -> None:
    path, model = realtime_directory(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    marks = ["<s>", *["[STREAMING_PAD]"] * 38]
    prompt = torch.tensor([tokenizer.convert_tokens_to_ids(marks)])
    others = tokenizer.convert_tokens_to_ids(["</s>", "[STREAMING_PAD]", "[STREAMING_WORD]"])

    def generate(samples: np.ndarray) -> tuple[str, list[float]]:
        """Return the text of a clip, and the log-probabilities of its letters."""
        features = realtime_features(samples)
        options = {"num_delay_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
        found = model.generate(prompt, input_features=features, do_sample=False, **options)
        tokens = found.sequences[0, prompt.shape[1] :].tolist()
        rows = [row[0].log_softmax(-1) for row in found.logits]
        letters = [row[t].item() for t, row in zip(tokens, rows, strict=True) if t not in others]
        return tokenizer.decode(tokens, skip_special_tokens=True).strip(), letters

    clips = [clip(seed, 1.8 + 0.37 * seed) for seed in range(3)]
    expected = [generate(samples) for samples, _ in clips]
    small = ("--max-num-batched-tokens", "24", "--max-num-seqs", "8", "--block-size", "16")
    with Server(str(path), *FLAGS, *small, *parallel) as server:
        create = client(server).transcriptions.create

        def transcribe(file: tuple[str, bytes]) -> tuple[str, list[float]]:
            events = create(model="tiny", file=file, stream=True, include=["logprobs"])
            *_, done = events
            return done.text, [each.logprob for each in done.logprobs]

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            # The second time, the prompt and most of the text are cached.
            found = list(pool.map(transcribe, [file for _, file in clips] * 2))
        for (text, scores), (wanted, wanted_scores) in zip(found, expected * 2, strict=True):
            assert text == wanted != ""
            np.testing.assert_allclose(scores, wanted_scores, atol=1e-4)
        events = iter(create(model="tiny", file=clips[2][1], stream=True))
        next(events)
        server.child("worker 0").kill()
        *_, done = events
        assert done.text == expected[2][0]
        server.wait_until_whole()
        _check_live(server, clips[2][0], generate, lambda: transcribe(clips[0][1]) == found[0])
        whole = create(model="tiny", file=clips[1][1], temperature=0.001, response_format="text")
        assert whole.strip() == expected[1][0]
        for fields, named in (
            ({"language": "fr"}, "detects the language itself"),
            ({"prompt": "names"}, "accepts only audio"),
        ):
            with pytest.raises(openai.BadRequestError, match=named):
                create(model="tiny", file=clips[0][1], **fields)
        with pytest.raises(openai.BadRequestError, match="is a speech model"):
            url = server.url + "/v1"
            openai.OpenAI(base_url=url, api_key="none").completions.create(model="tiny", prompt="a")
        assert_nothing_is_held(server)


def _check_live(
    server: Server, samples: np.ndarray, generate: Any, check_others: Callable[[], bool]
) -> None:
    """Check the text of an utterance that begins before the utterance ends, also if a worker is killed meanwhile."""
    pcm = realtime.to_pcm(samples)
    expected = generate(np.frombuffer(pcm, "<i2").astype(np.float32) / 32768)[0]
    url = server.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="none").realtime.connect(model="tiny") as connection:
        assert connection.recv().type == "session.created"
        connection.session.update(session=realtime.session_of(model="tiny"))
        assert connection.recv().type == "session.updated"
        half = len(pcm) // 4 * 2
        realtime.append(connection, pcm[:half])
        begun = connection.recv()
        assert begun.type == "conversation.item.input_audio_transcription.delta"
        # A request that waits for audio does not disturb others.
        assert check_others()
        server.child("worker 0").kill()
        realtime.append(connection, pcm[half:])
        connection.input_audio_buffer.commit()
        text, events = realtime.read_item(connection, begun)
        assert text == expected != ""
        assert {getattr(event, "item_id", begun.item_id) for event in events} == {begun.item_id}
        # What is cleared is not transcribed.
        realtime.append(connection, pcm)
        connection.input_audio_buffer.clear()
        while connection.recv().type != "input_audio_buffer.cleared":
            pass
    for _ in range(4):
        # The connection ends while what was cleared is being ended.
        with openai.OpenAI(base_url=url, api_key="none").realtime.connect(
            model="tiny"
        ) as connection:
            connection.session.update(session=realtime.session_of(model="tiny"))
            realtime.append(connection, pcm[:half])
            while not connection.recv().type.endswith("transcription.delta"):
                pass
            connection.input_audio_buffer.clear()
    server.wait_until_whole()


def test_more_files_than_are_read_at_once_wait_for_each_other(server: Server) -> None:
    sent = speech_requests(4, 3 * WINDOW_S - 1)
    alone = [answers(server, [request])[0] for request in sent]
    assert [answer for answer in alone if "error" in answer] == []
    assert answers(server, sent * 10) == alone * 10
    assert_nothing_is_held(server)
