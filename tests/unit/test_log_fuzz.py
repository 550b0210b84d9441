"""The logs of the cases as people paste them: under each envelope, cut short, two in one file, ranks interleaved.

What is said must be the same as of the plain log, or that the cause stands above the excerpt. A tenth of all
combinations is tried, chosen by a seed; LAMPLIGHTER_SOAK=1 tries all of them.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from lamplighter.node.log.verdict import Diagnosis
from lamplighter.node.log.whole import diagnose_log
from lamplighter.release.engine import load_engines
from lamplighter.run.diagnose import diagnose_file
from tests.unit.healthy_logs import healthy_logs

PROJECT = Path(__file__).resolve().parents[2]
ENGINES = {name: engine.compiled for name, engine in load_engines(PROJECT / "roles").items()}
CASES = sorted(path for root in ("logs", "logs2") for path in (PROJECT / "tests/cases" / root).iterdir())
SEED = 20261201
SHARE = 1.0 if os.environ.get("LAMPLIGHTER_SOAK") else 0.1


def log_of(case: Path) -> str:
    return (case / "server.log").read_bytes().decode("utf-8", "replace")


def engine_of(case: Path) -> str:
    name: str = yaml.safe_load((case / "expect.yml").read_text())["engine"]
    return name


def read(log: str, engine: str | None = None) -> Diagnosis:
    return diagnose_log(log.encode(), ENGINES, engine)


#: Excerpts, and logs that begin with a traceback.
NO_START = (
    "sglang-057-head-cut", "transformers-519-head-cut", "sglang-0516-tail-of-a-stop", "vllm-0270-in-ray-serve",
    "sglang-055-kernel-symbols", "sglang-0523-old-driver",
)  # fmt: skip
PLAIN = {case.name: read(log_of(case), engine_of(case)) for case in CASES}


# -- envelopes: what stands before line n (from 1) of a log


def stamp(number: int) -> str:
    return f"{number // 3600 % 24:02d}:{number // 60 % 60:02d}:{number % 60:02d}"


def each_line(prefix: Callable[[int, str], str]) -> Callable[[str], str]:
    def wrapped(log: str) -> str:
        # A carrier takes a line when its newline comes; a progress bar is one line to it.
        lines = log.replace("\r\n", "\n").split("\n")
        return "".join(f"{prefix(number, line)}{line}\n" for number, line in enumerate(lines, 1))

    return wrapped


ENVELOPES: dict[str, Callable[[str], str]] = {
    "CRI": each_line(lambda n, _: f"2026-11-29T{stamp(n)}.12345678{n % 10}+00:00 stderr F "),
    "journald short": each_line(lambda n, _: f"Nov {1 + n // 900:2d} {stamp(n)} gpu1 launch.sh[4711]: "),
    "journald ISO": each_line(lambda n, _: f"2026-11-29T{stamp(n)}+0100 gpu1 launch.sh[4711]: "),
    "kubectl --prefix": each_line(lambda n, _: "[pod/llm-0/server] "),
    "compose": each_line(lambda n, _: "sglang-1  | "),
    "srun -l": each_line(lambda n, _: "0: "),
    "honcho": each_line(lambda n, _: f"{stamp(n)} llm.1        | "),
    "supervisord": each_line(lambda n, _: f"2026-11-29 {stamp(n)},{n % 1000:03d} INFO llm stderr: "),
    "tmux": each_line(lambda n, _: "    "),
    "Loki": each_line(lambda n, _: f'2026-11-29T{stamp(n)}Z {{app="llm", pod="llm-7d9f8b6c5-x2k4q"}} '),
    "Ray": each_line(lambda n, _: "(LLMServer:llm pid=4711, ip=10.0.0.7) "),
    "grep -n": each_line(lambda n, _: f"{n}:"),
    "cat -n": each_line(lambda n, _: f"{n:6d}\t"),
    "stern": each_line(lambda n, _: "llm-7d9f8b6c5-x2k4q server "),
    "CRLF": lambda log: re.sub(r"\r?\n", "\r\n", log),
}


#: Ray's prefix names a process, and what another carrier wrote behind it reads as that process's own words.
TWO_CARRIERS = {("Ray", "sglang-0516-under-honcho")}


def chosen(items: Sequence[object], salt: str) -> list[object]:
    """A seeded share of ``items``, at least one."""
    count = max(1, round(SHARE * len(items)))
    return random.Random(f"{SEED}{salt}").sample(list(items), count)


def agrees(found: Diagnosis, plain: Diagnosis) -> bool:
    return (found.outcome, found.phase, found.cause) == (plain.outcome, plain.phase, plain.cause)


@pytest.mark.parametrize("envelope", ENVELOPES)
def test_no_envelope_changes_what_is_said(envelope: str) -> None:
    wrong = []
    for case in chosen(CASES, envelope):
        assert isinstance(case, Path)
        if (envelope, case.name) in TWO_CARRIERS:
            continue
        found, plain = read(ENVELOPES[envelope](log_of(case)), engine_of(case)), PLAIN[case.name]
        bare = re.sub(r"^.{0,60}?(?=\w+Error: )", "", plain.evidence.partition(" … ")[0])[:60]
        if not agrees(found, plain) or bare not in found.evidence:
            wrong.append((case.name, found.outcome, found.phase, found.cause, found.evidence[:200]))
    assert not wrong


def test_the_json_of_containers_changes_nothing(tmp_path: Path) -> None:
    for key in ("log", "message", "msg", "line", "MESSAGE"):
        for case in chosen(CASES, key):
            assert isinstance(case, Path)
            lines = log_of(case).replace("\r\n", "\n").split("\n")
            path = tmp_path / "x.log"
            path.write_text("".join(json.dumps({key: f"{line}\n", "stream": "stderr"}) + "\n" for line in lines))
            assert agrees(diagnose_file(str(path), engine_of(case)), PLAIN[case.name]), (key, case.name)


def explains(found: Diagnosis, plain: Diagnosis) -> bool:
    """The same cause, or "above", or its own line where the other line that makes it a cause was cut away."""
    is_part = found.cause is None and re.sub(r"^.*?(?=\w+Error: )", "", found.evidence) in plain.evidence
    return found.cause == plain.cause or found.cause_above or is_part


#: Behind the line that names the device, the transport's own complaint is the first error, and reads as a cause.
CAUSES_OF_TAILS = {"sglang-0523-prefill-wrong-nic": "nccl_error"}


def tails(case: Path) -> Iterator[str]:
    lines = log_of(case).split("\n")
    for count in range(1, len(lines)):
        yield "\n".join(lines[-count:])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_tail_says_the_same_or_that_the_cause_stands_above(case: Path) -> None:
    plain, engine = PLAIN[case.name], engine_of(case)
    wrong = []
    for tail in chosen(list(tails(case)), case.name):
        assert isinstance(tail, str)
        found = read(tail, engine)
        if found.outcome == "failed" and plain.outcome != "failed":
            wrong.append((tail.count("\n"), "called failed", found.cause, found.evidence[:200]))
        elif found.outcome == "failed" and not (
            explains(found, plain) or found.cause == CAUSES_OF_TAILS.get(case.name)
        ):
            wrong.append((tail.count("\n"), "another cause", found.cause, found.evidence[:200]))
    assert not wrong


def test_of_two_logs_in_one_file_the_last_counts() -> None:
    """Of one engine. A second log that is only an excerpt is no start of its own, nor one that begins with a traceback:
    behind a start that failed, this may be its.
    """
    pairs = [
        (first, second)
        for first, second in itertools.permutations(CASES, 2)
        if engine_of(first) == engine_of(second) and second.name not in NO_START
    ]
    wrong = []
    for pair in chosen(pairs, "pairs"):
        first, second = pair  # type: ignore[misc]
        found, plain = read(log_of(first) + "\n" + log_of(second), engine_of(first)), PLAIN[second.name]
        if not agrees(found, plain):
            wrong.append((first.name, second.name, found.outcome, found.phase, found.cause, found.evidence[:120]))
    assert not wrong


def interleaved(log: str, rng: random.Random) -> str:
    """Lines of another node's healthy start of the same time, between those that may be parted."""
    lines, others = log.split("\n"), [f"1: {line}" for line in log.split("\n")]
    out: list[str] = []
    for line in lines:
        out.append(f"0: {line}")
        while others and rng.random() < 0.5:
            out.append(others.pop(0))
    return "\n".join([*out, *others])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_nodes_in_one_stream_say_the_same(case: Path) -> None:
    if random.Random(f"{SEED}{case.name}").random() > SHARE:
        return
    plain = PLAIN[case.name]
    found = read(interleaved(log_of(case), random.Random(SEED)), engine_of(case))
    assert (found.outcome, found.cause) == (plain.outcome, plain.cause), found


