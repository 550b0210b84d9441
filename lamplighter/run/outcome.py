"""What came of one check."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

#: Kinds of result, those that exit 8 first.
FAILED, ERROR, WARNING, SKIPPED, PASSED = "failed", "error", "warning", "skipped", "passed"
BLOCKS = (FAILED, ERROR)

#: Who tells what a check asks: testinfra on the node, or the node's own program alone.
HOST, NODE = "host", "node program"

#: The threshold after which a check is ended, and its value where nobody sets it: seconds.
OVERDUE = "check_seconds"
OVERDUE_SECONDS = 300.0

#: What testinfra's modules ask before anything else: sent along, or ahead, since each would cost all a round trip.
FIRST = (
    "uname -s",
    "cat /etc/os-release",
    "uname -m",
    "command -v command",
    "command -v ss",
    "test -d /run/systemd/system/",
)


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """One check. ``outcome``: passed, warning (failed, and that blocks nothing), failed, error, skipped.

    ``evidence`` is the line that says why, or what was seen; ``question`` the words for people. ``is_of_serving``: a
    server that fails it does not serve. ``witness``: HOST where it asks the node by testinfra, beside the node's own
    program or instead of it; NODE where that program's word is all that it has; "" for what is no check.
    """

    name: str
    question: str
    level: str
    outcome: str
    evidence: str
    seconds: float
    is_of_serving: bool = False
    witness: str = ""


@dataclasses.dataclass(frozen=True)
class Collected:
    """A check that will be run; its fields are CheckResult's."""

    name: str
    question: str
    level: str
    is_of_serving: bool
    witness: str

    def result(self, outcome: str, evidence: str, seconds: float = 0.0) -> CheckResult:
        """Return what came of it, at its level."""
        if self.level == "warning" and outcome in BLOCKS:
            outcome = WARNING
        return CheckResult(
            self.name, self.question, self.level, outcome, evidence, seconds, self.is_of_serving, self.witness
        )


def unreadable(path: str, outcome: str, why: str) -> CheckResult:
    """Return what is told of a check file that could not be read."""
    return CheckResult(Path(path).name, f"can {path} be read", "blocker", outcome, why, 0.0)


def unfinished(why: str, not_run: Sequence[str]) -> CheckResult:
    """Return what is told where the checks came to no end, and which were not run."""
    lost = f"; not run: {', '.join(dict.fromkeys(not_run))}" if not_run else ""
    return CheckResult("checks", "could every check run", "blocker", ERROR, f"{why}{lost}", 0.0)
