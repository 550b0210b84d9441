"""Measures what one `verify` costs on the wire, beside testinfra's own backends: ``python -m tests.perf.verify``.

Needs root (a node of its own network, with a real sshd). The same work is timed without delay and at 50 ms round trip
time; the difference, divided by 50 ms, is the number of round trips. Exit status 1 when one `verify` of the shipped
checks, its login included, takes more than 35.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.driver import PROJECT

RTT_MS = 50.0
MOST_ROUND_TRIPS = 35
PORT = 8000

#: Thirty checks of one command each: what a file of one's own would ask.
THIRTY = """
import pytest
PATHS = ["/etc/passwd", "/etc/hosts", "/proc/meminfo", "/bin/sh", "/dev/shm", "/tmp"] * 5
@pytest.mark.parametrize("number", range(30))
def test_path(host, number):
    assert host.run("test -e %s", PATHS[number]).rc == 0
"""


def main() -> int:
    from tests.nodes.fixtures import gpu_furniture
    from tests.nodes.park import NodePark, why_no_nodes

    if why_no_nodes():
        print(f"cannot measure here: {why_no_nodes()}")
        return 0
    with tempfile.TemporaryDirectory() as scratch, NodePark(_made(scratch, "park"), furniture=gpu_furniture) as park:
        node = park.node("gpu1")
        server = {"engine": "demo", "model": "demo-model", "port": PORT, "env": {"LAB_SPEED": "25"}}
        inventory = park.write_inventory(Path(scratch, "inventory"), {"gpu1": {"servers": {"demo": server}}})
        checks = _made(scratch, "thirty") / "test_thirty.py"
        checks.write_text(THIRTY)
        words = [sys.executable, "-m", "invoke", "--search-root", PROJECT, "deploy", "--host", "gpu1"]
        done = park.run(words, inventory=inventory, timeout=300)
        assert done.returncode == 0, done.stderr
        times: list[dict[str, float]] = []
        for delay in (0.0, RTT_MS / 2):
            node.delay(delay)
            words = [sys.executable, "-m", "tests.perf.verify", "measure", inventory, checks.parent, park.ssh_config]
            done = park.run([*map(str, words), node.name, str(park.key)], timeout=600)
            assert done.returncode == 0, done.stderr
            times.append(json.loads(done.stdout.splitlines()[-1]))
    return _tell(*times)


def _made(scratch: str, name: str) -> Path:
    path = Path(scratch, name)
    path.mkdir()
    return path


def _tell(near: dict[str, float], far: dict[str, float]) -> int:
    print(f"{'':58}  RTT 0    RTT {RTT_MS:.0f}   round trips")
    trips = {}
    for what, seconds in far.items():
        trips[what] = (seconds - near[what]) / (RTT_MS / 1000)
        print(f"{what:58} {near[what]:5.2f} s  {seconds:6.2f} s   {trips[what]:6.1f}")
    total = next(count for what, count in trips.items() if what.startswith("one verify"))
    print(f"one verify: {total:.1f} round trips, at most {MOST_ROUND_TRIPS} are allowed")
    return 0 if total <= MOST_ROUND_TRIPS else 1


def measure(inventory: str, thirty: str, ssh_config: str, name: str, key: str) -> None:
    """Time each way once, in the network of the node, after one that nobody counts; print JSON."""
    import testinfra
    import testinfra.host

    from lamplighter.inventory import load_inventory
    from lamplighter.run.backend import NodeBackend
    from lamplighter.run.deploy import open_session
    from lamplighter.run.verify import run_checks, verify

    host = load_inventory(Path(inventory), PROJECT / "roles").host("gpu1")
    server = host.servers["demo"]
    numbers: dict[str, int] = {}
    nobody: Any = None

    def ours() -> None:
        with open_session(host, PROJECT) as session:
            numbers["shipped"] = len(verify(session, server, Path(inventory))["checks"])

    def login() -> None:
        with open_session(host, PROJECT):
            pass

    def thirty_on(asked: Any) -> None:
        results = run_checks(asked, nobody, dict, [Path(thirty)])
        assert [result.outcome for result in results] == ["passed"] * 30, results[0]

    def thirty_ours() -> None:
        with open_session(host, PROJECT) as session:
            backend = NodeBackend(session.node)
            thirty_on(testinfra.host.Host(backend))
            backend.shell.close()

    def thirty_of(kind: str) -> Callable[[], None]:
        return lambda: thirty_on(
            testinfra.get_host(f"{kind}://root@{name}", ssh_config=ssh_config, ssh_identity_file=key)
        )

    ours()  # imports, and the program on the node
    ways = {
        f"one verify: {numbers['shipped']} shipped checks, login included": ours,
        "  of it the login": login,
        "30 checks of one command, our backend, login included": thirty_ours,
        "30 checks of one command, testinfra ssh": thirty_of("ssh"),
        "30 checks of one command, testinfra paramiko": thirty_of("paramiko"),
    }
    times = {}
    for what, way in ways.items():
        best = []
        for _ in range(1 if "testinfra" in what else 2):  # theirs takes long, and is far from ours
            began = time.monotonic()
            try:
                way()
            except Exception as error:
                print(f"{what}: {type(error).__name__}: {error}", file=sys.stderr)
                raise
            best.append(time.monotonic() - began)
        times[what] = min(best)
    print(json.dumps(times))


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(*sys.argv[2:])
    else:
        sys.exit(main())
