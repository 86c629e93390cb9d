"""One replica computes prompts for another. Every token is compared with that of the request run alone."""

from __future__ import annotations

import random

import pytest
from engine.core.kv_cache.connectors.direct_transfer import DirectTransfer
from engine.protocol.config import LoadFailurePolicy
from engine.protocol.kv_cache_groups import FULL_ATTENTION, AttentionKind, KVCacheGroup
from engine.protocol.kv_transfer.direct import ONE_WAY, PullSettings
from engine.protocol.messages import EventKind, FinishReason
from support.scheduler.client_view import ClientView, Key
from support.scheduler.direct_exchange import Exchange
from support.scheduler.recorded_harness import RecordedHarness, replay

pytestmark = pytest.mark.slow

PREFILL, DECODE = 0, 1
WINDOWED = (KVCacheGroup(), KVCacheGroup(AttentionKind.SLIDING_WINDOW, 8))


class Pair:
    """A prefill replica and a decode replica, whose workers exchange blocks."""

    def __init__(self, seed: int = 0, pull: PullSettings = ONE_WAY, **limits: object) -> None:
        self.rng = random.Random(seed)
        self._pull = pull
        self._limits = limits
        self.replicas: list[RecordedHarness] = []
        self.exchanges: list[Exchange] = []
        self.peers: list[Exchange | None] = []
        for _ in range(2):
            harness, exchange = self._start()
            self.replicas.append(harness)
            self.exchanges.append(exchange)
            self.peers.append(exchange)
        self.num_prompts = 0

    def _start(self) -> tuple[RecordedHarness, Exchange]:
        # A host, as opposed to a replica, stands for the decode replica.
        connector = DirectTransfer(host="decode", port=1, pull=self._pull)
        harness = RecordedHarness(connector=connector, **self._limits)
        exchange = Exchange(harness.worker.kv_cache, self.peers, self.rng)
        harness.worker.transfers = exchange
        return harness, exchange

    def restart(self, replica: int) -> None:
        """Replace a replica with an empty one, to which clients resubmit their requests."""
        views = self.replicas[replica].received
        harness, exchange = self._start()
        self.replicas[replica] = harness
        self.exchanges[replica] = self.peers[replica] = exchange
        for (client, _), view in views.items():
            harness.resubmit(client, view)

    def prefill(self, prompt: list[int] | int) -> tuple[Key, str]:
        self.num_prompts += 1
        name = f"prompt {self.num_prompts}"
        params = {"do_remote_decode": True, "remote_request_id": name}
        return self.replicas[PREFILL].add(prompt, 1, kv_transfer_params=params), name

    def decode(
        self, prompt: list[int] | int, name: str, max_tokens: int = 6, **more: object
    ) -> Key:
        params = {"do_remote_prefill": True, "remote_request_id": name, "replica": PREFILL, **more}
        return self.replicas[DECODE].add(prompt, max_tokens, kv_transfer_params=params)

    def move(self, key: Key, source: int) -> Key:
        """Move a request from a replica to the other one."""
        return self.replicas[source].move(key, self.replicas[1 - source], source)

    def turn(self) -> bool:
        """Let each replica process a step, and some blocks move. Return False if nothing is left to do."""
        worked = [harness.step() for harness in self.replicas]
        for harness, exchange in zip(self.replicas, self.exchanges, strict=True):
            exchange.move()
            exchange.deliver(harness.scheduler, harness.now)
        return any(worked) or not all(exchange.is_idle for exchange in self.exchanges)

    def drain(self) -> None:
        idle = 0
        for _ in range(10_000):
            idle = 0 if self.turn() else idle + 1
            if idle > 4:
                break
            if idle:
                # Blocks that nobody fetches are held for a while.
                self.replicas[PREFILL].now += 100.0
        for harness, peer in zip(self.replicas, self.peers, strict=True):
            if peer is not None:
                harness.check_empty()

    def hits(self) -> int:
        stats = self.replicas[DECODE].stats
        return sum(each.kv_connector.prefix_cache_hits for each in stats)


def test_blocks_move_while_the_prompt_is_computed():
    pair = Pair(max_num_batched_tokens=8)
    source, name = pair.prefill(41)
    pair.replicas[PREFILL].step()
    assert pair.replicas[PREFILL].received[source].num_events(EventKind.SCHEDULED)
    key = pair.decode(41, name)
    while pair.exchanges[DECODE].num_fetched < 4:
        pair.turn()
    assert not pair.replicas[PREFILL].received[source].is_over
    pair.drain()
    assert pair.hits() == 40
    received = pair.replicas[DECODE].received[key]
    assert received.reason is FinishReason.LENGTH
    assert received.events[1].num_cached_tokens == 40
    # Only the last token was computed there.
    assert pair.replicas[DECODE].worker.num_prompt_tokens_computed <= 1


