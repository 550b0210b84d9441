"""The zoo: processes of every kind on one node, stopped through the real path; exactly the right ones die."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import control, ledger
from lamplighter.node import journal
from lamplighter.node.events import Exit
from lamplighter.node.gpu import driver, freeing, gpus, holders
from lamplighter.node.keeper import adopt, ownership, stop
from lamplighter.node.keeper.ownership import FOREIGN, OURS, STALE
from lamplighter.node.layout import RunDirectory
from lamplighter.node.stages import swap
from lamplighter.node.stages.values import Former, Staged
from lamplighter.node.system import ports, processes
from lamplighter.node.worker import StageFailure
from tests.lab.bench import Bench, furnish
from tests.node.living import IS_ROOT, NOBODY, SLEEP, is_running, process_of, until

STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""
#: Forks twice, with a session of its own in between, and tells its pid: a daemon.
DAEMON = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        print(os.getpid(), flush=True)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.execv(sys.argv[1], ["sglang::scheduler_TP5", "600"])
    os._exit(0)
os._exit(0)
"""
TITLE = "sglang::scheduler_TP0"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for made in furnish(tmp_path, monkeypatch):
        made.gpus = [0]
        yield made


def on_gpu(bench: Bench, pid: int, index: int = 0) -> int:
    control.allocate(bench.node, pid, 1000 + pid % 100, index)
    return pid


def by_hand(bench: Bench) -> int:
    """A demo server on our port and GPU that somebody started in a shell, with a model of their own."""
    words = [str(bench.node / "bin" / "lamplighter-demo-server"), "--model-path", "hand", "--tp", "1"]
    words += ["--port", str(bench.port), "--lab-speed", "30"]
    child = bench.living.start(
        words,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": control.uuids(bench.node)[0]},
        stdout=-3,
        stderr=-3,
        process_group=0,
    )
    assert until(lambda: bool(ports.listeners(bench.port)), 120)
    return child.pid


def ours(bench: Bench) -> set[int]:
    """What we launched: a main process, a child, and one that has left its session and its parent."""
    run = bench.home.run("20261129T120000Z-abcdef")
    Path(run.path).mkdir(parents=True)
    script = f"{SLEEP} 601 & (setsid {SLEEP} 602 &) ; exec {SLEEP} 603"
    launched = bench.living.launch(["/bin/sh", "-c", script], run.launch("new"), bench.runner)
    record = ownership.Recorded(launched.main, launched.supervisor)

    def pids() -> set[int]:
        return {p.pid for p in ownership.members(record, processes.processes()) if p.title == SLEEP}

    assert until(lambda: len(pids()) == 3)
    return pids()


def remember(run: RunDirectory, process: processes.Process) -> None:
    """Write a launch record whose pid has become somebody else's: same pid, another start time."""
    Path(run.path).mkdir(parents=True)
    gone = dataclasses.replace(process.identity, start=process.start - 1)
    record = {"boot_id": gone.boot_id, "pid": gone.pid, "start": gone.start}
    Path(run.launch("new").process).write_text(
        json.dumps({**record, "supervisor_pid": gone.pid, "supervisor_start": gone.start})
    )


