import asyncio
import functools
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from engine.frontend.client.engine_client import (
    EngineClient,
    EngineDead,
    EngineDraining,
    Overloaded,
    ReplicaUnavailable,
    RequestGroup,
    SequenceRequest,
)
from engine.frontend.client.replicas.routing import HEADROOM
from engine.protocol.arrays import int32_bytes, int32_view, uint64_bytes
from engine.protocol.block_hash import HASH_BYTES, adapter_key, block_keys, hash_blocks, root_hash
from engine.protocol.config import (
    FIRST_EPOCH,
    PROTOCOL_VERSION,
    EngineConfig,
    ParallelConfig,
    PrefixHash,
    SchedulerConfig,
)
from engine.protocol.errors import POISON_REQUEST, EngineError, ParameterError
from engine.protocol.file_identity import LoraAdapter
from engine.protocol.messages import (
    AbortRequests,
    AddRequests,
    ClientHello,
    EngineCoreOutputs,
    FinishedRequest,
    FinishReason,
    LossNoted,
    ReplicaLoadUpdate,
    ReplicaLost,
)
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.supervisor_messages import EngineStatus, ReplicaInfo, ReplicaState
from engine.protocol.transport import StatusPublisher
from support.echo_core import EchoCore
from support.engine_fixtures import (
    MAX_MODEL_LEN,
    connected,
    drive,
    engine_config,
    on_event_loop,
    opened,
    read_next,
    read_step,
    smollm2_tokenizer,
    until,
)

pytestmark = pytest.mark.slow

PROMPT = smollm2_tokenizer().encode("The quick brown fox jumps over the lazy dog. ")


def request(max_tokens: int = 4, prompt: list[int] = PROMPT, **params: object) -> SequenceRequest:
    return SequenceRequest(prompt, SamplingParams(max_tokens=max_tokens, **params))  # type: ignore[arg-type]


async def read_all(group: RequestGroup) -> dict[int, tuple[str, list[int]]]:
    """Return text and tokens of each sequence, read piece by piece."""
    read = {sequence.position: ("", list[int]()) for sequence in group.sequences}
    while update := await read_next(group):
        for position, delta in update:
            text, token_ids = read[position]
            read[position] = text + delta.text, token_ids + delta.token_ids
    return read


