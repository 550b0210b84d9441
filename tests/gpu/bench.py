"""What the scenarios share: the machine, `./inv` on it, witnesses that do not belong to lamplighter, and the table.

Standard library only, because the first scenario runs before the project's own packages are there.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "gpu"
SERVER = "tiny"
PORT = 30000
QUERY_GPUS = ["--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
QUERY_APPS = ["--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits"]


@dataclass(frozen=True)
class Outcome:
    """One finished `./inv` command."""

    code: int
    lines: list[dict[str, Any]]
    text: str
    seconds: float

    @property
    def events(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "event" in line]

    def server(self, name: str = SERVER) -> dict[str, Any]:
        """The last line's report of one server; empty when there is none."""
        with contextlib.suppress(IndexError, KeyError):
            return dict(self.lines[-1]["report"]["hosts"][HOST]["servers"][name])
        return {}

    def stage(self, name: str) -> dict[str, Any]:
        """The end of a stage; empty when it was not reached."""
        ends = [event for event in self.events if event["event"] == "stage_end" and event["stage"] == name]
        return ends[-1] if ends else {}

    def said(self, part: str) -> str:
        """The first message that has ``part`` in it."""
        return next((event["message"] for event in self.events if part in str(event.get("message"))), "")


@dataclass
class Bench:
    """The machine as run.sh describes it, and the table that grows."""

    machine: dict[str, Any]
    out: Path
    scenario: str = ""
    failed: int = 0
    _count: int = field(default=0)

    @property
    def base(self) -> Path:
        return Path(self.machine["base"])

    @property
    def raw(self) -> Path:
        return self.base / "raw"

    def fresh(self, what: str) -> Path:
        """A new file among the raw outputs."""
        self.raw.mkdir(exist_ok=True)
        self._count += 1
        return self.raw / f"{self.scenario}-{self._count:02}-{what}"

    # ---- the table

    def check(self, what: str, passed: object, evidence: object = "") -> bool:
        """Add a row to the table and say it."""
        row = {
            "scenario": self.scenario,
            "check": what,
            "passed": bool(passed),
            "evidence": " ".join(f"{evidence}".split()),
        }
        self.failed += not passed
        with (self.base / "table.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{'PASS' if passed else 'FAIL'} {self.scenario}: {what}: {row['evidence'][:600]}", flush=True)
        return bool(passed)

    def note(self, text: str) -> None:
        print(f"     {time.strftime('%T')} {self.scenario}: {text}", flush=True)

    def save(self) -> None:
        """Write the table and the raw outputs so far to where they are fetched from."""
        table = self.base / "table.jsonl"
        rows = [json.loads(line) for line in table.read_text().splitlines()] if table.exists() else []
        (self.out / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        wide = max([len(row["scenario"]) for row in rows], default=0)
        words = [
            f"{'pass' if row['passed'] else 'FAIL'}  {row['scenario']:{wide}}  {row['check']}: {row['evidence']}\n"
            for row in rows
        ]
        (self.out / "table.txt").write_text("".join(words))
        with tarfile.open(self.out / "raw.tar.gz", "w:gz") as archive:
            for path in (self.raw, *self.node_root().glob("servers/*/runs")):
                if path.is_dir():
                    archive.add(path, arcname=str(path.relative_to(path.anchor)))

    def node_root(self) -> Path:
        """Where lamplighter keeps the node's state."""
        return Path(self.machine.get("root", "/var/lib/lamplighter"))

    # ---- what the inventory says

    def server(self, **changes: Any) -> dict[str, Any]:
        """The server of most scenarios, with ``changes``; mappings are merged."""
        wanted: dict[str, Any] = {
            "engine": "sglang",
            "engine_version": "0.5.16",
            "model": self.machine["model"],
            "served_name": "tiny",
            "port": PORT,
            "python": self.machine["python"],
            "args": {
                "tp": 1,
                "attention-backend": "triton",
                "sampling-backend": "pytorch",
                "disable-custom-all-reduce": True,
                "mem-fraction-static": 0.7,
            },
            "env": {
                **self.machine["environment"],
                "NCCL_PROTO": "LL",
                "NCCL_ALGO": "Ring",
                "NCCL_P2P_LEVEL": {"value": "SYS", "mode": "force"},
                "CUDA_DEVICE_MAX_CONNECTIONS": {"value": "32", "mode": "force"},
            },
            "timeouts": {"stop": 30, "ready": 240},
        }
        for name, value in changes.items():
            wanted[name] = {**wanted[name], **value} if isinstance(wanted.get(name), dict) and value else value
        return wanted

    def write_inventory(self, **servers: Mapping[str, Any]) -> None:
        directory = self.base / "inventory"
        directory.mkdir(exist_ok=True)
        host = {**self.machine["ssh"], "servers": servers}
        if "root" in self.machine:
            host["root"] = self.machine["root"]
        (directory / "hosts.yml").write_text(json.dumps({"all": {"hosts": {HOST: host}}}, indent=1))

    # ---- lamplighter

    def inv(self, *words: str, timeout: float = 200, listen: Callable[[dict[str, Any]], None] | None = None) -> Outcome:
        """Run a command of `./inv`; ``listen`` is called with each JSON line as it comes."""
        began = time.monotonic()
        stem = self.fresh(words[0])
        with stem.with_suffix(".err").open("wb") as errors:
            process = subprocess.Popen(
                [*self.machine["tool"], *words, "--json", "--host", HOST],
                env={**os.environ, "LAMPLIGHTER_INVENTORY": str(self.base / "inventory"), "TERM": "dumb"},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        assert process.stdout
        clock = threading.Timer(timeout, process.kill)
        clock.start()
        lines, text = [], ""
        try:
            for piece in process.stdout:
                text += piece
                if piece.startswith("{"):
                    lines.append(json.loads(piece))
                    if listen:
                        listen(lines[-1])
        finally:
            clock.cancel()
            process.kill() if process.poll() is None and sys.exc_info()[0] else None
            code = process.wait()
            stem.with_suffix(".jsonl").write_text(text)
        outcome = Outcome(code, lines, stem.with_suffix(".err").read_text(), time.monotonic() - began)
        self.note(f"inv {' '.join(words)}: exit {code} after {outcome.seconds:.1f} s")
        return outcome

    def deploy(self, name: str = SERVER, timeout: float = 200, listen: Any = None, **server: Any) -> Outcome:
        """Deploy one server as the inventory would say it."""
        self.write_inventory(**{name: self.server(**server)})
        return self.inv("deploy", timeout=timeout, listen=listen)

    def by_hand(self, environment: Mapping[str, str], *extra: str) -> subprocess.Popen[bytes]:
        """Start the engine as an engineer would, without lamplighter, with nothing but ``environment``."""
        words = [self.machine["python"], "-m", "sglang.launch_server", "--model-path", self.machine["model"]]
        words += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(PORT), "--attention-backend"]
        words += ["triton", "--sampling-backend", "pytorch", "--disable-custom-all-reduce"]
        words += ["--mem-fraction-static", "0.7", *extra]
        given = {"HOME": str(Path.home()), **self.machine["environment"], **environment}
        with self.fresh("by-hand.log").open("wb") as log:
            return subprocess.Popen(
                words, env=given, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True
            )

    # ---- witnesses of our own

    def smi(self, words: Sequence[str]) -> str:
        done = subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, timeout=20, check=False, env=self.smi_environment()
        )
        return done.stdout

    def smi_environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.machine.get('smi', '')}:{os.environ['PATH']}".lstrip(":")}

    def used(self) -> int:
        """MiB in use on all GPUs, as nvidia-smi says."""
        return sum(int(line.split(",")[1]) for line in self.smi(QUERY_GPUS).splitlines() if "," in line)

    def gpu_pids(self) -> dict[int, str]:
        """Processes with GPU memory: names by pid."""
        rows = [line.split(", ") for line in self.smi(QUERY_APPS).splitlines()]
        return {int(row[1]): row[2] for row in rows if len(row) == 4}


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block after ``seconds``."""

    def too_late(_number: int, _frame: object) -> None:
        raise TimeoutError(f"over its {seconds} s")

    signal.signal(signal.SIGALRM, too_late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def eventually(question: Callable[[], Any], seconds: float, pause: float = 0.05) -> Any:
    """Ask until the answer is true, and return it; the last answer after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(pause)
    return answer


