"""Every line of the scheduler's specification is shown by a test that is named for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

NUM_LINES = {1: 10, 2: 7, 3: 10, 4: 7, 5: 3, 6: 4, 7: 4, 8: 4}
"""Lines of each part: steps, policies, blocks, outputs, drafts, asynchrony, encoders, connectors."""

LINES = [f"{part}_{line}" for part, count in NUM_LINES.items() for line in range(1, count + 1)]
INVARIANTS = [f"i{number}" for number in range(1, 7)]


@pytest.mark.parametrize("line", LINES + INVARIANTS)
def test_there_is_a_test_named_for(line):
    pattern = re.compile(rf"def test_(?:\w+_)?{line}_")
    files = Path(__file__).parents[0].rglob("test_*.py")
    assert any(pattern.search(file.read_text()) for file in files)