@pytest.mark.parametrize("num_tokens", [39, 40, 41, 42])
@pytest.mark.parametrize("is_early", [True, False], ids=["while it is computed", "after it"])
def test_the_last_block_moves_although_it_is_incomplete(num_tokens, is_early):
    pair = Pair(max_num_batched_tokens=8, transfer_timeout_s=1e6)
    _, name = pair.prefill(num_tokens)
    pair.replicas[PREFILL].step()
    while not (is_early or pair.exchanges[PREFILL].held):
        pair.replicas[PREFILL].step()
    key = pair.decode(num_tokens, name, fetches_last_block=True)
    pair.drain()
    received = pair.replicas[DECODE].received[key]
    assert received.reason is FinishReason.LENGTH
    assert received.events[1].num_cached_tokens == num_tokens - 1
    assert sum(each.kv_connector.num_failed_loads for each in pair.replicas[DECODE].stats) == 0
    assert not pair.exchanges[PREFILL].held
    for harness in pair.replicas:
        replay(harness.dump())


@pytest.mark.parametrize("end", ["expires", "is aborted"])
def test_the_last_block_is_offered_only_while_it_is_held(end):
    pair = Pair(transfer_timeout_s=50.0)
    harness, exchange = pair.replicas[PREFILL], pair.exchanges[PREFILL]
    key, name = pair.prefill(42)
    while not exchange.held:
        harness.step()
    assert len(exchange.offered) == 11
    if end == "expires":
        harness.now += 100.0
    else:
        harness.abort(key)
    while harness.step():
        pass
    assert len(exchange.offered) == 10
    decoding = pair.decode(42, name, fetches_last_block=True)
    pair.drain()
    received = pair.replicas[DECODE].received[decoding]
    assert received.reason is FinishReason.LENGTH
    assert received.events[1].num_cached_tokens == 40


def test_a_prefill_replica_that_dies_at_any_moment_costs_only_what_was_not_fetched():
    for num_turns in range(0, 12, 2):
        pair = Pair(num_turns, max_num_batched_tokens=8)
        _, name = pair.prefill(41)
        pair.replicas[PREFILL].step()
        key = pair.decode(41, name)
        for _ in range(num_turns):
            pair.turn()
        pair.peers[PREFILL] = None
        num_fetched = pair.exchanges[DECODE].num_fetched
        pair.drain()
        received = pair.replicas[DECODE].received[key]
        assert received.reason is FinishReason.LENGTH
        assert received.events[1].num_cached_tokens == 4 * num_fetched


def test_blocks_are_held_until_they_are_fetched_or_the_time_is_over():
    pair = Pair(transfer_timeout_s=50.0)
    source, name = pair.prefill(20)
    harness = pair.replicas[PREFILL]
    while not harness.received[source].is_over:
        harness.step()
    params = harness.received[source].finished.kv_transfer_params
    assert params is not None and params["do_remote_prefill"] is True
    assert params["remote_request_id"] == name and [
        len(blocks) for blocks in params["remote_block_ids"]
    ] == [5]
    pool = harness.scheduler.kv_cache_manager.pool
    assert pool.num_free == pool.num_blocks - 1 - 5
    pair.decode(20, name)
    pair.drain()
    _, name = pair.prefill([7] * 20)
    while not pair.exchanges[PREFILL].held:
        harness.step()
    pair.drain()
    assert not pair.exchanges[PREFILL].held
    assert sum(each.kv_connector.num_expired_transfers for each in harness.stats) == 1
    # The request arrives too late for the held blocks, but they are cached.
    key = pair.decode([7] * 20, name)
    pair.drain()
    assert pair.replicas[DECODE].received[key].events[1].num_cached_tokens == 16


def test_the_policy_fail_fails_a_request_whose_blocks_are_missing():
    pair = Pair(load_failure_policy=LoadFailurePolicy.FAIL)
    _, name = pair.prefill(20)
    key = pair.decode(20, name)
    pair.peers[PREFILL] = None
    pair.drain()
    assert pair.replicas[DECODE].received[key].reason is FinishReason.ERROR