def token(port: int = PORT, model: str = "tiny", timeout: float = 20) -> str | None:
    """One completion's text; None when nothing answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 4})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        answer = json.loads(reply.read())
        return repr(answer["choices"][0]["text"]) if reply.status == 200 else None  # never empty, so never false
    except (OSError, http.client.HTTPException, ValueError, KeyError):
        return None
    finally:
        connection.close()


class FirstToken(threading.Thread):
    """Asks a port again and again; ``at`` is the wall clock time of the first token after ``since``."""

    def __init__(self, port: int = PORT, model: str = "tiny", pause: float = 0.02) -> None:
        super().__init__(daemon=True)
        self._port, self._model, self._pause = port, model, pause
        self.over = threading.Event()
        self.at: float | None = None
        self.last: float | None = None
        self.was_silent = False

    def run(self) -> None:
        while not self.over.wait(self._pause):
            if token(self._port, self._model, timeout=60) is None:
                self.was_silent = True
            elif self.was_silent and self.at is None:
                self.at = time.time()
            elif not self.was_silent:
                self.last = time.time()


class Memory(threading.Thread):
    """Samples the used memory as fast as nvidia-smi answers: (wall clock, MiB)."""

    def __init__(self, bench: Bench, pause: float = 0.05) -> None:
        super().__init__(daemon=True)
        self._bench, self._pause = bench, pause
        self.over = threading.Event()
        self.samples: list[tuple[float, int]] = []

    def run(self) -> None:
        while not self.over.wait(self._pause):
            with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
                self.samples.append((time.time(), self._bench.used()))

    def first_zero(self, after: float) -> float | None:
        """When nothing was in use for the first time after ``after``."""
        return next((at for at, used in self.samples if at >= after and used == 0), None)


# ---- processes, read without lamplighter


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    return ""


def parents() -> dict[int, int]:
    """Parent by pid, the dead left out."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    found[int(entry.name)] = int(fields[1])
    return found


def descendants(pid: int) -> set[int]:
    table = parents()
    found: set[int] = set()
    new = {pid}
    while new := {child for child, parent in table.items() if parent in new} - found:
        found |= new
    return found


def workers(pid: int) -> set[int]:
    """Spawned children of a launcher, the resource tracker not counted."""
    return {child for child in descendants(pid) if "spawn_main" in command_of(child) or "sglang::" in command_of(child)}


def alive(pids: set[int]) -> set[int]:
    return pids & parents().keys()
