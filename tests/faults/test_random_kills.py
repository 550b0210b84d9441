"""Anything killed at any moment, beside a second deploy and a `cancel`: one server, no stuck lock, no bystander hit.

In each round an old server serves and a deploy begins; at random moments of its length a victim is struck (VICTIMS), a
second deploy of another release begins (refused by the lock, or waiting for it), and `cancel` is called. Asserted: at
no moment two releases run; what was said of what serves is what an independent client finds; look-alikes of the same
user live on; the next plain deploy ends ``deployed``. Rounds are drawn by a seed: a few in `./inv test`, N with
LAMPLIGHTER_KILLS=N (`./inv dev.soak`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.events import Exit
from tests.driver import Done, Driver, eventually
from tests.faults.conftest import say, say_now
from tests.faults.crew import KINDS, Crew
from tests.faults.ground import HOME, PATIENCE, Ground
from tests.faults.words import Found, claims_of, denials
from tests.nodes.park import NodePark, why_no_systemd

KILLS = int(os.environ.get("LAMPLIGHTER_KILLS") or 4)
SEED = int(os.environ.get("LAMPLIGHTER_SEED") or 20240)
VICTIMS = ("worker", "relay", "control", "server", "session")
TOLD_EACH = 10
#: A server of somebody else's, and a process that only has the title of a worker.
LOOK_ALIKES = """
mkdir -p /root/other/lab && echo 'import time; time.sleep(100000)' >/root/other/lab/launch_server.py
setsid /usr/bin/python3 /root/other/lab/launch_server.py --model-path demo-model --port 19999 \\
    >/dev/null 2>&1 </dev/null & echo $!
