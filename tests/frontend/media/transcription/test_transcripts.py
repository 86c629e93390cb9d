"""Segments, word times and subtitles of a transcript."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine.frontend.media.transcription.segments import (
    DecodedWindow,
    Segment,
    best_attempt,
    separator,
    split_segments,
)
from engine.frontend.media.transcription.subtitles import write_srt, write_vtt
from engine.frontend.media.transcription.turns import join_turns, make_reader
from engine.frontend.media.transcription.words import align_words
from msgspec.structs import replace

FIRST_TIME = 1000
TEXTS = {1: " The", 2: " quick", 3: " fox", 4: ".", 5: " (", 6: "so", 7: ")", 8: "ly", 9: " €"}


class Tokens:
    """A tokenizer of the words above. Tokens 20 and 21 have one half of a character each."""

    def token_bytes(self, token_id: int) -> bytes:
        halves = {20: "ü".encode()[:1], 21: "ü".encode()[1:]}
        return halves.get(token_id) or TEXTS[token_id].encode()

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode()


TOKENS: Any = Tokens()


def at(seconds: float) -> int:
    return FIRST_TIME + round(seconds / 0.02)


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([1, 2], [(0.0, 8.0, " The quick")]),
        ([at(0), 1, 2, at(2), at(3), 3, at(5)], [(0.0, 2.0, " The quick"), (3.0, 5.0, " fox")]),
        ([at(1), 1, at(2), at(2.5), 3], [(1.0, 2.0, " The"), (2.5, 8.0, " fox")]),
        ([at(1), 1, at(2), 3], [(1.0, 2.0, " The"), (2.0, 8.0, " fox")]),
        ([at(1), 1, at(20)], [(1.0, 8.0, " The")]),
        ([at(1), at(2)], []),
        ([], []),
    ],
)
def test_segments_are_the_text_between_timestamps(
    token_ids: list[int], expected: list[Any]
) -> None:
    window = DecodedWindow(30.0, 8.0, token_ids, "", 0.0, -0.5)
    segments = split_segments(
        window, TOKENS, first_timestamp_id=FIRST_TIME, time_precision=0.02, first_id=4
    )
    assert [(s.start - 30, s.end - 30, s.text) for s in segments] == expected
    assert [s.id for s in segments] == list(range(4, 4 + len(expected)))
    assert {s.seek for s in segments} <= {3000}
    assert [token for s in segments for token in s.tokens] == (token_ids if expected else [])


def words_of(token_ids: list[int], path: list[int], language: str = "en") -> list[tuple[str, ...]]:
    """Return the words and their times if each token's outputs begin at `path`."""
    matrix = np.zeros((len(token_ids) + 1, 40), np.float32)
    for token, (begin, end) in enumerate(zip(path, [*path[1:], 40], strict=True)):
        matrix[token, begin:end] = 1
    words = align_words(
        matrix, token_ids, TOKENS, language=language, start=10.0, seconds_per_output=0.1
    )
    return [(word.word, f"{word.start:.1f}-{word.end:.1f}") for word in words]


def test_words_get_the_times_of_their_tokens() -> None:
    assert words_of([1, 2, 3, 4], [0, 5, 9, 14, 15]) == [
        ("The", "10.0-10.5"),
        ("quick", "10.5-10.9"),
        ("fox.", "10.9-11.5"),
    ]
    assert words_of([1, 5, 6, 7, 2, 8], [0, 4, 5, 8, 9, 12, 14]) == [
        ("The", "10.0-10.4"),
        ("(so)", "10.4-10.9"),
        ("quickly", "10.9-11.4"),
    ]


def test_characters_are_words_without_spaces_and_never_cut() -> None:
    assert words_of([6, 20, 21, 8], [0, 4, 6, 9, 12], "ja") == [
        ("so", "10.0-10.4"),
        ("ü", "10.4-10.9"),
        ("ly", "10.9-11.2"),
    ]


def test_word_times_follow_the_best_path_through_a_noisy_matrix() -> None:
    random = np.random.default_rng(3)
    matrix = random.standard_normal((7, 30)).astype(np.float32)
    words = align_words(
        matrix, [1, 2, 3, 1, 2, 3], TOKENS, language="en", start=0.0, seconds_per_output=1.0
    )
    # The same path, one cell after the other.
    cost = np.full((8, 31), np.inf)
    cost[0, 0] = 0
    trace = np.zeros((8, 31), int)
    for j in range(1, 31):
        for i in range(1, 8):
            choices = [cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1]]
            trace[i, j] = int(np.argmin(choices))
            cost[i, j] = min(choices) - matrix[i - 1, j - 1]
    i, j = 7, 30
    first = {}
    while i > 0 and j > 0:
        first[i - 1] = j - 1
        move = trace[i, j]
        i, j = i - (move != 2), j - (move != 1)
    assert [word.start for word in words] == [first[i] for i in range(6)]
    assert [word.end for word in words] == [first[i] for i in range(1, 7)]


