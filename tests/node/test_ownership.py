"""Whose a process is, in a zoo of real ones; and that exactly the claimed ones are dead after a stop."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.keeper import ownership, stop
from lamplighter.node.keeper.ownership import FOREIGN, LISTED, OURS, STALE, Claim, Evidence, Recorded
from lamplighter.node.layout import RunDirectory
from lamplighter.node.system import ports, processes
from lamplighter.node.system.processes import Identity, Process
from lamplighter.release.engine import load_engine
from tests.node.living import (
    IS_ROOT,
    NOBODY,
    PROJECT,
    SLEEP,
    Living,
    group_members,
    is_running,
    kill,
    process_of,
    until,
)

ENGINE: dict[str, Any] = load_engine("sglang", PROJECT / "roles").compiled
NOTHING: frozenset[int] = frozenset()

#: An SGLang-shaped server: listens, and has workers with SGLang's titles in its process group.
LAUNCH_SERVER = """
import json, os, socket, subprocess, sys, time
sleep, info = sys.argv[sys.argv.index("--sleep") + 1], sys.argv[sys.argv.index("--info") + 1]
server = socket.create_server(("127.0.0.1", 0))
workers = {}
for title in ("sglang::scheduler_TP0", "sglang::detokenizer", "nvidia-helper"):
    workers[title] = subprocess.Popen([title, "600"], executable=sleep).pid
workers["main"] = os.getpid()
with open(info + ".part", "w") as file:
    json.dump({"port": server.getsockname()[1], **workers}, file)
os.rename(info + ".part", info)
time.sleep(600)
"""

#: Leaves an orphan of multiprocessing, spawned as SGLang spawns its workers, before it has taken a title.
SPAWN = """
import multiprocessing, os, time
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    print(child.pid, multiprocessing.resource_tracker._resource_tracker._pid, flush=True)
    os._exit(0)
