"""Drives `./inv` as a person or cron does, against an inventory that a test wrote."""

from __future__ import annotations

import contextlib
import functools
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Done:
    """One finished command. ``events`` are the JSON lines of stdout without the report, ``report`` the last of them."""

    code: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.splitlines() if line.startswith("{")]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "event" in line]

    @property
    def report(self) -> dict[str, Any]:
        return self.lines[-1]["report"]

    def server(self, host: str, name: str) -> dict[str, Any]:
        """The report of one server."""
        return self.report["hosts"][host]["servers"][name]

    def __str__(self) -> str:
        return f"exit {self.code}\n{self.stdout}\n{self.stderr}"


def wait_for_stage(process: Any, stage: str) -> dict[str, Any]:
    """Read a command's JSON lines up to the beginning of ``stage``."""
    for line in process.stdout:
        event: dict[str, Any] = json.loads(line)
        if event.get("event") == "stage_start" and event["stage"] == stage:
            return event
    raise AssertionError(f"{stage} never began")


@dataclass(frozen=True)
class Driver:
    """An inventory directory, and the commands on it.

    ``prefix`` runs them elsewhere (in a test network), ``home`` is their home directory.
    """

    inventory: Path
    prefix: tuple[str, ...] = ()
    home: Path | None = None

    def write(self, host: str, variables: Mapping[str, Any]) -> None:
        """Make the inventory say this of ``host``, and have no other host."""
        self.inventory.mkdir(parents=True, exist_ok=True)
        (self.inventory / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {host: dict(variables)}}}))

    def command(self, *words: str) -> list[str]:
        return [*self.prefix, sys.executable, "-m", "invoke", "--search-root", str(PROJECT), *words]

    def environment(self) -> dict[str, str]:
        home = {"HOME": str(self.home)} if self.home else {}
        return {**os.environ, **home, "LAMPLIGHTER_INVENTORY": str(self.inventory), "TERM": "dumb"}

    def run(self, *words: str, timeout: float = 240) -> Done:
        """Run a command to its end."""
        done = subprocess.run(
            self.command(*words),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    @contextlib.contextmanager
    def started(self, *words: str, stderr: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
        """Run a command while the block runs; it is killed at its end."""
        with subprocess.Popen(
            self.command(*words),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()


#: Ports for servers of the tests, below those that the kernel hands out by itself, in blocks of one session each.
PORTS = range(12_000, 32_000, 400)
_own_block = socket.socket(socket.AF_UNIX)


def free_port() -> int:
    """Return a port that nobody has, and that no other session is given before its server has it."""
    for port in _ports():
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("unreachable: the ports never end")


@functools.cache
def _ports() -> Iterator[int]:
    for first in PORTS:
        with contextlib.suppress(OSError):  # another session's, until it ends
            _own_block.bind(f"\0lamplighter-tests-ports-{first}")
            return itertools.cycle(range(first, first + PORTS.step))
    raise RuntimeError("more test sessions than blocks of ports")


@contextlib.contextmanager
def signals_as_before() -> Iterator[None]:
    """A command that ends in this process leaves its signals unheeded, as is right where the process ends, too."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def eventually(question: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Ask until the answer is true, and return it; fail after ``seconds``, which only a hang takes."""
    deadline = time.monotonic() + seconds
    while not (answer := question()):
        assert time.monotonic() < deadline, f"{question} was never true within {seconds} s"
        time.sleep(0.05)
    return answer


def ask(port: int, path: str, body: object = None, host: str = "127.0.0.1", timeout: float = 60) -> tuple[int, Any]:
    """Ask a server over HTTP; the status and the parsed answer. (0, None) when nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, path, data, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read()
        return reply.status, json.loads(text) if text else None
    except OSError:
        return 0, None
    finally:
        connection.close()


def token(port: int, model: str = "demo-model") -> str | None:
    """One completion's text; None when nothing serves."""
    status, answer = ask(port, "/v1/completions", {"model": model, "prompt": "Hello", "max_tokens": 4})
    return answer["choices"][0]["text"] if status == 200 else None
