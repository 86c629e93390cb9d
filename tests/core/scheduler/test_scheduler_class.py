"""Classes of `--scheduler-cls` are loaded or rejected, recorded and replayed."""

from __future__ import annotations

import pytest
from engine.core.replay.__main__ import main as replay_command
from engine.core.replay.dump import DumpError, read_dump, write_dump
from engine.core.scheduler.scheduler import Scheduler
from engine.core.scheduler.scheduler_class import load_scheduler_class
from engine.core.simulation.__main__ import main as simulate_command
from engine.protocol.errors import ConfigError
from support.scheduler.custom_schedulers import EverySecondCall, Wrapper
from support.scheduler.recorded_harness import RecordedHarness, replay

OWN = "support.scheduler.custom_schedulers.EverySecondCall"


def test_a_class_is_loaded_by_its_name():
    assert load_scheduler_class(None) is Scheduler
    assert load_scheduler_class(OWN) is EverySecondCall
    assert load_scheduler_class("support.scheduler.custom_schedulers.Wrapper") is Wrapper


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no.such.Class", r"cannot be loaded: ModuleNotFoundError.*PYTHONPATH"),
        ("support.scheduler.custom_schedulers.Nothing", "cannot be loaded: AttributeError"),
        (
            "support.scheduler.custom_schedulers.NOT_A_CLASS",
            "is not a subclass of .*SchedulerInterface",
        ),
        (
            "support.scheduler.custom_schedulers.Incomplete",
            "does not implement add_client, .*schedule",
        ),
    ],
)
def test_a_class_that_is_no_scheduler_is_rejected(name, problem):
    with pytest.raises(ConfigError, match=problem):
        load_scheduler_class(name)


def recorded(**settings: object) -> RecordedHarness:
    harness = RecordedHarness(scheduler_cls=OWN, num_blocks=200, **settings)
    for index in range(12):
        harness.add([index] * 5, 6)
        harness.step()
    while harness.has_work:
        harness.step()
    return harness


def test_a_class_that_derives_from_the_scheduler_is_replayed_from_every_segment():
    harness = recorded(segment_bytes=4_000)
    assert harness.scheduler.num_calls > 20
    dump = harness.dump()
    assert dump.problem == "" and all(segment.is_whole for segment in dump.segments)
    assert dump.segments[0].snapshot is not None
    assert min(replay(dump)) > 0


def test_a_dump_cannot_choose_the_class_to_import(tmp_path, capsys):
    harness = recorded()
    path = write_dump(harness.scheduler, str(tmp_path), reason="test", wall_time=0.0, now=0.0)
    with pytest.raises(DumpError, match=f"pass --scheduler-cls {OWN} if you trust it"):
        read_dump(path)
    assert replay_command([str(path)]) == 2
    assert simulate_command([str(path)]) == 2
    assert "a custom scheduler class" in capsys.readouterr().err
    assert replay_command([str(path), "--scheduler-cls", OWN]) == 0
    assert simulate_command([str(path), "--scheduler-cls", OWN, "--json"]) == 0
    assert '"finished": 12' in capsys.readouterr().out
    other = RecordedHarness()
    other.add(4, 2)
    other.drain()
    path = write_dump(other.scheduler, str(tmp_path), reason="own", wall_time=0.0, now=0.0)
    assert replay_command([str(path), "--scheduler-cls", OWN]) == 2
