"""Restart processes in units: a frontend alone, the store alone, or a replica with its core and workers."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from typing import Final

from ...protocol.errors import counted
from ...protocol.process import STOP_PROCESS
from ...protocol.supervisor_messages import Stage
from .child import Child
from .launcher import Launcher
from .local_process import ProcessSpec, Role
from .saved_state import SavedUnit

FINAL_ERROR_S: Final = 1.0
"""Maximum seconds for a core that lost a worker to report the requests that it was computing."""

SLEEP_S: Final = 10.0
"""Maximum seconds for a core that goes to sleep to exit; it may have to write blocks of its KV cache to a disk."""

FIRST_BACKOFF_S: Final = 0.25
MAX_BACKOFF_S: Final = 8.0

SERVED_BACKOFF_S: Final = 1.0
"""Maximum seconds before a frontend or store that had been ready is restarted."""

RESUMING_S: Final = 3.0
"""Seconds that streams of a crashed core wait for its replacement before they are computed again elsewhere.

On a busy machine, it may need more than a second to take over.
"""

REPORT_INTERVAL_CRASHES: Final = 50
"""Crashes between reports of a process that keeps crashing while others serve."""

STABLE_S: Final = {Role.FRONTEND: 10.0, Role.STORE: 10.0, Role.CORE: 600.0}
"""A leader's crash resets the count of consecutive failures if the leader was ready for this many seconds.

