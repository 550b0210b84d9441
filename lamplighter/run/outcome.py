"""What came of one check."""

from __future__ import annotations

import dataclasses

#: Kinds of result, those that exit 8 first.
FAILED, ERROR, WARNING, SKIPPED, PASSED = "failed", "error", "warning", "skipped", "passed"
BLOCKS = (FAILED, ERROR)


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """One check. ``outcome``: passed, warning (failed, and that blocks nothing), failed, error, skipped.

    ``evidence`` is the line that says why, or what was seen; ``question`` the words for people. ``is_of_serving``: a
    server that fails it does not serve.
    """

    name: str
    question: str
    level: str
    outcome: str
    evidence: str
    seconds: float
    is_of_serving: bool = False
