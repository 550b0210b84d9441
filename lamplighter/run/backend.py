"""What testinfra asks of a node, on its way to the process that has the connection.

`NodeBackend` is a testinfra backend, and `ask_together` has many questions asked by testinfra's own modules in a few
round trips: each question is begun again whenever an answer has come, and goes as far as the answers reach. What runs
on the node are the very commands that testinfra asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import testinfra.backend.base
import testinfra.host

from lamplighter.run.outcome import FIRST

#: So many round trips a question may take; more are no question, but a loop.
MOST_ROUNDS = 30


class Said(Protocol):
    """What a command left behind."""

    @property
    def exit_status(self) -> int: ...

    @property
    def stdout(self) -> bytes: ...

    @property
    def stderr(self) -> bytes: ...


class NoAnswer(Exception):
    """A command did not end in time, or said too much; the text says so."""


class Way(Protocol):
    """The way to the node."""

    def run_all(self, commands: Sequence[str]) -> Sequence[Said | NoAnswer]:
        """Run all ``commands`` in one round trip."""


class _Unasked(BaseException):
    """The answer to a command is not there yet; no Exception, which a module or a check might take for an answer."""


class NodeBackend(testinfra.backend.base.BaseBackend):  # type: ignore[misc]  # testinfra ships no types
    """testinfra's questions, each one round trip."""

    NAME = "lamplighter"

    def __init__(self, way: Way) -> None:
        super().__init__("node")
        self._way = way
        self._encoding = "utf-8"  # asking the node for its encoding would cost a command

    def decode(self, data: bytes) -> str:
        """Any bytes are text: those that are no UTF-8 come back as the same bytes where they go into a command."""
        return data.decode("utf-8", "surrogateescape")

    def run(self, command: str, *args: str, **kwargs: Any) -> testinfra.backend.base.CommandResult:
        line = self.get_command(command, *args)
        said = self._said(line)
        if isinstance(said, NoAnswer):
            raise said
        return self.result(said.exit_status, self.encode(line), said.stdout, said.stderr)

    def _said(self, line: str) -> Said | NoAnswer:
        (said,) = self._way.run_all([line])
        return said


class _Rehearsal(NodeBackend):
    """Answers what is known, and takes note of the rest."""

    def __init__(self, way: Way, known: Mapping[str, Said | NoAnswer]) -> None:
        super().__init__(way)
        self._known = known
        self.wanted: dict[str, None] = {}

    def _said(self, line: str) -> Said | NoAnswer:
        if line in self._known:
            return self._known[line]
        self.wanted[line] = None
        raise _Unasked


def host_on(way: Way) -> Any:
    """Return testinfra's ``host``, whose every command is one round trip."""
    return testinfra.host.Host(NodeBackend(way))


Question = Callable[[Any], Any]


def ask_together(
    questions: Iterable[Question], way: Way, answered: Mapping[str, Said | NoAnswer] | None = None
) -> dict[Question, Callable[[], Any]]:
    """Ask all ``questions`` of a ``host``; return what each came to: a function that returns or raises it.

    A question may be begun several times, so it only asks. Takes as many round trips as the longest has commands, less
    those that are ``answered`` already.
    """
    known: dict[str, Said | NoAnswer] = dict(answered or {})
    found: dict[Question, Callable[[], Any]] = {}
    open_ones = list(dict.fromkeys(questions))
    rounds = 0
    while open_ones:
        backend = _Rehearsal(way, known)
        host = testinfra.host.Host(backend)
        for question in open_ones:
            try:
                found[question] = _returning(question(host))
            except _Unasked:
                continue
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a failure, or a skip: the check that asks tells it
                found[question] = _raising(error)
        open_ones = [question for question in open_ones if question not in found]
        rounds += 1
        if open_ones and rounds > MOST_ROUNDS:
            endless = NoAnswer(f"more than {MOST_ROUNDS} commands, one after another: no question asks so much")
            return {**dict.fromkeys(open_ones, _raising(endless)), **found}
        if open_ones:
            first = [command for command in FIRST if command not in known] if rounds == 1 else []
            commands = list(dict.fromkeys((*first, *backend.wanted)))
            known.update(zip(commands, way.run_all(commands), strict=True))
    return found


def together(*questions: Callable[[], Any]) -> list[Any]:
    """Return the answers to several questions that need not wait for one another."""
    answers, is_whole = [], True
    for question in questions:
        try:
            answers.append(question())
        except _Unasked:
            is_whole = False
    if not is_whole:
        raise _Unasked
    return answers


def _returning(value: Any) -> Callable[[], Any]:
    return lambda: value


def _raising(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail
