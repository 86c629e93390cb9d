"""The DSpark heads of DeepSeek-V4 and V4.1 propose the drafts of their descriptions, and change no token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.config import ProposerMethod, SpeculativeConfig
from engine.protocol.errors import CheckpointError
from support.drafts.deepseek_block import save_deepseek_block
from support.drafts.deepseek_v4_block import save_deepseek_v4_block
from support.families.published.mixtures.deepseek_v4_1 import save_deepseek_v4_1
from support.workers.native_decoders import BLOCK_SIZE
from support.workers.worker_steps import Steps

COUNT, VOCAB_SIZE = 3, 97
PROMPT = list(range(20, 37))


def steps_of(path: Path) -> Steps:
    speculative = SpeculativeConfig(COUNT, ProposerMethod.DFLASH, model=str(path))
    return Steps(path, VOCAB_SIZE, BLOCK_SIZE, speculative=speculative)


@pytest.mark.parametrize("save", [save_deepseek_block, save_deepseek_v4_block])
def test_drafts_are_those_of_the_description(tmp_path: Path, save: Callable[[Path], Any]) -> None:
    """This also holds after a prompt in two parts, wrong drafts, and correct drafts that the test inserts."""
    model, head = save(tmp_path)
    steps = steps_of(tmp_path)

    def following(tokens: list[int]) -> int:
        return int(model(torch.tensor([tokens])).logits[0, -1].argmax())

    begin = steps.run(slots=[0], new=[steps.new(0, PROMPT)], chunks=[(0, 9)])
    assert begin.drafts is None
    result = steps.run(chunks=[(0, len(PROMPT) - 9)])
    tokens = [*PROMPT, *int32_view(result.sampled_token_ids).tolist()]
    for number in range(6):
        assert result.drafts is not None
        assert int32_view(result.drafts.token_ids).tolist() == head.drafts(tokens, COUNT)
        correct: list[int] = []
        for _ in range(2):
            correct.append(following(tokens + correct))
        written = {"draft_token_ids": int32_bytes(correct)} if number % 2 else {}
        count = len(correct) if written else COUNT
        counts = int32_bytes([(0, count)])
        result = steps.run(chunks=[(0, count + 1)], drafts=counts, **written)
        sampled = int32_view(result.sampled_token_ids).tolist()
        assert len(sampled) == 3 or not written
        for token in sampled:
            assert token == following(tokens)
            tokens.append(token)


def test_checkpoints_without_the_head_are_refused(tmp_path: Path) -> None:
    save_deepseek_v4_1(tmp_path / "plain", dspark_target_layer_ids=[2])
    with pytest.raises(CheckpointError, match="no DSpark head"):
        steps_of(tmp_path / "plain")
    save_deepseek_block(tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["dspark_target_layer_ids"] = [2, 4]
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"layers without embeddings of n-grams.*\[2, 4\]"):
        steps_of(tmp_path / "other")
