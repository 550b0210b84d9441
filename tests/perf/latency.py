"""How soon a deploy knows what the server knows: ``python -m tests.perf.latency [lab] [transformers] [watch]``.

Prints, as medians and 95th percentiles of RUNS starts: from the first moment at which a generation succeeds to our
*ready*, from a process's death to the verdict, from a fatal line to the verdict; beside them what the usual loop over
SSH (a question every 15 s, 50 times) would have taken for the same moments. And what watching costs: CPU and memory of
the watching process, children included, over a quiet while and during a flood of lines. A benchmark, not a test: its
numbers are those of the machine and its load (both printed).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lamplighter.node.keeper.launcher import Launched
from lamplighter.node.layout import LaunchFiles
from lamplighter.node.plan import Plan
from lamplighter.node.start import readiness
from lamplighter.node.start.readiness import NotReady, Ready
from lamplighter.node.system import http, processes
from lamplighter.release.engine import load_engine

PROJECT = Path(__file__).resolve().parents[2]
LOOP_SECONDS, LOOP_TRIES = 15.0, 50


@dataclasses.dataclass(frozen=True)
class Kind:
    """One engine as it is started here: its role, its model, its command line, and with which variables."""

    engine: str
    model: str
    argv: Callable[[int], list[str]]
    env: dict[str, str]


def lab() -> Kind:
    def argv(port: int) -> list[str]:
        return [sys.executable, str(PROJECT / "lab/launch_server.py"), "--model-path", "m", "--port", str(port)]

    env = {"LAB_SPEED": "20", "PYTHONPATH": str(PROJECT)}
    return Kind("demo", "m", argv, env)


def transformers() -> Kind:
    from tests.engines.place import TRANSFORMERS, cache_directory, made

    venv = made(TRANSFORMERS)
    model = cache_directory() / f"tiny-{venv.name.rpartition('-')[2]}"
    if not (model / "model.safetensors").exists():
        script = [venv / "bin/python", PROJECT / "tests/engines/tiny_model.py", model]
        subprocess.run(script, check=True, capture_output=True)

    def argv(port: int) -> list[str]:
        python = str(venv / "bin/python")
        return [python, str(venv / "bin/transformers"), "serve", str(model), "--device", "cpu", "--port", str(port)]

    return Kind("transformers", str(model), argv, {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})


@dataclasses.dataclass
class Started:
    """A server of one measurement, and its watch in a thread."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    engine: dict[str, Any]
    plan: Plan
    began: float
    verdict: Ready | NotReady | None = None
    at: float = 0.0
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)