setsid bash -c 'exec -a sglang::scheduler_TP0 sleep 100000' >/dev/null 2>&1 </dev/null & echo $!
"""
OURS, THEIRS = "lab/launch_server.py", "/root/other/"


@dataclass(frozen=True)
class Round:
    """Who is struck, and when what begins; 0 is the beginning of the first deploy, 1 where a plain one ends."""

    number: int
    kind: str
    victim: str
    struck_at: float
    second_at: float
    cancelled_at: float
    waits: bool
    fails: bool

    def __str__(self) -> str:
        second = f"a second deploy{' --wait' if self.waits else ''} at {self.second_at:.0%}"
        first = "deploy of one that fails" if self.fails else "deploy"
        return (
            f"{first} ({self.kind}), {self.victim} killed at {self.struck_at:.0%}, {second}, "
            f"cancel at {self.cancelled_at:.0%}"
        )


def draw() -> list[Round]:
    """KILLS rounds, half of them for each kind of node, each victim as often as the others; the seed decides when."""
    drawn = random.Random(SEED)
    return [
        Round(
            number=number,
            kind=KINDS[number % 2],
            victim=VICTIMS[number // 2 % len(VICTIMS)],
            struck_at=drawn.uniform(0.05, 1),
            second_at=drawn.random(),
            cancelled_at=drawn.random(),
            waits=drawn.random() < 0.5,
            fails=drawn.random() < 0.25,
        )
        for number in range(KILLS)
    ]


@pytest.mark.timeout(14_400)
def test_after_every_kill_one_server_serves_and_it_was_said(
    park: NodePark, tmp_path: Path, require: Any, request: pytest.FixtureRequest
) -> None:
    require("systemd", why_no_systemd())
    began = time.monotonic()
    failures: list[str] = []
    struck: Counter[str] = Counter()
    with Crew(park, tmp_path, without_systemd=False) as crew:
        played = {
            crew.play(one.kind, lambda ground, one=one: play(ground, one, tmp_path / f"second-{one.number}")): one
            for one in draw()
        }
        for number, future in enumerate(as_completed(played), 1):
            one = played[future]
            try:
                struck[f"{one.victim} {future.result()}"] += 1
            except Exception as error:
                failures.append(f"round {one.number}: {one}: {type(error).__name__}: {error}")
                say_now(request, f"FAILED {failures[-1]}")
            if number % TOLD_EACH == 0:
                took = time.monotonic() - began
                say_now(request, f"{number} kills beside a second deploy in {took:.0f} s, {len(failures)} failures")
    told = ", ".join(f"{count} {what}" for what, count in sorted(struck.items()))
    say(request, f"{KILLS} kills beside a second deploy and a cancel (seed {SEED}): {told}")
    say(
        request,
        f"{KILLS - len(failures)} left one server, no lock and every bystander, in {time.monotonic() - began:.0f} s",
    )
    assert not failures, "\n".join(failures)


def play(ground: Ground, one: Round, beside: Path) -> Generator[float, None, str]:
    """Play one round; whether there was somebody to strike."""
    yield 0.0
    old = ground.settle()
    assert ground.answer() == old, f"{old} served at the end of the last round, and no longer"
    bystanders = start_bystanders(ground)
    ages = [ground.age + 1, ground.age + 2]
    ground.configure(**({"args": {"lab-fail": "die:weights"}} if one.fails else {}))
    second = Driver(beside, ground.driver.prefix)
    ground.age += 1
    second.write("gpu", ground.wanting({}))
    with Watched(ground) as watched:
        scene = Scene(ground, second, one)
        scene.play()
        eventually(lambda: not ground.workers(), PATIENCE)  # a run goes on without whoever asked for it
        found = ground.look()
        assert watched.seen_together == [], f"two servers at once: {watched.seen_together}"
    for done, age in zip(scene.heard[:2], ages, strict=True):
        if done is not None:
            ground.learn(done, age)
    told = "\n".join(
        f"{name}: exit {done.code}, {done.report}\n{done.stderr}" if done else f"{name}: killed"
        for name, done in zip(("first", "second", "cancel"), scene.heard, strict=True)
    )
    lies = scene.lies(found)
    assert not lies, "\n".join([*lies, told])
    assert survivors(ground, bystanders) == bystanders, told
    ground.configure()
    done = ground.deploy()
    assert done.code == Exit.OK, f"the next plain deploy: {done}\nbefore it: {told}"
    ground.learn(done)
    found = ground.look()
    assert denials(claims_of(done), found, ground.ages, "after the next plain deploy") == []
    assert found.age == str(ground.age)
    # a journal that a kill has torn stays so
    assert [flaw for flaw in ground.trouble() if not re.match(r"run \S+ has no", flaw)] == [], told
    assert len(servers(ground)) == 1, servers(ground)
    assert survivors(ground, bystanders) == bystanders
    for pid in bystanders:
        ground.node.exec(["kill", "-9", str(pid)])
    ground.serving = str(ground.age)
    return "killed" if scene.was_struck else "spared, none was there"


@dataclass
class Scene:
    """The commands of a round, and what they said: the first deploy, the second, `cancel`; None for a killed one."""

    ground: Ground
    second: Driver
    one: Round
    heard: list[Done | None] = field(default_factory=list)
    was_struck: bool = False
    struck: tuple[float, float] = (0.0, 0.0)  # wall clock before and after

    def play(self) -> None:
        """Begin everything at its moment, and wait until every command has ended."""
        wait = ("--wait", "120") if self.one.waits else ()
        with contextlib.ExitStack() as commands:
            running: dict[str, subprocess.Popen[str]] = {}

            def begin(name: str, driver: Driver, *words: str) -> None:
                command = driver.started(*words, "--json", "--host", "gpu", stderr=subprocess.PIPE)
                running[name] = commands.enter_context(command)

            deeds = [
                (0.0, lambda: begin("first", self.ground.driver, "deploy")),
                (self.one.second_at, lambda: begin("second", self.second, "deploy", *wait)),
                (self.one.cancelled_at, lambda: begin("cancel", self.ground.driver, "cancel")),
                (self.one.struck_at, lambda: self.strike(running["first"])),
            ]
            began = time.monotonic()
            for at, deed in sorted(deeds, key=lambda each: each[0]):
                moment = began + at * self.ground.deploy_seconds
                time.sleep(max(0.0, moment - time.monotonic()))  # the moment is what is drawn
                deed()
            for name in ("first", "second", "cancel"):
                told = running[name].communicate(timeout=PATIENCE)
                done = Done(running[name].returncode, *told)
                assert "\nTraceback" not in "\n" + done.stderr, done  # one in the server's log has a margin
                self.heard.append(done if done.code >= 0 else None)

    def strike(self, first: subprocess.Popen[str]) -> None:
        before = time.time()
        self.was_struck = STRIKES[self.one.victim](self.ground, first)
        self.struck = before, time.time()

    def lies(self, found: Found) -> list[str]:
        """What was said last of what serves, and what says `status`, as far as it is not so."""
        runs = self.runs()
        lies = []
        for done in self.heard:
            if done is not None and self.is_last_word(done, runs):
                lies += denials(claims_of(done), found, self.ground.ages, "when all had ended")
        status = self.ground.run("status", "--json")
        now = status.lines[-1]["status"]["hosts"]["gpu"]["servers"]["demo"]
        if (now["state"] == "serving") != found.answers and now["state"] in ("serving", "stopped"):
            lies.append(f"`status` says {now}, and an independent client finds: {found}")
        if now["state"] == "serving" and now["pid"] != found.pid:
            lies.append(f"`status` says pid {now['pid']}, and an independent client finds: {found}")
        return lies

    def runs(self) -> dict[str, list[dict[str, Any]]]:
        """The events of every run on the node, by run, but for those whose contact was lost before they began."""
        tell = 'echo "== $run"; [ ! -e $run/events.jsonl ] || cat $run/events.jsonl'
        told = self.ground.node.sh(f"cd {HOME}/runs && for run in *; do {tell}; done")
        runs: dict[str, list[dict[str, Any]]] = {}
        for line in told.splitlines():
            if line.startswith("== "):
                events = runs.setdefault(line[3:], [])
                continue
            with contextlib.suppress(ValueError):  # torn by a kill
                events.append(json.loads(line))
        return {run: events for run, events in runs.items() if events}

    def is_last_word(self, done: Done, runs: dict[str, list[dict[str, Any]]]) -> bool:
        """Whether nobody had a hand in it after ``done`` had looked: no other run with the lock, and no strike."""
        part = done.report["hosts"].get("gpu", {"servers": {}})["servers"].get("demo")
        if part is None or part["run"] not in runs:
            return False
        errors = [event["t"] for event in done.events if event["event"] == "error"]
        own = runs[part["run"]]
        said = max([own[-1]["t"], *errors])
        others = [events for run, events in runs.items() if run != part["run"] and had_the_lock(events)]
        if any(events[-1]["t"] > said for events in others):
            return False
        last_stage = max((event["t"] for event in own if event["event"] == "stage_start"), default=0.0)
        return self.one.victim != "server" or self.struck[1] < last_stage


def had_the_lock(events: list[dict[str, Any]]) -> bool:
    """Whether a run may have changed something: it has passed the lock, or was killed at it."""
    ended = [event for event in events if event["event"] == "stage_end" and event["stage"] == "lock"]
    return bool(events) and (not ended or ended[0]["ok"])


# -- who is struck; each tells whether there was somebody


def kill_a_worker(ground: Ground, first: subprocess.Popen[str]) -> bool:
    table = ground.node.processes().items()
    return kill(ground, [pid for pid, words in table if words.endswith(" worker")][:1])


def kill_relays(ground: Ground, first: subprocess.Popen[str]) -> bool:
    table = ground.node.processes().items()
    return kill(ground, [pid for pid, words in table if "sys.stdin.buffer.read(" in words and "sh -c" not in words])


def kill_control(ground: Ground, first: subprocess.Popen[str]) -> bool:
    lived = first.poll() is None
    first.kill()
    return lived


def kill_server(ground: Ground, first: subprocess.Popen[str]) -> bool:
    """The old one or the new one, all of it at once."""
    return kill(ground, servers(ground))


def kill_sessions(ground: Ground, first: subprocess.Popen[str]) -> bool:
    had = any(words.startswith("sshd: ") and "@" in words for words in ground.node.processes().values())
    ground.node.kill_sessions()
    return had


STRIKES = {
    "worker": kill_a_worker,
    "relay": kill_relays,
    "control": kill_control,
    "server": kill_server,
    "session": kill_sessions,
}


def kill(ground: Ground, pids: list[int]) -> bool:
    if pids:
        ground.node.exec(["kill", "-9", *map(str, pids)], check=False)  # one may have ended by itself meanwhile
    return bool(pids)


# -- who is on the node


def servers(ground: Ground) -> list[int]:
    return [
        pid
        for pid, words in ground.node.processes().items()
        if OURS in words and THEIRS not in words and "nsenter" not in words
    ]


def start_bystanders(ground: Ground) -> dict[int, str]:
    """Start processes of the same user that look like ours and have neither our GPUs nor our port."""
    pids = [int(pid) for pid in ground.node.sh(LOOK_ALIKES).split()]
    return eventually(lambda: are_themselves(survivors(ground, dict.fromkeys(pids, "")), len(pids)))


def are_themselves(found: dict[int, str], count: int) -> dict[int, str] | None:
    """The processes once they have executed what they are."""
    names = " ".join(found.values())
    are_done = "sglang::" in names and THEIRS in names and not any(still in names for still in ("setsid", "bash"))
    return found if len(found) == count and are_done else None


def survivors(ground: Ground, bystanders: dict[int, str]) -> dict[int, str]:
    """Those of ``bystanders`` that live, each with its start time and words: no other process has its pid."""
    pids = ",".join(map(str, bystanders))
    lines = ground.node.exec(["ps", "-o", "pid=,lstart=,args=", "-p", pids], check=False).stdout.splitlines()
    return {int(pid): words for pid, words in (line.split(None, 1) for line in lines)}


class Watched:
    """Looks at a node's processes as long as the block runs: do two releases ever run at once?"""

    def __init__(self, ground: Ground) -> None:
        self.seen_together: list[set[str]] = []
        self._proc = Path(f"/proc/{ground.node.pid}/root/proc")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(0.1):
            ages = set(self._ages())
            if len(ages) > 1:
                self.seen_together.append(ages)

    def _ages(self) -> Iterator[str]:
        for process in self._proc.glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if OURS in words and THEIRS not in words and "nsenter" not in words:
                    given = (process / "environ").read_bytes()
                    age = re.search(rb"(?:^|\0)AGE=([^\0]*)", given)
                    if age is not None and not self._waits(given):
                        yield age[1].decode()

    def _waits(self, given: bytes) -> bool:
        """Whether a process stands before a gate that is closed: it is no server yet."""
        gate = re.search(rb"(?:^|\0)LAMPLIGHTER_GATE=([^\0]*)", given)
        return gate is not None and not Path(f"{self._proc.parent}{gate[1].decode()}").read_text().endswith("go\n")
