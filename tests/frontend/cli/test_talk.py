from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from engine.frontend.cli.remote.server import RemoteServer, ServerError, find_api_key
from engine.frontend.cli.talk.answer import Answer, Piece
from engine.frontend.cli.talk.conversation import Conversation, image_url
from engine.frontend.cli.talk.line_input import complete_line
from engine.frontend.cli.talk.markdown_view import split_finished
from engine.frontend.cli.talk.slash import SLASH_COMMANDS, Quit, Retry, run_command
from engine.protocol.errors import EngineError


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/v1", "http://h:1"),
        ("https://h/v1/", "https://h"),
        ("unix:/run/engine", "unix:/run/engine"),
    ],
)
def test_url_may_end_in_v1(url: str, base: str) -> None:
    assert RemoteServer(url).url == base


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h", "http://"])
def test_other_urls_are_rejected_by_name(url: str) -> None:
    with pytest.raises(ServerError, match="--url"):
        RemoteServer(url)


def test_unreachable_server_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ServerError, match=r"cannot reach .*engine serve"):
        RemoteServer("http://127.0.0.1:9").call("/v1/models")


def test_api_key_is_taken_from_flag_then_openai_then_engine_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ENGINE_API_KEY", "engine")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert find_api_key(None) == "engine"
    monkeypatch.setenv("OPENAI_API_KEY", "openai")
    assert find_api_key(None) == "openai"
    assert find_api_key("given") == "given"


def test_image_of_a_file_becomes_a_data_url(tmp_path: Path) -> None:
    path = tmp_path / "red.png"
    path.write_bytes(b"\x89PNG")
    assert image_url(str(path)) == "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()
    assert image_url("https://h/x.png") == "https://h/x.png"
    with pytest.raises(EngineError, match="does not have an image extension"):
        image_url(str(tmp_path / "notes.txt"))
    with pytest.raises(EngineError, match="No such file"):
        image_url(str(tmp_path / "absent.png"))


def test_images_go_with_the_next_message_only() -> None:
    conversation = Conversation("Be short.")
    run_command(conversation, "/image https://h/a.png 'https://h/b.png'")
    conversation.ask("What is this?")
    conversation.answer("A cat.")
    conversation.ask("Sure?")
    system, question, _, second = conversation.for_request()
    assert system == {"role": "system", "content": "Be short."}
    assert [part["type"] for part in question["content"]] == ["image_url", "image_url", "text"]
    assert second == {"role": "user", "content": "Sure?"}


def test_saved_conversation_is_continued_after_loading(tmp_path: Path) -> None:
    first = Conversation("Be short.")
    first.ask("Grüße?")
    first.answer("Hallo.")
    run_command(first, f"/save {tmp_path / 'chat.json'}")
    second = Conversation()
    second.load(tmp_path / "chat.json")
    assert second.for_request() == first.for_request()
    (tmp_path / "other.json").write_text(json.dumps({"messages": []}))
    with pytest.raises(EngineError, match="list of messages"):
        second.load(tmp_path / "other.json")


def test_retry_removes_the_answer_and_keeps_the_question() -> None:
    conversation = Conversation()
    with pytest.raises(EngineError, match="no answer"):
        run_command(conversation, "/retry")
    conversation.ask("One?")
    conversation.answer("Two.")
    with pytest.raises(Retry):
        run_command(conversation, "/retry")
    assert conversation.for_request() == [{"role": "user", "content": "One?"}]


def test_help_lists_every_command_and_unknown_ones_are_rejected() -> None:
    conversation = Conversation()
    text = run_command(conversation, "/help")
    assert all(name in text for name in SLASH_COMMANDS)
    with pytest.raises(EngineError, match="unknown command /nonsense"):
        run_command(conversation, "/nonsense x")
    with pytest.raises(Quit):
        run_command(conversation, "/quit")


def test_answer_separates_reasoning_and_counts_tokens() -> None:
    answer = Answer()
    events = [
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"reasoning_content": "hm"}}]},
        {"choices": [{"delta": {"content": "Yes"}}]},
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 2}},
    ]
    assert list(answer.read(events)) == [Piece("hm", True), Piece("Yes")]
    assert answer.text == "Yes"
    assert answer.figures().startswith("2 tokens, first after ")
    assert answer.figures().endswith("stopped at the token limit")


def test_only_the_last_block_of_markdown_is_unfinished() -> None:
    blocks = [
        "# Title\n\n",
        "* one\n* two\n\n",
        "```\ncode\n\n# no title\n```\n\n",
        "| a |\n|---|\n",
    ]
    text = "".join(blocks)
    assert split_finished(text) == ("".join(blocks[:3]), blocks[3])
    assert split_finished("one line") == ("", "one line")
    assert split_finished("") == ("", "")
    # Cut anywhere, the parts are the whole.
    for end in range(len(text)):
        assert "".join(split_finished(text[:end])) == text[:end]


def test_tab_completes_commands_and_files(tmp_path: Path) -> None:
    (tmp_path / "cat.png").touch()
    (tmp_path / "more").mkdir()
    assert complete_line("/s", "/s", SLASH_COMMANDS) == ["/system ", "/save "]
    assert complete_line("hello", "hello", SLASH_COMMANDS) == []
    word = f"{tmp_path}/"
    found = complete_line(f"/image {word}", word, SLASH_COMMANDS)
    assert found == [f"{word}cat.png", f"{word}more/"]