def test_a_request_that_ends_without_a_fetch_lets_its_blocks_go():
    pair = Pair(transfer_timeout_s=1e6)
    _, name = pair.prefill(20)
    while not pair.exchanges[PREFILL].held:
        pair.replicas[PREFILL].step()
    key = pair.decode(20, name)
    pair.replicas[DECODE].abort(key)
    pair.drain()
    assert not pair.exchanges[PREFILL].held


def test_a_refused_request_lets_its_blocks_go():
    pair = Pair(transfer_timeout_s=1e6, max_num_seqs=1, max_num_queued_reqs=1)
    _, name = pair.prefill(20)
    while not pair.exchanges[PREFILL].held:
        pair.replicas[PREFILL].step()
    for _ in range(2):
        pair.replicas[DECODE].add([9] * 5, 30)
    key = pair.decode(20, name)
    pair.drain()
    assert pair.replicas[DECODE].received[key].reason is FinishReason.REJECTED
    assert not pair.exchanges[PREFILL].held


@pytest.mark.parametrize("groups", [FULL_ATTENTION, WINDOWED], ids=["full", "windows"])
@pytest.mark.parametrize("threshold", [16, 17])
def test_the_next_turn_is_computed_from_the_blocks_of_the_turn_before(threshold, groups):
    pair = Pair(pull=PullSettings(True, threshold), groups=groups, transfer_timeout_s=50.0)
    params, history = answer_first_turn(pair)
    assert params["remote_num_tokens"] == 39 and not params["do_remote_prefill"]
    key = pair.replicas[PREFILL].add([*history, 1, 2, 3, 4, 5], 1, kv_transfer_params=params)
    while not pair.exchanges[PREFILL].held:
        pair.turn()
    received = pair.replicas[PREFILL].received[key]
    # The first replica has the blocks of its own prompt. The transfer of 16 tokens is worth it, or is not.
    assert received.events[1].num_cached_tokens == (36 if threshold == 16 else 20)
    answer = received.finished.kv_transfer_params
    assert answer is not None and answer["do_remote_prefill"]
    assert answer["remote_request_id"] != params["remote_request_id"]
    pair.drain()
    replay(pair.replicas[PREFILL].dump())


@pytest.mark.parametrize("policy", LoadFailurePolicy)
@pytest.mark.parametrize("change", ["text", "restart"])
def test_blocks_of_the_turn_before_that_are_gone_are_computed(change, policy):
    pull, role = PullSettings(True, 1), "kv_producer"
    pair = Pair(pull=pull, kv_role=role, load_failure_policy=policy, transfer_timeout_s=50.0)
    params, history = answer_first_turn(pair)
    if change == "restart":
        pair.restart(DECODE)
    else:
        # The client has changed the third block of the answer.
        history[20 + 8] += 1
    key = pair.replicas[PREFILL].add(history, 1, kv_transfer_params=params)
    pair.drain()
    received = pair.replicas[PREFILL].received[key]
    assert received.reason is FinishReason.LENGTH
    assert received.events[1].num_cached_tokens == (20 if change == "restart" else 28)


def answer_first_turn(pair: Pair) -> tuple[dict[str, object], list[int]]:
    """Return where the blocks of a prompt of 20 tokens and its answer of 20 tokens are, and these tokens."""
    _, name = pair.prefill(prompt := list(range(30, 50)))
    key = pair.decode(prompt, name, max_tokens=20)
    pair.drain()
    received = pair.replicas[DECODE].received[key]
    assert received.finished.kv_transfer_params is not None
    return received.finished.kv_transfer_params, [*prompt, *received.token_ids]


@pytest.mark.parametrize("is_lost", [False, True], ids=["aborted", "client lost"])
def test_blocks_held_for_an_ended_request_are_freed(is_lost):
    """A client aborts the request that it has ended, because no other replica will fetch its blocks."""
    pair = Pair(transfer_timeout_s=1e6)
    harness, exchange = pair.replicas[PREFILL], pair.exchanges[PREFILL]
    key, _ = pair.prefill(20)
    while not exchange.held:
        harness.step()
    if is_lost:
        harness.scheduler.finish_client(key[0])
    else:
        harness.abort(key)
    while harness.step():
        pass
    assert not exchange.held
    harness.check_empty()
    assert sum(each.kv_connector.num_expired_transfers for each in harness.stats) == 0
    replay(harness.dump())


def is_movable(view: ClientView) -> bool:
    params = view.message.kv_transfer_params or {}
    return not (view.is_over or view.was_aborted or "do_remote_decode" in params)