def test_repetitive_or_unlikely_windows_are_doubtful() -> None:
    def window(text: str, mean_logprob: float, no_speech_prob: float = 0.0) -> DecodedWindow:
        return DecodedWindow(0.0, 5.0, [], text, 0.0, mean_logprob, no_speech_prob)

    assert window(" again and" * 30, -0.1).is_doubtful
    assert window("He bought three apples.", -1.2).is_doubtful
    assert not window("He bought three apples.", -0.4).is_doubtful
    assert window("Thank you.", -1.2, 0.7).is_silent
    assert not window("Thank you.", -0.4, 0.7).is_silent
    good, likely = window("He bought free apples.", -0.9), window("He bought", -1.1)
    repeated, garbled = window(" again and" * 30, -0.1), window("He borg tree as pulse.", -3.0)
    assert best_attempt([repeated, likely, good]) is good
    assert best_attempt([repeated, likely, garbled]) is likely
    assert best_attempt([window(" again and" * 30, -0.2), repeated]) is repeated


def test_subtitles_have_times_and_one_line_each() -> None:
    segments = [
        Segment(0, 0, 0.0, 2.5, " The quick\n\nfox --> jumps", [], 0.0, 0.0, 1.0, 0.0),
        Segment(1, 0, 3661.0, 3662.04, " over", [], 0.0, 0.0, 1.0, 0.0),
    ]
    assert write_srt(segments) == (
        "1\n00:00:00,000 --> 00:00:02,500\nThe quick fox -> jumps\n\n"
        "2\n01:01:01,000 --> 01:01:02,040\nover\n\n"
    )
    assert "R&amp;D &lt;3 a -> b\n" in write_vtt([replace(segments[0], text="R&D <3 a --> b")])
    assert write_vtt(segments).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nThe quick fox")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "One", ""),
        ("One.", "Two", " "),
        ("One.", " Two", ""),
        ("今天。", "明天", ""),
        ("こんにちは", "世界", ""),
        ("안녕", "하세요", " "),
        ("今天", "ok", " "),
    ],
)
def test_texts_of_windows_are_separated_as_their_script_separates_words(
    before: str, after: str, expected: str
) -> None:
    assert separator(before, after) == expected


@pytest.mark.parametrize(
    ("turns", "answer", "text", "expected"),
    [
        (
            "json",
            'assistant\n[{"Start":0,"End":1.52,"Speaker":0,"Content":" Say \\"hi\\" \\ud83d\\ude00 "}, '
            '{"Start": 2.0, "End": 3.5, "Content": "[Noise]"},\n{"Start":4,"End":5,"Speaker":12,"Content":"b\\u00e9',
            'Say "hi" 😀 [Noise] bé',
            [(0.0, 1.52, 0, 'Say "hi" 😀'), (2.0, 3.5, -1, "[Noise]"), (4.0, 5.0, 12, "bé")],
        ),
        ("json", "no [turns ", "no [turns", [(0.0, 0.0, -1, "no [turns")]),
        ("json", '[{"Start":0,"End":1,"Speaker":0,"Content":""}]', "", [(0.0, 1.0, 0, "")]),
        ("json", "assis", "assis", [(0.0, 0.0, -1, "assis")]),
        (
            "marks",
            "[0.00][S01]Good morning. [laughs][1.52][1.60] [S02] Hello. [1:02.5]",
            "Good morning. [laughs] Hello.",
            [(0.0, 1.52, 1, "Good morning. [laughs]"), (1.6, 62.5, 2, "Hello.")],
        ),
        (
            "marks",
            "[0.5][S01]\u4f60\u597d[1.5][1.5][S03]\u518d\u89c1",
            "\u4f60\u597d\u518d\u89c1",
            [(0.5, 1.5, 1, "\u4f60\u597d"), (1.5, 1.5, 3, "\u518d\u89c1")],
        ),
        ("marks", "no [turns", "no [turns", [(0.0, 0.0, -1, "no [turns")]),
        ("marks", "[0.0][S01] [0.4][1..2][S02]a[9]", "a", [(0.0, 0.4, 1, ""), (0.0, 9.0, 2, "a")]),
        ("marks", " ", "", []),
    ],
)
def test_turns_are_read_from_pieces_of_any_length(
    turns: str, answer: str, text: str, expected: list[Any]
) -> None:
    for size in range(1, len(answer) + 1):
        reader = make_reader(turns)
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
        shown, ended = "", []
        for piece in pieces:
            shown += reader.feed(piece)
            ended += reader.take_ended(is_end=False)
        shown += reader.feed("", is_end=True)
        ended += reader.take_ended(is_end=True)
        assert ended == [turn for turn in reader.turns if turn.text]
        assert shown == text == join_turns(reader.turns)
        assert [(t.start, t.end, t.speaker, t.text) for t in reader.turns] == expected
    window = DecodedWindow(30.0, 10.0, [], text, 0.0, -0.5, turns=reader.turns)
    segments = split_segments(window, TOKENS, first_timestamp_id=9, time_precision=0.0, first_id=0)
    assert [each.speaker for each in segments] == [turn[2] for turn in expected if turn[3]]
    assert all(30.0 <= each.start <= each.end <= 40.0 for each in segments)
