"""Processes that are restarted together: a frontend alone, or a replica."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Final

from ..protocol.supervisor_messages import Stage
from .child import Child
from .local_process import LocalProcess, Process, ProcessSpec, Role

LAST_WORDS_S: Final = 1.0
"""How long a core that has lost a worker may take to tell its clients what it was computing."""

FIRST_BACKOFF_S: Final = 0.25
MAX_BACKOFF_S: Final = 8.0

SPARE_DELAY_S: Final = 2.0
"""How long after its leader and the whole engine are ready a spare is started: its imports take time from serving."""

RESUMING_S: Final = 1.0
"""How long the streams of a core that died wait for its successor, rather than begin anew at another replica."""

STABLE_S: Final = {Role.FRONTEND: 10.0, Role.CORE: 600.0}
"""The death of a leader that was ready for so long is not fruitless, even if it generated nothing."""


class RecoveryUnit:
    """A leader and its followers, started anew under the next epoch when they die.

    A replica's leader is its core and the followers are its workers; a frontend is a leader without followers.

    A leader that dies is replaced alone, and its followers go on with the next one: so workers keep their model. If
    that was in vain, or a follower dies, all of them end: the leader is told by SIGUSR2, and has a moment for its last
    message. A spare leader waits to take over, if its program can wait: starting one takes longer than everything else.
    """

    def __init__(
        self,
        leader: ProcessSpec,
        followers: list[ProcessSpec],
        epoch: int,
        launch: Callable[[ProcessSpec, int], Process],
    ) -> None:
        self.leader = leader
        self._specs = [*followers, leader]
        self.children: dict[str, Child] = {}
        self.epoch = epoch
        self._launch = launch
        self.num_restarts = dict.fromkeys((spec.name for spec in self._specs), 0)
        self.num_fruitless_deaths = 0
        self._num_causes_found = 0
        self.is_down = False
        self._is_exhausted = False
        self._awaits_ends = False
        self._is_renewed = False
        # Several workers may be left in different steps. On this machine they can read how far the leader had come.
        self._outlives_leader = len(followers) == 1 or all(spec.node is None for spec in followers)
        self._start_at = 0.0
        self._resumed_at = -RESUMING_S
        self._spare: LocalProcess | None = None
        self._last_spare_at = 0.0

    def start(self) -> list[Child]:
        """Start what does not run. Returns the new processes."""
        started = [spec for spec in self._specs if spec.name not in self.children]
        for spec in started:
            spare = self._take_spare() if spec is self.leader else None
            process = spare or self._launch(spec, self.epoch)
            self.children[spec.name] = Child(spec, self.epoch, process)
        return [self.children[spec.name] for spec in started]

    def keep_spare(self, now: float, engine_ready_since: float) -> None:
        """See that a spare waits to take the leader's place, once the leader has served for a while."""
        leader = self.children.get(self.leader.name)
        if self._spare is not None and self._spare.poll() is not None:
            self.dismiss_spare()
        if (
            self.leader.can_wait
            and self._spare is None
            and leader is not None
            and leader.ready_since is not None
            and now - max(engine_ready_since, leader.ready_since, self._last_spare_at)
            > SPARE_DELAY_S
        ):
            self._last_spare_at = now
            self._spare = LocalProcess(self.leader, None)

    def dismiss_spare(self) -> None:
        """End the spare, if there is one."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.kill()
            spare.close()
            if spare.exit_fd is not None:
                os.close(spare.exit_fd)

    def _take_spare(self) -> LocalProcess | None:
        if self._spare is None or not self._spare.begin(self.epoch):
            self.dismiss_spare()
            return None
        spare, self._spare = self._spare, None
        return spare

    def restart(self, now: float) -> None:
        """End every process, to start them anew. This does not count as a death, and earlier deaths are forgotten."""
        self.num_fruitless_deaths = self._num_causes_found = 0
        self.is_down = self._is_renewed = True
        self._is_exhausted = False
        self._start_at = now
        for child in self.children.values():
            child.kill()

    def died(self, child: Child, max_restarts: int) -> None:
        """A process is gone. After more than `max_restarts` fruitless deaths it is started again only now and then."""
        now = time.monotonic()
        leader = self.children[self.leader.name]
        if self._has_made_progress(leader):
            self.num_fruitless_deaths = self._num_causes_found = 0
        if child is not leader and leader.alive and leader.kill_at is None:
            leader.signal(signal.SIGUSR2)
            leader.kill_at = now + LAST_WORDS_S
        if not self.is_down:
            self.is_down = True
            self.num_fruitless_deaths += 1
            self._is_exhausted = self.num_fruitless_deaths > max_restarts
            self._start_at = now + self._backoff_s()

    def cause_found(self, max_restarts: int) -> None:
        """A request was failed for the last deaths, which count no more: what it asked for is not tried again.

        One that fails more than `max_restarts` requests with no token in between may be broken itself.
        """
        self._num_causes_found += 1
        if self._num_causes_found <= max_restarts:
            self.num_fruitless_deaths = 0
            self._is_exhausted = False

    def _backoff_s(self) -> float:
        if self._is_exhausted:
            return MAX_BACKOFF_S
        if self.num_fruitless_deaths <= 1:
            return 0.0
        return min(FIRST_BACKOFF_S * 2 ** (self.num_fruitless_deaths - 2), MAX_BACKOFF_S)

    def _has_made_progress(self, leader: Child) -> bool:
        since = leader.ready_since
        was_stable = since is not None and time.monotonic() - since > STABLE_S[leader.spec.role]
        return was_stable or leader.progress.num_tokens > 0

    def recover(self, now: float) -> list[Child]:
        """Do the next thing towards running again. Returns the processes that were started."""
        dead = [child for child in self.children.values() if not child.alive]
        if not self.is_down or not all(child.is_known_dead for child in dead):
            # The supervisor has not handled a process's end yet, whose last report may say why it ended.
            return []
        if not self._may_resume:
            for child in self.children.values():
                if child.spec is not self.leader:
                    child.kill()
            self._awaits_ends = len(dead) < len(self.children)
            if self._awaits_ends:
                return []
        if now < self._start_at:
            return []
        self.is_down = self._is_renewed = False
        self.epoch += 1
        for child in dead:
            child.close()
            del self.children[child.spec.name]
            self.num_restarts[child.spec.name] += 1
        if self.children:
            self._resumed_at = now
        return self.start()

    @property
    def _may_resume(self) -> bool:
        """Whether the followers are to go on with the next leader."""
        return (
            self._outlives_leader
            and not self._is_renewed
            and self.num_fruitless_deaths <= 1
            and all(
                child.alive for child in self.children.values() if child.spec is not self.leader
            )
        )

    @property
    def is_ready(self) -> bool:
        leader = self.children.get(self.leader.name)
        return leader is not None and leader.alive and leader.stage is Stage.READY

    @property
    def is_resuming(self) -> bool:
        """Whether the leader is being replaced, or has just been, while its followers go on."""
        is_next = self.is_down and self._may_resume
        return is_next or time.monotonic() - self._resumed_at < RESUMING_S

    @property
    def has_ended(self) -> bool:
        """Whether the leader is gone, and the next epoch has not begun."""
        return self.is_down and not self.children[self.leader.name].alive

    @property
    def is_up(self) -> bool:
        return not self.is_down and self.is_ready

    @property
    def is_lost(self) -> bool:
        """It has died too often, and does not serve."""
        return self._is_exhausted and not self.is_up

    @property
    def next_action(self) -> float | None:
        """When `recover` has something to do even if nothing happens before; None for never."""
        if not self.is_down:
            return None
        if self._awaits_ends:
            kill_at = self.children[self.leader.name].kill_at
            return kill_at if kill_at is not None and kill_at > time.monotonic() else None
        return self._start_at