def test_exactly_the_right_ones_die(bench: Bench) -> None:
    living = bench.living
    die = {OURS: ours(bench), STALE: set[int]()}
    stay: dict[str, int] = {}

    main = by_hand(bench)
    family = {main, *(process.pid for process in processes.descendants([main]))}
    die[STALE] |= family
    die[STALE].add(on_gpu(bench, living.orphan([TITLE, "600"], executable=SLEEP, start_new_session=True).pid))
    stubborn = living.start([TITLE, "-c", STUBBORN], executable=sys.executable, stdout=-1, text=True)
    assert stubborn.stdout.readline() == "up\n"
    die[STALE].add(on_gpu(bench, stubborn.pid))
    daemon = living.keep(int(living.output([sys.executable, "-I", "-S", "-c", DAEMON, SLEEP])))
    assert until(lambda: process_of(daemon.pid).title == "sglang::scheduler_TP5")
    die[STALE].add(on_gpu(bench, daemon.pid))

    stay["same title, other GPU"] = on_gpu(bench, living.titled(TITLE).pid, 1)
    stay["same title, no GPU"] = living.titled(TITLE).pid
    stay["notebook on our GPU"] = on_gpu(bench, living.titled("jupyter-notebook").pid)
    script = "read x; : python lab/launch_server.py"
    for name, argv in {
        "editor on our GPU": ["vim", "-c", "read x", "lab/launch_server.py"],
        "shell over SSH": ["bash", "-c", script, "--host", "box"],
    }.items():
        stay[name] = living.start(argv, executable="/bin/sh", stdin=-1, start_new_session=True).pid
    on_gpu(bench, stay["editor on our GPU"])
    stay["shell on our GPU"] = on_gpu(
        bench, living.start(["bash", "-c", script], executable="/bin/sh", stdin=-1, start_new_session=True).pid
    )
    recycled = living.titled("innocent", start_new_session=True)
    stay["recycled pid"] = recycled.pid
    remember(bench.home.run("20261129T110000Z-abcdef"), recycled)
    if IS_ROOT:
        stay["same title, other user"] = on_gpu(bench, living.titled(TITLE, user=NOBODY).pid)
    zombie = living.start([TITLE, "0"], executable=SLEEP, start_new_session=True)
    assert until(lambda: process_of(zombie.pid).state == "Z")

    claims = {claim.process.pid: claim for claim in bench.claims()}
    for kind, pids in die.items():
        assert {pid for pid, claim in claims.items() if claim.kind == kind} == pids, kind
    foreign = {pid for pid, claim in claims.items() if claim.kind == FOREIGN}
    assert foreign == {pid for name, pid in stay.items() if "our GPU" in name or "other user" in name}
    assert zombie.pid not in claims
    found = adopt.find(claims.values(), bench.port)
    assert isinstance(found, adopt.Found)
    assert found.process.pid == main

    bench.stop(grace=1.0)
    assert [pid for pids in die.values() for pid in pids if is_running(pid)] == []
    assert {name for name, pid in stay.items() if not is_running(pid)} == set()
    verdict = bench.await_freed()
    assert isinstance(verdict, freeing.NotFreed)  # the foreign ones have our GPU
    assert set(verdict.holders) == foreign


def test_none_of_ours_is_claimed_when_nobody_runs(bench: Bench) -> None:
    assert bench.claims() == []
    assert isinstance(bench.await_freed(), freeing.Freed)


def test_who_takes_over_the_memory_of_the_stopped_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """facts: importers of CUDA IPC memory are charged with it when its owner dies."""
    importer = bench.living.titled("exporter")
    server = on_gpu(bench, bench.living.titled(TITLE, start_new_session=True).pid)

    really = stop.stop

    def stop_and_take_over(*given: Any) -> list[processes.Process]:
        survivors = really(*given)
        assert not is_running(server)
        on_gpu(bench, importer.pid)
        return survivors

    monkeypatch.setattr(stop, "stop", stop_and_take_over)
    run = bench.run()
    swap.stop_old(run, bench.allocation, Former())
    monkeypatch.undo()
    told = [event["message"] for event in journal.read(run.directory.journal) if event["event"] == "warning"]
    assert len(told) == 1
    assert f"a new holder after the stop: pid {importer.pid} " in told[0]
    assert "CUDA IPC" in told[0]
    assert is_running(importer.pid)


def test_who_came_after_the_check_leaves_the_old_server_alone_or_the_new_one_unstarted(bench: Bench) -> None:
    run, stranger = bench.run(), bench.living.titled("trainer")
    old = on_gpu(bench, bench.living.titled(TITLE, start_new_session=True).pid)
    on_gpu(bench, stranger.pid)
    with pytest.raises(StageFailure, match="between the check and the start") as refused:
        swap.stop_old(run, bench.allocation, Former())
    assert refused.value.exit_code == Exit.REFUSED
    assert is_running(old)
    assert not run.touched
    former, staged = Former(), Staged(bench.plan, bench.uuids, bench.home.release("0123456789ab"))
    with pytest.raises(StageFailure, match="between the check and the start") as refused:
        swap.start(run, staged, run.directory.launch("new"), former)
    assert refused.value.exit_code == Exit.NOT_FREED
    assert f"pid {stranger.pid} " in refused.value.evidence
    assert former.successor is None


# ------------------------------------------------------------------------------ those who have a device open, no memory


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(gpus, "DEVICES", str(tmp_path / "nvidia"))
    monkeypatch.setattr(holders, "APART_SECONDS", 0.02)
    path = tmp_path / "nvidia0"
    path.touch()
    return str(path)