def start_request(pair: Pair, num_tokens: int) -> Key:
    """Return a request of the first replica that has generated this many tokens."""
    harness = pair.replicas[PREFILL]
    key = harness.add(21, 40)
    while len(harness.received[key].token_ids) < num_tokens:
        pair.turn()
    return key


@pytest.mark.parametrize("groups", [FULL_ATTENTION, WINDOWED], ids=["full", "windows"])
def test_a_moved_request_continues_with_its_blocks(groups) -> None:
    pair = Pair(groups=groups, transfer_timeout_s=1e6)
    moved = pair.move(start_request(pair, 14), PREFILL)
    pair.drain()
    received = pair.replicas[DECODE].received[moved]
    assert received.reason is FinishReason.LENGTH and len(received.token_ids) == 40
    # The last block is not full, and is computed again.
    assert received.events[1].num_cached_tokens == (21 + 14 - 1) // 4 * 4
    assert not pair.exchanges[PREFILL].held


def test_a_moved_request_survives_the_death_of_either_replica_at_any_moment() -> None:
    for num_turns in range(0, 12, 2):
        for dies in (PREFILL, DECODE):
            pair = Pair(num_turns, load_failure_policy=LoadFailurePolicy.FAIL)
            moved = pair.move(start_request(pair, 14), PREFILL)
            message = pair.replicas[DECODE].received[moved].message
            for _ in range(num_turns):
                pair.turn()
            if dies == DECODE:
                pair.restart(DECODE)
            else:
                pair.peers[PREFILL] = None
            pair.drain()
            (received,) = pair.replicas[DECODE].received.values()
            assert received.message.arrival_time == message.arrival_time
            assert received.reason is FinishReason.LENGTH and len(received.token_ids) == 40


def test_a_request_that_waits_moves_without_blocks() -> None:
    pair = Pair(max_num_seqs=1, transfer_timeout_s=1e6)
    harness = pair.replicas[PREFILL]
    harness.add(9, 12)
    waiting = harness.add(9, 5)
    harness.step()
    moved = pair.move(waiting, PREFILL)
    pair.drain()
    assert pair.replicas[DECODE].received[moved].reason is FinishReason.LENGTH
    assert not pair.exchanges[PREFILL].held


@pytest.mark.parametrize("groups", [FULL_ATTENTION, WINDOWED], ids=["full", "windows"])
@pytest.mark.parametrize("seed", range(3))
def test_random_transfers_survive_losses_aborts_and_preemptions(seed: int, groups) -> None:
    rng = random.Random(seed)
    pair = Pair(
        seed,
        num_blocks=rng.choice((24, 40)),
        groups=groups,
        max_num_batched_tokens=16,
        inject_preemption=0.02,
        transfer_timeout_s=60.0,
    )
    for exchange in pair.exchanges:
        exchange.loss = 0.02
    waiting: list[tuple[Key, str, list[int]]] = []
    prefill = pair.replicas[PREFILL]
    for _ in range(150):
        if rng.random() < 0.25:
            # Some have a common beginning.
            first = rng.choice(([5] * 12, [9] * 20, []))
            prompt = first + [rng.randrange(1, 500) for _ in range(rng.randrange(1, 24))]
            waiting.append((*pair.prefill(prompt), prompt))
        if rng.random() < 0.1:
            # Other requests on that replica evict offered blocks.
            rng.choice(pair.replicas).add(rng.randrange(1, 50), 3)
        for entry in list(waiting):
            source, name, prompt = entry
            received = prefill.received[source]
            if received.is_over or received.num_events(EventKind.SCHEDULED):
                waiting.remove(entry)
                if rng.random() < 0.9:
                    last = rng.random() < 0.7
                    pair.decode(prompt, name, rng.randrange(1, 8), fetches_last_block=last)
        for harness in pair.replicas:
            live = [key for key, view in harness.received.items() if not view.is_over]
            if live and rng.random() < 0.03:
                harness.abort(rng.choice(live))
        source = rng.randrange(2)
        views = pair.replicas[source].received
        movable = [key for key, view in views.items() if is_movable(view)]
        if movable and rng.random() < 0.1:
            pair.move(rng.choice(movable), source)
        pair.turn()
    pair.drain()
    assert pair.hits() > 0
    assert not any(exchange.held for exchange in pair.exchanges)
    for harness in pair.replicas:
        assert sum(replay(harness.dump())) > 100
