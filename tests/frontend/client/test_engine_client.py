"""The engine client and the requests that it sends to one core."""

import asyncio
import gc
from pathlib import Path

import msgspec
import pytest
import zmq
from engine.frontend.client.engine_client import (
    EngineClient,
    EngineDead,
    EngineDraining,
    Overloaded,
    RequestGroup,
    Sequence,
    SequenceRequest,
)
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.block_hash import HASH_BYTES, hash_blocks, root_hash
from engine.protocol.config import PROTOCOL_VERSION, PrefixHash, SchedulerConfig
from engine.protocol.errors import EngineError, ParameterError
from engine.protocol.messages import AbortRequests, AddRequests, ClientHello, EngineCoreOutputs
from engine.protocol.pooling_params import PoolingKind, PoolingParams
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.supervisor_messages import EngineStatus, ReplicaInfo, ReplicaState
from engine.protocol.transport import StatusPublisher
from support.requests.client_requests import PROMPT, request
from support.servers.echo_core import EchoCore
from support.servers.engine_fixtures import (
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


@pytest.mark.parametrize("is_aborted", [False, True])
@on_event_loop
async def test_an_ended_request_is_freed_without_a_garbage_collection(
    tmp_path: Path, is_aborted: bool
) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        gc.collect()
        gc.disable()
        try:
            group = await client.submit([request(5), request(3)], request_id="r")
            if is_aborted:
                await drive(core, read_next(group))
                group.abort()
            await drive(core, group.result())
            del group
            await until(lambda: not core.requests, core.receive)
            assert not [o for o in gc.get_objects() if isinstance(o, RequestGroup | Sequence)]
        finally:
            gc.enable()


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


@pytest.mark.parametrize("ends_by", ["step", "abort", "restart"])
@on_event_loop
async def test_the_inputs_of_a_large_request_are_sent_a_few_at_a_time(
    tmp_path: Path, ends_by: str
) -> None:
    num_steps = 3
    config = engine_config(tmp_path, scheduler=SchedulerConfig(max_num_seqs=4))
    async with connected(config) as (client, core):
        pooled = msgspec.structs.replace(request(1), pooling=PoolingParams(PoolingKind.MEAN, False))
        large = await client.submit([pooled] * 50, request_id="large")
        small = await client.submit([pooled], request_id="small")
        await until(lambda: len(core.requests) > 4 * num_steps, core.receive)
        assert core.requests[-1].request_id == "small"
        assert len(core.requests) == 4 * num_steps + 1
        if ends_by == "abort":
            large.abort()
            await until(lambda: len(core.requests) == 1, core.receive)
        if ends_by == "restart":
            core.close()
            core = opened(EchoCore(config, epoch=8))
        await drive(core, small.result())
        reason = "abort" if ends_by == "abort" else "length"
        ends = [delta.finish_reason for delta in await drive(core, large.result())]
        assert ends == [reason] * 50
        assert client.num_inflight == 0


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
        found = list(group.sequences[0].iterate_prompt_logprobs())
        assert len(found) == len(PROMPT) * 4
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
async def test_a_request_that_no_message_can_hold_fails_alone(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        numbers = {"remote_port": 2**70}
        large = SequenceRequest(PROMPT, SamplingParams(), kv_transfer_params=numbers)
        group = await client.submit([large, request(20)], request_id="r")
        refused, other = await drive(core, group.result())
        assert "this request cannot be sent to the engine's core" in str(refused.error)
        assert (refused.finish_reason, other.finish_reason) == ("error", "length")
        assert sum(isinstance(message, ClientHello) for message in core.received) == 1


@on_event_loop
async def test_a_request_that_its_core_has_refused_fails_alone(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        group = await client.submit([request(5), request(20)], request_id="r")
        await read_step(core, group)
        first = group.sequences[0].request_index
        core.hub.send(b"client0", AbortRequests(int32_bytes([first, 1000])))
        refused, other = await drive(core, group.result())
        assert "refused this request as invalid" in str(refused.error)
        assert (refused.finish_reason, other.finish_reason) == ("error", "length")


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
            reset = asyncio.ensure_future(client.calls.reset_prefix_cache(reset_running))
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
            asked = asyncio.ensure_future(client.calls.reset_prefix_cache())
            await until(asked.done, lambda: publisher.publish(gone))
            publisher.close()
        with pytest.raises(EngineError, match="replica 0 is not up"):
            asked.result()
        with pytest.raises(EngineError, match="replica 0 is not up"):
            await client.calls.dump_event_logs()


@on_event_loop
async def test_a_dump_returns_its_path_or_the_failure(tmp_path: Path) -> None:
    async with connected(engine_config(tmp_path)) as (client, core):
        dump = asyncio.ensure_future(client.calls.dump_event_logs())
        await until(dump.done, core.receive)
        assert dump.result() == ["/dumps/core0"]
        core.dump_answer = (False, "the disk is full")
        dump = asyncio.ensure_future(client.calls.dump_event_logs())
        await until(dump.done, core.receive)
        with pytest.raises(EngineError, match="the disk is full"):
            dump.result()


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