"""


@dataclasses.dataclass
class Sglang:
    """A server that somebody started by hand."""

    port: int
    main: int
    scheduler: int
    detokenizer: int
    helper: int

    @property
    def pids(self) -> set[int]:
        return {self.main, self.scheduler, self.detokenizer, self.helper}


class Zoo:
    """Processes of all kinds, and what is seen of them."""

    def __init__(self, living: Living, directory: Path, runner: str) -> None:
        self.living = living
        self.directory = directory
        self.runner = runner
        self.recorded: list[Recorded] = []
        self.holders: set[int] = set()
        self.port: int | None = None
        package = directory / "site" / "sglang"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "launch_server.py").write_text(LAUNCH_SERVER)
        self.site = {**os.environ, "PYTHONPATH": str(package.parent)}

    # -- its inhabitants

    def command(self, name: str) -> list[str]:
        info = str(self.directory / name)
        return [sys.executable, "-S", "-m", "sglang.launch_server", "--sleep", SLEEP, "--info", info]

    def info(self, name: str) -> Sglang:
        path = self.directory / name
        assert until(path.exists)
        found = json.loads(path.read_text())
        titles = ("sglang::scheduler_TP0", "sglang::detokenizer", "nvidia-helper")
        for title in titles:
            assert until(lambda title=title: self.living.keep(found[title]).title == title)
        return Sglang(found["port"], self.living.keep(found["main"]).pid, *(found[title] for title in titles))

    def sglang(self, name: str) -> Sglang:
        self.living.start(self.command(name), env=self.site, start_new_session=True)
        return self.info(name)

    def lamplighters(self) -> set[int]:
        """A server that we launched, with a child and a daemon in another session."""
        launch = RunDirectory(str(self.directory)).launch("new")
        script = "sleep 600 & setsid sleep 600 & echo up; exec sleep 600"
        launched = self.living.launch(["/bin/sh", "-c", script], launch, self.runner)
        record = Recorded(launched.main, launched.supervisor)
        self.recorded.append(record)
        assert until(lambda: len(ownership.members(record, processes.processes())) == 3)
        assert until(lambda: all(p.comm == "sleep" for p in ownership.members(record, processes.processes())))
        return {process.pid for process in ownership.members(record, processes.processes())}

    def nameless(self) -> tuple[int, int]:
        (self.directory / "spawn.py").write_text(SPAWN)
        said = self.living.output([sys.executable, "-S", str(self.directory / "spawn.py")], start_new_session=True)
        pid, tracker = map(int, said.split())
        self.living.keep(tracker)
        assert until(lambda: "resource_tracker" in process_of(tracker).command)
        self.living.keep(pid)
        assert until(lambda: "spawn_main" in process_of(pid).command)
        return pid, tracker

    def waiting_shell(self, *argv: str) -> int:
        """A shell that reads its stdin and shows ``argv`` as its command line."""
        return self.living.start(list(argv), executable="/bin/sh", stdin=-1, start_new_session=True).pid

    # -- what is seen of them

    def look(self) -> Evidence:
        table = processes.processes()
        listeners = {pid for one in (ports.listeners(self.port) if self.port else ()) for pid in one.pids}
        return Evidence(
            table,
            frozenset(pid for pid in self.holders if pid in table and not table[pid].is_dead),
            frozenset(listeners),
        )

    def claims(self, policy: str = "engine", listed: Iterable[str] = (), uid: int | None = None) -> dict[int, str]:
        return {claim.process.pid: claim.kind for claim in self.judge(policy, listed, uid)}

    def judge(self, policy: str, listed: Iterable[str], uid: int | None = None) -> list[Claim]:
        uid = os.geteuid() if uid is None else uid
        return ownership.claims(self.look(), self.recorded, ENGINE, policy=policy, listed=listed, uid=uid)

    def stop(self, policy: str, listed: Iterable[str] = ()) -> None:
        def find() -> list[Process]:
            return [claim.process for claim in self.judge(policy, listed) if claim.may_be_stopped]

        assert stop.stop(find, stop.Manner(signal.SIGTERM, 1.0), lambda _: None) == []


@pytest.fixture
def zoo(living: Living, tmp_path: Path, runner_home: str) -> Zoo:
    return Zoo(living, tmp_path, runner_home)


# ------------------------------------------------------------------------------------------------------ the whole zoo


@pytest.mark.parametrize("policy", ["engine", "ours", "report"])
def test_exactly_the_claimed_ones_are_dead_after_a_stop(zoo: Zoo, living: Living, policy: str) -> None:
    ours = zoo.lamplighters()
    by_hand = zoo.sglang("by-hand")
    zoo.port = by_hand.port
    neighbour = zoo.sglang("neighbour")
    orphan = living.orphan(["sglang::scheduler_TP1", "600"], executable=SLEEP, start_new_session=True).pid
    nameless, tracker = zoo.nameless()
    notebook = living.titled("jupyter-notebook").pid
    listed = living.titled("old-server").pid
    listed_elsewhere = living.titled("old-server").pid
    zoo.holders = {by_hand.scheduler, orphan, nameless, notebook, listed}
    editor = zoo.waiting_shell("vim", "-c", "read x; : -m sglang.launch_server", "/opt/sglang/launch_server.py")
    shell = zoo.waiting_shell("bash", "-c", "read x; : pkill -f sglang; python -m sglang.launch_server")
    holding_shell = zoo.waiting_shell("bash", "-c", "read x; python -m sglang.launch_server --tp 8")
    zoo.holders.add(holding_shell)
    untouched = {*neighbour.pids, notebook, listed_elsewhere, editor, shell, holding_shell}
    if IS_ROOT:
        others = living.titled("sglang::scheduler_TP2", user=NOBODY).pid
        zoo.holders.add(others)
        untouched.add(others)

    kinds = dict.fromkeys(ours, OURS)
    stale = {*by_hand.pids, orphan, nameless, tracker}
    if policy == "engine":
        kinds |= dict.fromkeys(stale, STALE)
    else:
        untouched |= stale
    kinds[listed] = FOREIGN if policy == "report" else LISTED
    if policy == "report":
        untouched.add(listed)
    seen = zoo.holders | {by_hand.main}
    kinds |= dict.fromkeys(untouched & seen, FOREIGN)

    assert zoo.claims(policy, ["old-server"]) == kinds
    zoo.stop(policy, ["old-server"])
    stoppable = {pid for pid, kind in kinds.items() if kind != FOREIGN}
    assert [pid for pid in stoppable if is_running(pid)] == []
    assert [pid for pid in untouched if not is_running(pid)] == []
    assert zoo.claims(policy, ["old-server"]) == {pid: kind for pid, kind in kinds.items() if kind == FOREIGN}


# ------------------------------------------------------------------------------------------- stale ones of the engine


def test_a_server_that_is_still_loading_is_known_by_its_workers(zoo: Zoo) -> None:
    """It does not listen yet: only its scheduler shows, on a GPU."""
    server = zoo.sglang("loading")
    zoo.holders = {server.scheduler}
    assert zoo.claims() == dict.fromkeys(server.pids, STALE)


def test_a_detokenizer_whose_server_died_goes_with_the_scheduler_on_our_gpu(zoo: Zoo) -> None:
    server = zoo.sglang("dead")
    kill(process_of(server.main).identity)
    assert until(lambda: process_of(server.detokenizer).ppid != server.main)
    zoo.holders = {server.scheduler}
    found = zoo.claims()
    if process_of(server.detokenizer).ppid == 1:  # not where somebody above us reaps
        assert found == dict.fromkeys((server.scheduler, server.detokenizer), STALE)
    assert server.helper not in found


@pytest.mark.parametrize("script_lives", [True, False])
def test_a_second_server_of_one_start_script_is_not_ours(zoo: Zoo, living: Living, script_lives: bool) -> None:
    """Both are in the script's process group; the second one has other GPUs and another port."""
    first, second = ("'" + "' '".join(zoo.command(name)) + "'" for name in ("first", "second"))
    script = f"{first} & {second} & " + ("wait" if script_lives else "exit")
    shell = living.start(["/bin/sh", "-c", script], env=zoo.site, start_new_session=True)
    ours, neighbour = zoo.info("first"), zoo.info("second")
    assert process_of(ours.main).pgid == process_of(neighbour.scheduler).pgid == shell.pid
    zoo.port = ours.port
    zoo.holders = {ours.scheduler}
    assert zoo.claims() == dict.fromkeys(ours.pids, STALE)
    zoo.port = None  # while it is loading
    assert zoo.claims() == dict.fromkeys(ours.pids, STALE)