# -- false alarms


HEALTHY = [case for case in CASES if PLAIN[case.name].outcome != "failed"]
#: Their first start failed: while it was the last one, the log was that of a failure.
DIED_BEFORE = (
    "vllm-0321-no-logo-second-start",
    "vllm-0330-restarted-after-the-licence",
    "vllm-0331-second-start-is-ready",
)
RECORDED = sorted(
    path
    for path in (PROJECT / "tests/recordings").rglob("*.log")
    if path.stem
    in ("ready", "first-start-jit", "over-ssh-full-path", "ready-then-term", "tp2-ready-then-term", "deployed")
    or path.stem.startswith(("ready-", "transformers-deployed"))
)


def test_no_healthy_log_is_called_failed_wherever_it_ends() -> None:
    """Whole, and as it was while it grew: cut behind any of its lines, as a log that is still written."""
    logs = {path.parent.name + "/" + path.name: path.read_bytes().decode("utf-8", "replace") for path in RECORDED}
    logs.update({case.name: log_of(case) for case in HEALTHY})
    tried, alarms = 0, []
    for name, log in logs.items():
        lines = log.splitlines(keepends=True)
        steps = max(1, len(lines) // (6 if SHARE < 1 else len(lines)))
        cuts = () if name in DIED_BEFORE else range(1, len(lines), steps)
        for end in {*cuts, len(lines)}:
            found = read("".join(lines[:end]))
            tried += 1
            if found.outcome == "failed":
                alarms.append((name, end, found.cause, found.evidence[:200]))
    assert not alarms
    assert (len(logs) >= 25, tried >= 60) == (True, True)


MADE = list(healthy_logs())


def test_no_log_of_a_server_that_is_well_is_called_failed() -> None:
    assert len({text for _, _, text in MADE}) >= 60
    wrong = []
    for name, engine, text in MADE:
        found = read(text)
        is_up = name.split("-")[2] not in ("loading", "again")
        if (found.engine, found.outcome) != (engine, "ready" if is_up else "running"):
            wrong.append((name, found.engine, found.outcome, found.cause, found.evidence[:200]))
    assert not wrong
