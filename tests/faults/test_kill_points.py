"""A worker killed anywhere: the next plain deploy, without any cleaning up, ends `deployed`.

The worker of a deploy runs on strings (tests/faults/puppet.py) and is killed right before its n-th checkpoint, on
nodes with and without systemd in turn. Points are drawn by a seed: 50 of them in `./inv test`, N with
LAMPLIGHTER_SOAK=N (`./inv dev.soak`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import yaml

from lamplighter.inventory import load_inventory
from lamplighter.node import journal
from lamplighter.run.host_session import HostSession
from lamplighter.run.payload import pack
from tests.driver import PROJECT
from tests.faults.conftest import say, say_now
from tests.faults.ground import HELD_DIRECTORY, HOME, PORT, PUPPET, ROOT, look
from tests.faults.state import trouble_on_disk
from tests.nodes.park import Node, NodePark, why_no_systemd

SOAK = os.environ.get("LAMPLIGHTER_SOAK")
POINTS = int(SOAK or 50)
SEED = int(os.environ.get("LAMPLIGHTER_SEED") or 20240)
KINDS = ("plain", "systemd")
#: A point keeps a processor busy most of the time, so more scenes than processors gain little.
SCENES_OF_A_KIND = 2
TOLD_EACH = 20

#: What is killed: a deploy over a serving server; one whose new server dies, so that it rolls back; a first deploy.
STORIES = {"over": 6, "failing": 3, "first": 1}
ORDER = f"{HELD_DIRECTORY}/kill.json"
COUNT = f"{HELD_DIRECTORY}/count"


@dataclass(frozen=True)
class Point:
    """Where a run is killed: before the ``number``-th checkpoint of its story, which is called ``name``."""

    kind: str
    story: str
    number: int
    name: str

    def __str__(self) -> str:
        return f"{self.story} ({self.kind}), killed before checkpoint {self.number} ({self.name})"


@dataclass
class Scene:
    """A node, whose workers are run directly, and one server's history on it."""

    node: Node
    inventory: Path
    deploys: int = 0
    last_runs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        runner = pack()
        self.runner = f"{ROOT}/bin/{runner.digest}"
        zipfile.ZipFile(BytesIO(runner.data)).extractall(self.seen(self.runner))
        self.seen(HELD_DIRECTORY).mkdir(parents=True)

    def seen(self, path: str) -> Path:
        """A path of the node as this machine sees it."""
        return Path(f"/proc/{self.node.pid}/root{path}")

    def begin(self, story: str, order: dict[str, Any]) -> dict[str, Any] | None:
        """Run the worker of ``story`` on strings; its end event, None if it was killed before that."""
        if story == "first":
            self.forget()
        failing = {"args": {"lab-fail": "die:weights"}} if story == "failing" else {}
        return self.run("deploy", order, **failing)

    def forget(self) -> None:
        """Make it a node on which nothing was ever deployed."""
        end = self.run("undeploy", stop=True)
        assert end is not None, "the worker of undeploy was killed"
        assert end["outcome"] == "undeployed", end
        self.node.exec(["rm", "-rf", HOME])

    def run(
        self, verb: str, order: dict[str, Any] | None = None, *, stop: bool = False, **server: Any
    ) -> dict[str, Any] | None:
        """Run a worker to its end, or until it is killed; its end event."""
        self.deploys += 1
        request = {**self._request(verb, server), "stop": stop}
        directory = f"{HOME}/runs/{request['run']}"
        self.last_runs = [*self.last_runs[-1:], request["run"]]
        self.seen(directory).mkdir(parents=True, mode=0o700)
        self.seen(ORDER).write_text(json.dumps(order or {}))
        words = ["/usr/bin/python3", "-I", "-S", str(PUPPET), ORDER, self.runner, "worker"]
        done = self.node.exec(words, input=json.dumps(request), check=False, timeout=300)
        assert done.returncode in (0, -9, 137), f"the worker ended with {done.returncode}: {done.stderr}"
        told = journal.read(str(self.seen(f"{directory}/events.jsonl")))
        return told[-1] if told and told[-1]["event"] == "end" else None

    def _request(self, verb: str, server: dict[str, Any]) -> dict[str, Any]:
        said = {
            "engine": "demo", "model": "demo-model", "port": PORT, "gpus": [0, 1],
            "launcher": "auto" if self.node.systemd else "detached",
            "env": {"LAB_SPEED": "200", "AGE": str(self.deploys)}, **server,
            "args": {"tp": 1, **server.get("args", {})},
        }  # fmt: skip
        self.inventory.mkdir(exist_ok=True)
        (self.inventory / "hosts.yml").write_text(
            yaml.safe_dump({"all": {"hosts": {"gpu": {"servers": {"demo": said}}}}})
        )
        found = load_inventory(self.inventory, PROJECT / "roles")
        host = next(iter(found.resolve(["gpu"])))
        session = HostSession(host, None, PROJECT)  # type: ignore[arg-type]
        return {**session.prepare(verb, next(iter(host.servers.values()))), "resolved_root": ROOT}

    def trouble(self) -> list[str]:
        """What a plain deploy should not have left; and that what serves is what it brought, once."""
        killed, plain = self.last_runs  # one that was killed before its first word is removed
        runs = [killed, plain] if self.seen(f"{HOME}/runs/{killed}").exists() else [plain]
        found = trouble_on_disk(self.seen(ROOT), "demo", runs=runs)
        record = json.loads(self.seen(f"{HOME}/server.json").read_text())
        mains = [pid for pid, words in self.node.processes().items() if is_main(words)]
        if len(mains) != 1 or (not record.get("unit") and mains != [record["pid"]]):
            found.append(f"servers {sorted(mains)} run, server.json names {record['pid']}")
        age = look(self.node).age
        if age != str(self.deploys):
            found.append(f"{age} answers, not {self.deploys}")
        return found


