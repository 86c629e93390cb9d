"""After a crash of the core, requests continue with the states and the keys that the workers kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.source import source_directory
from support.checkpoints.tiny import layers_directory
from support.processes.program import wait_until
from support.requests.mixed_streams import Streams, undisturbed_answers
from support.servers.server import Server, assert_nothing_is_held

SAMPLING = {"stream": True, "temperature": 0.8, "ignore_eos": True, "return_token_ids": True}


def hybrid(path: Path, kind: str) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Return a server's flags and requests whose prompts are long."""
    layers_directory(path, kind)
    prompts = [[4 + (seed * i) % 290 for i in range(1, 300)] for seed in range(1, 5)]
    return ("--max-model-len", "512"), [{"prompt": prompt, "max_tokens": 200} for prompt in prompts]


def encoder_decoder(path: Path, kind: str) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Return a server's flags and requests whose answers are long."""
    source_directory(path, kind, {"max_position_embeddings": 512})
    prompts = [[seed, 7, 8 + seed] * seed for seed in range(4, 10)]
    flags = ("--max-model-len", "512", "--skip-tokenizer-init")
    return flags, [{"prompt": prompt, "max_tokens": 480} for prompt in prompts]


@pytest.mark.parametrize(
    ("make", "kind"), [(hybrid, "delta net"), (encoder_decoder, "bart")], ids=["hybrid", "bart"]
)
def test_requests_continue_with_their_blocks_after_a_crash_of_the_core(
    tmp_path: Path, make: Any, kind: str
) -> None:
    flags, requests = make(tmp_path, kind)
    requests = [SAMPLING | {"seed": seed} | each for seed, each in enumerate(requests)]
    flags = (*flags, "--dtype", "float32", "--max-num-seqs", "8", "--served-model-name", "tiny")
    with Server(str(tmp_path), *flags, "--no-enable-prefix-caching") as server:
        undisturbed = undisturbed_answers(server, requests)

        def count_computed() -> float:
            return server.metric("engine:scheduled_tokens_total")

        computed = count_computed()
        assert undisturbed_answers(server, requests) == undisturbed
        computed, alone = count_computed(), count_computed() - computed
        victim = server.child("core 0")
        streams = Streams(server, requests)
        streams.wait_for_events(40 * len(requests))
        victim.kill()
        assert streams.answers() == undisturbed
        wait_until(lambda: not victim.is_running(), what="the core is gone")
        assert "adopted the blocks of" in server.log
        # A state that covers more tokens than its client has is computed again.
        if make is encoder_decoder:
            assert count_computed() - computed < alone + 20 * len(requests)
        assert_nothing_is_held(server)
