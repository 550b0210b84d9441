"""The judge of the matrix on reports made up for it: it believes what is so, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.driver import Done
from tests.faults.words import Found, claims_of, denials

AGES = {"aaa111aaa111": "1", "bbb222bbb222": "2"}
OLD = Found("1", 41, 18000, "demo-model")
NEW = Found("2", 42, 18000, "demo-model")
SILENT = Found()
SERVING_NEW = {"release": "bbb222bbb222", "pid": 42, "port": 18000, "model": "demo-model", "since": 1.0}


def told(code: int, message: str, serving: dict[str, Any] | None = None, *, stderr: str = "", error: str = "") -> Done:
    """A command that ended on the node, or with ``error`` on the control side, which then says what serves."""
    last = {"event": "error", "serving": error} if error else {"event": "end"}
    part = {"outcome": "", "exit_code": code, "message": message, "serving": serving, "run": "r"}
    report = {"report": {"hosts": {"gpu": {"servers": {"demo": part}}}}}
    return Done(code, "\n".join(map(json.dumps, (last, report))), stderr)


#: What was said, what is found, and how many of the claims that denies.
CASES = {
    "true of a new one": (told(0, "demo-model answers on port 18000", SERVING_NEW), NEW, 0),
    "another pid": (told(0, "", {**SERVING_NEW, "pid": 7}), NEW, 1),
    "another release": (told(0, "", {**SERVING_NEW, "release": "aaa111aaa111"}), NEW, 1),
    "another port": (told(0, "demo-model answers on port 18001", SERVING_NEW), NEW, 1),
    "one that died": (told(0, "demo-model answers on port 18000", SERVING_NEW), SILENT, 3),
    "null, and it serves": (told(8, "demo-model answers on port 18000; no records"), NEW, 1),
    "dark": (told(6, "crashed; no earlier release to go back to; nothing is serving"), SILENT, 0),
    "dark, and it serves": (told(6, "crashed; rolling back failed too: why; nothing is serving"), OLD, 3),
    "closing words": (told(6, "crashed", stderr="x; NOTHING IS SERVING\n  serving now  nothing\n"), OLD, 4),
    "the other one": (told(9, "rolled back: release bbb222bbb222 is serving again", SERVING_NEW), OLD, 2),
    "the cause begins like it": (
        told(9, "nothing answers at 127.0.0.1; rolled back: release bbb222bbb222 is serving again", SERVING_NEW),
        NEW,
        0,
    ),
    "as before": (told(3, "refused: release aaa111aaa111 serves as before", None), OLD, 1),
    "not known": (told(1, "it ended without a last word", error="unknown: the run may have stopped it"), OLD, 0),
    "on its way": (told(1, "it ended", error="nothing (starting): its process is alive"), NEW, 0),
    "stopped": (told(1, "it ended", error="nothing (stopped): pid 7 is gone"), NEW, 1),
    "another one now": (
        told(1, "it ended", error="demo-model on port 18000, pid 41, release aaa111aaa111, since 1"), NEW, 1,
    ),
    "another run's": (told(10, "the other run decides what serves"), NEW, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_claim_is_judged_on_its_own(case: str) -> None:
    done, found, lies = CASES[case]
    assert len(denials(claims_of(done), found, AGES, "at the end")) == lies
