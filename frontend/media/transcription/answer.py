"""The parts of a speech model's answer."""

from __future__ import annotations

from typing import NamedTuple


class Answer(NamedTuple):
    """The parts of an answer: the code of the language that it names, or "", and the index of the first text token."""

    language: str
    start: int
