"""Measures what one `verify` costs on the wire, beside testinfra's own backends: ``python -m tests.perf.verify``.

Needs root (a node of its own network, with a real sshd) and an idle machine. The same work is done without delay and at
50 ms round trip time, in turn. What is taken is the time in which nothing was computed here: the wall time less the
command's own CPU time, which varies more than the wire does. The median difference, divided by the round trip that a
TCP connect then takes (51 ms; what delays packets has a grain), is the number of round trips that somebody waits for:
less of a login that travels while the checks' own process imports pytest. Exit status 1 when one `./inv verify`, of the
shipped checks or of thirty of one command each, its login included, takes more than 35.

facts: a login of paramiko's to OpenSSH takes 6 round trips (TCP 1; the server's banner 1, and its key exchange offer 1
more, which Nagle holds back until the banner is acknowledged; the exchange 1, the service 1, the key 1); opening a
channel 2 (Nagle again: the server tells its host keys first); a command on it, the first included, 1.
"""

from __future__ import annotations

import json
import resource
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
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


#: What is timed in a process of its own, as people and cron run it; REPEATS times without and with delay, in turn.
COMMANDS = {
    "one ./inv verify: the shipped checks": ("-k", "not test_path"),
    "one ./inv verify: 30 own checks of one command": ("-k", "test_path"),
}
#: What is timed inside one process, in the network of the node.
ROUND_TRIP = "  a round trip: one TCP connect"
OURS = (
    ROUND_TRIP,
    "  our login alone",
    "  paramiko's login alone, as it comes",
    "30 checks, our backend after a login that is waited for",
)
THEIRS = ("30 checks, testinfra's paramiko backend", "30 checks, testinfra's ssh backend")
REPEATS = 7

#: What a check may know of the server; those that are timed want nothing of it.
SERVER = {
    "name": "",
    "engine": {},
    "model": "",
    "served_name": "",
    "host": "",
    "port": 0,
    "gpus": [],
    "argv": [],
    "env": {},
}


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
        checks = _made(scratch, "inventory/checks") / "test_thirty.py"
        checks.write_text(THIRTY)
        invoke = [sys.executable, "-m", "invoke", "--search-root", PROJECT]
        done = park.run([*invoke, "deploy", "--host", "gpu1"], inventory=inventory, timeout=300)
        assert done.returncode == 0, done.stderr
        near: dict[str, list[float]] = defaultdict(list)
        far: dict[str, list[float]] = defaultdict(list)
        words = [sys.executable, "-m", "tests.perf.verify", "measure", inventory, checks.parent, park.ssh_config]
        for repeat in range(REPEATS):
            for delay, times in ((0.0, near), (RTT_MS / 2, far)):
                node.delay(delay)
                for what, chosen in COMMANDS.items():
                    began = time.monotonic() - _cpu_of_children()
                    done = park.run([*invoke, "verify", "--host", "gpu1", *chosen], inventory=inventory, timeout=120)
                    times[what].append(time.monotonic() - _cpu_of_children() - began)
                    assert done.returncode == 0, (done.stdout, done.stderr)
                ways = OURS if repeat else [*OURS, *THEIRS]  # theirs take long, and are far from ours
                done = park.run([*map(str, words), node.name, str(park.key), *ways], timeout=600)
                assert done.returncode == 0, done.stderr
                for what, seconds in json.loads(done.stdout.splitlines()[-1]).items():
                    times[what].append(seconds)
    return _tell(near, far)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _made(scratch: str, name: str) -> Path:
    path = Path(scratch, name)
    path.mkdir()
    return path


def _tell(near: dict[str, list[float]], far: dict[str, list[float]]) -> int:
    print(f"{'waited for':58} RTT 0     RTT {RTT_MS:.0f}   round trips (median, of how many)")
    more = {what: median(b - a for a, b in zip(near[what], far[what], strict=True)) for what in far}
    trips = {}
    for what, seconds in far.items():
        trips[what] = more[what] / more[ROUND_TRIP]
        times = f"{median(near[what]):6.3f} s  {median(seconds):6.3f} s"
        print(f"{what:58} {times}   {trips[what]:6.1f}  ({len(seconds)})")
    most = max(trips[what] for what in COMMANDS)
    print(f"one verify, login included: {most:.1f} round trips at most, {MOST_ROUND_TRIPS} are allowed")
    return 0 if most <= MOST_ROUND_TRIPS else 1


def measure(inventory: str, thirty: str, ssh_config: str, name: str, key: str, *wanted: str) -> None:
    """Time each of the ``wanted`` ways once, in the network of the node, after one that nobody counts; print JSON."""
    import paramiko
    import testinfra

    from lamplighter.inventory import load_inventory
    from lamplighter.run.checks import Order, run_checks
    from lamplighter.run.host_session import open_session
    from lamplighter.run.shell import Shell

    host = load_inventory(Path(inventory), PROJECT / "roles").host("gpu1")

    def connect() -> None:
        socket.create_connection((host.connection.host, 22)).close()

    def login() -> None:
        with open_session(host, PROJECT):
            pass

    def bare_login() -> None:
        with paramiko.SSHClient() as client:
            client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
            client.connect(host.connection.host, username="root", key_filename=key, look_for_keys=False)

    class Asked:
        """The node by one way or another."""

        def __init__(self, run_all: Callable[..., Any]) -> None:
            self.run_all = run_all

        def connect(self) -> dict[str, Any]:
            return {}

        def facts(self) -> dict[str, Any]:
            return {}

        def tell(self, what: str, *said: Any) -> None: ...

    def thirty_on(run_all: Callable[..., Any]) -> None:
        results = run_checks(Asked(run_all), Order(SERVER, (thirty,), {}, {"check_seconds": 300}))
        assert [result.outcome for result in results] == ["passed"] * 30, results[0]

    def thirty_ours() -> None:
        with open_session(host, PROJECT) as session:
            shell = Shell(session.node)
            thirty_on(shell.run_all)
            shell.close()

    def thirty_of(kind: str) -> Callable[[], None]:
        def thirty_theirs() -> None:
            theirs = testinfra.get_host(f"{kind}://root@{name}", ssh_config=ssh_config, ssh_identity_file=key)
            thirty_on(lambda commands, seconds=None: [theirs.run(command) for command in commands])

        return thirty_theirs

    ways = dict(
        zip(
            (*OURS, *THEIRS),
            (connect, login, bare_login, thirty_ours, thirty_of("paramiko"), thirty_of("ssh")),
            strict=True,
        )
    )
    thirty_ours()  # imports
    times = {}
    for what in wanted:
        began = time.monotonic() - time.process_time()
        ways[what]()
        times[what] = time.monotonic() - time.process_time() - began
    print(json.dumps(times))


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(*sys.argv[2:])
    else:
        sys.exit(main())
