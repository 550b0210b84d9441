"""The ground on which faults are tried: a node with an old server that serves, and a deploy held at a stage."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.driver import Done, Driver, eventually
from tests.faults.words import Found
from tests.nodes.fixtures import GPU_DIRECTORY
from tests.nodes.park import PROJECT, Node, NodePark

HERE = Path(__file__).parent
PORT = 18000
#: Seconds after which a command or a condition counts as stuck, on a machine that many tests share.
PATIENCE = 300
ROOT = "/var/lib/lamplighter"
HOME = f"{ROOT}/servers/demo"
#: The interpreter of the node side: Python itself, except that a worker is put on strings while there is an order.
HELD_DIRECTORY = "/opt/held"
PYTHON = f"{HELD_DIRECTORY}/python3"
ORDER, HELD = f"{HELD_DIRECTORY}/order", f"{HELD_DIRECTORY}/held"
PUPPET = HERE / "puppet.py"
WRAPPER = f"""#!/bin/bash
if [ "$4" = worker ] && [ -e {ORDER} ]; then
    exec -a "$0" /usr/bin/python3 -I -S {shlex.quote(str(PUPPET))} {ORDER} "$3" "$4"
fi
exec -a "$0" /usr/bin/python3 "$@"
"""
ASK = """
curl -s -m 10 -d '{{"model": "demo-model", "prompt": "Hello", "max_tokens": 2}}' -H 'Content-Type: application/json' \\
    http://127.0.0.1:{port}/v1/completions && echo && curl -s -m 10 http://127.0.0.1:{port}/lab/environ && echo &&
    curl -s -m 10 http://127.0.0.1:{port}/v1/models || true