Otherwise only a generated token resets it.
"""


def make_units(specs: Sequence[ProcessSpec], epoch: int, launcher: Launcher) -> list[RecoveryUnit]:
    """Return the recovery units (replicas, frontends, the store) in the order of `specs`."""
    units = []
    for spec in specs:
        workers: list[ProcessSpec] = []
        if spec.role is Role.WORKER:
            continue
        if spec.role is Role.CORE:
            workers = [s for s in specs if s.role is Role.WORKER and s.replica == spec.replica]
        units.append(RecoveryUnit(spec, workers, epoch, launcher))
    return units


def why_nothing_serves(unit: RecoveryUnit, units: list[RecoveryUnit], max_restarts: int) -> str:
    """Return why the server stops if `unit` is lost; "" if it is not, or if another one serves in its place."""
    role = unit.leader.role
    others = [other for other in units if other is not unit and other.leader.role is role]
    if role is Role.STORE or not all(each.is_lost for each in (unit, *others)):
        return ""
    crashes = " and ".join(
        f"{lost.leader.name} crashed {counted(lost.num_consecutive_failures, 'time')} in a row without generating a token"
        for lost in (unit, *others)
    )
    return f"Stopping the server: {crashes} (limit: --max-restarts {max_restarts})"


def describe_crash(unit: RecoveryUnit, max_restarts: int) -> str:
    """Return the text to report about the crash of a unit; "" to report nothing."""
    num_more = unit.num_consecutive_failures - max_restarts - 1
    if num_more < 0:
        return "restarting it"
    if num_more % REPORT_INTERVAL_CRASHES:
        return ""
    is_store = unit.leader.role is Role.STORE
    others = "requests are not stored meanwhile" if is_store else "others serve"
    return (
        f"{unit.leader.name} crashed {unit.num_consecutive_failures} times in a row "
        f"without generating a token; {others}, and it is restarted every {MAX_BACKOFF_S:.0f} s"
    )


def link_units(units: list[RecoveryUnit]) -> None:
    """Make connected units restart together. They are connected if their followers divide the experts of a model."""
    for unit in units:
        unit.peers = [peer for peer in units if peer is not unit]


class RecoveryUnit:
    """A leader process and its followers, which are restarted under the next epoch after a crash.

    The leader of a replica is its core, and the followers are its workers. A frontend is a leader without followers, as
    is the store.

    When a leader crashes it is restarted alone, so that the workers keep their model loaded. If it crashes again
    without progress, or a follower crashes, all of them are stopped: the leader receives SIGUSR2 and `FINAL_ERROR_S`
    seconds for its last message. Units that are linked are then stopped too; their leaders receive SIGALRM.

    A unit that is asleep has no processes, or only some that are exiting.
    """

    def __init__(
        self,
        leader: ProcessSpec,
        followers: list[ProcessSpec],
        epoch: int,
        launcher: Launcher,
    ) -> None:
        self.leader = leader
        self._specs = [*followers, leader]
        self.children: dict[str, Child] = {}
        self.epoch = epoch
        self._launcher = launcher
        self.num_restarts = dict.fromkeys((spec.name for spec in self._specs), 0)
        self.num_consecutive_failures = 0
        self._num_causes_found = 0
        self.peers: list[RecoveryUnit] = []
        self.next_epoch = 0
        self.is_down = False
        self.is_asleep = False
        self._is_exhausted = False
        self._awaits_ends = False
        self._is_renewed = False
        # Several workers may have stopped in different steps. Only workers on this machine can read the leader's step
        # log.
        self._outlives_leader = len(followers) == 1 or all(spec.node is None for spec in followers)
        self._start_at = 0.0
        self._resumed_at = -RESUMING_S

    def start(self) -> list[Child]:
        """Start all processes that are not running and return them. A unit that is asleep starts none."""
        if self.is_asleep:
            return []
        started = [spec for spec in self._specs if spec.name not in self.children]
        for spec in started:
            self.children[spec.name] = Child(
                spec, self.epoch, self._launcher.launch(spec, self.epoch)
            )
        return [self.children[spec.name] for spec in started]

    def save(self) -> SavedUnit:
        """Return what another supervisor needs to adopt the processes of this unit."""
        return SavedUnit(
            self.epoch,
            self.num_consecutive_failures - self.is_down,
            self.num_restarts,
            [child.save() for child in self.children.values()],
            self.is_asleep,
        )

    def adopt(self, saved: SavedUnit) -> None:
        """Adopt the processes that an earlier supervisor has started. `start` starts those that are missing."""
        names = {spec.name: spec for spec in self._specs}
        for process in saved.processes:
            spec = names[process.name]
            child = Child(spec, process.epoch, self._launcher.adopt(process.pid))
            child.enter_stage(process.stage, process.detail)
            self.children[spec.name] = child
        # A process may have been started that was not saved.
        self.epoch = saved.epoch + 2 * (len(self.children) < len(self._specs))
        self.num_consecutive_failures = max(saved.num_failures, 0)
        self.num_restarts.update(saved.num_restarts)
        if saved.is_asleep:
            self.sleep(time.monotonic())

    def sleep(self, now: float) -> None:
        """Stop every process. The leader gets `SLEEP_S` seconds for it; its followers stop after it."""
        self.num_consecutive_failures = self._num_causes_found = 0
        self.is_down = self.is_asleep = self._is_renewed = True
        self._is_exhausted = self._awaits_ends = False
        if (leader := self.children.get(self.leader.name)) is not None:
            leader.signal(STOP_PROCESS)
            leader.kill_at = now + SLEEP_S

    @property
    def has_slept(self) -> bool:
        """True if the unit sleeps, or has been woken while followers of its stopped leader had yet to exit."""
        return self.is_asleep or self.leader.name not in self.children

    def wake(self, now: float) -> None:
        """Start every process again, once those that exit have exited."""
        self.is_asleep = False
        self._start_at = now

    def restart(self, now: float) -> None:
        """Kill and restart every process. This does not count as a crash and resets the count of earlier crashes."""
        self.num_consecutive_failures = self._num_causes_found = 0
        self.is_down = self._is_renewed = True
        self._is_exhausted = False
        self._start_at = now
        for child in self.children.values():
            child.kill()

    def record_exit(self, child: Child, max_restarts: int) -> None:
        """Record the exit of a process. After more than `max_restarts` consecutive failures, restarts become rare.

        If the unit's followers cannot continue, the followers of linked units cannot either, and all units restart
        under a common epoch.
        """
        is_of_peer = bool(self.peers) and child.has_lost_peer
        self.record_failure(child, max_restarts, signal.SIGALRM if is_of_peer else signal.SIGUSR2)
        if self.peers and not self._may_resume and self.next_epoch <= self.epoch:
            for peer in self.peers:
                peer.record_failure(None, max_restarts, signal.SIGALRM)
            units = [self, *self.peers]
            epoch = 1 + max(unit.epoch for unit in units)
            for unit in units:
                unit.next_epoch = epoch

    def find_cause(self, child: Child) -> Child | None:
        """Return the worker whose exit caused the exit of its peer `child`; None if there is none.

        A worker that exited only because it lost a peer is not the cause.
        """
        return next(
            (
                other
                for other in self._connected_to(child)
                if not other.alive and not other.may_have_lost_peer
            ),
            None,
        )

    def has_connected(self, child: Child) -> bool:
        """Return whether a worker exchanges tensors with other workers."""
        return child.spec is not self.leader and any(True for _ in self._connected_to(child))

    def _connected_to(self, child: Child) -> Iterator[Child]:
        for unit in (self, *self.peers):
            for other in unit.children.values():
                if other is not child and other.spec is not unit.leader:
                    yield other

    def record_failure(
        self, child: Child | None, max_restarts: int, signum: signal.Signals
    ) -> None:
        """Record the exit of a process of this unit, or (with None) of a linked unit."""
        now = time.monotonic()
        leader = self.children[self.leader.name]
        if self._has_made_progress(leader):
            self.num_consecutive_failures = self._num_causes_found = 0
        if child is not leader and leader.alive and leader.kill_at is None:
            leader.signal(signum)
            leader.kill_at = now + FINAL_ERROR_S
        # The followers that still run have lost a peer.
        self._is_renewed |= child is None
        if not self.is_down:
            self.is_down = True
            self.num_consecutive_failures += 1
            # Hostile input may have crashed a frontend that was ready. Its replacement can still serve other clients.
            has_served = leader.spec.role is not Role.CORE and leader.ready_since is not None
            self._is_exhausted = self.num_consecutive_failures > max_restarts and not has_served
            backoff_s = self._backoff_s()
            self._start_at = now + (min(backoff_s, SERVED_BACKOFF_S) if has_served else backoff_s)

    def record_cause_found(self, max_restarts: int) -> None:
        """Record that a request was failed as the cause of the last crashes, which then no longer count."""
        self._num_causes_found += 1
        if self._num_causes_found <= max_restarts:
            self.num_consecutive_failures = 0
            self._is_exhausted = False

    def _backoff_s(self) -> float:
        if self._is_exhausted:
            return MAX_BACKOFF_S
        if self.num_consecutive_failures <= 1:
            return 0.0
        # The exponent is limited, because a frontend that has served may fail any number of times and a float would
        # overflow.
        num_doublings = min(self.num_consecutive_failures - 2, 10)
        return min(FIRST_BACKOFF_S * 2.0**num_doublings, MAX_BACKOFF_S)

    def _has_made_progress(self, leader: Child) -> bool:
        since = leader.ready_since
        was_stable = since is not None and time.monotonic() - since > STABLE_S[leader.spec.role]
        return was_stable or leader.progress.num_tokens > 0

    def recover(self, now: float) -> list[Child]:
        """Continue a restart if its next step is due. Return the processes that were started."""
        dead = [child for child in self.children.values() if not child.alive]
        if not self.is_down or not all(child.is_known_dead for child in dead):
            # The supervisor has yet to handle an exit; the final report of that process may explain it.
            return []
        if self.is_asleep:
            self._fall_asleep(dead)
            return []
        if not self._may_resume:
            for child in self.children.values():
                if child.spec is not self.leader:
                    child.kill()
            self._awaits_ends = len(dead) < len(self.children)
            if self._awaits_ends or any(
                peer.has_followers_before(self.next_epoch) for peer in self.peers
            ):
                return []
        if now < self._start_at:
            return []
        self.is_down = self._is_renewed = False
        self.epoch = max(self.epoch + 1, self.next_epoch)
        for child in dead:
            child.close()
            del self.children[child.spec.name]
            self.num_restarts[child.spec.name] += 1
        if self.children:
            self._resumed_at = now
        return self.start()

    def _fall_asleep(self, dead: list[Child]) -> None:
        """Forget the processes that have exited, and stop the followers once the leader has."""
        for child in dead:
            child.close()
            del self.children[child.spec.name]
        if self.leader.name not in self.children:
            for child in self.children.values():
                child.kill()

    def has_followers_before(self, epoch: int) -> bool:
        """Return whether followers of an epoch before `epoch` are still running."""
        return any(
            child.epoch < epoch and child.alive
            for child in self.children.values()
            if child.spec is not self.leader
        )

    @property
    def _may_resume(self) -> bool:
        """True if the followers keep running and can continue with the next leader."""
        return (
            self._outlives_leader
            and not self._is_renewed
            and self.num_consecutive_failures <= 1
            and all(
                child.alive for child in self.children.values() if child.spec is not self.leader
            )
        )

    @property
    def is_ready(self) -> bool:
        """True if the leader is ready."""
        leader = self.children.get(self.leader.name)
        return leader is not None and leader.alive and leader.stage is Stage.READY

    @property
    def is_resuming(self) -> bool:
        """True if the leader is being replaced, or was just replaced, while its followers continue."""
        is_next = self.is_down and self._may_resume
        return is_next or time.monotonic() - self._resumed_at < RESUMING_S

    @property
    def has_ended(self) -> bool:
        """True if the leader has exited and its successor has not been started; in sleep, if all have exited."""
        if self.is_asleep:
            return not self.children
        leader = self.children.get(self.leader.name)
        return self.is_down and not (leader is not None and leader.alive)

    @property
    def is_up(self) -> bool:
        """True if the unit can serve requests."""
        return not self.is_down and self.is_ready

    @property
    def is_settled(self) -> bool:
        """True if nothing changes until a process reports something or exits."""
        if self.is_asleep:
            return not self.children
        return (
            self.is_up
            and not self.is_resuming
            and all(child.alive and child.kill_at is None for child in self.children.values())
        )

    @property
    def is_lost(self) -> bool:
        """True if the unit crashed too often and does not serve."""
        return self._is_exhausted and not self.is_up

    @property
    def next_action(self) -> float | None:
        """The time (CLOCK_MONOTONIC seconds) to call `recover` if no event happens before; None for never."""
        if not self.is_down:
            return None
        if self._awaits_ends or self.is_asleep:
            leader = self.children.get(self.leader.name)
            kill_at = None if leader is None else leader.kill_at
            return kill_at if kill_at is not None and kill_at > time.monotonic() else None
        return self._start_at
