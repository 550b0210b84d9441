"""The relay: shows a journal live and whole, says how a conversation ended, and takes no worker along when it goes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node import events, journal
from lamplighter.node.layout import RunDirectory
from lamplighter.node.system import files
from lamplighter.node.system.processes import Identity
from tests.node.living import Living, is_running, process_of, until

READER_GONE = 77

HEAD = """
import os
from lamplighter.node import events, relay
from lamplighter.node.layout import RunDirectory
run, options = RunDirectory(sys.argv[1]), dict(word.split("=") for word in sys.argv[2:])
events.HEARTBEAT_SECONDS = float(options.get("beat", 60))
"""
FOLLOW = """
try:
    relay.follow(run, after=int(options.get("after", 0)))
except relay.ReaderGone:
    os._exit(77)
"""
START = """
relay.send({"event": "hello"})
worker = relay.start_worker({"verb": "deploy", "secrets": {"HF_TOKEN": "hf_secret"}}, options["home"], run)
relay.follow(run, worker=worker)
"""
BYE = {"event": "bye"}


@dataclasses.dataclass
class Relayed:
    """A relay at work, and what it has said."""

    child: subprocess.Popen[str]

    def next(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, "the relay ended"
        return dict(json.loads(line))

    def rest(self) -> list[dict[str, Any]]:
        assert self.child.stdout is not None
        return [json.loads(line) for line in self.child.stdout]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "20260101T000000Z-abcdef").mkdir()
    return RunDirectory(str(tmp_path / "20260101T000000Z-abcdef"))


@pytest.fixture
def start(living: Living, run: RunDirectory) -> Callable[..., Relayed]:
    def begin(code: str = FOLLOW, **options: object) -> Relayed:
        words = living.words(HEAD + code, run.path, *(f"{name}={value}" for name, value in options.items()))
        return Relayed(living.start(words, stdout=subprocess.PIPE, text=True))

    return begin


class Worker:
    """A process that stands for the worker of ``run``, whose journal the test writes."""

    def __init__(self, living: Living, run: RunDirectory) -> None:
        self.process = living.titled("worker")
        self.living = living
        record(run, self.process.identity)
        self.journal = journal.Journal(run.journal, run.ballast, {"run": run.run_id})

    def progress(self, text: str = "x") -> dict[str, Any]:
        return self.journal.write(events.progress("ready", text))

    def end(self) -> dict[str, Any]:
        return self.journal.write(events.ended("deployed", 0, "done"))

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.living.exit_code(self.process.pid)


def record(run: RunDirectory, identity: Identity) -> None:
    files.write_json(run.worker, {"boot_id": identity.boot_id, "pid": identity.pid, "start": identity.start})


@pytest.fixture
def worker(living: Living, run: RunDirectory) -> Worker:
    return Worker(living, run)


# ---------------------------------------------------------------------------------------------------- what it shows


def test_events_are_shown_as_they_are_written_until_the_end(start: Callable[..., Relayed], worker: Worker) -> None:
    first = worker.progress()
    relayed = start()
    assert relayed.next() == first
    second = worker.progress("y" * 100_000)
    assert relayed.next() == second
    end = worker.end()
    assert [relayed.next(), *relayed.rest()] == [end, BYE]
    assert relayed.child.wait() == 0


def test_whoever_attaches_gets_what_they_have_not_seen(start: Callable[..., Relayed], worker: Worker) -> None:
    written = [worker.progress() for _ in range(5)]
    early, late = start(), start(after=3)
    assert [late.next(), late.next()] == written[3:]
    written.append(worker.end())
    assert late.rest() == [written[5], BYE]
    assert early.rest() == [*written, BYE]


def test_an_end_that_was_seen_already_still_ends_the_conversation(
    start: Callable[..., Relayed], worker: Worker
) -> None:
    end = worker.end()
    assert start(after=end["seq"]).rest() == [BYE]


def test_a_torn_line_is_never_shown(start: Callable[..., Relayed], worker: Worker, run: RunDirectory) -> None:
    with open(run.journal, "ab", buffering=0) as file:
        file.write(b'{"event":"progress","seq":9,"mess\n')
        relayed = start(beat=0.2)
        file.write(b'{"event":"prog')
        assert relayed.next() == {"event": "beat"}  # it has looked, and shown no half of it
        file.write(b'ress","seq":10}\n')
    line = relayed.next()
    while line["event"] == "beat":
        line = relayed.next()
    assert line == {"event": "progress", "seq": 10}
    worker.end()
    assert relayed.rest()[-1] == BYE


def test_silence_is_filled_with_beats(start: Callable[..., Relayed], worker: Worker, run: RunDirectory) -> None:
    relayed = start(beat=0.1)
    assert [relayed.next() for _ in range(3)] == [{"event": "beat"}] * 3
    worker.end()
    assert [event["event"] for event in relayed.rest()][-2:] == ["end", "bye"]
    assert {event["event"] for event in journal.read(run.journal)} == {"end"}


def test_a_long_answer_is_accompanied_by_beats(start: Callable[..., Relayed]) -> None:
    relayed = start(
        "import time\n"
        "beats, send = [], relay.send\n"
        "def counted(event):\n"
        "    send(event)\n"
        "    beats.extend([1] * (event['event'] == 'beat'))\n"
        "relay.send = counted\n"
        "with relay.heartbeat():\n"
        "    for _ in range(300):\n"
        "        relay.send({'event': 'result', 'text': 'x' * 5000})\n"
        "        time.sleep(0.001)\n"
        "    while len(beats) < 4:\n"
        "        time.sleep(0.001)\n",
        beat=0.01,
    )
    kinds = [event["event"] for event in relayed.rest()]  # each line is whole, else this is no JSON
    assert kinds.count("result") == 300
    assert kinds.count("beat") > 3


@pytest.mark.parametrize("how", ["removed", "moved", "with its directory"])
def test_a_journal_that_is_taken_away_is_followed_to_its_end(
    start: Callable[..., Relayed], worker: Worker, run: RunDirectory, tmp_path: Path, how: str
) -> None:
    relayed = start()
    first = worker.progress()
    assert relayed.next() == first
    if how == "removed":
        os.unlink(run.journal)
    elif how == "moved":
        os.rename(run.journal, tmp_path / "elsewhere")
    else:
        shutil.rmtree(run.path)
    end = worker.end()
    assert relayed.rest() == [end, BYE]


def test_a_journal_that_was_gone_before_is_said_to_be(
    start: Callable[..., Relayed], worker: Worker, run: RunDirectory
) -> None:
    worker.progress()
    os.unlink(run.journal)
    relayed = start(beat=0.05)
    assert relayed.next() == {"event": "beat"}
    worker.kill()
    *_, bye = relayed.rest()
    assert bye["worker_gone"]
    assert f"{run.journal} was removed" in bye["errors"]


# ----------------------------------------------------------------------------------------------- who goes, who stays


def test_a_killed_worker_is_told_with_its_last_words(
    start: Callable[..., Relayed], worker: Worker, run: RunDirectory
) -> None:
    Path(run.worker_errors).write_bytes(b"x" * 5000 + b"MemoryError \xff\n")
    relayed = start()
    written = [worker.progress() for _ in range(50)]
    worker.kill()
    *shown, bye = relayed.rest()
    assert shown == written
    assert (bye["event"], bye["worker_gone"]) == ("bye", True)
    assert bye["errors"].endswith("MemoryError \ufffd")
    assert len(bye["errors"]) <= 2000


def test_a_dead_workers_end_counts_more_than_its_death(start: Callable[..., Relayed], worker: Worker) -> None:
    end = worker.end()
    worker.kill()
    assert start().rest() == [end, BYE]


@pytest.mark.parametrize("change", [{"start": 1}, {"boot_id": "before the reboot"}])
def test_a_recycled_pid_is_not_the_worker(
    start: Callable[..., Relayed], worker: Worker, run: RunDirectory, change: dict[str, Any]
) -> None:
    record(run, dataclasses.replace(worker.process.identity, **change))
    assert [event.get("worker_gone") for event in start().rest()] == [True]


def test_a_run_that_is_just_beginning_is_waited_for(
    start: Callable[..., Relayed], living: Living, run: RunDirectory
) -> None:
    """Its directory is there, its worker has not written down yet who it is."""
    relayed = start(beat=0.05)
    assert relayed.next() == {"event": "beat"}
    worker = Worker(living, run)
    first = worker.progress()
    assert next(event for event in iter(relayed.next, None) if event != {"event": "beat"}) == first
    worker.kill()
    assert relayed.rest()[-1] == {"event": "bye", "worker_gone": True, "errors": ""}


def test_a_run_that_left_nothing(start: Callable[..., Relayed], run: RunDirectory) -> None:
    os.utime(run.path, (0, 0))
    (bye,) = start().rest()
    assert bye["worker_gone"]
    assert "how the run ended is not known" in bye["errors"]


def test_a_reader_that_goes_is_noticed_in_silence_too(start: Callable[..., Relayed], worker: Worker) -> None:
    relayed = start(beat=600)
    assert relayed.child.stdout is not None
    worker.progress()
    relayed.next()
    relayed.child.stdout.close()
    assert relayed.child.wait(timeout=60) == READER_GONE
    assert is_running(worker.process.pid)


# ------------------------------------------------------------------------------------------------ starting a worker

#: What stands in for the runner: says who it is, then lives on or dies.
STAND_IN = """
import json, os, sys, time
request = json.load(sys.stdin)
run, mode = {run!r}, {mode!r}
os.write(1, b"a word on stdout")
if mode == "dies":
    raise SystemExit("cannot go on")
