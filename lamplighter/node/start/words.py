"""The engine's own parser, asked before anything is stopped: does it take the words that the server is started with?

A wrong flag, a value out of range, a package that cannot be imported or a model whose configuration nobody knows need
no GPU to be found, and would else be found in the dark. What the parser is, ``parser`` of engine.yml says: a few lines
of Python that run in the environment of the launch, beside the server that serves. Starts one process, and ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import IO, Any, Iterator, List, Mapping, Optional, Sequence

from lamplighter.node.finding import Finding
from lamplighter.node.log.verdict import Diagnosis
from lamplighter.node.log.watch import LogWatch
from lamplighter.node.plan import Plan
from lamplighter.node.start import startup
from lamplighter.node.start.ground import Start

#: Exit status of a parser that this version of the engine does not have.
NONE_HERE = 77
#: What is kept of its output: an engine says why at the end.
TAIL_BYTES = 1 << 20
DEADLINE_SECONDS = 120.0
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Verdict:
    """What the parser made of the words.

    ``refusal``: why the server would not start; None where it takes them. ``unsure``: why that is not known: it did not
    end in time, there is none in this version, or it needs what only the server will have.
    """

    refusal: Optional[Diagnosis] = None
    last_line: str = ""
    unsure: str = ""
    seconds: float = 0.0
    tail: Sequence[str] = ()


class Parser:
    """The engine's parser at work on the words of one launch. ``close`` ends it."""

    def __init__(
        self,
        engine: Mapping[str, Any],
        python: Sequence[str],
        argv: Sequence[str],
        environment: Mapping[str, str],
        directory: str = "/",
    ) -> None:
        """Start it: ``python`` are the words that start the server's interpreter as its launch does. Raises OSError."""
        self._engine = engine
        self._rule: Mapping[str, Any] = engine["parser"]
        self._began = time.monotonic()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [*python, "-c", self._rule["code"], *argv],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            cwd=directory,
            env=dict(environment),
            start_new_session=True,
        )

    def poll(self) -> Optional[Verdict]:
        """Return what it made of the words, None while it is at work."""
        status = self._process.poll()
        seconds = time.monotonic() - self._began
        limit = float(self._rule.get("seconds") or DEADLINE_SECONDS)
        if status is None and seconds < limit:
            return None
        if status is None:
            return Verdict(unsure=f"it did not end within {limit:.0f} s", seconds=seconds)
        if status == 0:
            return Verdict(seconds=seconds)
        if status == NONE_HERE:
            return Verdict(unsure="this version of the engine has none that is known here", seconds=seconds)
        return self._failed(status, seconds)

    def _failed(self, status: int, seconds: float) -> Verdict:
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - TAIL_BYTES))
        watched = LogWatch(self._engine, is_whole=True)
        watched.feed(self._output.read())
        watched.finish()
        found, tail = watched.diagnosis(exited=True), tuple(watched.tail(40))
        last = tail[-1] if tail else f"exit status {status}"
        if status < 0:
            return Verdict(unsure=f"it was killed by {signal.Signals(-status).name}", seconds=seconds, last_line=last)
        if found.cause in (self._rule.get("passes") or ()):
            return Verdict(unsure=found.evidence or last, seconds=seconds, last_line=last)
        return Verdict(refusal=found, last_line=last, seconds=seconds, tail=tail)

    def close(self) -> None:
        """End what still runs of it."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()


def examine(start: Start, plan: Plan) -> Iterator[Finding]:
    """Ask the parser, and wait for it, before there is a release: does it take what would be started?"""
    name = plan.engine["name"]
    if not plan.engine.get("parser") or plan.parser == "off":
        return
    try:
        python = startup.interpreter_of(start.argv, start.path, start.python)
        parser = Parser(plan.engine, python, words_of(start.argv, plan.argv_secrets), start.environment)
    except (startup.NoPython, OSError) as error:
        yield Finding("parser", "ok", f"{name}'s own parser cannot be asked", str(error))
        return
    try:
        while (verdict := parser.poll()) is None:
            time.sleep(POLL_SECONDS)
    finally:
        parser.close()
    if verdict.refusal is not None:
        yield refusal(verdict, plan)
    elif verdict.unsure:
        yield Finding("parser", "ok", f"{name}'s own parser cannot tell whether it takes the words", verdict.unsure)
    else:
        yield Finding("parser", "ok", f"{name}'s own parser takes the words", f"in {verdict.seconds:.1f} s")


def refusal(verdict: Verdict, plan: Plan) -> Finding:
    """Say what the parser refuses, and what to do about it."""
    found = verdict.refusal
    assert found is not None
    other = f"correct servers.{plan.name}.args, or set servers.{plan.name}.parser: off if the parser is wrong"
    return Finding(
        found.cause or "words",
        "error",
        f"{plan.engine['name']}'s own parser refuses the words of the launch",
        found.evidence or verdict.last_line,
        found.hint_for(plan.name) or other,
    )


def words_of(argv: Sequence[str], secrets: Mapping[str, int]) -> List[str]:
    """Return the words of a launch without what is secret in them: a parser has no use for it."""
    hidden = set(secrets.values())
    return ["secret" if place in hidden else word for place, word in enumerate(argv)]
