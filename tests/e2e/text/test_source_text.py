"""A server of encoder-decoder models of text: the prompt of a completion is the source."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import pytest
import torch
import transformers
from engine import LLM, BeamSearchParams, SamplingParams
from engine.protocol.errors import ParameterError
from support.checkpoints.marian_files import write_marian_tokenizer
from support.checkpoints.source import greedy, logits, source_directory, write_generation
from support.checkpoints.source_models import VOCAB_SIZE
from support.gguf.t5 import write_t5
from support.media.image_requests import NUM_TOKENS, chat, picture
from support.servers.server import DEVICE, Server, assert_nothing_is_held
from support.vision import florence2
from support.vision.florence2 import florence2_directory

torch.set_num_threads(1)
FLAGS = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
LONG = ("flan-t5", "global-longt5", "led", "switch", "umt5")
"""The models that read sources of 512 tokens."""

SOURCES = [[5, 6, 7, 8, 9, 10], [20, 30, 40] * 6, [11], [5, 6, 7, 8, 9, 10]]


@pytest.mark.parametrize(
    ("kind", "start", "flags"),
    [
        # Requests are preempted and resumed.
        ("bart", 3, ("--inject-preemption", "0.1", "--enforce-eager")),
        ("flan-t5", 0, ("--cpu-backend", "torch", "-tp", "2")),
        ("mbart", 3, ("-pp", "2")),
        ("fsmt", 3, ("-pp", "2", "--inject-preemption", "0.1")),
        ("bert2bert", 0, ("-pp", "2", "--inject-preemption", "0.1")),
        ("global-longt5", 0, ("-tp", "2", "--inject-preemption", "0.1")),
        ("led", 3, ("-tp", "2", "--inject-preemption", "0.1")),
        ("prophetnet", 3, ("-tp", "2", "-pp", "2", "--inject-preemption", "0.1")),
        ("pegasus_x", 3, ("-tp", "2", "-pp", "2", "--inject-preemption", "0.1")),
        ("switch", 0, ("-tp", "2", "-pp", "2", "--inject-preemption", "0.1")),
        ("umt5 gguf", 0, ("-tp", "2")),
        # Sources have another vocabulary. The likeliest tokens may not be generated.
        ("separate-marian", 3, ("--cpu-backend", "torch")),
    ],
)
def test_completions_equal_those_of_transformers(
    tmp_path: Path, kind: str, start: int, flags: tuple[str, ...]
) -> None:
    kind, *in_gguf = kind.split()
    changes = {"relative_attention_max_distance": 128} if in_gguf else {}
    path, model = source_directory(tmp_path, kind, changes)
    if in_gguf:
        path = write_t5(tmp_path / "tiny.gguf", model)
    bad_words = []
    sources = SOURCES
    if kind == "separate-marian":
        sources = [[120, *source] for source in SOURCES]
        first = logits(model, torch.tensor(sources[:1]), [start])[-1]
        bad_words = first.topk(3).indices.tolist()
        write_generation(path, bad_words_ids=[[token] for token in bad_words])
    expected = [greedy(model, torch.tensor([source]), [start], 20, bad_words) for source in sources]
    limits = ("--max-model-len", "64", "--max-num-seqs", "4", "--skip-tokenizer-init")
    with Server(str(path), *FLAGS, *limits, *flags) as server:

        def ask(index: int) -> None:
            body = {"prompt": sources[index], "max_tokens": 20, "temperature": 0}
            status, answer = server.post("/v1/completions", body | {"ignore_eos": True})
            assert status == 200, answer
            assert answer["choices"][0]["token_ids"] == expected[index]
            assert answer["usage"]["prompt_tokens"] == 1

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, [*range(len(SOURCES))] * 3))
        forced = [start, *expected[0][:2]]
        body = {"prompt": sources[0], "decoder_prompt": expected[0][:2], "max_tokens": 5}
        status, answer = server.post(
            "/v1/completions", body | {"temperature": 0, "ignore_eos": True}
        )
        assert status == 200, answer
        rest = greedy(model, torch.tensor(sources[:1]), forced, 5, bad_words)
        assert answer["choices"][0]["token_ids"] == rest
        limit = {"separate-marian": 1024}.get(kind, 512 if kind in LONG else 128)
        for body, words in (
            ({"prompt": [5] * 2000}, f"a source of at most {limit} tokens"),
            ({"prompt": [5], "decoder_prompt": [5] * 200}, "decoder_prompt"),
            (
                {"prompt": [5], "decoder_prompt": [1 << 20]},
                "decoder_prompt[0] is out of vocabulary",
            ),
            ({"prompt": [5], "echo": True}, "echo needs a model without an encoder"),
            ({"prompt": [5], "truncate_prompt_tokens": 9999}, "truncate_prompt_tokens must be"),
        ):
            status, answer = server.post("/v1/completions", body)
            assert status == 400 and words in answer["error"]["message"], answer
        assert_nothing_is_held(server)


def test_offline_answers_equal_those_of_transformers(tmp_path: Path) -> None:
    """A plain prompt is the source. The beginning of an answer may be given beside it."""
    path, model = source_directory(tmp_path, "separate-marian")
    sources = [[120, *source] for source in SOURCES]
    bad_words = logits(model, torch.tensor(sources[:1]), [3])[-1].topk(2).indices.tolist()
    write_generation(path, bad_words_ids=[[token] for token in bad_words])
    first, second = (
        greedy(model, torch.tensor([source]), [3], 8, bad_words) for source in sources[:2]
    )
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(str(path), dtype="float32", max_model_len=64, skip_tokenizer_init=True) as llm:
        begun = {"encoder_prompt": sources[0], "decoder_prompt": first[:2]}
        plain = {"prompt_token_ids": sources[0]}
        outputs = llm.generate([plain, sources[1], begun], params)
        assert [list(each.outputs[0].token_ids) for each in outputs[:2]] == [first, second]
        assert list(outputs[2].outputs[0].token_ids)[:6] == first[2:]
        assert outputs[2].prompt_token_ids == [3, *first[:2]]
        ids = torch.tensor(sources[:1])
        model.generation_config.forced_eos_token_id = None
        config = transformers.GenerationConfig(
            do_sample=False,
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=8,
            pad_token_id=0,
            bad_words_ids=[[token] for token in bad_words],
            decoder_start_token_id=3,
            early_stopping="never",
        )
        expected = model.generate(ids, config, attention_mask=torch.ones_like(ids)).tolist()
        beams = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
        [searched] = llm.beam_search(plain, beams)
        assert [each.tokens for each in searched.sequences] == expected
        for prompt, words in (
            ([5] * 2000, "prompt must have 1 to 1024 tokens, got 2000"),
            ({"encoder_prompt": []}, "encoder_prompt must have 1 to 1024 tokens, got 0"),
            (begun | {"decoder_prompt": [1 << 20]}, "decoder_prompt has the token 1048576"),
        ):
            with pytest.raises(ParameterError, match=words):
                llm.generate(prompt, params)


def test_texts_are_translated_with_the_tokenizers_of_two_languages(tmp_path: Path) -> None:
    """The vocabularies have different sizes. Each pair of letters is one token."""
    path, model = source_directory(tmp_path, "separate-marian")
    letters = [chr(ord("a") + i // 26) + chr(ord("a") + i % 26) for i in range(131)]
    special = ["<pad>", "</s>", "<unk>"]
    source, target = ([*special, *letters[: size - 3]] for size in (131, VOCAB_SIZE))
    scores = [{"▁": -1.0} | dict.fromkeys(names[3:], -2.0) for names in (source, target)]
    source[3] = target[3] = "▁"
    write_marian_tokenizer(path, *scores, source, target)
    text, start = "acabzz", "ababac"
    pieces = ["▁", "ac", "ab", "<unk>", "</s>"]
    sources = torch.tensor([[source.index(piece) for piece in pieces]])
    begun = [target.index(piece) for piece in ("▁", "ab", "ab", "ac")]
    with Server(str(path), *FLAGS, "--max-model-len", "64") as server:
        for more in ([], begun):
            expected = greedy(model, sources, [3, *more], 20)
            body = {"prompt": text, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            body |= {"decoder_prompt": start} if more else {}
            status, answer = server.post("/v1/completions", body)
            assert status == 200, answer
            shown = [target[i] for i in expected if i > 2]
            assert answer["choices"][0]["text"] == "".join(shown).replace("▁", " ").removeprefix(
                " "
            )
        assert_nothing_is_held(server)


def test_chats_with_images_equal_those_of_transformers(tmp_path: Path) -> None:
    """The source is an image and the question for the task. The request is preempted and resumed."""
    path, model, processor = florence2_directory(tmp_path, is_published=True)
    flags = ("--max-model-len", "64", "--inject-preemption", "0.1", "--cpu-backend", "torch")
    with Server(str(path), *FLAGS, *flags) as server:
        image, task = picture(0, 90, 60), "<CAPTION>"
        expected = florence2.greedy(model, processor, task, image, NUM_TOKENS)
        status, answer = server.post("/v1/chat/completions", chat(task, image))
        assert status == 200, answer
        [choice] = answer["choices"]
        assert choice["token_ids"] == expected
        text = processor.tokenizer.decode(expected, skip_special_tokens=True)
        assert choice["message"]["content"] == text
        status, answer = server.post("/v1/chat/completions", chat("a" * 120, picture(0, 9, 9)))
        message = answer["error"]["message"]
        assert status == 400 and "a source of at most 128 tokens" in message
        assert_nothing_is_held(server)
    text = "<image><s>What does the image describe?</s>"
    data = {"multi_modal_data": {"image": image}}
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    with LLM(str(path), dtype="float32", max_model_len=64) as llm:
        for prompt in (
            {"prompt": text} | data,
            {"encoder_prompt": text} | data,
            {"encoder_prompt": {"prompt": text} | data, "decoder_prompt": None},
        ):
            [output] = llm.generate(prompt, params)
            assert output.outputs[0].token_ids == expected
        begun = {"encoder_prompt": {"prompt": text} | data, "decoder_prompt": expected[:3]}
        [output] = llm.generate(begun, params)
        assert output.outputs[0].token_ids[: NUM_TOKENS - 3] == expected[3:]
