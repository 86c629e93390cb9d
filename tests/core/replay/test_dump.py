"""Dumps of the event log: their files, and the removal of user content."""

from __future__ import annotations

import stat
import zlib
from hashlib import sha256

import msgspec
import numpy as np
import pytest
from engine.core.replay import dump as event_dump
from engine.core.replay.__main__ import main
from engine.core.replay.dump import Dump, DumpError, read_dump, write_dump
from engine.core.replay.events import AddRequest, Schedule
from engine.protocol import messages, sampling_params, worker_messages
from engine.protocol.config import SchedulingPolicy, SpeculativeConfig
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.sampling_params import GrammarKind, ReturnedStates, StatesOf, StructuredOutput
from support.scheduler.recorded_harness import RecordedHarness, replay
from support.scheduler.recorded_traffic import SMALL_SEGMENT, contended, record

pytestmark = pytest.mark.slow


def write(harness: RecordedHarness, directory: str, second: int = 0) -> str:
    path = write_dump(
        harness.scheduler, directory, reason="test", wall_time=float(second), now=harness.now
    )
    return str(path)


def test_a_dump_file_is_private_complete_and_readable(tmp_path):
    harness = record(20, SMALL_SEGMENT)
    path = write(harness, str(tmp_path / "dumps"))
    (found,) = (tmp_path / "dumps").iterdir()
    assert str(found) == path
    assert stat.S_IMODE(found.stat().st_mode) == 0o600
    assert stat.S_IMODE(found.parent.stat().st_mode) == 0o700
    assert sum(replay(read_dump(path))) > 10


def test_the_oldest_dump_files_are_deleted(tmp_path):
    harness = contended()
    other = tmp_path / "core1-mine.engine-events"
    other.touch()
    paths = [write(harness, str(tmp_path), second) for second in range(14)]
    kept = sorted(str(path) for path in tmp_path.iterdir() if path != other)
    assert kept == paths[-event_dump.MAX_FILES :]
    assert other.exists()


def test_a_default_directory_of_another_user_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(event_dump.tempfile, "gettempdir", lambda: str(tmp_path))
    directory = event_dump.default_directory()
    (tmp_path / "elsewhere").mkdir(mode=0o777)
    (tmp_path / "elsewhere").chmod(0o777)
    (tmp_path / directory.rsplit("/", 1)[1]).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DumpError, match="not a private directory"):
        write(contended(), directory)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not an event dump"),
        (b"garbage", "not an event dump"),
        (zlib.compress(b"garbage"), "not an event dump"),
        (zlib.compress(msgspec.msgpack.encode(["engine events", 999])), "has version 999"),
    ],
)
def test_a_file_that_is_no_dump_is_rejected(data, problem, tmp_path, capsys):
    path = tmp_path / "file"
    path.write_bytes(data)
    assert main([str(path)]) == 2
    assert problem in capsys.readouterr().err


def test_a_dump_contains_no_text_or_tokens_of_users():
    """Each of these words and tokens must reach the core, and none may be in the dump."""
    rng = np.random.default_rng(5)
    secrets = ("tenant-secret", "salt-secret", "schema-secret", "stop-secret", "word-secret")
    secrets += ("adapter-secret", "picture-secret", "trace-secret")
    picture = EncoderInput(2, 3, sha256(b"picture").digest(), 3, secrets[6].encode())
    drafts = []

    def propose(row):
        drafts.append(rng.integers(200_004, 1 << 18, 2).tolist())
        return drafts[-1]

    harness = RecordedHarness(
        segment_bytes=6_000,
        vocab_size=2**18,
        policy=SchedulingPolicy.FAIR,
        log_kv_events=True,
        speculative=SpeculativeConfig(2),
        propose=propose,
    )
    prompts = []
    for _ in range(30):
        prompt = rng.integers(200_004, 1 << 18, 9).tolist()
        prompts.append(prompt)
        harness.add(
            prompt,
            12,
            tenant=secrets[0],
            salt=secrets[1],
            lora_name=secrets[5],
            inputs=[picture],
            trace_headers={"tracestate": secrets[7]},
            predicted=prompt[::-1],
            structured_output=None,
            stop=(secrets[3],),
            returned_states=ReturnedStates(StatesOf.ALL, f"/{secrets[3]}", in_file=True),
            bad_words=(secrets[4],),
            logit_bias={200_003: 1.0},
            bad_words_token_ids=((200_003,),),
            allowed_token_ids=None,
        )
        harness.add([3], 2, structured_output=StructuredOutput(GrammarKind.JSON_SCHEMA, secrets[2]))
        harness.step()
    hashes = [picture.content_hash]
    hashes += [received.message.block_hashes[:32] for received in harness.received.values()]
    outputs = [received.token_ids for received in harness.received.values()]
    dump = harness.dump()
    assert dump.segments[0].snapshot is not None
    data = msgspec.msgpack.encode(dump)
    for secret in secrets:
        assert secret.encode() not in data
    for digest in filter(None, hashes):
        assert digest not in data
    tokens = {token for sequence in (*prompts, *outputs, *drafts, [200_003]) for token in sequence}
    large = [token for token in tokens if token >= 1 << 17]
    assert len(large) > 300
    four_bytes = {data[start : start + 4] for start in range(len(data))}
    for token in large:
        assert token.to_bytes(4, "little") not in four_bytes
        assert token.to_bytes(4, "big") not in four_bytes
    replay(dump)


@pytest.mark.parametrize(
    ("struct", "num_fields"),
    [
        (messages.EngineCoreRequest, 24),
        (worker_messages.ModelRunnerOutput, 15),
        (worker_messages.SchedulerOutput, 18),
        (worker_messages.NewRequestData, 13),
        (messages.EngineCoreOutputs, 17),
        (EncoderInput, 13),
        (worker_messages.EncoderWork, 5),
        (worker_messages.DraftTokenIds, 5),
        (sampling_params.SamplingParams, 41),
    ],
)
def test_every_new_field_gets_a_redaction_decision(struct, num_fields):
    """A new field needs a decision in `redaction`, `decision_hash` and `snapshot`; then it is counted here."""
    assert len(struct.__struct_fields__) == num_fields


def test_a_dump_contains_the_recorded_facts():
    harness = contended()
    dump = harness.dump()
    events = dump.segments[0].events
    arrivals = [event for event in events if isinstance(event, AddRequest)]
    assert [event.num_prompt_bytes for event in arrivals] == [36] * 12
    steps = [event.step for event in events if isinstance(event, Schedule) and event.step]
    assert [step.step for step in steps] == [step.step for step in harness.steps]
    assert isinstance(dump, Dump)
