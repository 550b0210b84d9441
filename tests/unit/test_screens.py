"""What a terminal shows at 60, 80 and 120 columns, plain and without colour, as golden texts.

``LAMPLIGHTER_GOLDEN=write`` writes them anew, to be read and compared by a person.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lamplighter.report import check_text, plan_text, releases_text, status_text, summary, verify_text
from lamplighter.report.live import Live
from lamplighter.report.output import Output
from lamplighter.report.report import Report
from tests.unit.report_stories import detached, good_deploy, rolled_back

WIDTHS = (60, 80, 120)
GOLDEN = Path(__file__).parent / "golden" / "screens"

SERVING = {
    "state": "serving", "release": "3f2a9c81d0aa", "pid": 4242, "port": 8000, "model": "kimi-k2.5-int4",
    "since": 1767323351.0, "message": "", "run": None,
}  # fmt: skip
AT_WORK = {"id": "r7", "verb": "deploy", "by": "ann@desk", "stage": "prove", "since": 1767326951.0}
DRIFT = {"differences": [{"kind": "variable", "name": "NCCL_PROTO", "wanted": "LL", "found": None}], "unknown": []}
FINDINGS = [
    {"id": "interpreter", "level": "ok", "message": "Python 3.12.3", "evidence": "/opt/sglang/bin/python", "hint": ""},
    {"id": "disk_full", "level": "warning", "message": "little room for releases in /var/lib/lamplighter",
     "evidence": "3 GiB free of 400", "hint": "remove what nobody needs, or set root"},
]  # fmt: skip
WOULD_STOP = [
    {"pid": 4242, "user": "llm", "title": "sglang::scheduler_TP0", "why": "recorded by release 3f2a", "action": "stop"},
    {"pid": 77, "user": "bob", "title": "python train.py --epochs 3", "why": "not ours", "action": "leave"},
]
CHANGES = {
    "argv": [{"name": "--speculative-num-steps", "before": "2", "after": "3"}],
    "variables": [{"name": "NCCL_P2P_LEVEL", "before": None, "after": "SYS (forced)"}],
    "files": {"launch.sh": "--- a\n+++ b\n@@ -1,2 +1,2 @@\n-export A=1\n+export A=2\n"}, "restarts": True,
}  # fmt: skip
CHECKS = [
    {"name": "gpus_are_all_there", "question": "Are all GPUs there?", "outcome": "passed", "seconds": 0.1,
     "evidence": "8 GPUs, NVIDIA H200, driver 580.159.04, each with the memory that was recorded"},
    {"name": "no_xid", "question": "Has the driver reported no error since the server started?", "outcome": "warning",
     "seconds": 12.0, "evidence": "Xid 63 on 0000:06:00.0"},
]  # fmt: skip
RELEASES = [
    {"release": "3f2a9c81d0aa", "verdict": "good", "is_current": True, "judged": 1767323351.0, "bytes": 52000},
    {"release": "77aa01bc22ef", "verdict": "bad", "written": 1767323300.0, "bytes": 51000, "cause": "cuda_oom",
     "message": "CUDA out of memory while it captured graphs"},
]  # fmt: skip


def tables(width: int) -> dict[str, str]:
    """What the reading verbs print."""
    draft = {"state": "stopped", "run": None, "message": "never deployed"}
    servers = {"kimi": {**SERVING, "run": AT_WORK, "drift": DRIFT}, "draft": draft}
    plan = {
        "release": "77aa01bc22ef", "serving": "3f2a9c81d0aa", "state": "serving", "is_pending": True,
        "changes": CHANGES, "findings": FINDINGS, "would_stop": WOULD_STOP,
        "checks": ["gpus_are_all_there", "model_answers", "port_is_held_by_the_server", "nothing_has_drifted"],
    }  # fmt: skip
    return {
        "status": status_text({"gpu1": servers, "gpu2": {}}, width),
        "plan": plan_text({"gpu1": {"kimi": plan}}, width),
        "check": check_text({"gpu1": {"kimi": {"findings": FINDINGS, "would_stop": WOULD_STOP}}}, width),
        "verify": verify_text({"gpu1": {"kimi": {"checks": CHECKS}}}, width),
        "releases": releases_text({"gpu1": {"kimi": {"releases": RELEASES}}}, width),
    }


def summaries(width: int) -> dict[str, str]:
    """How deploys of two hosts end, one well; the sentences above the tables are for the terminal to wrap."""
    report = Report.fold([*good_deploy(), *rolled_back("gpu2")])
    return {"summary": "\n".join(line for line in summary(report, width) if line.startswith("  ") or not line)}


def views(width: int) -> dict[str, str]:
    """The live view in the middle of a deploy: with all that a node may tell of it."""
    moments: dict[str, dict[str, Any]] = {
        "weights": {"line": "Loading safetensors checkpoint shards:  42% Completed | 27/64 [01:20<01:49]"},
        "eta": {"eta": [60, 90], "phase_eta": [20, 25], "ranks": {"0": "weights", "1": "distributed"}},
    }
    gpus = [{"index": index, "used_mib": 51200, "total_mib": 143771} for index in range(8)]
    found = {}
    for name, more in moments.items():
        live = Live(Output(io.StringIO()), screen(width), lambda: 0.0)
        story = detached()
        for event in [*story[:-1], {**story[-1], "gpus": gpus, **more}]:
            live.event(event)
        with (on := screen(width)).capture() as captured:
            on.print(live.view())
        live.close(None)
        found[f"live_{name}"] = captured.get().rstrip("\n")
    return found


def screen(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, color_system=None, _environ={})


def screens() -> Iterator[tuple[str, int, str]]:
    for width in WIDTHS:
        for name, text in (tables(width) | summaries(width) | views(width)).items():
            yield name, width, text


@pytest.mark.parametrize(
    ("name", "width", "text"), [pytest.param(*each, id=f"{each[0]}-{each[1]}") for each in screens()]
)
def test_a_screen_is_as_it_was_read(name: str, width: int, text: str) -> None:
    path = GOLDEN / f"{name}-{width}.txt"
    if os.environ.get("LAMPLIGHTER_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text()
    assert "\x1b" not in text
    wide = [line for line in text.splitlines() if len(line) > width and not line.lstrip().startswith(OPEN)]
    assert wide == []


#: Lines that are left to the terminal, so that they can be copied whole: commands, quoted evidence, lines of a log.
OPEN = ("more:", "next", "why", "what failed", '"', "|", "serving now", "warning:")
