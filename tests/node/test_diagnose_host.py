"""``diagnose`` on the node: the log of a launch is whole, and what the run knew of its end is not forgotten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.health import diagnose
from lamplighter.node.layout import RunDirectory, server_home
from lamplighter.release.engine import load_engine

PROJECT = Path(__file__).resolve().parents[2]
BEGUN = "[2026-04-02 03:00:12 TP1] Load weight begin. avail mem=78.42 GB\n"
QUIT = "[2026-04-02 03:02:00] Received sigquit from a child process. It usually means the child failed.\n"
DIED = "[2026-04-02 03:02:00] RuntimeError: Rank 1 scheduler died during initialization (exit code: -9).\n"
HELD = (
    "[2026-04-02 03:02:00 TP1] Scheduler hit an exception: torch.OutOfMemoryError: CUDA out of memory. Tried to "
    "allocate 2.00 GiB. GPU 1 has a total capacity of 79.11 GiB of which 1.00 GiB is free. Process 77 has 40.00 GiB "
    "memory in use. Of the allocated memory this process has 30.00 GiB memory in use.\n"
)


def run_with(root: Path, log: str, **failure: Any) -> RunDirectory:
    run = server_home(str(root), "tiny").run("20260402T030000Z-0a0b0c")
    Path(run.path).mkdir(parents=True)
    Path(run.launch("new").log).write_text(log)
    event = {"event": "failure", "stage": "ready", "seq": 1, "message": "rank 1 died", **failure}
    Path(run.journal).write_text(json.dumps(event) + "\n")
    return run


def said(root: Path) -> dict[str, Any]:
    engine = load_engine("sglang", PROJECT / "roles").compiled
    return diagnose.diagnose({"servers": ["tiny"], "engine": engine}, str(root))


@pytest.mark.parametrize("log", [BEGUN + QUIT, BEGUN + DIED, QUIT + "Killed\n"])
def test_nothing_stands_above_the_log_of_a_launch(log: str, tmp_path: Path) -> None:
    run_with(tmp_path, log, cause=None, notes=["kernel: nothing"])
    found = said(tmp_path)
    assert (found["outcome"], found["cause_above"]) == ("failed", False)
    assert "whole log" not in found["hint"]
    assert found["evidence"]


@pytest.mark.parametrize(
    ("log", "known", "told", "is_the_runs"),
    [
        (BEGUN + DIED, "gpu_hardware", "host_oom", False),  # of host memory no Xid tells
        (BEGUN + QUIT, "gpu_hardware", "gpu_hardware", True),
        (BEGUN + DIED.replace("-9", "-11"), "gpu_hardware", "gpu_hardware", True),
        (BEGUN + DIED.replace("-9", "-11"), "host_oom", "host_oom", True),
        (BEGUN + HELD, "gpu_oom", "gpu_oom", True),
        (BEGUN + HELD, "stalled", "gpu_held", False),
        (BEGUN + QUIT, None, None, False),
    ],
)
def test_what_the_run_knew_stands_where_it_explains_the_log(
    log: str, known: str | None, told: str | None, is_the_runs: bool, tmp_path: Path
) -> None:
    run_with(tmp_path, log, cause=known, evidence="the kernel's word", hint="do this", notes=["kernel: a line"])
    found = said(tmp_path)
    assert found["cause"] == told
    assert (found["evidence"] == "the kernel's word") is is_the_runs
    assert found["message"] == "rank 1 died"
    assert found["notes"][0] == "kernel: a line"


def test_each_cause_that_is_explained_is_one_of_the_engines() -> None:
    engine = load_engine("sglang", PROJECT / "roles").compiled
    known = {each["id"] for each in engine["failures"]}
    explained = {*engine["faults"]["explained_by_xid"], *engine["faults"]["explained_by_oom"]}
    assert explained - known == {"crashed", "stalled", "killed"}