def test_a_pool_of_workers_of_another_program_in_the_group_is_not_ours(zoo: Zoo, living: Living) -> None:
    pool = (
        "import multiprocessing, os, sys, time\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=time.sleep, args=(600,))\n"
        "    child.start()\n"
        "    open(sys.argv[1] + '.part', 'w').write(str(child.pid))\n"
        "    os.rename(sys.argv[1] + '.part', sys.argv[1])\n"
        "    time.sleep(600)\n"
    )
    (zoo.directory / "bench.py").write_text(pool)
    server = "'" + "' '".join(zoo.command("first")) + "'"
    bench = f"'{sys.executable}' -S '{zoo.directory}/bench.py' '{zoo.directory}/child'"
    shell = living.start(["/bin/sh", "-c", f"{server} & {bench} & wait"], env=zoo.site, start_new_session=True)
    ours = zoo.info("first")
    assert until((zoo.directory / "child").exists)
    for process in group_members(shell.pid):
        living.keep(process.pid)
    child = int((zoo.directory / "child").read_text())
    assert until(lambda: "spawn_main" in process_of(child).command)
    zoo.port, zoo.holders = ours.port, {ours.scheduler}
    assert zoo.claims() == dict.fromkeys(ours.pids, STALE)


def test_looks_alone_claim_nothing(zoo: Zoo, living: Living) -> None:
    zoo.sglang("elsewhere")
    living.titled("sglang::scheduler_TP0")
    assert zoo.claims() == {}


def test_a_place_alone_claims_nothing(zoo: Zoo, living: Living) -> None:
    training = living.titled("python train.py").pid
    spawned = zoo.waiting_shell("python", "-c", "read x; : from multiprocessing.spawn import spawn_main")
    zoo.holders = {training, spawned}
    assert process_of(spawned).ppid == os.getpid()
    assert zoo.claims() == {training: FOREIGN, spawned: FOREIGN}


