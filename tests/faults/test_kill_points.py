"""A worker killed anywhere: the next plain deploy, without any cleaning up, ends `deployed`.

The worker of a deploy runs on strings (tests/faults/puppet.py) and is killed right before its n-th checkpoint. Points
are drawn by a seed: 16 of them in `./inv test`, 50 with LAMPLIGHTER_FAULTS=rows, N with LAMPLIGHTER_SOAK=N
(`./inv dev.soak`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import yaml

from lab import node as lab_node
from lamplighter.inventory import load_inventory
from lamplighter.node import journal
from lamplighter.run.deploy import HostSession
from lamplighter.run.runner import pack
from tests.driver import PROJECT, token
from tests.faults.conftest import say
from tests.faults.state import trouble_on_disk
from tests.lab.conftest import free_port

PUPPET = Path(__file__).with_name("puppet.py")
POINTS = int(os.environ.get("LAMPLIGHTER_SOAK") or (50 if os.environ.get("LAMPLIGHTER_FAULTS") == "rows" else 16))
SEED = int(os.environ.get("LAMPLIGHTER_SEED") or 20240)
SCENES = 2

#: What is killed: a deploy over a serving server; one whose new server dies, so that it rolls back; a first deploy.
STORIES = {"over": 6, "failing": 3, "first": 1}


@dataclass
class Scene:
    """A GPU node in a box without its SSH server, and one server's history on it."""

    directory: Path
    name: str
    port: int = field(default_factory=free_port)
    deploys: int = 0

    def __post_init__(self) -> None:
        self.box = lab_node.prepare(self.name, self.directory, gpus=1)
        self.root = self.box / "home" / "lamplighter"
        self.order = self.directory / f"{self.name}.order"
        runner = pack()
        self.runner = self.root / "bin" / runner.digest
        zipfile.ZipFile(BytesIO(runner.data)).extractall(self.runner)

    @property
    def home(self) -> Path:
        return self.root / "servers" / "demo"

    def forget(self) -> None:
        """Make it a node on which nothing was ever deployed."""
        lab_node.down(self.name, self.directory)
        subprocess.run(["rm", "-rf", str(self.root / "servers")], check=True)

    def deploy(self, order: dict[str, Any] | None = None, **server: Any) -> dict[str, Any] | None:
        """Run a worker to its end, or until it is killed; its end event."""
        self.deploys += 1
        request = self._request(server)
        directory = self.home / "runs" / request["run"]
        directory.mkdir(parents=True, mode=0o700)
        self.order.write_text(json.dumps(order or {}))
        python = ["-I", "-S"]
        words = [sys.executable, *python, str(PUPPET), str(self.order), str(self.runner), "worker"]
        done = subprocess.run(
            words,
            input=json.dumps(request),
            env={**os.environ, "HOME": str(self.box / "home"), "PATH": f"{self.box / 'bin'}:{os.environ['PATH']}"},
            cwd="/",
            text=True,
            capture_output=True,
            start_new_session=True,
            timeout=120,
            check=False,
        )
        told = journal.read(str(directory / "events.jsonl"))
        assert order is None or done.returncode in (0, -9), done.stderr
        return told[-1] if told and told[-1]["event"] == "end" else None

    def _request(self, server: dict[str, Any]) -> dict[str, Any]:
        said = {
            "engine": "demo", "model": "demo-model", "port": self.port, "gpus": "all",
            "env": {"LAB_SPEED": "200", "NUMBER": str(self.deploys)}, **server,
            "args": {"tp": 1, **server.get("args", {})},
        }  # fmt: skip
        inventory = self.directory / f"{self.name}.inventory"
        inventory.mkdir(exist_ok=True)
        host = {"root": str(self.root), "servers": {"demo": said}}
        (inventory / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"box": host}}}))
        found = load_inventory(inventory, PROJECT / "roles")
        resolved = next(iter(found.resolve(["box"])))
        session = HostSession(resolved, None, PROJECT)  # type: ignore[arg-type]
        prepared = session.prepare("deploy", next(iter(resolved.servers.values())))
        return {**prepared, "resolved_root": str(self.root)}

    def trouble(self) -> list[str]:
        """What a plain deploy should not have left: see trouble_on_disk, and more than one server."""
        found = trouble_on_disk(self.root, "demo")
        record = json.loads((self.home / "server.json").read_text())
        mains = {
            int(pid)
            for pid in map(str, lab_node.processes(self.name, self.directory))
            if b"launch_server.py" in _command_line(int(pid))
        }
        if mains != {record["pid"]}:
            found.append(f"servers {sorted(mains)} run, server.json names {record['pid']}")
        if token(self.port) is None:
            found.append("nobody answers")
        return found


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.fixture
def scenes(tmp_path: Path) -> Iterator[list[Scene]]:
    made = [Scene(tmp_path, f"box{number}") for number in range(SCENES)]
    try:
        yield made
    finally:
        for scene in made:
            lab_node.down(scene.name, scene.directory)


def count(scene: Scene, story: str) -> list[str]:
    """The checkpoints of one whole run of ``story``, by name."""
    counted = scene.directory / f"{scene.name}.count"
    begin(scene, story, {"count": str(counted)})
    return counted.read_text().split("\n")[:-1]


def begin(scene: Scene, story: str, order: dict[str, Any]) -> dict[str, Any] | None:
    if story == "first":
        scene.forget()
    failing = {"args": {"lab-fail": "die:weights"}} if story == "failing" else {}
    return scene.deploy(order, **failing)


@pytest.mark.timeout(14_400)
def test_after_every_kill_one_plain_deploy_ends_deployed(scenes: list[Scene], request: pytest.FixtureRequest) -> None:
    assert scenes[0].deploy()["outcome"] == "deployed"  # type: ignore[index]
    assert scenes[1].deploy()["outcome"] == "deployed"  # type: ignore[index]
    checkpoints = {story: count(scenes[0], story) for story in STORIES}
    drawn = random.Random(SEED)
    stories = drawn.choices(list(STORIES), list(STORIES.values()), k=POINTS)
    points = [(story, drawn.randrange(len(checkpoints[story])) + 1) for story in stories]
    began = time.monotonic()
    free: SimpleQueue[Scene] = SimpleQueue()
    for scene in scenes:
        free.put(scene)

    def kill_and_deploy(point: tuple[str, int]) -> list[str]:
        scene = free.get()
        try:
            return try_point(scene, *point, checkpoints[point[0]])
        finally:
            free.put(scene)

    with ThreadPoolExecutor(SCENES) as pool:
        failures = [line for lines in pool.map(kill_and_deploy, points) for line in lines]
    totals = ", ".join(f"{story} {len(found)}" for story, found in checkpoints.items())
    say(request, f"{POINTS} kills (seed {SEED}) in {time.monotonic() - began:.0f} s; checkpoints: {totals}")
    say(request, f"{POINTS - len(failures)} were followed by one plain deploy that ended deployed")
    assert not failures, "\n".join(failures)


def try_point(scene: Scene, story: str, number: int, checkpoints: list[str]) -> list[str]:
    what = f"{story}, killed before checkpoint {number} ({checkpoints[number - 1]})"
    try:
        killed = begin(scene, story, {"kill": number})
        end = scene.deploy()
        if end is None or end["outcome"] != "deployed":
            return [f"{what}: the next deploy ended {json.dumps(end)}"]
        trouble = scene.trouble()
    except Exception as error:
        return [f"{what}: {type(error).__name__}: {error}"]
    return [f"{what}: {'; '.join(trouble)} (killed run ended: {killed is not None})"] if trouble else []