def opener(bench: Bench, device: str, title: str, **environment: str) -> int:
    with open(device) as file:
        child = bench.living.start(
            [title, "600"],
            executable=SLEEP,
            pass_fds=[file.fileno()],
            start_new_session=True,
            env={**os.environ, **environment},
        )
    assert until(lambda: process_of(child.pid).title == title)
    return child.pid


def test_an_open_device_without_memory_is_seen(bench: Bench, devices: str) -> None:
    """On a node with other GPUs it may be at work there: named, and not stopped on that ground."""
    stranger = opener(bench, devices, "trainer")
    engine = opener(bench, devices, TITLE)
    (first, second) = control.uuids(bench.node)
    pinned = opener(bench, devices, "sglang::scheduler_TP1", CUDA_VISIBLE_DEVICES=first)
    elsewhere = opener(bench, devices, "sglang::scheduler_TP2", CUDA_VISIBLE_DEVICES=second)
    neighbour = on_gpu(bench, opener(bench, devices, "sglang::scheduler_TP3"), 1)
    found = {claim.process.pid: claim for claim in bench.claims()}
    assert {pid: claim.kind for pid, claim in found.items()} == {stranger: FOREIGN, engine: FOREIGN, pinned: STALE}
    assert f"has {devices} open" in found[stranger].why
    bench.stop()
    assert [is_running(pid) for pid in (stranger, engine, pinned, elsewhere, neighbour)] == [
        True,
        True,
        False,
        True,
        True,
    ]
    verdict = bench.await_freed()
    assert isinstance(verdict, freeing.NotFreed)
    assert set(verdict.holders) == {stranger, engine}


def test_where_all_gpus_are_ours_an_engine_with_an_open_device_is_stale(bench: Bench, devices: str) -> None:
    bench.gpus = "all"
    pid = opener(bench, devices, TITLE)
    assert [(claim.process.pid, claim.kind) for claim in bench.claims()] == [(pid, STALE)]
    bench.end()
    assert not is_running(pid)


