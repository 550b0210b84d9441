"""All tests, as pytest sessions side by side: most of them wait for nodes and servers most of the time.

Each session's progress comes line by line as it is made, its closing part in one piece when it is over; then the counts
of all together, for each kind of test, and one closing line. `python -m tests.run`; arguments go to pytest in one plain
session. TERM and Ctrl-C reach every session, and each tears down what it has made.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

PROJECT = Path(__file__).resolve().parent.parent
#: What each session runs: directories and files below tests/, the longest sessions first. Each test is in one of them.
SESSIONS = (
    ("faults",),
    ("engines",),
    ("lab/test_[a-k]*.py",),
    ("lab/test_r[a-e]*.py",),
    ("lab/test_r[f-z]*.py", "lab/test_[s-z]*.py"),
    ("unit", "node"),
    ("ssh", "systemd"),
    ("lab/test_[l-q]*.py",),
)
AT_ONCE = 4
COUNTS = re.compile(
    r"^(?:(?P<kind>[a-z]+) +)?(?P<passed>\d+) passed, (?P<failed>\d+) failed, (?P<skipped>\d+) skipped$"
)


def main(words: list[str]) -> int:
    """Run the tests; the exit status is the worst of the sessions'."""
    pytest = [sys.executable, "-m", "pytest"]
    if words:
        return subprocess.run([*pytest, *words], cwd=PROJECT, check=False).returncode
    everything = Everything([[*pytest, *files_of(session)] for session in SESSIONS])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, everything.end)
    status = everything.run(AT_ONCE)
    print("== all sessions together")
    for kind, count in together(everything.said).items():
        print(f"{kind:10} {sentence(count)}" if kind else sentence(count))
    return status


def files_of(session: Iterable[str]) -> list[str]:
    """The directories and files that a session's patterns stand for, as pytest takes them."""
    return [str(path.relative_to(PROJECT)) for each in session for path in sorted((PROJECT / "tests").glob(each))]


class Everything:
    """The sessions, and all lines that they have said."""

    def __init__(self, commands: list[list[str]]) -> None:
        self.said: list[str] = []
        self._commands = commands
        self._running: list[subprocess.Popen[str]] = []
        self._printing = threading.Lock()
        self._is_over = False

    def run(self, at_once: int) -> int:
        with ThreadPoolExecutor(at_once) as pool:
            return max(abs(status) for status in pool.map(self._session, self._commands))

    def end(self, number: int, _frame: FrameType | None) -> None:
        """Begin no further session, and have those that run tear down; Ctrl-C has reached them by itself."""
        self._is_over = True
        for session in self._running:
            if number != signal.SIGINT:
                session.send_signal(number)

    def _session(self, command: list[str]) -> int:
        if self._is_over:
            return int(signal.SIGINT)
        with subprocess.Popen(
            command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as session:
            self._running.append(session)
            assert session.stdout is not None
            head = True
            closing: list[str] = []
            for line in session.stdout:
                is_ruler = line.startswith(("=", "!", "_"))
                if closing or (is_ruler and not head):
                    closing.append(line)
                else:
                    head = head and not line.startswith("tests/")
                    self._print([line])
            self._print(closing)
        self._running.remove(session)
        return session.returncode

    def _print(self, lines: Iterable[str]) -> None:
        with self._printing:
            for line in lines:
                sys.stdout.write(line)
                self.said.append(line.rstrip("\n"))
            sys.stdout.flush()


def together(lines: Iterable[str]) -> dict[str, Counter[str]]:
    """Add the sessions' closing counts up by kind; the sum of all is last, under an empty name."""
    counts: dict[str, Counter[str]] = {}
    for match in filter(None, map(COUNTS.match, lines)):
        kind = match["kind"] or ""
        counts.setdefault(kind, Counter()).update({word: int(match[word]) for word in ("passed", "failed", "skipped")})
    if "" in counts:
        counts[""] = counts.pop("")
    return counts


def sentence(count: Counter[str]) -> str:
    return f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
