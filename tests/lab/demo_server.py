"""Starts the demo server for tests, on a free port, and ends every process of it afterwards."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.driver import free_port

SPEED = "60"


@dataclass
class Reply:
    """What an endpoint answered."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Demo:
    """A running demo server."""

    def __init__(self, root: Path, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.root = root
        self.process = process
        self.port = port
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_bytes().decode(errors="replace")  # with its carriage returns

    @property
    def pieces(self) -> list[str]:
        return re.split(r"[\r\n]+", self.log)

    def ask(
        self, path: str, body: object = None, *, timeout: float = 60, headers: dict[str, str] | None = None
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, headers or {})
            reply = connection.getresponse()
            return Reply(reply.status, reply.read().decode())
        finally:
            connection.close()

    def status(self, path: str) -> int | None:
        """The status of a GET; None while the port refuses."""
        try:
            return self.ask(path).status
        except OSError:
            return None

    def processes(self) -> dict[str, int]:
        """Title -> pid of the live processes of the group (argv[0] of the rest: launcher, resource tracker)."""
        found = {}
        for pid in members(self.process.pid):
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
                found[title if "::" in title else f"{title} {pid}"] = pid
        return found

    def wait_ready(self) -> Demo:
        self.wait_line("fired up and ready")
        wait_until(lambda: self.status("/health") == 200)
        return self

    def wait_line(self, text: str) -> None:
        wait_until(lambda: text in self.log or self.process.poll() is not None)
        assert text in self.log, f"ended with {self.process.poll()} before {text!r}:\n{self.log[-2000:]}"

    def wait_end(self) -> int:
        return self.process.wait(120)


@contextlib.contextmanager
def demo(root: Path, *words: str, tp: int = 1, port: int | None = None, **environment: str) -> Iterator[Demo]:
    """The demo server of the node ``root``, started as a launch script would; LAB_SPEED unless given."""
    port = port or free_port()
    log = root / f"server-{port}-{time.monotonic_ns()}.log"
    command = [root / "bin" / "lamplighter-demo-server", "--model-path", "demo-model", "--port", str(port)]
    variables = {"PATH": "/usr/bin:/bin", "LAB_SPEED": SPEED, **environment}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*map(str, command), "--tp", str(tp), *words],
            env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/",
        )  # fmt: skip
    try:
        yield Demo(root, process, port, log)
    finally:
        # The tree is one group, orphans included; the group's number stays taken as long as one of them lives.
        while members(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.01)
        process.wait()


def members(group: int) -> list[int]:
    """The live processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[2]) == group and fields[0] not in (b"Z", b"X"):
                    found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], object], timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
