"""Whole deploys of SGLang and transformers to an H200: events as the control side got them, and the server's log."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.log.whole import diagnose_log
from lamplighter.release.engine import load_engines
from lamplighter.report.report import Fold

PROJECT = Path(__file__).resolve().parents[2]
RUNS = PROJECT / "tests" / "recordings" / "h200" / "runs"
ENGINES = {name: engine.compiled for name, engine in load_engines(PROJECT / "roles").items()}

# outcome, exit code, cause; and what the log alone tells: outcome, phase, cause
RECORDED: dict[str, tuple[tuple[str, int, str | None], tuple[str, str, str | None] | None]] = {
    "deployed": (("deployed", 0, None), ("ready", "ready", None)),
    "listed-stranger": (("deployed", 0, None), None),
    "foreign-stranger": (("refused", 3, "gpu_held"), None),
    "memory-fraction-too-large": (("rolled_back", 9, "gpu_oom"), ("failed", "weights", "gpu_oom")),
    "no-such-model-name": (("rolled_back", 9, "hub_offline"), ("failed", "boot", "hub_offline")),
    "port-taken-after-the-start": (("rolled_back", 9, "port_in_use"), ("failed", "http", "port_in_use")),
    # Nothing in the log says so: a stall is what does not come, a kill is in the exit status.
    "scheduler-stopped-in-start": (("rolled_back", 9, "stalled"), ("running", "distributed", None)),
    "launcher-killed-in-start": (("failed", 6, "killed"), ("running", "boot", None)),
    "transformers-deployed": (("deployed", 0, None), ("ready", "ready", None)),
    "transformers-unknown-flag": (("rolled_back", 9, "unknown_flag"), ("failed", "boot", "unknown_flag")),
}


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RUNS / f"{name}.jsonl").read_text().splitlines()]


def test_each_recording_is_expected_to_say_something() -> None:
    assert {path.stem for path in RUNS.iterdir()} == RECORDED.keys()


@pytest.mark.parametrize("name", RECORDED)
def test_the_journal_is_folded_into_the_report_of_that_day(name: str) -> None:
    *events, last = recorded(name)
    fold = Fold()
    for event in events:
        fold.add(event)
    (then,) = last["report"]["hosts"]["gpu"]["servers"].values()
    (now,) = fold.report().to_json()["report"]["hosts"]["gpu"]["servers"].values()
    assert (now["outcome"], now["exit_code"], now["cause"]) == RECORDED[name][0]
    told = ("phase", "evidence", "release", "serving", "ready_seconds", "downtime_seconds")
    assert {key: now[key] for key in told} == {key: then[key] for key in told}


@pytest.mark.parametrize("name", [name for name, (_, log) in RECORDED.items() if log])
def test_the_log_of_the_server_says_the_same(name: str) -> None:
    log = (RUNS / f"{name}.log").read_bytes()
    found = diagnose_log(io.BytesIO(log), ENGINES)
    assert found.engine == ("transformers" if name.startswith("transformers") else "sglang")
    assert (found.outcome, found.phase, found.cause) == RECORDED[name][1]
