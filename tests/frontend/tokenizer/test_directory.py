"""Tokenizers of Hugging Face directories, compared with transformers on the same files."""

import json
from pathlib import Path

import pytest
import tokenizers
from engine.frontend.chat import ModelTemplates
from engine.frontend.tokenizer.load import load_tokenizer
from engine.frontend.tokenizer.token_bytes import parse_decoding
from engine.protocol.errors import CheckpointError
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def write_directory(path: Path, config: dict | None = None, **files: str) -> Path:
    """Write a byte-level tokenizer of single bytes, `<s>`, `</s>` and the additions of `config`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "<s>", "</s>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config or {}))
    for name, content in files.items():
        file = path / name.replace("__", ".")
        file.write_text(content)
    return path


def test_named_tokens_become_special(tmp_path: Path) -> None:
    path = write_directory(tmp_path, {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", 256)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 257)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == (None, None)
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.encode("a</s>") == [tokenizer.token_to_id("a"), 257]
    assert tokenizer.decode([256, 66, 257], skip_special_tokens=True) == tokenizer.decode([66])


def test_special_tokens_map_is_used_if_the_config_names_no_tokens(tmp_path: Path) -> None:
    path = write_directory(
        tmp_path, {"eos_token": None}, special_tokens_map__json='{"bos_token": "<s>"}'
    )
    assert load_tokenizer(path).bos_token_id == 256


def test_added_tokens_of_the_config_are_read(tmp_path: Path) -> None:
    config = {
        "added_tokens_decoder": {
            "259": {"content": "<tool>", "special": False, "lstrip": True},
            "258": {"content": "<think>", "special": True},
            "256": {"content": "<s>", "special": True},
        }
    }
    tokenizer = load_tokenizer(write_directory(tmp_path, config))
    assert tokenizer.encode("<think> <tool>") == [258, 259]
    assert tokenizer.special_ids == {256, 258}
    assert tokenizer.vocab_size == 260


def test_the_post_processor_of_tokenizer_json_adds_tokens(tmp_path: Path) -> None:
    path = write_directory(tmp_path, {"bos_token": "<s>", "add_bos_token": True})
    assert load_tokenizer(path).encode("a") == [64]
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    backend.enable_truncation(3)
    backend.enable_padding(length=3)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": false}')
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("abcdef")[0] == 256
    assert (
        len(tokenizer.encode("abcdef")) == 7
    )  # a limit saved with the tokenizer is not a prompt's


_STRIPS = {"__type": "AddedToken", "content": "fox", "lstrip": True, "normalized": False}
_PLAIN = {"content": "fox", "normalized": True, "special": False}


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"added_tokens_decoder": {"258": _PLAIN | {"lstrip": True}}}, {}),
        ({"added_tokens_decoder": {"256": {"content": "<s>", "special": False}}}, {}),
        ({"added_tokens_decoder": {"258": _PLAIN}, "pad_token": "fox"}, {}),
        ({"added_tokens_decoder": {"258": _PLAIN}, "extra_special_tokens": ["fox"]}, {}),
        ({"eos_token": "</s>", "sep_token": _STRIPS}, {}),
        ({"image_token": "fox"}, {}),
        ({"extra_special_tokens": {"image": "fox"}, "additional_special_tokens": ["</s>"]}, {}),
        ({"extra_special_tokens": ["fox"], "additional_special_tokens": ["</s>"]}, {}),
        ({"extra_special_tokens": [], "additional_special_tokens": [_STRIPS]}, {}),
        ({"eos_token": "<s>"}, {"eos_token": "</s>", "mask_token": _STRIPS}),
        ({"eos_token": "<s>", "added_tokens_decoder": {}}, {"eos_token": "</s>"}),
        ({}, {"additional_special_tokens": ["fox", "</s>"]}),
        ({"additional_special_tokens": ["</s>"]}, {"additional_special_tokens": ["fox"]}),
        ({"split_special_tokens": True}, {}),
    ],
)
def test_added_and_special_tokens_are_those_of_transformers(
    tmp_path: Path, config: dict, files: dict
) -> None:
    path = write_directory(tmp_path, config, special_tokens_map__json=json.dumps(files))
    content = json.loads((path / "tokenizer.json").read_text())
    content["model"]["vocab"]["fox"] = 258
    (path / "tokenizer.json").write_text(json.dumps(content))
    ours, theirs = load_tokenizer(path), PreTrainedTokenizerFast.from_pretrained(path)
    assert (ours.eos_token, ours.pad_token) == (theirs.eos_token, theirs.pad_token)
    for text in ("a fox b", "<s>a</s> foxes", "A Fox <s>"):
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)


def test_texts_are_in_lower_case_if_sentence_transformers_changes_them(tmp_path: Path) -> None:
    path = write_directory(tmp_path, sentence_bert_config__json='{"do_lower_case": true}')
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("A Fox ÄÉ")) == "a fox äé"


def test_ids_and_text_equal_those_of_transformers(tmp_path: Path) -> None:
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    path = write_directory(tmp_path, config)
    ours, theirs = load_tokenizer(path), PreTrainedTokenizerFast.from_pretrained(path)
    text = "<s> Grüße, 世界 👍 </s>\n"
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    for skip in (False, True):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_chat_templates_are_chosen_by_precedence(tmp_path: Path) -> None:
    config = {"chat_template": "from config"}
    assert load_tokenizer(write_directory(tmp_path, config)).chat_templates == {
        "default": "from config"
    }
    in_json = json.dumps({"chat_template": "from json"})
    write_directory(tmp_path, config, chat_template__json=in_json)
    assert load_tokenizer(tmp_path).chat_templates == {"default": "from json"}
    write_directory(tmp_path, config, chat_template__jinja="from jinja")
    assert load_tokenizer(tmp_path).chat_templates == {"default": "from jinja"}


def test_lists_of_chat_templates_are_read(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]
    tokenizer = load_tokenizer(write_directory(tmp_path, {"chat_template": templates}))
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "with tools"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("documents")
    assert load_tokenizer(tmp_path).chat_templates == {"default": "plain", "rag": "documents"}
    (tmp_path / "additional_chat_templates" / "rag.jinja").unlink()
    (tmp_path / "chat_template.jinja").write_text("newer")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template
    assert load_tokenizer(tmp_path).chat_templates == {"default": theirs}


def test_templates_may_use_all_named_tokens(tmp_path: Path) -> None:
    source = "{{ bos_token }}|{{ sep_token }}|{{ mask_token }}|{{ image_token }}|{{ boi_token }}"
    config = {"bos_token": "<s>", "sep_token": {"__type": "AddedToken", "content": "</s>"}}
    config |= {"image_token": "a", "extra_special_tokens": {"boi_token": "b"}}
    path = write_directory(tmp_path, config | {"chat_template": source})
    template = ModelTemplates(load_tokenizer(path)).choose(with_tools=False)
    messages = [{"role": "user", "content": "x"}]
    theirs = PreTrainedTokenizerFast.from_pretrained(path)
    expected = theirs.apply_chat_template(messages, tokenize=False)
    assert template.render(messages) == expected == "<s>|</s>||a|b"


def test_a_missing_chat_template_is_none(tmp_path: Path) -> None:
    assert load_tokenizer(write_directory(tmp_path)).chat_templates == {}


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path)
    write_directory(tmp_path, tokenizer_config__json="{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not valid JSON"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"absent\.gguf: cannot be read"):
        load_tokenizer(tmp_path / "absent.gguf")


def test_decoders_that_cannot_decode_token_by_token_are_rejected(tmp_path: Path) -> None:
    path = write_directory(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.decoder = decoders.CTC()
    backend.save(str(path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="'CTC' is not supported"):
        load_tokenizer(path)


def test_word_pieces_are_joined() -> None:
    decoding = parse_decoding({"type": "WordPiece", "prefix": "##", "cleanup": True})
    pieces = ("an", "em", "##bed", "##ding")
    assert b"".join(map(decoding.to_bytes, pieces)) == b" an embedding"
    assert decoding.strips_leading_space


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Metaspace(prepend_scheme="first"),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        decoders.Sequence([decoders.ByteLevel()]),
        None,
    ],
)
def test_token_decoding_equals_the_tokenizers_library(decoder) -> None:
    decoding = parse_decoding(None if decoder is None else json.loads(decoder.__getstate__()))
    for tokens in (["▁Hello", "▁world", "!"], ["x", "▁y"], ["<0xE6>", "<0xBC>", "<0xA2>", "a"]):
        text = b"".join(map(decoding.to_bytes, tokens)).decode(errors="replace")
        text = text.removeprefix(" ") if decoding.strips_leading_space else text
        if "<0xE6>" in tokens and "ByteFallback" not in str(decoder):
            assert "<0xE6>" in text
        else:
            assert text == (" ".join(tokens) if decoder is None else decoder.decode(tokens))