@on_event_loop
async def test_streams_the_tokens_and_text_of_every_sequence(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        group = await client.submit([request(5), request(3)], request_id="r")
        read = await drive(core, read_all(group))
        assert read == {
            0: (smollm2_tokenizer().decode(PROMPT[:5]), PROMPT[:5]),
            1: (smollm2_tokenizer().decode(PROMPT[:3]), PROMPT[:3]),
        }
        assert await read_next(group) == []
        assert client.num_inflight == 0
        assert [s.num_generated_tokens for s in group.sequences] == [5, 3]
        assert all(s.num_prompt_tokens == len(PROMPT) for s in group.sequences)


@on_event_loop
async def test_result_contains_the_whole_output_of_each_sequence(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        group = await client.submit([request(5), request(3)], request_id="r")
        first, second = await drive(core, group.result())
        assert (first.text, first.token_ids) == (smollm2_tokenizer().decode(PROMPT[:5]), PROMPT[:5])
        assert (second.token_ids, second.finish_reason) == (PROMPT[:3], "length")
        assert await read_next(group) == []


@on_event_loop
async def test_a_slow_reader_receives_missed_output_in_one_piece(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        slow = await client.submit([request(100)], request_id="slow")
        fast = await client.submit([request(100)], request_id="fast")
        fast_reads = 0

        async def read_fast() -> None:
            nonlocal fast_reads
            while await read_next(fast):
                fast_reads += 1

        await drive(core, read_fast())
        assert fast_reads > 10
        [(_, delta)] = await read_next(slow)
        tokens = [PROMPT[i % len(PROMPT)] for i in range(100)]
        assert delta.token_ids == tokens
        assert delta.text == smollm2_tokenizer().decode(tokens)
        assert delta.finish_reason == "length"
        assert await read_next(slow) == []


@on_event_loop
async def test_requests_of_one_tick_are_sent_in_one_message(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        groups = [await client.submit([request()], request_id=str(i)) for i in range(10)]
        await until(lambda: len(core.requests) == 10, core.receive)
        assert sum(isinstance(message, AddRequests) for message in core.received) == 1
        for group in groups:
            group.abort()
        await until(lambda: not core.requests, core.receive)
        assert sum(isinstance(message, AbortRequests) for message in core.received) == 1


@on_event_loop
async def test_the_core_receives_every_field_of_a_request(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        prompt = [i % 1000 for i in range(100)]
        wanted = SequenceRequest(prompt, SamplingParams(), cache_salt="tenant a", tenant="a")
        await client.submit([wanted], request_id="r")
        await until(lambda: bool(core.requests), core.receive)
        [sent] = core.requests
        assert int32_view(sent.prompt_token_ids).tolist() == prompt
        assert sent.sampling_params.max_tokens == MAX_MODEL_LEN - 100
        assert sent.sampling_params.seed is not None
        assert sent.eos_token_ids == engine_config(tmp_path).model.eos_token_ids
        assert sent.root_hash == root_hash(cache_salt="tenant a")
        tokens = int32_view(sent.prompt_token_ids)
        assert sent.block_hashes == hash_blocks(tokens, 16, sent.root_hash)
        assert len(sent.block_hashes) == 6 * HASH_BYTES
        assert sent.tenant == "a"


@pytest.mark.parametrize("algorithm", PrefixHash)
@on_event_loop
async def test_hashing_a_prompt_in_slices_does_not_change_its_hashes(
    tmp_path: Path, algorithm: PrefixHash
) -> None:
    config = engine_config(tmp_path)
    config = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, max_model_len=20_000),
        cache=msgspec.structs.replace(config.cache, prefix_hash=algorithm),
    )
    async with connected(config) as (client, core):
        prompt = [i % 1000 for i in range(10_007)]
        await client.submit([SequenceRequest(prompt, SamplingParams())], request_id="r")
        await until(lambda: bool(core.requests), core.receive)
        [sent] = core.requests
        tokens = int32_view(sent.prompt_token_ids)
        assert sent.block_hashes == hash_blocks(tokens, 16, sent.root_hash, (), algorithm)


@on_event_loop
async def test_prompt_logprobs_cover_all_but_the_first_prompt_token(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        wanted = request(1, prompt=PROMPT * 4, prompt_logprobs=2)
        group = await client.submit([wanted], request_id="r")
        await drive(core, group.result())
        found = group.sequences[0].prompt_logprobs
        assert found is not None and len(found) == len(PROMPT) * 4
        assert found[0] is None
        assert [p.token_id for p in found if p is not None] == (PROMPT * 4)[1:]


@on_event_loop
async def test_sequences_without_a_seed_get_different_seeds(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        await client.submit([request(), request(), request(seed=3)], request_id="r")
        await until(lambda: len(core.requests) == 3, core.receive)
        seeds = [sent.sampling_params.seed for sent in core.requests]
        assert seeds[2] == 3
        assert len({*seeds}) == 3


@on_event_loop
async def test_abort_ends_the_request_at_the_core_and_its_stream(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        group = await client.submit([request(100), request(2)], request_id="r")
        reader = asyncio.ensure_future(read_all(group))
        await drive(core, until(lambda: group.sequences[1].finished, lambda: None))
        assert len(core.requests) == 1
        group.abort()
        group.abort()
        await until(lambda: not core.requests, core.receive)
        read = await reader
        assert read[1][1] == PROMPT[:2]
        assert client.num_inflight == 0
        core.step()
        aborts = [m for m in core.received if isinstance(m, AbortRequests)]
        assert [int32_view(m.request_indices).tolist() for m in aborts] == [[0]]
        assert await read_next(group) == []


@on_event_loop
async def test_4_7_a_stop_string_ends_the_request_at_the_core(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        group = await client.submit([request(100, stop=("jumps",))], request_id="r")
        [delta] = await drive(core, group.result())
        assert delta.text == "The quick brown fox "
        assert (delta.finish_reason, delta.stop_reason) == ("stop", "jumps")
        await until(lambda: not core.requests, core.receive)
        assert client.num_inflight == 0


@on_event_loop
async def test_start_waits_for_the_cores_greeting(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    core = opened(EchoCore(config))
    client = opened(EngineClient(config, 3, smollm2_tokenizer()))
    starting = asyncio.ensure_future(client.start())
    await until(lambda: bool(core.callers), core.read)
    assert not client.ready and not starting.done()
    core.greet()
    await until(lambda: bool(core.received), core.receive)
    assert starting.done() and client.ready
    assert core.received == [ClientHello(config.version, config.epoch, 3)]


@on_event_loop
async def test_a_core_that_starts_after_its_frontend_is_found(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    client = opened(EngineClient(config, 0, smollm2_tokenizer()))
    starting = asyncio.ensure_future(client.start())
    await asyncio.sleep(0)
    core = opened(EchoCore(config))
    await until(starting.done, core.receive)
    assert client.ready


@on_event_loop
async def test_a_core_of_another_version_is_rejected(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    core = opened(EchoCore(config))
    core.ready = msgspec.structs.replace(core.ready, version=PROTOCOL_VERSION + 1)
    client = opened(EngineClient(config, 0, smollm2_tokenizer()))
    starting = asyncio.ensure_future(client.start())
    await until(starting.done, core.receive)
    expected = f"version {PROTOCOL_VERSION + 1}; this frontend expects version {PROTOCOL_VERSION}"
    with pytest.raises(EngineDead, match=expected):
        starting.result()
    assert not client.ready


@on_event_loop
async def test_a_failed_engine_fails_current_and_new_requests(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        streamed = await client.submit([request(100)], request_id="a")
        await read_step(core, streamed)
        waiting = asyncio.ensure_future(read_next(streamed))
        unread = await client.submit([request(100), request(100)], request_id="b")
        resetting = asyncio.ensure_future(client.reset_prefix_cache())
        await asyncio.sleep(0)
        client.fail("core 0 died: out of memory")
        [(_, delta)] = await waiting
        assert (delta.finish_reason, delta.error) == ("error", "core 0 died: out of memory")
        assert await read_next(streamed) == []
        assert [d.finish_reason for d in await unread.result()] == ["error", "error"]
        with pytest.raises(EngineDead, match="out of memory"):
            await resetting
        with pytest.raises(EngineDead, match="out of memory"):
            await client.submit([request()], request_id="c")
        assert client.num_inflight == 0 and not client.ready


@on_event_loop
async def test_streams_continue_unchanged_on_the_next_core(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    whole = [PROMPT[i % len(PROMPT)] for i in range(40)]
    async with connected(config) as (client, core):
        pair = [request(40, logprobs=1), request(40, stop=("lazy",), prompt_logprobs=0)]
        read = await client.submit(pair, request_id="read as it comes")
        unread = await client.submit([request(40), request(1)], request_id="read at its end")
        waiting = await client.submit([request(40)], request_id="not begun")
        aborted = await client.submit([request(40)], request_id="aborted meanwhile")
        await until(lambda: len(core.requests) == 6, core.receive)
        num_read = [0, 0]
        for _ in range(3):
            for position, delta in await drive(core, read_next(read)):
                num_read[position] += len(delta.token_ids)
        core.close()
        aborted.abort()
        early = await client.submit([request(2)], request_id="submitted meanwhile")
        successor = opened(EchoCore(config, epoch=8))
        await until(lambda: len(successor.requests) == 5, successor.receive)
        [hello] = successor.received
        assert isinstance(hello, ClientHello) and hello.epoch == 8
        # Each contains the index that it had at the previous core.
        assert [again.was_index for again in hello.requests] == [0, 1, 2, 4, 6]
        # A request that no core had accepted has no place in a queue yet.
        assert [again.is_resubmitted for again in hello.requests] == [True] * 4 + [False]
        rest = await drive(successor, read.result())
        texts = await drive(successor, unread.result())
        assert [delta.token_ids for delta in texts] == [whole, whole[:1]]
        [delta] = await drive(successor, waiting.result())
        assert delta.token_ids == whole
        [delta] = await drive(successor, early.result())
        assert delta.token_ids == whole[:2]
        assert [delta.token_ids for delta in rest] == [
            whole[num_read[0] :],
            whole[num_read[1] : 8],
        ]
        assert rest[0].logprobs is not None
        assert [entry.token_id for entry in rest[0].logprobs] == whole[num_read[0] :]
        assert (rest[1].finish_reason, rest[1].stop_reason) == ("stop", "lazy")
        prompt_logprobs = read.sequences[1].prompt_logprobs
        assert prompt_logprobs is not None and len(prompt_logprobs) == len(PROMPT)
        assert client.num_inflight == 0


@on_event_loop
async def test_requests_and_greetings_over_the_message_limit_are_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.frontend.client.replicas.core_connection.PIECE_BYTES", 2000)
    config = engine_config(tmp_path)
    whole = [PROMPT[i % len(PROMPT)] for i in range(30)]
    async with connected(config) as (client, core):
        group = await client.submit([request(30)] * 40, request_id="r")
        gone = await client.submit([request(30)] * 10, request_id="gone before it was sent")
        gone.abort()
        await drive(core, group.wait_for_updates())
        added = [m for m in core.received if isinstance(m, AddRequests)]
        assert len(added) > 2 and not any(message.ends_greeting for message in added)
        assert sum(len(message.requests) for message in added) == 40
        core.close()
        successor = opened(EchoCore(config, epoch=8))
        await until(lambda: bool(successor.received), successor.receive)
        late = await client.submit([request(30)], request_id="late")
        rest = await drive(successor, group.result())
        hello, *more = successor.received
        assert isinstance(hello, ClientHello) and hello.requests and not hello.is_whole
        ends = [m.ends_greeting for m in more if isinstance(m, AddRequests)]
        assert ends.count(True) == 1
        again = [
            sent.was_index
            for message in successor.received
            if isinstance(message, ClientHello | AddRequests)
            for sent in message.requests
            if 0 <= sent.was_index < 40
        ]
        assert again == list(range(40))
        assert [delta.token_ids for delta in rest] == [whole] * 40
        [delta] = await drive(successor, late.result())
        assert delta.token_ids == whole
        assert client.num_inflight == 0


@on_event_loop
async def test_a_greeting_is_complete_when_its_remaining_requests_are_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.frontend.client.replicas.core_connection.PIECE_BYTES", 1)
    config = engine_config(tmp_path)
    async with connected(config) as (client, core):
        first = await client.submit([request(3)], request_id="goes on")
        second = await client.submit([request(3)] * 5, request_id="is aborted")
        await until(lambda: len(core.requests) == 6, core.receive)
        core.close()
        successor = opened(EchoCore(config, epoch=8))

        async def abort_once_greeted() -> None:
            while client._cores[0].epoch != 8:
                await asyncio.sleep(0)
            second.abort()

        aborting = asyncio.create_task(abort_once_greeted())
        await until(aborting.done, successor.receive)
        await until(
            lambda: AddRequests([], ends_greeting=True) in successor.received, successor.receive
        )
        hello, *more = successor.received
        assert isinstance(hello, ClientHello) and len(hello.requests) == 1 and not hello.is_whole
        assert sum(isinstance(m, AddRequests) and m.ends_greeting for m in more) == 1
        await until(lambda: len(successor.requests) == 1, successor.receive)
        [delta] = await drive(successor, first.result())
        assert delta.token_ids == PROMPT[:3]


@on_event_loop
async def test_a_request_over_the_message_limit_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.protocol.transport.MAX_FRAME_BYTES", 3000)
    config = engine_config(tmp_path)
    async with connected(config) as (client, core):
        large = SequenceRequest(PROMPT, SamplingParams(allowed_token_ids=tuple(range(1000, 2500))))
        several = await client.submit([large] + [request(20)] * 50, request_id="r")
        refused, *others = await drive(core, several.result())
        assert refused.finish_reason == "error" and "is too large for a message" in str(
            refused.error
        )
        assert {delta.finish_reason for delta in others} == {"length"}
        assert sum(isinstance(message, ClientHello) for message in core.received) == 1
        assert client.num_inflight == 0


@on_event_loop
async def test_sequences_move_to_another_replica_if_theirs_is_delayed(
    tmp_path: Path,
) -> None:
    parallel = ParallelConfig(data_parallel_size=2)
    config = engine_config(tmp_path, epoch=FIRST_EPOCH, parallel=parallel)
    cores = [opened(EchoCore(config, 0)), opened(EchoCore(config, 1))]
    client = opened(EngineClient(config, 0, smollm2_tokenizer()))
    with zmq.Context() as context:
        publisher = StatusPublisher(context, config)
        epochs = config.epoch + 1, config.epoch
        resuming, gone = (
            EngineStatus(
                [],
                [
                    ReplicaInfo(i, ReplicaState.SERVING, epoch, 0, 0, is_resuming and i == 0)
                    for i, epoch in enumerate(epochs)
                ],
            )
            for is_resuming in (True, False)
        )

        def receive() -> None:
            for core in cores:
                core.receive()

        starting = asyncio.ensure_future(client.start())
        await until(starting.done, receive)
        group = await client.submit([request(40)], request_id="r")
        await until(lambda: len(cores[0].requests) == 1, receive)
        [(_, begun)] = await drive(cores[0], read_next(group))
        cores.pop(0).close()
        await until(
            lambda: not client._cores[0].ready, lambda: (publisher.publish(resuming), receive())
        )
        assert not cores[0].requests
        await until(lambda: bool(cores[0].requests), lambda: (publisher.publish(gone), receive()))
        [rest] = await drive(cores[0], group.result())
        assert begun.token_ids + rest.token_ids == [PROMPT[i % len(PROMPT)] for i in range(40)]
        assert client.ready and client.num_inflight == 0
        publisher.close()


@on_event_loop
async def test_a_request_is_suspected_until_it_gets_a_token(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    async with connected(config) as (client, first):
        group = await client.submit([request(40), request(40), request(40)], request_id="r")
        await until(lambda: len(first.requests) == 3, first.receive)
        cores = [first]
        suspect, bystander, _ = (sequence.request_index for sequence in group.sequences)
        expected = [[True, False, False], [False, True, False], [False, False, False]]
        for epoch, suspicions in enumerate(expected, 8):
            lost = cores.pop()
            lost.hub.send(b"client0", ReplicaLost(int32_bytes(suspect), int32_bytes(bystander)))
            await until(functools.partial(lost.received.__contains__, LossNoted()), lost.receive)
            assert not client.ready
            lost.close()
            core = opened(EchoCore(config, epoch=epoch))
            cores.append(core)
            while len(core.requests) < 3:
                core.receive()
                await asyncio.sleep(0.001)
            assert [sent.is_suspect for sent in core.requests] == suspicions
            core.step()
            await drive(core, read_next(group))
            suspect, bystander = -1, core.requests[1].request_index


class CrashingCores:
    """Cores of consecutive epochs, each of which exits without a final message."""

    def __init__(self, config: EngineConfig, first: EchoCore) -> None:
        self._config = config
        self.core = first
        self._epoch = config.epoch

    def next(self) -> EchoCore:
        self.core.close()
        self._epoch += 1
        self.core = opened(EchoCore(self._config, epoch=self._epoch))
        return self.core

    def receive(self) -> None:
        self.core.receive()


@on_event_loop
async def test_a_request_that_kills_every_core_fails_and_no_other_does(
    tmp_path: Path,
) -> None:
    config = engine_config(tmp_path)
    async with connected(config) as (client, first):
        cores = CrashingCores(config, first)
        begun = await client.submit([request(200)], request_id="begun")
        await drive(first, begun.wait_for_updates())
        neighbours = await client.submit([request(200)] * 3, request_id="neighbours")
        poisoned = await client.submit([request(200, prompt=[5, 6, 7])], request_id="poison")
        [poison] = poisoned.sequences
        others = [*begun.sequences, *neighbours.sequences]
        num_doubtful: list[int] = []

        def run_core() -> None:
            cores.receive()
            sent = cores.core.requests
            if any(message.request_index == poison.request_index for message in sent):
                num_doubtful.append(sum(not other.has_progressed for other in others))
                cores.next()
            elif sent:
                cores.core.step()

        await until(lambda: poison.finished, run_core)
        assert (poison.finish_reason, poison.error) == (FinishReason.ERROR, POISON_REQUEST)
        # It was sent twice with others, and twice when none of them could have been the cause.
        assert len(num_doubtful) == 4 and num_doubtful[2:] == [0, 0]
        await until(lambda: not client.num_inflight, run_core)
        for sequence in others:
            assert sequence.finish_reason is FinishReason.LENGTH
            assert sequence.token_ids.tolist() == [PROMPT[i % len(PROMPT)] for i in range(200)]


@on_event_loop
async def test_a_poison_request_is_rejected_when_it_is_sent_again(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        prompt = [5, 6, 7]
        group = await client.submit([request(prompt=prompt), request()], request_id="poison")
        await until(lambda: len(core.requests) == 2, core.receive)
        failed = FinishedRequest(
            group.sequences[0].request_index, FinishReason.ERROR, message=POISON_REQUEST
        )
        core.send(b"client0", EngineCoreOutputs(0, 0, 1.0, finished=[failed]))
        assert [delta.error for delta in await group.result()] == [POISON_REQUEST] * 2
        again = await client.submit([request(prompt=prompt)] * 2, request_id="again")
        assert [delta.error for delta in await again.result()] == [POISON_REQUEST] * 2
        others = [request(prompt=prompt, logprobs=1), request()]
        answered = [await client.submit([other], request_id="other") for other in others]
        for answer in answered:
            [delta] = await drive(core, answer.result())
            assert delta.finish_reason == "length"
        sent = [
            len(message.requests) for message in core.received if isinstance(message, AddRequests)
        ]
        assert sum(sent) == 4


@on_event_loop
async def test_a_poison_request_on_several_replicas_fails_with_the_fourth_core(
    tmp_path: Path,
) -> None:
    parallel = ParallelConfig(data_parallel_size=2)
    config = engine_config(tmp_path, epoch=FIRST_EPOCH, parallel=parallel)
    epochs = [FIRST_EPOCH, FIRST_EPOCH]
    cores = [opened(EchoCore(config, index)) for index in range(2)]
    client = opened(EngineClient(config, 0, smollm2_tokenizer()))
    with zmq.Context() as context:
        publisher = StatusPublisher(context, config)

        def publish() -> None:
            infos = [
                ReplicaInfo(index, ReplicaState.SERVING, epoch, 0, 0, is_resuming=False)
                for index, epoch in enumerate(epochs)
            ]
            publisher.publish(EngineStatus([], infos))

        def receive() -> None:
            for core in cores:
                core.receive()

        starting = asyncio.ensure_future(client.start())
        await until(starting.done, receive)
        others = await client.submit([request(200)], request_id="another")
        poisoned = await client.submit([request(200, prompt=[5, 6, 7])], request_id="poison")
        [poison] = poisoned.sequences
        killed: list[int] = []

        def run_cores() -> None:
            receive()
            for index, core in enumerate(cores):
                if poison.request_index in {sent.request_index for sent in core.requests}:
                    killed.append(index)
                    core.close()
                    epochs[index] += 1
                    publish()
                    cores[index] = opened(EchoCore(config, index, epochs[index]))
                elif core.requests:
                    core.step()

        await until(lambda: poison.finished, run_cores)
        assert poison.error == POISON_REQUEST
        assert len(killed) == 4
        answering = asyncio.ensure_future(others.result())
        await until(answering.done, run_cores)
        [delta] = answering.result()
        assert delta.token_ids == [PROMPT[i % len(PROMPT)] for i in range(200)]
        publisher.close()


@on_event_loop
async def test_a_token_between_two_crashes_clears_a_sequence(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    async with connected(config) as (client, first):
        cores = CrashingCores(config, first)
        group = await client.submit([request(60)], request_id="r")
        for number in range(12):
            await until(lambda: len(cores.core.requests) == 1, cores.receive)
            assert not cores.core.requests[0].is_suspect
            if number % 2:
                tokens = group.sequences[0].num_generated_tokens
                cores.core.step()
                await until(
                    lambda tokens=tokens: group.sequences[0].num_generated_tokens > tokens,
                    cores.receive,
                )
            cores.next()
        [delta] = await drive(cores.core, group.result())
        assert delta.token_ids == [PROMPT[i % len(PROMPT)] for i in range(60)]


@on_event_loop
async def test_a_core_that_names_no_suspects_makes_no_request_suspected(
    tmp_path: Path,
) -> None:
    config = engine_config(tmp_path)
    async with connected(config) as (client, first):
        cores = CrashingCores(config, first)
        group = await client.submit([request(5)], request_id="r")
        for _ in range(5):
            await until(lambda: len(cores.core.requests) == 1, cores.receive)
            assert not cores.core.requests[0].is_suspect
            cores.core.hub.send(b"client0", ReplicaLost(b"", b""))
            await until(lambda: LossNoted() in cores.core.received, cores.receive)
            cores.next()
        [delta] = await drive(cores.core, group.result())
        assert delta.finish_reason == "length"


@on_event_loop
async def test_a_draining_client_finishes_requests_and_rejects_new_ones(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        group = await client.submit([request(10)], request_id="a")
        client.draining = True
        with pytest.raises(EngineDraining):
            await client.submit([request()], request_id="b")
        [delta] = await drive(core, group.result())
        assert delta.finish_reason == "length"


@on_event_loop
async def test_invalid_and_repeated_frames_are_dropped(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        group = await client.submit([request(6)], request_id="r")
        await read_step(core, group)
        for garbage in (b"", b"\xc1\x00", b"\x92\xa7outputs", b"x" * 1000):
            core.hub.socket.send_multipart((b"client0", garbage))
        repeated = EngineCoreOutputs(0, 0, 1.0, request_indices=b"\0\0\0\0", token_ids=b"\1\0\0\0")
        core.hub.send(b"client0", repeated)
        [delta] = await drive(core, group.result())
        assert delta.token_ids == PROMPT[1:6]
        body, _ = client.metrics.render()
        assert (
            b'dropped_frames_total{engine="0",model_name="smollm2",process="frontend"} 5.0' in body
        )


@on_event_loop
async def test_frames_dropped_by_the_supervisor_are_counted_in_metrics(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    async with connected(config) as (client, core):
        with zmq.Context() as context:
            publisher = StatusPublisher(context, config)

            def publish() -> None:
                core.receive()
                publisher.publish(EngineStatus([], num_dropped_frames=3))

            line = b'dropped_frames_total{engine="",model_name="smollm2",process="supervisor"} 3.0'
            await until(lambda: line in client.metrics.render()[0], publish)
            publisher.close()


NONSENSE = EngineCoreOutputs(0, 0, 1.0, int32_bytes([0]), int32_bytes([0, 1]))


@pytest.mark.parametrize("fault", ["a message is lost", "a message makes no sense"])
@on_event_loop
async def test_streams_continue_at_the_same_core_after_lost_outputs(
    tmp_path: Path, fault: str
) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        begun = await client.submit([request(50), request(50, logprobs=1)], request_id="begun")
        await read_step(core, begun)
        waiting = await client.submit([request(3)], request_id="waiting")
        if fault == "a message is lost":
            core.lose_outputs()
            core.step()
        else:
            core.send(b"client0", NONSENSE)
        core.is_greeting = False
        await until(lambda: bool(core.callers), core.read)
        core.send(b"client0", EngineCoreOutputs(0, 0, 1.0, int32_bytes([0]), int32_bytes([0])))
        core.is_greeting = True
        first, second = await drive(core, begun.result())
        assert (
            first.token_ids == second.token_ids == [PROMPT[i % len(PROMPT)] for i in range(1, 50)]
        )
        assert second.logprobs is not None
        assert [entry.token_id for entry in second.logprobs] == second.token_ids
        [delta] = await drive(core, waiting.result())
        assert delta.token_ids == PROMPT[:3]
        assert client.ready and client.num_inflight == 0 and not core.requests


@on_event_loop
async def test_a_request_fails_after_losing_outputs_twice_without_a_token(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        group = await client.submit([request(50)], request_id="r")
        await drive(core, read_next(group))
        core.send(b"client0", NONSENSE)
        await until(
            lambda: sum(isinstance(m, ClientHello) for m in core.received) == 2, core.receive
        )
        late = await client.submit([request(3)], request_id="late")
        core.send(b"client0", NONSENSE)
        [delta] = await group.result()
        assert delta.finish_reason == "error"
        assert delta.error is not None and "tokens twice" in delta.error
        [delta] = await drive(core, late.result())
        assert delta.token_ids == PROMPT[:3]


@on_event_loop
async def test_a_full_queue_rejects_requests_with_the_limit(tmp_path: Path) -> None:
    limits = SchedulerConfig(max_num_seqs=2, max_num_queued_reqs=3)
    async with connected(engine_config(tmp_path, scheduler=limits)) as (client, core):
        groups = [await client.submit([request()], request_id=str(i)) for i in range(5)]
        with pytest.raises(
            Overloaded, match=r"4 sequences would wait, but the limit is 3"
        ) as refused:
            await client.submit([request()], request_id="six")
        assert 1 <= refused.value.retry_after_s <= 60
        for group in groups:
            await drive(core, group.result())
        await drive(core, (await client.submit([request()], request_id="seven")).result())


@on_event_loop
async def test_a_full_queue_of_tokens_rejects_requests(tmp_path: Path) -> None:
    limits = SchedulerConfig(max_num_queued_tokens=100)
    async with connected(engine_config(tmp_path, scheduler=limits)) as (client, core):
        first = await client.submit([request(prompt=[5] * 300)], request_id="alone: any size")
        with pytest.raises(Overloaded, match=r"301 prompt tokens would wait, but the limit is 100"):
            await client.submit([request(prompt=[5])], request_id="refused")
        await drive(core, read_next(first))
        await client.submit([request(prompt=[5] * 90)], request_id="the first is scheduled now")


@on_event_loop
async def test_prefix_cache_reset_returns_whether_it_succeeded(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        group = await client.submit([request(1000 // 5)], request_id="r")
        await until(lambda: bool(core.requests), core.receive)
        for reset_running, expected in ((False, False), (True, True)):
            reset = asyncio.ensure_future(client.reset_prefix_cache(reset_running))
            await until(reset.done, core.receive)
            assert reset.result() is expected
        group.abort()


@on_event_loop
async def test_commands_to_an_exited_core_do_not_wait(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    gone = EngineStatus([], [ReplicaInfo(0, ReplicaState.SERVING, config.epoch + 1, 0, 0)])
    async with connected(config) as (client, _core):
        with zmq.Context() as context:
            publisher = StatusPublisher(context, config)
            asked = asyncio.ensure_future(client.reset_prefix_cache())
            await until(asked.done, lambda: publisher.publish(gone))
            publisher.close()
        with pytest.raises(EngineError, match="replica 0 is not up"):
            asked.result()
        with pytest.raises(EngineError, match="replica 0 is not up"):
            await client.dump_event_logs()


@on_event_loop
async def test_a_dump_returns_its_path_or_the_failure(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        dump = asyncio.ensure_future(client.dump_event_logs())
        await until(dump.done, core.receive)
        assert dump.result() == ["/dumps/core0"]
        core.dump_answer = (False, "the disk is full")
        dump = asyncio.ensure_future(client.dump_event_logs())
        await until(dump.done, core.receive)
        with pytest.raises(EngineError, match="the disk is full"):
            dump.result()


@on_event_loop
async def test_prompts_are_balanced_and_all_sequences_of_one_use_one_replica(
    tmp_path: Path,
) -> None:
    parallel = ParallelConfig(data_parallel_size=2)
    config = engine_config(tmp_path, epoch=FIRST_EPOCH, parallel=parallel)
    cores = [opened(EchoCore(config, 0)), opened(EchoCore(config, 1))]
    client = opened(EngineClient(config, 0, smollm2_tokenizer()))

    def receive() -> None:
        for core in cores:
            core.receive()

    starting = asyncio.ensure_future(client.start())
    await until(starting.done, receive)
    starting.result()
    for i in range(4):
        await client.submit([request()], request_id=str(i))
    await until(lambda: [len(core.requests) for core in cores] == [2, 2], receive)
    await client.submit([request()] * 3, request_id="n=3")
    await client.submit([request()], request_id="alone")
    await until(lambda: [len(core.requests) for core in cores] == [5, 3], receive)
    batch = [request(prompt=list(PROMPT)) for _ in range(4)]
    await client.submit(batch, request_id="four prompts")
    await until(lambda: [len(core.requests) for core in cores] == [6, 6], receive)


@on_event_loop
async def test_a_restarted_frontend_serves_with_the_replicas_that_are_up(
    tmp_path: Path,
) -> None:
    parallel = ParallelConfig(data_parallel_size=2)
    config = engine_config(tmp_path, epoch=FIRST_EPOCH + 1, parallel=parallel)
    client = opened(EngineClient(config, 0, smollm2_tokenizer()))
    cores = [opened(EchoCore(config, 1))]
    starting = asyncio.ensure_future(client.start())
    await until(starting.done, cores[0].receive)
    assert client.ready
    group = await client.submit([request(3)], request_id="r")
    [delta] = await drive(cores[0], group.result())
    assert delta.token_ids == PROMPT[:3]
    cores.append(opened(EchoCore(config, 0)))
    await until(lambda: bool(cores[1].received), cores[1].receive)
    late = replace(request(3), data_parallel_rank=0)
    [delta] = await drive(cores[1], (await client.submit([late], request_id="late")).result())
    assert delta.token_ids == PROMPT[:3]


@on_event_loop
async def test_requests_go_to_a_replica_with_their_adapter_until_it_is_too_busy(
    tmp_path: Path,
) -> None:
    parallel = ParallelConfig(data_parallel_size=2)
    config = engine_config(tmp_path, epoch=FIRST_EPOCH, parallel=parallel)
    cores = [opened(EchoCore(config, 0)), opened(EchoCore(config, 1))]
    client = opened(EngineClient(config, 0, smollm2_tokenizer()))
    held, new = (
        LoraAdapter(name, "", bytes([number] * HASH_BYTES)) for name, number in (("a", 2), ("b", 3))
    )

    def receive() -> None:
        for core in cores:
            core.receive()

    async def submit(lora: LoraAdapter, count: int, *expected: int) -> None:
        for _ in range(count):
            await client.submit([replace(request(), lora=lora)], request_id=lora.name)
        await until(lambda: tuple(len(core.requests) for core in cores) == expected, receive)

    starting = asyncio.ensure_future(client.start())
    await until(starting.done, receive)
    # Without a report, a would go to the first replica and b to the second.
    cores[1].hub.send(
        b"client0", ReplicaLoadUpdate(0, stored=uint64_bytes([adapter_key(held.version)]))
    )
    answer = asyncio.ensure_future(client.reset_prefix_cache())
    await until(answer.done, receive)
    await submit(held, HEADROOM, 0, HEADROOM)
    await submit(new, 1, 1, HEADROOM)
    await submit(held, 3, 2, HEADROOM + 2)


@on_event_loop
async def test_prompts_go_to_their_cached_prefix_but_not_to_a_drained_replica(
    tmp_path: Path,
) -> None:
    parallel = ParallelConfig(data_parallel_size=2)
    config = engine_config(tmp_path, epoch=FIRST_EPOCH, parallel=parallel)
    cores = [opened(EchoCore(config, 0)), opened(EchoCore(config, 1))]
    client = opened(EngineClient(config, 0, smollm2_tokenizer()))
    prompt = list(range(100, 100 + 3 * config.cache.block_size))
    hashes = hash_blocks(np.array(prompt, np.int32), config.cache.block_size, root_hash())

    def receive() -> None:
        for core in cores:
            core.receive()

    async def arrived(*counts: int) -> None:
        await until(lambda: tuple(len(core.requests) for core in cores) == counts, receive)

    with zmq.Context() as context:
        publisher = StatusPublisher(context, config)
        starting = asyncio.ensure_future(client.start())
        await until(starting.done, receive)
        cores[1].hub.send(b"client0", ReplicaLoadUpdate(0, uint64_bytes(block_keys(hashes))))
        answer = asyncio.ensure_future(client.reset_prefix_cache())
        await until(answer.done, receive)
        for _ in range(3):
            await client.submit([request(prompt=prompt)], request_id="its prefix is at 1")
        await arrived(0, 3)
        await client.submit([request()], request_id="another prompt")
        await arrived(1, 3)
        cores[1].hub.send(
            b"client0", ReplicaLoadUpdate(20, removed=uint64_bytes(block_keys(hashes)))
        )
        cores[0].hub.send(b"client0", ReplicaLoadUpdate(5))
        answer = asyncio.ensure_future(client.reset_prefix_cache())
        await until(answer.done, receive)
        for _ in range(4):
            await client.submit([request()], request_id="others have more at 1")
        await arrived(5, 3)
        await client.submit([replace(request(), data_parallel_rank=1)], request_id="by name")
        await arrived(5, 4)
        states = ReplicaState.DRAINING, ReplicaState.SERVING
        infos = [ReplicaInfo(i, state, config.epoch, 0, 0) for i, state in enumerate(states)]
        drained = EngineStatus([], infos)
        await until(
            lambda: client.watch is not None and client.watch.status.replicas == infos,
            lambda: (publisher.publish(drained), receive()),
        )
        await client.submit([request()], request_id="0 is drained")
        await arrived(5, 5)
        with pytest.raises(ReplicaUnavailable, match="replica 0"):
            await client.submit([replace(request(), data_parallel_rank=0)], request_id="by name")
        downs = [
            ReplicaInfo(i, ReplicaState.SERVING, config.epoch, 0, 0, is_up=i == 1) for i in (0, 1)
        ]
        down = EngineStatus([], downs)
        await until(
            lambda: client.watch is not None and client.watch.status.replicas == downs,
            lambda: (publisher.publish(down), receive()),
        )
        await client.submit([request()], request_id="0 is down")
        await arrived(5, 6)
        publisher.close()


@on_event_loop
async def test_requests_wait_while_no_replica_accepts_them(
    tmp_path: Path,
) -> None:
    parallel = ParallelConfig(data_parallel_size=2)
    config = engine_config(tmp_path, epoch=FIRST_EPOCH, parallel=parallel)
    cores = [opened(EchoCore(config, 0)), opened(EchoCore(config, 1))]
    client = opened(EngineClient(config, 0, smollm2_tokenizer()))

    def receive() -> None:
        for core in cores:
            core.receive()

    with zmq.Context() as context:
        publisher = StatusPublisher(context, config)
        starting = asyncio.ensure_future(client.start())
        await until(starting.done, receive)
        cores.pop().close()
        infos = [
            ReplicaInfo(0, ReplicaState.DRAINED, config.epoch, 0, 0),
            ReplicaInfo(1, ReplicaState.SERVING, config.epoch + 1, 0, 0, is_up=False),
        ]
        await until(
            lambda: client.watch is not None and client.watch.status.replicas == infos,
            lambda: (publisher.publish(EngineStatus([], infos)), receive()),
        )
        assert not client.ready
        for _ in range(2):
            await client.submit([request()], request_id="waits")
        cores.append(opened(EchoCore(config, 1, epoch=config.epoch + 1)))
        await until(lambda: len(cores[1].requests) == 2, receive)
        assert not cores[0].requests
        publisher.close()


@on_event_loop
async def test_live_requests_have_different_indices(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        await client.submit([request()], request_id="index 0")
        client._last_index = 2**31 - 2
        await client.submit([request(), request()], request_id="the last index, then 1")
        await until(lambda: len(core.requests) == 3, core.receive)
        assert [r.request_index for r in core.requests] == [0, 2**31 - 1, 1]


@on_event_loop
async def test_stream_interval_groups_tokens_after_the_first(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    config = msgspec.structs.replace(
        config, frontend=msgspec.structs.replace(config.frontend, stream_interval=4)
    )
    async with connected(config) as (client, core):
        group = await client.submit([request(10)], request_id="r")
        [sequence] = group.sequences
        sizes: list[int] = []

        async def read() -> None:
            while update := await read_next(group):
                sizes.extend(len(delta.token_ids) for _, delta in update)

        reading = asyncio.ensure_future(read())
        await until(lambda: bool(core.requests), core.receive)
        for count in range(1, 11):
            core.step()
            await until(lambda n=count: sequence.num_generated_tokens == n, core.receive)
            await until(lambda: not group.updates, core.receive)
        await reading
        assert sizes == [1, 4, 4, 1]


@on_event_loop
async def test_no_sequence_starts_if_one_of_them_is_invalid(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        with pytest.raises(ParameterError, match="temperature"):
            await client.submit([request(), request(temperature=-1.0)], request_id="r")
        assert client.num_inflight == 0
        group = await client.submit([request(2)], request_id="r2")
        await drive(core, group.result())
        added = [m for m in core.received if isinstance(m, AddRequests)]
        assert sum(len(message.requests) for message in added) == 1


@on_event_loop
async def test_close_fails_requests_in_flight_and_can_be_repeated(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, _):
        group = await client.submit([request()], request_id="r")
        client.close()
        [delta] = await group.result()
        assert (delta.finish_reason, delta.error) == (
            "error",
            "the server stopped before this request finished",
        )
        group.abort()
        client.close()
