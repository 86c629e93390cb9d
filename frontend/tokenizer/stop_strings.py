"""Find the first of several strings in a text that arrives in pieces, in time linear in the text."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Final, NamedTuple

_CACHED_AUTOMATA: Final = 64
"""Maximum cached automata. The sequences of a request share one, and clients often repeat their stop strings."""


class Match(NamedTuple):
    """A stop string in a text. Positions are in characters relative to the last piece; `start` may be negative."""

    start: int
    end: int
    text: str


class _Automaton:
    """An Aho-Corasick automaton: a trie of the strings with suffix links."""

    __slots__ = ("children", "depths", "first_characters", "suffixes", "words")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.words: list[str | None] = [None]
        """The longest string that ends at each node."""
        for string in strings:
            self._insert(string)
        self.suffixes = [0] * len(self.depths)
        self._link()
        self.first_characters = frozenset(self.children[0])

    def _insert(self, string: str) -> None:
        node = 0
        for character in string:
            child = self.children[node].get(character)
            if child is None:
                child = self.children[node][character] = len(self.depths)
                self.children.append({})
                self.depths.append(self.depths[node] + 1)
                self.words.append(None)
            node = child
        self.words[node] = string

    def _link(self) -> None:
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self.children[node].items():
                queue.append(child)
                suffix = self.suffixes[child] = self.next(self.suffixes[node], character)
                self.words[child] = self.words[child] or self.words[suffix]

    def next(self, node: int, character: str) -> int:
        """Return the node after one more character, in constant time on average."""
        children = self.children
        while (child := children[node].get(character)) is None:
            if not node:
                return 0
            node = self.suffixes[node]
        return child


_automaton = lru_cache(maxsize=_CACHED_AUTOMATA)(_Automaton)


class StopStrings:
    """The matching state of one text. The match that ends first wins. If several end there, the longest wins."""

    needs_tokens: Final = False
    """True if each piece must be the text of one token."""

    __slots__ = ("_automaton", "_node")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._automaton = _automaton(strings)
        self._node = 0

    @property
    def num_possible(self) -> int:
        """The number of characters at the end of the text that may begin a match."""
        return self._automaton.depths[self._node]

    def find(self, piece: str, *, is_protected: bool = False) -> Match | None:
        """Return the first match that ends in the next piece, or None.

        If `is_protected`, matches in the piece do not count.
        """
        automaton, node = self._automaton, self._node
        if not node and automaton.first_characters.isdisjoint(piece):
            return None
        for end, character in enumerate(piece, 1):
            node = automaton.next(node, character)
            word = automaton.words[node]
            if word is not None and not is_protected:
                return Match(end - len(word), end, word)
        self._node = node
        return None
