"""The engine client continues requests when a core exits, or its outputs are lost."""

import asyncio
import functools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine.frontend.client.engine_client import EngineDead
from engine.protocol.arrays import int32_bytes
from engine.protocol.config import FIRST_EPOCH, EngineConfig
from engine.protocol.errors import POISON_REQUEST
from engine.protocol.messages import (
    AddRequests,
    ClientHello,
    EngineCoreOutputs,
    FinishedRequest,
    FinishReason,
    LossNoted,
    ReplicaLost,
)
from engine.protocol.transport import Peer
from support.requests.client_requests import PROMPT, request
from support.servers.echo_core import EchoCore
from support.servers.engine_fixtures import (
    connected,
    drive,
    engine_config,
    on_event_loop,
    opened,
    read_next,
    read_step,
    until,
)
from support.servers.two_replicas import TwoReplicas

pytestmark = pytest.mark.slow


@on_event_loop
async def test_a_failed_engine_fails_current_and_new_requests(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        streamed = await client.submit([request(100)], request_id="a")
        await read_step(core, streamed)
        waiting = asyncio.ensure_future(read_next(streamed))
        unread = await client.submit([request(100), request(100)], request_id="b")
        resetting = asyncio.ensure_future(client.calls.reset_prefix_cache())
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
            core.step()
            for position, delta in await read_next(read):
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
        prompt_logprobs = list(read.sequences[1].iterate_prompt_logprobs())
        assert len(prompt_logprobs) == len(PROMPT)
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
            while client.cores[0].epoch != 8:
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
async def test_a_request_is_suspected_until_it_gets_a_token(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    async with connected(config) as (client, first):
        group = await client.submit([request(40), request(40), request(40)], request_id="r")
        await until(lambda: len(first.requests) == 3, first.receive)
        cores = [first]
        suspect, unsuspected, _ = (sequence.request_index for sequence in group.sequences)
        expected = [[True, False, False], [False, True, False], [False, False, False]]
        for epoch, suspicions in enumerate(expected, 8):
            lost = cores.pop()
            lost.hub.send(b"client0", ReplicaLost(int32_bytes(suspect), int32_bytes(unsuspected)))
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
            suspect, unsuspected = -1, core.requests[1].request_index


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
    replicas = TwoReplicas(tmp_path)
    cores, client = replicas.cores, await replicas.start()
    epochs = [FIRST_EPOCH, FIRST_EPOCH]
    others = await client.submit([request(200)], request_id="another")
    poisoned = await client.submit([request(200, prompt=[5, 6, 7])], request_id="poison")
    [poison] = poisoned.sequences
    killed: list[int] = []

    def run_cores() -> None:
        replicas.receive()
        for index, core in enumerate(cores):
            if poison.request_index in {sent.request_index for sent in core.requests}:
                killed.append(index)
                core.close()
                epochs[index] += 1
                replicas.publish([replicas.info(i, epoch=epoch) for i, epoch in enumerate(epochs)])
                cores[index] = opened(EchoCore(replicas.config, index, epochs[index]))
            elif core.requests:
                core.step()

    await until(lambda: poison.finished, run_cores)
    assert poison.error == POISON_REQUEST
    assert len(killed) == 4
    answering = asyncio.ensure_future(others.result())
    await until(answering.done, run_cores)
    [delta] = answering.result()
    assert delta.token_ids == [PROMPT[i % len(PROMPT)] for i in range(200)]


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
async def test_requests_that_could_not_be_sent_are_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, failures = Peer.send, [MemoryError()]

    def fail_once(self: Peer[Any], message: msgspec.Struct) -> None:
        if failures and isinstance(message, AddRequests):
            raise failures.pop()
        send(self, message)

    async with connected(engine_config(tmp_path)) as (client, core):
        monkeypatch.setattr(Peer, "send", fail_once)
        group = await client.submit([request(6)], request_id="r")
        [delta] = await drive(core, group.result())
        assert delta.token_ids == PROMPT[:6] and not failures


@on_event_loop
async def test_work_goes_on_after_a_callback_has_failed(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        group = await client.submit([request(6)], request_id="r")

        def fail() -> bool:
            group.on_update = None
            # The readers are woken in the callback that this ends.
            raise MemoryError

        group.on_update = fail
        loop = asyncio.get_running_loop()
        failures: list[object] = []
        loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
        other = await client.submit([request(6)], request_id="other")
        ended = asyncio.ensure_future(other.result())
        await until(ended.done, lambda: (core.receive(), core.requests and core.step()))
        client.resume_outputs()
        [delta] = await drive(core, group.result())
        assert delta.token_ids == ended.result()[0].token_ids == PROMPT[:6]
        assert [type(each) for each in failures] == [MemoryError]
