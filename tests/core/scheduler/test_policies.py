"""The order of admission under each policy. Tests are named for the lines of docs/scheduler.md."""

from __future__ import annotations

from collections import Counter

import pytest
from engine.core.scheduler.queues.backlog import TenantLimits
from engine.core.scheduler.queues.tenant_backpressure import TenantBackpressure
from engine.core.state.request import Request
from engine.protocol.arrays import int32_bytes
from engine.protocol.config import SchedulingPolicy
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.messages import EngineCoreRequest, EventKind, FinishReason
from engine.protocol.sampling_params import SamplingParams
from support.scheduler.client_view import Key
from support.scheduler.harness import Harness, admissions, preempted
from support.suite.reachable import reachable

# fcfs, priority


def test_2_1_priority_admits_smaller_values_first_then_arrivals():
    harness = Harness(policy=SchedulingPolicy.PRIORITY, max_num_seqs=1)
    keys = [harness.add(3, 2, priority=priority) for priority in (5, 0, -1, 5, 0)]
    harness.drain()
    assert admissions(harness) == [keys[index] for index in (2, 1, 4, 0, 3)]


def test_2_1_under_priority_the_worst_running_request_is_preempted():
    harness = Harness(
        policy=SchedulingPolicy.PRIORITY, num_blocks=8, block_size=2, enable_prefix_caching=False
    )
    low = harness.add([1] * 4, 8, priority=9)
    high = harness.add([2] * 4, 8, priority=1)
    harness.drain()
    assert preempted(harness, low) > 0
    assert preempted(harness, high) == 0


def test_2_1_a_waiting_request_displaces_one_of_strictly_lower_priority():
    harness = Harness(
        policy=SchedulingPolicy.PRIORITY, priority_preemption=True, max_num_seqs=2, max_in_flight=1
    )
    low, lower = harness.add(4, 30, priority=3), harness.add(5, 30, priority=4)
    harness.step()
    urgent = harness.add(6, 3, priority=0)
    harness.step()
    assert admissions(harness)[-1] == urgent
    harness.drain()
    assert (preempted(harness, low), preempted(harness, lower)) == (0, 1)


def test_2_1_equal_priority_never_displaces():
    harness = Harness(
        policy=SchedulingPolicy.PRIORITY, priority_preemption=True, max_num_seqs=1, max_in_flight=1
    )
    first = harness.add(4, 10, priority=3)
    harness.step()
    harness.add(4, 3, priority=3)
    harness.drain()
    assert preempted(harness, first) == 0


def test_2_1_without_priority_preemption_running_requests_stay():
    harness = Harness(policy=SchedulingPolicy.PRIORITY, max_num_seqs=1)
    first = harness.add(4, 10, priority=3)
    harness.step()
    harness.add(4, 3, priority=0)
    harness.drain()
    assert preempted(harness, first) == 0


def test_2_1_no_request_is_displaced_if_that_frees_too_few_blocks():
    harness = Harness(
        policy=SchedulingPolicy.PRIORITY,
        priority_preemption=True,
        num_blocks=11,
        block_size=4,
        max_in_flight=1,
    )
    high = harness.add([1] * 16, 9, priority=0)
    low = harness.add([2] * 4, 9, priority=5)
    harness.step()
    # Even with the blocks of the low-priority request, only six of the nine blocks that it needs would be free.
    harness.add([3] * 36, 2, priority=1)
    for _ in range(5):
        harness.step()
    assert (preempted(harness, high), preempted(harness, low)) == (0, 0)
    harness.drain()


def test_2_1_no_more_requests_are_displaced_than_needed():
    harness = Harness(
        policy=SchedulingPolicy.PRIORITY,
        priority_preemption=True,
        num_blocks=13,
        block_size=4,
        max_in_flight=1,
        max_num_batched_tokens=100,
    )
    keys = [harness.add([n] * 11, 1 + 4, priority=n) for n in (1, 2, 3)]
    harness.step()
    urgent = harness.add([7] * 22, 1, priority=0)
    harness.step()
    assert admissions(harness)[-1] == urgent
    harness.drain()
    assert [preempted(harness, key) for key in keys] == [0, 0, 1]