"""


@dataclass
class Ground:
    """One node and the inventory that names it ``gpu``. Each release is told by its AGE, which its server knows."""

    park: NodePark
    node: Node
    driver: Driver
    age: int = 0
    serving: str = "none"
    settings: dict[str, Any] = field(default_factory=dict)
    #: Runs whose journals lack events because the disk was full.
    forgiven: set[str] = field(default_factory=set)
    #: The age of each release that a run was about.
    ages: dict[str, str] = field(default_factory=dict)
    #: What the last command said that was run to its end.
    last: Done | None = None
    transport: str = "auto"
    #: How long the last plain deploy took, its command's start included.
    deploy_seconds: float = 0.0

    @classmethod
    def make(cls, park: NodePark, name: str, directory: Path, *, systemd: bool) -> Ground:
        ground = cls(park, park.node(name, systemd=systemd), Driver(directory / name, tuple(park.hub_words([]))))
        ground.node.write(PYTHON, WRAPPER, mode="755")
        return ground

    # what the inventory says

    def configure(self, **server: Any) -> None:
        """Make the inventory ask for a release that the node has not seen yet."""
        self.age += 1
        self.settings = server
        self.say(server)

    def say(self, server: dict[str, Any]) -> None:
        self.driver.write("gpu", self.wanting(server))

    def wanting(self, server: dict[str, Any]) -> dict[str, Any]:
        """What an inventory says of the node that wants a release of this AGE there."""
        return {
            **self.node.connection(),
            "known_hosts": str(self.park.known_hosts),
            "ansible_python_interpreter": PYTHON,
            "connect_timeout": 10,
            "transport": self.transport,
            "servers": {
                "demo": {
                    "engine": "demo", "model": "demo-model", "port": PORT, "gpus": "all",
                    "launcher": "auto" if self.node.systemd else "detached", **server,
                    "args": {"tp": 1, **server.get("args", {})},
                    "env": {"LAB_SPEED": "60", "AGE": str(self.age), **server.get("env", {})},
                    "timeouts": {"stop": 3, "free": 10, "ready": 120, **server.get("timeouts", {})},
                }
            },
        }  # fmt: skip

    def deploy(self) -> Done:
        began = time.monotonic()
        done = self.run("deploy", "--json")
        self.deploy_seconds = time.monotonic() - began
        return done

    def run(self, *words: str) -> Done:
        self.last = self.driver.run(*words, "--host", "gpu", timeout=PATIENCE)
        return self.last

    def learn(self, done: Done, age: int | None = None) -> None:
        """Remember the age (the last one) of the release that a deploy, or an attach to it, was about."""
        for part in done.report["hosts"].get("gpu", {"servers": {}})["servers"].values():
            if part["release"] is not None:
                self.ages[part["release"]] = str(age or self.age)

    def settle(self, **server: Any) -> str:
        """Have an old release serve that asks for nothing special; its age."""
        if self.serving == "none" or server or self.settings:
            self.configure(**server)
            done = self.deploy()
            assert done.code == 0, f"the ground cannot be prepared: {done}"
            self.learn(done)
            self.serving = str(self.age)
        return self.serving

    def start_by_hand(self) -> str:
        """Make it a node that never heard of us, with a server that a person has started; its age."""
        if self.serving != "none":
            assert self.run("stop", "--json").code == 0
        words = f"--model-path demo-model --served-model-name demo-model --port {PORT} --tp 1 --lab-speed 60"
        self.node.sh(
            f"rm -rf {ROOT}/servers; cd /root; "
            f"AGE=hand setsid lamplighter-demo-server {words} >by-hand.log 2>&1 </dev/null &"
        )
        eventually(lambda: self.answer() == "hand", PATIENCE)
        self.serving, self.settings = "none", {}
        return "hand"

    # what the node does

    @contextlib.contextmanager
    def holding(self, stage: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
        """A deploy that waits at the beginning of ``stage``; `release` lets it go on."""
        self.node.sh(f"rm -f {HELD}")
        self.node.write(ORDER, json.dumps({"hold": stage, "held": HELD, **more}))
        try:
            with self.driver.started("deploy", "--json", "--host", "gpu", stderr=subprocess.PIPE) as process:
                eventually(lambda: self.held_worker() or process.poll() is not None, PATIENCE)
                assert process.poll() is None, process.stdout.read() if process.stdout else ""
                yield process
        finally:
            self.release()

    def held_worker(self) -> int:
        return int(self.node.sh(f"cat {HELD} 2>/dev/null || echo 0") or 0)

    def release(self) -> None:
        self.node.sh(f"rm -f {ORDER}")

    def answer(self) -> str:
        """Ask for a token; the age of the release that gave it, or `none`."""
        return self.look().age

    def look(self) -> Found:
        """Ask for a token, past all that is ours; who gave it."""
        return look(self.node)

    def inject(self, **states: Any) -> None:
        """Put nvidia-smi into an odd state (lab/control.py); none: back to normal."""
        self.node.write(f"{GPU_DIRECTORY}/control.json", json.dumps(states), mode="666")

    def python(self, program: str, *words: str) -> str:
        """Run a program on the node with the project on its path; its output."""
        python = f"import sys; sys.path.insert(0, {str(PROJECT)!r}); {program}"
        return self.node.exec([sys.executable, "-c", python, *words]).stdout

    def trouble(self, *, gaps: bool = False) -> list[str]:
        """What an ended run may not leave behind; with ``gaps`` the journals so far may lack events, for good."""
        found = json.loads(
            self.node.exec(["/usr/bin/python3", "-I", "-S", str(HERE / "state.py"), ROOT, "demo"]).stdout
        )
        if gaps:
            self.forgiven |= {flaw.partition(":")[0] for flaw in found if ": numbers " in flaw}
        found = [flaw for flaw in found if flaw.partition(":")[0] not in self.forgiven]
        until = time.monotonic() + 60  # one whose last word is read may still be ending
        while (workers := self.workers()) and time.monotonic() < until:
            time.sleep(0.1)
        return [*found, *(f"still runs: {words}" for words in workers)]

    def workers(self) -> list[str]:
        return [words for words in self.node.processes().values() if words.endswith(" worker")]

    def launchers(self) -> int:
        """How many demo servers run, serving or not."""
        return sum(
            "lab/launch_server.py" in words and "nsenter" not in words for words in self.node.processes().values()
        )


def look(node: Node, port: int = PORT) -> Found:
    """Ask the server on ``node`` for a token over its loopback, and the one that gives it who it is."""
    told = node.sh(ASK.format(port=port)).splitlines()
    if len(told) < 3 or "text" not in told[0]:
        return Found()
    main, models = json.loads(told[1])["processes"][0], json.loads(told[2])
    return Found(str(main["environ"]["AGE"]), main["pid"], port, models["data"][0]["id"])
