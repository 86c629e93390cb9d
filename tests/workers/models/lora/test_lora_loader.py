"""Loads of LoRA adapters that end with an error."""

from __future__ import annotations

import select
from typing import Any

import pytest
from engine.protocol.errors import NO_ADAPTER_MEMORY, CheckpointError
from engine.protocol.file_identity import LoraAdapter
from engine.protocol.worker_messages import LoraLoad
from engine.workers.models.lora.lora_loader import LoraLoader

NO_ROOM = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (MemoryError(), NO_ADAPTER_MEMORY),
        (NO_ROOM, NO_ADAPTER_MEMORY),
        (CheckpointError("a", "no rank"), "no rank"),
        (KeyError("x"), "cannot be loaded: KeyError"),
    ],
)
@pytest.mark.parametrize("fails_at_install", [True, False])
def test_a_failed_load_is_reported(problem: Exception, words: str, fails_at_install: bool) -> None:
    def fail(*_: Any) -> Any:
        raise problem

    def succeed(*_: Any) -> Any:
        return None

    steps = (succeed, fail) if fails_at_install else (fail, succeed)
    loader = LoraLoader(*steps)
    loader.begin(LoraLoad(3, LoraAdapter("a", "/adapters/a", bytes(32))))
    select.select([loader.fd], [], [], 10)
    if fails_at_install and words is not NO_ADAPTER_MEMORY:
        with pytest.raises(type(problem)):
            loader.take_answers()
        return
    [(number, error)] = loader.take_answers()
    assert number == 3 and words in error
    assert error.startswith(NO_ADAPTER_MEMORY) == (words is NO_ADAPTER_MEMORY)
    assert not loader.is_loading
