"""What `./inv env` prints: every worker's verdict and witness; who overwrote which variable, wanted and found."""

from __future__ import annotations

from typing import Any

from lamplighter.report.environment import env_text

CARRIES = {
    "pid": 40,
    "title": "sglang::scheduler_TP0",
    "verdict": "carries",
    "witness": "memory",
    "proven": 2,
    "reason": "",
}
DIFFERS = {**CARRIES, "pid": 41, "title": "sglang::scheduler_TP1\x1b[31m", "verdict": "differs", "proven": 1}
UNSEEN = {**CARRIES, "pid": 42, "verdict": "inconclusive", "witness": "exec", "proven": 1,
          "reason": "A not seen: Yama forbids it: kernel.yama.ptrace_scope is 1"}  # fmt: skip
DIFFERENCE = {"pid": 41, "title": "sglang::scheduler_TP1", "name": "NCCL_PROTO", "expected": "LL", "found": None,
              "by": "sglang writes it itself (always 0), changed by the server after its start"}  # fmt: skip
NOTHING: dict[str, Any] = {
    "state": "carries",
    "message": "",
    "variables": 2,
    "workers": [],
    "differences": [],
    "nccl": "",
}


def text(**found: Any) -> list[str]:
    return env_text({"gpu1": {"kimi": {**NOTHING, **found}}}).splitlines()


def test_all_is_well_in_one_table() -> None:
    assert text(workers=[CARRIES], nccl="NCCL itself names A in 1 workers") == [
        "gpu1/kimi: 1/1 workers carry 2 variables",
        "    pid  process                verdict  proven  by",
        "    40   sglang::scheduler_TP0  carries  2/2     its live memory",
        "",
        "  NCCL itself names A in 1 workers",
    ]


def test_a_difference_says_who_wanted_found_why_and_what_to_do() -> None:
    lines = text(state="differs", workers=[CARRIES, DIFFERS], differences=[DIFFERENCE], advice="give it mode: force")
    assert lines[0] == "gpu1/kimi: 1/2 workers carry 2 variables"
    assert lines[3].split() == ["41", "sglang::scheduler_TP1", "differs", "1/2", "its", "live", "memory"]
    assert lines[4:] == [
        "",
        "    pid  process                variable    planned  is         why",
        f"    41   sglang::scheduler_TP1  NCCL_PROTO  LL       (not set)  {DIFFERENCE['by']}",
        "  next: give it mode: force",
    ]


def test_what_forbids_reading_is_said_once_for_all_it_forbids() -> None:
    lines = text(state="inconclusive", workers=[UNSEEN, {**UNSEEN, "pid": 43}])
    assert lines[0] == "gpu1/kimi: 0/2 workers carry 2 variables"
    assert [line for line in lines if "ptrace_scope is 1" in line] == [f"  {UNSEEN['reason']}"]


def test_nothing_runs() -> None:
    assert text(state="stopped", message="its process is gone") == ["gpu1/kimi: its process is gone"]
    assert env_text({"gpu1": {}}) == "gpu1: no servers"