def test_another_users_engine_is_foreign_and_ours_is_foreign_to_them(zoo: Zoo, living: Living) -> None:
    zoo.holders = {living.titled("sglang::scheduler_TP0").pid}
    assert list(zoo.claims(uid=os.geteuid() + 1).values()) == [FOREIGN]
    assert list(zoo.claims().values()) == [STALE]


def test_the_looker_never_claims_itself(zoo: Zoo) -> None:
    zoo.holders = {os.getpid()}
    engine = {"processes": {"titles": ["."], "entry_points": ["."]}}
    found = ownership.claims(zoo.look(), [], engine, policy="engine", listed=[], uid=os.geteuid())
    assert [claim.kind for claim in found if claim.process.pid == os.getpid()] == [FOREIGN]


def test_whom_the_looker_descends_from_is_foreign(zoo: Zoo) -> None:
    """The shell over SSH that carries our command may well name the engine, and hold what we ask for."""
    zoo.holders = {os.getpid(), os.getppid()}
    engine = {"processes": {"titles": ["."], "entry_points": ["."]}}
    for listed in ([], [process_of(os.getppid()).title]):
        found = ownership.claims(zoo.look(), [], engine, policy="engine", listed=listed, uid=os.geteuid())
        line = {claim.process.pid: claim for claim in found if claim.process.pid in zoo.holders}
        assert [claim.kind for claim in line.values()] == [FOREIGN] * len(zoo.holders)
        assert "this very run descends from it" in line[os.getppid()].why


def test_commands_are_shown_without_secrets(living: Living) -> None:
    words = ["trainer", "--api-key", "s3cret", "--token=s3cret", "HF_TOKEN=s3cret", "--port", "80", "--keys", "-x"]
    shown = ownership.shown_command(dataclasses.replace(process_of(os.getpid()), argv=tuple(words)))
    assert shown == "trainer --api-key *** --token=*** HF_TOKEN=*** --port 80 --keys -x"
    titled = dataclasses.replace(process_of(os.getpid()), argv=("trainer --api-key s3cret", "sh", "A_KEY=s3cret x"))
    assert ownership.shown_command(titled) == "trainer --api-key *** *** A_KEY=*** ***"  # vLLM takes several
    long = dataclasses.replace(process_of(os.getpid()), argv=("x" * 500,))
    assert len(ownership.shown_command(long)) == ownership.COMMAND_LENGTH


def test_a_claim_reads_as_a_sentence(zoo: Zoo, living: Living) -> None:
    process = living.titled("sglang::scheduler_TP0")
    user = processes.user_name(os.getuid())
    zoo.holders = {process.pid}
    assert str(zoo.judge("engine", [])[0]) == (
        f"pid {process.pid} ({user}, sglang::scheduler_TP0): stale, "
        "has the engine's title 'sglang::scheduler_TP0', holds one of our GPUs"
    )
    assert str(zoo.judge("ours", [])[0]) == (
        f"pid {process.pid} ({user}, sglang::scheduler_TP0 600): foreign, "
        "has the engine's title 'sglang::scheduler_TP0', holds one of our GPUs; left because stale.policy is ours"
    )
    assert "; left because stale.policy is report" in str(zoo.judge("report", [])[0])


def test_a_listed_name_is_a_title_a_command_or_a_path(zoo: Zoo, living: Living) -> None:
    by_path = living.start([SLEEP, "600"]).pid
    titled = living.titled("text-generation").pid
    argument = zoo.waiting_shell("sh", "-c", "read x; : text-generation", "text-generation")
    zoo.holders = {by_path, titled, argument}
    assert until(lambda: process_of(by_path).title == SLEEP)
    assert zoo.claims(listed=["text-generation"])[titled] == LISTED
    assert zoo.claims(listed=["text-generation"])[argument] == FOREIGN
    for name in ("sleep", SLEEP):
        assert zoo.claims(listed=[name])[by_path] == LISTED
    assert zoo.claims(listed=["/opt/elsewhere/sleep"])[by_path] == FOREIGN
    assert zoo.claims(listed=["slee"])[by_path] == FOREIGN