with open(run + "/seen.part", "w") as file:
    json.dump({{"pid": os.getpid(), "argv": sys.argv[1:], "request": request, "cwd": os.getcwd()}}, file)
os.rename(run + "/seen.part", run + "/seen")
time.sleep(600)
"""


def runner_that(mode: str, run: RunDirectory, directory: Path) -> Path:
    (directory / "runner").mkdir()
    (directory / "runner" / "__main__.py").write_text(STAND_IN.format(run=run.path, mode=mode))
    return directory / "runner"


def test_a_worker_outlives_the_relay_and_its_session(
    start: Callable[..., Relayed], run: RunDirectory, living: Living, tmp_path: Path
) -> None:
    relayed = start(START, home=runner_that("lives", run, tmp_path))
    assert relayed.next() == {"event": "hello"}
    seen = Path(run.path) / "seen"
    assert until(seen.exists)
    told = json.loads(seen.read_text())
    worker = living.keep(told["pid"])
    assert told["argv"] == ["worker"]
    assert told["request"] == {"verb": "deploy", "secrets": {"HF_TOKEN": "hf_secret"}}
    assert told["cwd"] == "/"
    assert "hf_secret" not in worker.command
    assert worker.sid == worker.pgid == worker.pid
    assert process_of(relayed.child.pid).sid != worker.sid
    os.kill(relayed.child.pid, signal.SIGKILL)
    assert relayed.rest() == []  # nobody else holds its stdout: the channel ends with the relay
    relayed.child.wait()
    assert is_running(worker.pid)


def test_a_worker_that_dies_at_once_is_told_with_its_words(
    start: Callable[..., Relayed], run: RunDirectory, tmp_path: Path
) -> None:
    relayed = start(START, home=runner_that("dies", run, tmp_path))
    assert relayed.rest() == [{"event": "hello"}, {"event": "bye", "worker_gone": True, "errors": "cannot go on"}]