def is_main(words: str) -> bool:
    return "lab/launch_server.py" in words


@pytest.fixture
def scenes(park: NodePark, tmp_path: Path, require: Any) -> Iterator[list[Scene]]:
    require("systemd", why_no_systemd())
    nodes = [
        park.node(f"kill-{kind[:5]}{number}", systemd=kind == "systemd", disk_mib=512)
        for kind in KINDS
        for number in range(SCENES_OF_A_KIND)
    ]
    yield [Scene(node, tmp_path / node.name) for node in nodes]
    for node in nodes:
        park.forget(node.name)


@pytest.mark.timeout(14_400)
def test_after_every_kill_one_plain_deploy_ends_deployed(scenes: list[Scene], request: pytest.FixtureRequest) -> None:
    began = time.monotonic()
    free: dict[str, SimpleQueue[Scene]] = {kind: SimpleQueue() for kind in KINDS}

    def try_in_turn(point: Point) -> list[str]:
        scene = free[point.kind].get()
        try:
            return try_point(scene, point)
        finally:
            free[point.kind].put(scene)

    with cancelling(ThreadPoolExecutor(len(scenes))) as pool:
        list(pool.map(prepare, scenes))
        for scene in scenes:
            free["systemd" if scene.node.systemd else "plain"].put(scene)
        checkpoints = dict(zip(KINDS, pool.map(count_all, scenes[::SCENES_OF_A_KIND]), strict=True))
        points = draw(checkpoints)
        failures: list[str] = []
        tried = [pool.submit(try_in_turn, point) for point in points]
        for number, future in enumerate(as_completed(tried), 1):
            for failure in future.result():
                failures.append(failure)
                if SOAK:
                    say_now(request, f"FAILED {failure}")
            if SOAK and number % TOLD_EACH == 0:
                took = time.monotonic() - began
                say_now(request, f"{number} kills in {took:.0f} s, {len(failures)} failures")
    for kind, stories in checkpoints.items():
        drawn = Counter((point.story, point.number) for point in points if point.kind == kind)
        told = ", ".join(
            f"{story} {sum(one == story for one, _ in drawn)} of {len(found)}" for story, found in stories.items()
        )
        say(request, f"checkpoints struck on {kind} nodes: {told}")
    say(request, f"{POINTS} kills (seed {SEED}) in {time.monotonic() - began:.0f} s")
    say(request, f"{POINTS - len(failures)} were followed by one plain deploy that ended deployed")
    assert not failures, "\n".join(failures)


@contextlib.contextmanager
def cancelling(pool: ThreadPoolExecutor) -> Iterator[ThreadPoolExecutor]:
    """The pool, whose end waits for what is being done, not for what is still to do."""
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def prepare(scene: Scene) -> None:
    end = scene.run("deploy")
    assert end is not None, "the worker was killed"
    assert end["outcome"] == "deployed", end


def count_all(scene: Scene) -> dict[str, list[str]]:
    """The checkpoints of one whole run of each story, by name."""
    found = {}
    for story in STORIES:
        scene.begin(story, {"count": COUNT})
        found[story] = scene.seen(COUNT).read_text().splitlines()
    return found


def draw(checkpoints: dict[str, dict[str, list[str]]]) -> list[Point]:
    """POINTS points, half of them for each kind of node; the seed decides which."""
    drawn = random.Random(SEED)
    points = []
    for number in range(POINTS):
        kind = KINDS[number % 2]
        story = drawn.choices(list(STORIES), list(STORIES.values()))[0]
        names = checkpoints[kind][story]
        at = drawn.randrange(len(names))
        points.append(Point(kind, story, at + 1, names[at]))
    return points


def try_point(scene: Scene, point: Point) -> list[str]:
    """Kill and deploy; what was wrong afterwards."""
    try:
        killed = scene.begin(point.story, {"kill": point.number})
        end = scene.run("deploy")
        if end is None or end["outcome"] != "deployed":
            return [f"{point}: the next deploy ended {json.dumps(end)}"]
        trouble = scene.trouble()
    except Exception as error:
        return [f"{point}: {type(error).__name__}: {error}"]
    return [f"{point}: {'; '.join(trouble)} (killed run ended: {killed is not None})"] if trouble else []