# ------------------------------------------------------------------------------------------------- recorded by us


def other_start(identity: Identity) -> Identity:
    return dataclasses.replace(identity, start=identity.start - 1)


def test_a_recycled_pid_is_nobodys(zoo: Zoo, living: Living) -> None:
    """Its new owner leads a session and has children; so has the one that got the supervisor's pid."""
    code = "import os, time\nif os.fork(): print('up')\ntime.sleep(600)"
    main, supervisor = (living.python(code, start_new_session=True) for _ in range(2))
    for leader in (main, supervisor):
        for process in group_members(leader.pid):
            living.keep(process.pid)
    identities = [process_of(leader.pid).identity for leader in (main, supervisor)]
    zoo.recorded = [Recorded(*map(other_start, identities)), Recorded(other_start(identities[0]), None)]
    assert zoo.claims() == {}
    zoo.recorded = [Recorded(*identities)]
    assert len(zoo.claims()) == 3  # the supervisor itself is not among them


def left_by_a_login(living: Living, **options: Any) -> Process:
    """A program whose shell has ended: its session has the number of a process that is gone."""
    code = "import os, time\nif os.fork(): os._exit(0)\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    pid = int(living.output(["/usr/bin/python3", "-I", "-S", "-c", code], start_new_session=True, **options))
    found = living.keep(pid)
    assert until(lambda: found.sid not in processes.processes())
    return found


def test_a_session_without_its_leader_is_ours_only_in_our_place(zoo: Zoo, living: Living) -> None:
    """The main process and the supervisor were killed: workers are left, or the number is that of a later login."""
    left = left_by_a_login(living)
    gone = Identity(left.identity.boot_id, left.sid, left.start)
    elsewhere = f"0::/system.slice/lamplighter-kimi-new.scope\n{left.cgroup}"
    supervisor = other_start(process_of(os.getpid()).identity)
    for cgroup, expected in ((left.cgroup, {left.pid: OURS}), (None, {left.pid: OURS}), (elsewhere, {})):
        zoo.recorded = [Recorded(gone, supervisor, cgroup)]
        assert zoo.claims() == expected
    # A living supervisor has them all below it, so that this one is not of its launch.
    zoo.recorded = [Recorded(gone, living.titled("supervisor").identity, left.cgroup)]
    assert zoo.claims() == {}


@pytest.mark.skipif(not IS_ROOT, reason="only root can be two users")
def test_another_users_session_without_its_leader_is_not_ours(zoo: Zoo, living: Living) -> None:
    left = left_by_a_login(living, user=NOBODY, cwd="/")
    zoo.recorded = [Recorded(Identity(left.identity.boot_id, left.sid, left.start), None)]
    assert zoo.claims() == {}


def test_a_record_of_another_boot_is_nobodys(zoo: Zoo) -> None:
    zoo.lamplighters()
    assert len(zoo.claims()) == 3
    zoo.recorded = [
        Recorded(*(dataclasses.replace(one, boot_id="before") for one in (record.main, record.supervisor) if one))
        for record in zoo.recorded
    ]
    assert zoo.claims() == {}


def test_a_zombie_is_no_member(zoo: Zoo, living: Living) -> None:
    child = living.start(["/bin/true"], start_new_session=True)
    assert until(lambda: process_of(child.pid).state == "Z")
    identity = process_of(child.pid).identity
    zoo.recorded = [Recorded(identity, None)]
    assert zoo.claims() == {}


def test_a_launch_is_ours_whatever_user_or_title_it_has_by_now(zoo: Zoo) -> None:
    pids = zoo.lamplighters()
    zoo.holders = set(pids)
    assert zoo.claims("ours", uid=os.geteuid() + 1) == dict.fromkeys(pids, OURS)


def test_holders_that_have_vanished_are_passed_over(zoo: Zoo) -> None:
    evidence = Evidence({}, frozenset({4_000_001}), frozenset({4_000_002}))
    assert ownership.claims(evidence, [], ENGINE, policy="engine", listed=["x"], uid=0) == []
    assert ownership.claims(Evidence({}, NOTHING, NOTHING), [], ENGINE, policy="engine", listed=[], uid=0) == []
