"""A run that whoever asked for it has given up: it begins before that is told, or never, and nothing in between."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node import events, journal, worker
from lamplighter.node.events import Exit
from lamplighter.node.layout import ServerHome, server_home
from lamplighter.node.verbs import follow
from tests.driver import PROJECT, eventually

RUN = "20260101T000000Z-abcdef"
#: A node side whose look at the server lasts until there is a file ``go``, and whose worker only says that it began.
SERVE = """
import json, os, subprocess, sys, time
from pathlib import Path
from lamplighter.node import __main__, relay
from lamplighter.node.verbs import unchanged
root = Path(sys.argv[1])
def look(request, _):
    (root / "looking").touch()
    while not (root / "go").exists():
        time.sleep(0.01)
    return unchanged.Before(None, ("something differs",))
def start(request, home, run):
    (root / "began").touch()
    return subprocess.Popen(["true"])
unchanged.look_before, relay.start_worker = look, start
__main__.serve(json.load(sys.stdin), str(root), "")
"""
DEPLOY = {
    "verb": "deploy",
    "run": RUN,
    "host": "gpu1",
    "by": "ann@desk",
    "server": {"name": "kimi"},
    "release": {"digest": "d"},
}
AGAIN = {"verb": "attach", "servers": ["kimi"], "host": "gpu1", "to": RUN, "after": 0}
FORBID = {"forbid": {"verb": "deploy", "by": "ann@desk"}}
CANCEL = {**AGAIN, "verb": "cancel", "by": "ann@desk", "order": "one"}


@dataclasses.dataclass
class Node:
    """The node side's conversations, each a process of its own."""

    root: Path
    children: list[subprocess.Popen[str]] = dataclasses.field(default_factory=list)

    def begin(self, request: dict[str, Any]) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", SERVE, str(self.root)]
        child = subprocess.Popen(words, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.children.append(child)
        assert child.stdin is not None
        child.stdin.write(json.dumps(request))
        child.stdin.close()
        return child

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        return self.rest(self.begin(request))

    def rest(self, child: subprocess.Popen[str]) -> list[dict[str, Any]]:
        assert child.stdout is not None
        with child.stdout:
            said = [json.loads(line) for line in child.stdout]
        assert child.wait(120) == 0
        return [event for event in said if event["event"] != events.BEAT]

    @property
    def home(self) -> ServerHome:
        return server_home(str(self.root), "kimi")

    @property
    def has_begun(self) -> bool:
        return (self.root / "began").exists()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    try:
        yield made
    finally:
        for child in made.children:
            assert child.stdout is not None
            child.stdout.close()
            child.kill()
            child.wait()


@pytest.fixture
def looking(node: Node) -> Callable[[], list[dict[str, Any]]]:
    """A deploy that looks at the server before it begins; call it to let it come to an end."""
    child = node.begin({**DEPLOY, "if_changed": True})
    eventually((node.root / "looking").exists)

    def go() -> list[dict[str, Any]]:
        (node.root / "go").touch()
        return node.rest(child)

    return go


def end_of(said: list[dict[str, Any]]) -> dict[str, Any]:
    assert [event["event"] for event in said] == [events.RUN, events.END, events.BYE]
    assert all(event["run"] == RUN for event in said[:-1])
    return said[1]


def test_a_run_that_is_given_up_while_the_node_looks_never_begins(
    node: Node, looking: Callable[[], list[dict[str, Any]]]
) -> None:
    end = end_of(node.ask({**AGAIN, **FORBID}))
    assert (end["outcome"], end["exit_code"]) == ("unreachable", Exit.UNREACHABLE)
    assert end["message"] == "contact was lost before the run began; nothing was touched"
    assert end_of(looking()) == end
    assert not node.has_begun
    assert end_of(node.ask(AGAIN)) == end
    assert end_of(node.ask({**AGAIN, **FORBID})) == end


def test_a_run_that_is_cancelled_while_the_node_looks_never_begins(
    node: Node, looking: Callable[[], list[dict[str, Any]]]
) -> None:
    end = end_of(node.ask({**CANCEL, **FORBID}))
    assert (end["outcome"], end["exit_code"], end["cause"]) == ("refused", Exit.INTERRUPTED, "cancelled")
    assert end["message"] == "cancelled by ann@desk before it began; nothing was touched"
    assert end_of(node.ask({**CANCEL, **FORBID})) == end
    assert end_of(looking()) == end
    assert not node.has_begun


def test_whoever_only_asks_for_a_run_does_not_forbid_it(
    node: Node, looking: Callable[[], list[dict[str, Any]]]
) -> None:
    assert "no run" in node.ask(AGAIN)[0]["error"]
    looking()
    assert node.has_begun


def test_a_run_that_has_begun_is_shown_and_not_forbidden(node: Node) -> None:
    assert node.ask(DEPLOY)[-1]["worker_gone"]
    assert node.has_begun
    book = journal.Journal(node.home.run(RUN).journal, node.home.run(RUN).ballast, {"run": RUN})
    book.write(events.run_started("deploy", "ann@desk", "d"))
    book.write(events.ended("deployed", Exit.OK, "ready"))
    book.close()
    assert end_of(node.ask({**AGAIN, **FORBID}))["outcome"] == "deployed"


def test_a_reader_who_leaves_while_the_node_looks_is_missed(node: Node) -> None:
    child = node.begin({**DEPLOY, "if_changed": True})
    eventually((node.root / "looking").exists)
    assert child.stdout is not None
    child.stdout.close()
    (node.root / "go").touch()
    assert child.wait(120) == 0
    assert not node.has_begun


def test_where_no_place_can_be_taken_nothing_is_said_to_be_sure(node: Node) -> None:
    (node.root / "servers").touch()
    said = node.ask({**AGAIN, **FORBID})
    assert "no run" in said[0]["error"]


def test_one_of_several_gets_the_place(node: Node) -> None:
    run = node.home.run(RUN)
    assert [worker.take_place(run), follow.take_place(run)] == [True, False]


def test_an_order_to_cancel_is_for_one_run_however_often_it_comes(node: Node) -> None:
    """The run that it was for has ended; the next one, which is beginning, is not meant."""
    first, second = node.home.run(RUN), node.home.run("20260101T000001Z-abcdef")
    assert worker.take_place(first)
    child = node.begin({**CANCEL, "to": None})
    eventually(lambda: Path(first.cancel).exists())
    book = journal.Journal(first.journal, first.ballast, {"run": RUN})
    book.write(events.run_started("deploy", "ann@desk", "d"))
    book.write(events.ended("refused", Exit.INTERRUPTED, "cancelled by ann@desk"))
    book.close()
    assert worker.take_place(second)
    end = end_of(node.rest(child))
    assert end_of(node.ask({**CANCEL, "to": None})) == end
    assert not Path(second.cancel).exists()


def test_two_orders_for_one_run_are_both_remembered(node: Node) -> None:
    run = node.home.run(RUN)
    assert worker.take_place(run)
    children = []
    for order, by in (("one", "ann@desk"), ("two", "bob@desk")):
        children.append(node.begin({**CANCEL, "order": order, "by": by}))
        eventually(lambda order=order: order in orders_in(run.cancel))
    assert json.loads(Path(run.cancel).read_text())["by"] == "ann@desk"
    book = journal.Journal(run.journal, run.ballast, {"run": RUN})
    book.write(events.run_started("deploy", "ann@desk", "d"))
    book.write(events.ended("refused", Exit.INTERRUPTED, "cancelled by ann@desk"))
    book.close()
    for order, child in zip(("one", "two"), children, strict=True):
        assert end_of(node.ask({**CANCEL, "order": order})) == end_of(node.rest(child))


def orders_in(path: str) -> list[str]:
    try:
        return list(json.loads(Path(path).read_text())["orders"])
    except OSError:
        return []