@contextlib.contextmanager
def started(kind: Kind, extra: list[str], timeouts: dict[str, float] | None = None) -> Iterator[Started]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        launch = LaunchFiles(place, "new")
        with Path(launch.log).open("wb") as output:
            began = time.monotonic()
            process = subprocess.Popen(
                [*kind.argv(port), *extra],
                env={**os.environ, **kind.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        main = processes.read_process(process.pid)
        assert main is not None
        # what the supervisor would write the moment it ends
        threading.Thread(target=_record_exit, args=(process, launch.exit), daemon=True).start()
        engine = load_engine(kind.engine, PROJECT / "roles").compiled
        made = Started(process, port, Path(launch.log), engine, _plan(kind, engine, port, timeouts or {}), began)

        def watch() -> None:
            launched = Launched(main.identity, None)
            made.verdict = readiness.watch(made.plan, launch, launched, None, lambda *_, **__: None)
            made.at = time.monotonic()
            made.ended.set()

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield made
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            made.ended.wait(20)


def _record_exit(process: subprocess.Popen[bytes], path: str) -> None:
    code = process.wait()
    with contextlib.suppress(OSError):
        ending = {"code": code, "signal": None} if code >= 0 else {"code": None, "signal": -code}
        Path(path).write_text(json.dumps({**ending, "t": time.time()}))


def _plan(kind: Kind, engine: dict[str, Any], port: int, timeouts: dict[str, float]) -> Plan:
    data: dict[str, Any] = {
        "name": "bench", "engine": kind.engine, "engine_version": None, "model": kind.model, "served_name": kind.model,
        "host": "127.0.0.1", "port": port, "gpus": [], "python": "python3", "argv": [], "env": {},
        "launcher": "detached", "stale": {"policy": "engine", "kill": []}, "keep_releases": 5,
        "timeouts": {"stop": 5, "free": 5, "ready": 900, "stall": "by phase", **timeouts},
        "gpus_unified": "refuse", "allow": [], "sitecustomize": {"scope": "server"},
    }  # fmt: skip
    return Plan.load({"server": data, "engine": engine})


def to_ready(kind: Kind) -> tuple[float, float]:
    """From the first generation that succeeds to *ready*; and the same moment's seconds since the launch."""
    with started(kind, []) as server:
        # in a process of its own, so that it takes nothing from the watch but the machine
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        context.Process(target=_first_generation, args=(server, kind.model, theirs), daemon=True).start()
        assert server.ended.wait(300)
        first = ours.recv()
        assert isinstance(server.verdict, Ready), server.verdict
        return max(0.0, server.at - first), first - server.began


def _first_generation(server: Started, model: str, answer: Any) -> None:
    """Ask every 10 ms; send back the moment of the first success, on the clock of the whole machine."""
    while True:
        asked = time.monotonic()
        with contextlib.suppress(http.HttpFailed):
            if http.generate(server.engine, "127.0.0.1", server.port, model, 60).ok:
                answer.send(time.monotonic())
                return
        time.sleep(max(0.0, 0.01 - (time.monotonic() - asked)))


def to_verdict_of_death(kind: Kind) -> tuple[float, float]:
    with started(kind, []) as server:
        time.sleep(0.4)  # somewhere in its start
        os.killpg(server.process.pid, signal.SIGKILL)
        died = time.monotonic()
        assert server.ended.wait(60)
        assert isinstance(server.verdict, NotReady), server.verdict
        return server.at - died, died - server.began


def to_verdict_of_fatal_line(kind: Kind) -> tuple[float, float]:
    """A launcher that prints an error no server survives, and hangs on."""
    stuck = dataclasses.replace(kind, argv=lambda port: [sys.executable, "-c", HANGING])
    with started(stuck, []) as server:
        while b"OutOfMemory" not in server.log.read_bytes():
            time.sleep(0.005)
        written = time.monotonic()
        assert server.ended.wait(60)
        assert isinstance(server.verdict, NotReady), server.verdict
        assert server.verdict.diagnosis.cause == "gpu_oom", server.verdict
        return server.at - written, written - server.began


def by_loop(truth: float, *, is_failure: bool) -> float:
    """What the loop adds: it sees a success at its next question, and a failure when it has asked 50 times."""
    if is_failure:
        return LOOP_SECONDS * LOOP_TRIES - truth
    return -truth % LOOP_SECONDS


def measure(name: str, kind: Kind, runs: int) -> None:
    for what, one, is_failure in (
        ("first generation to ready", to_ready, False),
        ("process death to verdict", to_verdict_of_death, True),
        (f"fatal line to verdict (settle {readiness.SETTLE_SECONDS:g} s)", to_verdict_of_fatal_line, True),
    ):
        found = [one(kind) for _ in range(runs)]
        ours = sorted(delay for delay, _ in found)
        loop = statistics.median(by_loop(truth, is_failure=is_failure) for _, truth in found)
        p95 = ours[min(len(ours) - 1, round(0.95 * (len(ours) - 1)))]
        print(
            f"{name:13} {what:38} median {statistics.median(ours):6.3f} s  p95 {p95:6.3f} s  (n={runs}; "
            f"the loop: {loop:.0f} s)",
            flush=True,
        )


# -- what watching costs


def _watching(pid: int, port: int, place: str, seconds: float, answer: Any) -> None:
    """In a process of its own: watch, and send back CPU seconds, wall seconds and MiB."""
    main = processes.read_process(pid)
    assert main is not None
    kind = Kind("sglang", "m", lambda _: [], {})
    engine = load_engine("sglang", PROJECT / "roles").compiled
    for name in ("yaml", "pydantic"):  # the control side's, which no node loads
        sys.modules.pop(name, None)
    plan = _plan(kind, engine, port, {"ready": seconds, "stall": 10_000.0})
    began, before = time.monotonic(), time.process_time()
    readiness.watch(plan, LaunchFiles(place, "new"), Launched(main.identity, None), None, lambda *_, **__: None)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = time.process_time() - before + children.ru_utime + children.ru_stime
    answer.send((used, time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def cost(what: str, writer: str, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as place:
        with Path(place, "server.log").open("wb") as output:
            server = subprocess.Popen([sys.executable, "-c", writer], stdout=output, start_new_session=True)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=_watching, args=(server.pid, 1, place, seconds, theirs)
        )
        process.start()
        used, wall, mib = ours.recv()
        process.join()
        server.kill()
        server.wait()
        size = Path(place, "server.log").stat().st_size >> 20
    print(f"watching {what:20} {100 * used / wall:6.2f} % of a core, peak {mib:.0f} MiB, {wall:.0f} s, log {size} MiB")


QUIET = """
import time
while True:
    print("Loading safetensors checkpoint shards: 5% Completed | 1/16", flush=True)
    time.sleep(1)
"""
FLOOD = """
import sys, time
lines = "[2026-01-01 10:00:00 TP0] Decode batch, #running-req: 1, #token: 99, cuda graph: True\\n" * 5000
for _ in range((1 << 30) // len(lines)):
    sys.stdout.write(lines)
    sys.stdout.flush()
    time.sleep(0.02)
time.sleep(600)
"""
#: An error that no server survives, from a launcher that hangs on.
HANGING = """
import time
time.sleep(0.5)
print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", flush=True)
time.sleep(600)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", default=["lab", "transformers", "watch"])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=180, help="of quiet watching")
    given = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} at first, Python {sys.version.split()[0]}")
    for name, kind in (("lab", lab), ("transformers", transformers)):
        if name in given.what:
            measure(name, kind(), given.runs)
    if "watch" in given.what:
        cost("a quiet start", QUIET, given.seconds)
        cost("a log flood", FLOOD, min(given.seconds, 60))
    print(f"load {os.getloadavg()[0]:.1f} at last")


if __name__ == "__main__":
    main()
