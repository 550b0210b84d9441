"""All tests, as two pytest sessions side by side: most of them wait for nodes and servers most of the time.

The first session's output comes live, the second's when both are over; then the counts of both together, for each kind
of test, and one closing line. `python -m tests.run`; arguments go to pytest in one plain session.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
HALVES = (("unit", "node", "lab"), ("ssh", "systemd", "faults", "engines"))
COUNTS = re.compile(
    r"^(?:(?P<kind>[a-z]+) +)?(?P<passed>\d+) passed, (?P<failed>\d+) failed, (?P<skipped>\d+) skipped$"
)


def main(words: list[str]) -> int:
    """Run the tests; the exit status is the worse one of the two sessions."""
    pytest = [sys.executable, "-m", "pytest"]
    if words:
        return subprocess.run([*pytest, *words], cwd=PROJECT, check=False).returncode
    live, later = ([*pytest, *(f"tests/{kind}" for kind in half)] for half in HALVES)
    with tempfile.TemporaryFile("w+") as first, tempfile.TemporaryFile("w+") as second:
        with subprocess.Popen(later, cwd=PROJECT, stdout=second, stderr=subprocess.STDOUT) as beside:
            status = follow(live, first)
        for output in (first, second):
            output.seek(0)
        said = second.read()
        print(said, end="", flush=True)
        counts = together(first.read() + said)
    print("== both sessions together")
    for kind, count in counts.items():
        print(f"{kind:10} {sentence(count)}" if kind else sentence(count))
    return status or beside.returncode


def follow(command: list[str], kept: object) -> int:
    """Run a session, show what it says as it says it, and keep that too."""
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as session:
        assert session.stdout is not None
        while piece := session.stdout.read(1):
            sys.stdout.write(piece)
            sys.stdout.flush()
            kept.write(piece)  # type: ignore[attr-defined]
    return session.returncode


def together(text: str) -> dict[str, Counter[str]]:
    """Add the sessions' closing counts up by kind; the sum of all is last, under an empty name."""
    counts: dict[str, Counter[str]] = {}
    for match in filter(None, map(COUNTS.match, text.splitlines())):
        kind = match["kind"] or ""
        counts.setdefault(kind, Counter()).update({word: int(match[word]) for word in ("passed", "failed", "skipped")})
    if "" in counts:
        counts[""] = counts.pop("")
    return counts


def sentence(count: Counter[str]) -> str:
    return f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