def test_who_opens_a_device_for_a_moment_is_nobody(bench: Bench, devices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = opener(bench, devices, "monitor")
    real = gpus.device_holders
    looks: list[int] = []

    def once() -> gpus.DeviceHolders:
        looks.append(1)
        return real() if len(looks) == 1 else gpus.DeviceHolders({}, True)

    monkeypatch.setattr(gpus, "device_holders", once)
    assert bench.claims() == []
    assert is_running(pid)


# --------------------------------------------------------------------------------------------------- freed, or not


def test_a_wrong_answer_about_who_is_alive_never_frees(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder counts as gone although it lives, and the other way round: HELD or UNKNOWN, never FREED."""
    pid = bench.living.titled("trainer").pid
    on_gpu(bench, pid)
    sample = gpus.take_sample()
    for alive in (lambda _: False, lambda _: True, processes.is_pid_alive):
        assert gpus.judge(sample, bench.uuids, {}, alive).word in (gpus.HELD, gpus.UNKNOWN)
    monkeypatch.setattr(processes, "is_pid_alive", lambda _: False)
    plan = bench.plan
    quick = dataclasses.replace(plan, timeouts=dataclasses.replace(plan.timeouts, free=0.5))
    found = freeing.await_freed(quick, bench.home, bench.uuids, lambda _: [], lambda *_, **__: None)
    assert isinstance(found, freeing.NotFreed)
    assert found.word == gpus.UNKNOWN


def test_the_idle_memory_is_learned_and_only_ever_lowered(bench: Bench) -> None:
    (uuid,) = bench.uuids
    Path(bench.home.path).mkdir(parents=True)
    for used, learned in ((300, 300), (40, 40), (100, 40)):
        control.inject(bench.node, used={uuid: used})
        assert isinstance(bench.await_freed(), freeing.Freed)
        assert freeing.read_baseline(bench.home) == {uuid: learned}
    control.inject(bench.node, used={uuid: 300})  # what was idle before anything was known is no longer
    plan = bench.plan
    quick = dataclasses.replace(plan, timeouts=dataclasses.replace(plan.timeouts, free=0.3))
    found = freeing.await_freed(quick, bench.home, bench.uuids, lambda _: [], lambda *_, **__: None)
    assert isinstance(found, freeing.NotFreed)
    assert freeing.read_baseline(bench.home) == {uuid: 40}


def test_what_is_idle_is_learned_anew_under_another_driver(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    (uuid,) = bench.uuids
    Path(bench.home.path).mkdir(parents=True)
    for version, used in (("580.1", 0), ("590.1", 400), ("590.1", 401)):
        monkeypatch.setattr(driver, "loaded_driver", lambda version=version: version)
        control.inject(bench.node, used={uuid: used})
        assert isinstance(bench.await_freed(), freeing.Freed)
    assert freeing.read_baseline(bench.home) == {uuid: 400}
    assert ledger.read_json(bench.home.baseline) == {uuid: 400, "driver": "590.1"}


def test_a_gpu_that_wants_a_reset_is_not_free_whatever_it_shows(bench: Bench) -> None:
    """As after an error that the stop itself has provoked; one of somebody else's GPUs is their affair."""
    Path(bench.home.path).mkdir(parents=True)
    control.inject(bench.node, fields={"1": {"gpu_recovery_action": "Reset"}})
    assert isinstance(bench.await_freed(), freeing.Freed)
    control.inject(bench.node, fields={"0": {"gpu_recovery_action": "Drain and Reset"}})
    found = bench.await_freed()
    assert isinstance(found, freeing.NotFreed)
    assert found.word == gpus.UNKNOWN
    assert "needs recovery: Drain and Reset" in found.reason


# ------------------------------------------------------------------------------------------- how long it is waited for


class Leaps:
    """Time that passes only where somebody sleeps: then 12 s."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += 12.0


def wait_for(
    bench: Bench, clock: Leaps, free: float, memory: Iterator[int], ours: Iterable[int] = ()
) -> freeing.Freed | freeing.NotFreed:
    """Wait with ``timeouts.free``, while the GPU uses what ``memory`` says, sample by sample."""
    (uuid,) = bench.uuids
    plan = dataclasses.replace(bench.plan, timeouts=dataclasses.replace(bench.plan.timeouts, free=free))

    def look(_: gpus.Sample) -> list[int]:
        control.inject(bench.node, used={uuid: next(memory)})
        return list(ours)

    control.inject(bench.node, used={uuid: next(memory)})
    began = clock.now
    found = freeing.await_freed(plan, bench.home, (uuid,), look, lambda *_, **__: None)
    clock.now -= began
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Leaps:
    made = Leaps()
    monkeypatch.setattr(freeing, "time", made)
    return made


def test_falling_memory_is_waited_for_beyond_the_time_that_a_still_one_gets(bench: Bench, clock: Leaps) -> None:
    falling = itertools.chain(range(9000, 0, -1000), itertools.repeat(0))
    assert isinstance(wait_for(bench, clock, 20, falling), freeing.Freed)
    assert clock.now > 100


def test_memory_that_nobody_holds_and_that_stays_ends_the_wait_after_a_minute(bench: Bench, clock: Leaps) -> None:
    found = wait_for(bench, clock, 500, itertools.chain([9000, 8000], itertools.repeat(7000)))
    assert isinstance(found, freeing.NotFreed)
    assert (found.word, found.holders) == (gpus.HELD, ())
    assert "nothing has moved for 60 s" in found.reason
    assert 80 <= clock.now <= 100


def test_what_is_free_is_seen_again_however_short_the_wait(bench: Bench, clock: Leaps) -> None:
    assert isinstance(wait_for(bench, clock, 0.5, itertools.repeat(0)), freeing.Freed)
    found = wait_for(bench, clock, 0.5, itertools.chain([0, 0], itertools.repeat(9000)))
    assert isinstance(found, freeing.NotFreed)
    assert "timeouts.free" in found.reason
    assert clock.now < 100


def test_our_own_that_stay_are_waited_for_as_long_as_the_inventory_says(bench: Bench, clock: Leaps) -> None:
    pid = bench.living.titled(TITLE).pid
    found = wait_for(bench, clock, 100, itertools.repeat(7000), [pid])
    assert isinstance(found, freeing.NotFreed)
    assert found.holders == (pid,)
    assert "timeouts.free" in found.reason
    assert 100 < clock.now <= 112


def test_no_wait_is_for_ever(bench: Bench, clock: Leaps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "sleep", lambda _: setattr(clock, "now", clock.now + 59.0))
    found = wait_for(bench, clock, 120, itertools.count(9000, -10))
    assert isinstance(found, freeing.NotFreed)
    assert "in all" in found.reason
    assert 600 < clock.now < 660