def test_2_1_blocks_and_cache_of_a_displaced_request_are_usable_at_once():
    harness = Harness(
        policy=SchedulingPolicy.PRIORITY,
        priority_preemption=True,
        num_blocks=35,
        max_model_len=512,
        max_num_batched_tokens=256,
        long_prefill_token_threshold=40,
        encoder_cache_size=4,
        max_in_flight=1,
    )
    sea, sky = (
        EncoderInput(first, count, b"%d" % first, 4) for first, count in ((0, 120), (4, 60))
    )
    low = harness.add([1] * 130, 2, priority=9, inputs=[sea])
    harness.step()
    # They precede an input that does not fit in the cache beside the other one.
    high = [harness.add([2, n] * 40, 2, inputs=[sky]) for n in range(4)]
    harness.step()
    harness.add([3] * 36, 2)
    harness.step()
    assert preempted(harness, low) == 1
    harness.drain()
    assert all(harness.received[key].reason is FinishReason.LENGTH for key in (low, *high))


def tenants_kept(harness: Harness) -> set[str]:
    """Return the names of tenants that the scheduler refers to anywhere."""
    names = (item for item in reachable(harness.scheduler) if isinstance(item, str))
    return {name for name in names if name.startswith("user ")}


def tokens_by_tenant(harness: Harness, tenant_of: dict[Key, str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for key, received in harness.received.items():
        counts[tenant_of[key]] += len(received.token_ids)
    return counts


def flood(harness: Harness, tenants: str, num_each: int) -> dict[Key, str]:
    return {
        harness.add([1], 10, tenant=tenant): tenant for tenant in tenants for _ in range(num_each)
    }


@pytest.mark.parametrize(
    ("weights", "share"), [({}, 0.5), ({"a": 3.0}, 0.75), ({"a": 1.0, "b": 4.0}, 0.2)]
)
def test_2_2_tenants_get_tokens_by_their_weights(weights, share):
    harness = Harness(
        policy=SchedulingPolicy.FAIR,
        tenant_weights=weights,
        max_num_seqs=2,
        enable_prefix_caching=False,
    )
    # All requests of one tenant come before those of the other.
    tenant_of = flood(harness, "ab", 60)
    for _ in range(300):
        harness.step()
    counts = tokens_by_tenant(harness, tenant_of)
    assert counts["a"] / (counts["a"] + counts["b"]) == pytest.approx(share, abs=0.05)
    harness.drain()


def test_2_2_tokens_recomputed_after_preemption_do_not_count():
    harness = Harness(policy=SchedulingPolicy.FAIR, max_num_seqs=2, enable_prefix_caching=False)
    tenant_of = flood(harness, "ab", 60)
    for step in range(300):
        harness.step()
        for key, tenant in tenant_of.items():
            request = harness.scheduler.requests.get(key)
            if step % 3 == 0 and tenant == "a" and request is not None and request.slot >= 0:
                harness.preempt(key)
    counts = tokens_by_tenant(harness, tenant_of)
    assert counts["a"] / (counts["a"] + counts["b"]) == pytest.approx(0.5, abs=0.05)
    harness.drain()


def test_2_2_requests_of_a_tenant_are_admitted_by_arrival():
    harness = Harness(policy=SchedulingPolicy.FAIR, max_num_seqs=1)
    tenant_of = flood(harness, "ab", 8)
    harness.drain()
    for tenant in "ab":
        mine = [key for key in admissions(harness) if tenant_of[key] == tenant]
        assert mine == sorted(mine)


@pytest.mark.parametrize("alone", ["waits", "runs"])
def test_2_2_an_idle_tenant_earns_no_credit(alone):
    harness = Harness(policy=SchedulingPolicy.FAIR, max_num_seqs=2, max_model_len=500)
    tenant_of: dict[Key, str] = {}
    if alone == "waits":
        tenant_of |= flood(harness, "a", 40)
    else:
        tenant_of[harness.add([1], 150, tenant="a")] = "a"
    for _ in range(140):
        harness.step()
    tenant_of |= flood(harness, "b", 40)
    tenant_of |= flood(harness, "a", 40)
    before = tokens_by_tenant(harness, tenant_of)
    for _ in range(200):
        harness.step()
    after = tokens_by_tenant(harness, tenant_of)
    gained = {tenant: after[tenant] - before[tenant] for tenant in "ab"}
    assert gained["a"] / sum(gained.values()) == pytest.approx(0.5, abs=0.08)
    harness.drain()


@pytest.mark.parametrize("is_beside", [False, True])
def test_2_2_tokens_used_while_no_other_tenant_waited_do_not_count(is_beside):
    """During that time, tenant `b` has no request, or one that leaves enough capacity for the others."""
    harness = Harness(
        policy=SchedulingPolicy.FAIR,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        max_model_len=500,
        num_blocks=256,
        enable_prefix_caching=False,
    )
    tenant_of = {harness.add([1], 250, tenant="b"): "b"} if is_beside else {}
    for _ in range(20):
        tenant_of |= {harness.add([2] * 50, 10, tenant="a"): "a" for _ in range(2)}
        for _ in range(12):
            harness.step()
    before = tokens_by_tenant(harness, tenant_of)
    assert before["a"] == 400
    tenant_of |= flood(harness, "ba", 60)
    for _ in range(100):
        harness.step()
    after = tokens_by_tenant(harness, tenant_of)
    assert after["a"] - before["a"] > 100
    assert after["a"] - before["a"] == pytest.approx(after["b"] - before["b"], rel=0.15)
    harness.drain()


def test_2_2_tokens_used_while_other_tenants_waited_count():
    harness = Harness(policy=SchedulingPolicy.FAIR, max_num_seqs=1, max_model_len=500)
    harness.add([1], 100, tenant="a")
    harness.step()
    others = [harness.add([2], 10, tenant="b") for _ in range(12)]
    harness.step()
    back = harness.add([1], 5, tenant="a")
    harness.drain()
    # First, the other tenants get the same number of tokens.
    assert admissions(harness).index(back) == pytest.approx(1 + 9, abs=1)
    assert others[0] == admissions(harness)[1]


def test_2_2_requests_of_ever_new_tenants_do_not_starve_others():
    harness = Harness(policy=SchedulingPolicy.FAIR, max_num_seqs=1, max_in_flight=1)
    harness.add([1], 3, tenant="first")
    key = harness.add([1], 3, tenant="patient")
    for index in range(20):
        harness.add([1], 3, tenant=f"user {index}")
        harness.add([1], 3, tenant=f"user {index}, too")
        for _ in range(3):
            harness.step()
    assert harness.received[key].is_over
    harness.drain()


def test_2_2_records_of_tenants_that_never_compete_are_deleted():
    harness = Harness(policy=SchedulingPolicy.FAIR)
    for index in range(50):
        harness.add([1], 2, tenant=f"user {index}")
        harness.drain()
        assert len(tenants_kept(harness)) <= 1


def test_2_2_records_of_idle_tenants_without_debt_are_deleted():
    harness = Harness(policy=SchedulingPolicy.FAIR)
    for index in range(200):
        harness.add([1], 2, tenant=f"user {index}")
        harness.step()
    harness.add([1], 50, tenant="last")
    harness.drain()
    assert len(tenants_kept(harness)) < 20


def test_2_2_records_of_tenants_whose_deferred_requests_are_aborted_are_deleted():
    harness = Harness(
        policy=SchedulingPolicy.FAIR,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=4,
        max_num_batched_tokens=32,
    )
    for number in range(4):
        harness.add([1] * 100, 1, tenant="long")
        harness.schedule()
        names = [f"user {number}.{index}" for index in range(20)]
        keys = [harness.add([2] * 20, 1, tenant=name) for name in names]
        harness.schedule()
        harness.abort(*keys)
        harness.drain()
        harness.add([3] * 120, 1, tenant="last")
        harness.drain()
        # New tenants replace the tenants that are gone.
        assert len(tenants_kept(harness)) <= 20


def test_2_2_records_of_tenants_that_are_never_idle_do_not_grow():
    harness = Harness(policy=SchedulingPolicy.FAIR, max_num_seqs=2)
    for tenant in "ab" * 4:
        harness.add([1], 3, tenant=tenant)
    sizes = []
    for number in range(400):
        harness.step()
        if len(harness.scheduler.requests) < 8:
            harness.add([1], 3, tenant="ab"[number % 2])
        sizes.append(len(reachable(harness.scheduler)))
    # The entries that steps add are removed periodically.
    assert max(sizes[200:]) < max(sizes[:200]) + 20
    harness.drain()


# deadline


def test_2_3_the_earliest_deadline_is_first_and_requests_without_one_last():
    harness = Harness(policy=SchedulingPolicy.DEADLINE, max_num_seqs=1)
    keys = [harness.add(3, 2, deadline=deadline) for deadline in (0.0, 900.0, 500.0, 700.0)]
    harness.drain()
    assert admissions(harness) == [keys[index] for index in (2, 3, 1, 0)]


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_2_3_a_deadline_that_passes_in_the_queue_expires_the_request(policy):
    harness = Harness(policy=policy, max_num_seqs=1, max_in_flight=1)
    harness.add(3, 10)
    harness.step()
    late = harness.add(3, 2, deadline=harness.now + 8.0)
    fine = harness.add(3, 2, deadline=harness.now + 500.0)
    if policy is SchedulingPolicy.DEADLINE:
        assert admissions(harness) == [(0, 0)]
    harness.drain()
    assert harness.received[late].reason is FinishReason.EXPIRED
    assert (
        "queued at its deadline, 8.000 s after it arrived"
        in harness.received[late].finished.message
    )
    assert harness.received[late].token_ids == []
    assert harness.received[fine].reason is FinishReason.LENGTH


def test_2_3_a_running_request_ends_at_its_deadline_with_its_tokens_so_far():
    harness = Harness()
    key, other = harness.add(3, 60, deadline=10.0), harness.add(3, 60)
    harness.drain()
    assert harness.received[key].reason is FinishReason.EXPIRED
    assert 0 < len(harness.received[key].token_ids) < 60
    assert len(harness.received[other].token_ids) == 60


# limits of a tenant


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_other_tenants_pass_a_tenant_at_its_running_limit(policy):
    harness = Harness(policy=policy, max_num_seqs=4, max_num_seqs_per_tenant=2)
    greedy = [harness.add(3, 6, tenant="a") for _ in range(6)]
    modest = [harness.add(3, 6, tenant="b") for _ in range(2)]
    harness.step()
    assert set(admissions(harness)) == {*greedy[:2], *modest}
    while harness.scheduler.has_requests():
        harness.step()
        running = [harness.scheduler.requests[key] for key in greedy if not_over(harness, key)]
        assert sum(request.slot >= 0 for request in running) <= 2
    harness.drain()
    assert {harness.received[key].reason for key in greedy + modest} == {FinishReason.LENGTH}


def not_over(harness: Harness, key: Key) -> bool:
    return key in harness.scheduler.requests


def test_the_policy_orders_requests_of_a_tenant_at_its_running_limit():
    harness = Harness(
        policy=SchedulingPolicy.PRIORITY, max_num_seqs=4, max_num_seqs_per_tenant=1, max_in_flight=1
    )
    first, late, later = (harness.add(3, 3, tenant="a", priority=5) for _ in range(3))
    harness.step()
    urgent = harness.add(3, 3, tenant="a", priority=1)
    gone = harness.add(3, 3, tenant="a", priority=0)
    harness.step()
    harness.abort(gone)
    harness.drain()
    assert admissions(harness) == [first, urgent, late, later]


def test_each_request_of_a_tenant_that_stops_lets_another_one_run():
    limits = TenantLimits(3, 0)
    for _ in range(9):
        limits.record_arrival("a")
    for _ in range(3):
        limits.record_start("a", 0.0, 0.0)
    assert not limits.may_run("a") and limits.take_openings() == []
    for _ in range(2):
        limits.record_stop("a")
        limits.record_end("a")
    assert limits.take_openings() == [("a", 2)]
    assert limits.take_openings() == []


def test_deferred_requests_of_a_tenant_resume_in_policy_order():
    def request(arrival: int, rank: float) -> Request:
        message = EngineCoreRequest(arrival, int32_bytes([1]), SamplingParams(), 0.0, tenant="a")
        request = Request(0, message, arrival, 0.0)
        request.rank = rank
        return request

    held = TenantBackpressure()
    requests = [request(0, 1.0), request(1, 0.0), request(2, 1.0), request(3, 0.0)]
    for each in requests:
        held.add_request(each)
    assert held.remove_request(requests[1]) and not held.remove_request(requests[1])
    assert held.pop_requests("a", 2) == [requests[3], requests[0]]
    assert held.pop_requests("b", 2) == []
    assert held.pop_requests("a", 2) == [requests[2]] and held.pop_requests("a", 2) == []


def test_only_a_tenant_over_its_queue_limit_is_rejected():
    harness = Harness(max_num_seqs=2, max_num_queued_reqs_per_tenant=3, max_in_flight=1)
    flood = [harness.add(3, 20, tenant="a") for _ in range(7)]
    other = harness.add(3, 4, tenant="b")
    harness.drain()
    reasons = [harness.received[key].reason for key in flood]
    assert reasons == [FinishReason.LENGTH] * 5 + [FinishReason.THROTTLED] * 2
    assert "max_num_queued_reqs_per_tenant=3" in harness.received[flood[5]].finished.message
    assert harness.received[other].reason is FinishReason.LENGTH


def test_a_full_queue_rejection_estimates_when_to_retry():
    harness = Harness(max_num_seqs=1, max_num_queued_reqs=5, max_in_flight=1)
    flood = [harness.add(3, 4) for _ in range(6)]
    harness.drain()
    harness.now += 1000.0
    for key in [harness.add(3, 4) for _ in range(6)]:
        assert harness.received[key].reason is None
    refused = harness.add(3, 4)
    harness.drain()
    finished = harness.received[refused].finished
    assert finished.reason is FinishReason.REJECTED
    first, *_, last = (
        event.timestamp
        for key in flood
        for event in harness.received[key].events
        if event.kind is EventKind.SCHEDULED
    )
    # Five requests took this long before; no request waited in the thousand seconds in between.
    assert finished.retry_after_s == pytest.approx(last - first, rel=0.3)


# delay


def test_2_5_admission_waits_until_the_oldest_request_has_waited_for_the_delay():
    harness = Harness(scheduler_delay_factor=2.0, max_in_flight=1)
    scheduler = harness.scheduler
    harness.add(5, 20)
    first = scheduler.schedule(100.0)
    harness.worker.submit(first)
    scheduler.update_from_output(first, harness.worker.next_output(), 103.0)
    # The prefill took 3 s, so a request waits 6 s.
    harness.now = 104.0
    harness.add(6, 2)
    for now, admitted in ((109.9, 0), (110.5, 1)):
        step = scheduler.schedule(now)
        assert len(step.new_requests) == admitted
        harness.worker.submit(step)
        scheduler.update_from_output(step, harness.worker.next_output(), now)


def test_2_5_admission_is_not_delayed_while_nothing_runs():
    harness = Harness(scheduler_delay_factor=1000.0)
    for _ in range(3):
        harness.add(5, 2)
        assert harness.schedule().new_requests
        harness.drain()
