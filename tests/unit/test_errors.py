"""The catalogue of errors: each kind says what failed, why, what serves, what to do next, and shows no traceback."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from invoke.exceptions import Exit as Leave

import lamplighter
from lab.node import LabFailed
from lamplighter import errors
from lamplighter.errors import LamplighterError
from lamplighter.inventory import load_inventory
from lamplighter.inventory.values import Origin, SecretMissing
from lamplighter.project import PROJECT
from lamplighter.report import Fold, summary
from lamplighter.run import command
from lamplighter.run.conversation import NoAnswer
from lamplighter.run.host_session import Follower, NodeDefect, NoSuchRun, detached
from lamplighter.ssh.connection import CommandTimedOut, TooMuchOutput
from lamplighter.ssh.host_keys import HostKeyChanged, HostKeyUnknown


def caught(kind: type[LamplighterError], raiser: Callable[[], object]) -> LamplighterError:
    with pytest.raises(kind) as raised:
        raiser()
    return raised.value


def no_such_run() -> None:
    told = {"event": "result", "error": "gpu1 has no run r1 of server kimi"}
    Follower("gpu1", "kimi", "r1", lambda event: None)(told)


#: One of each kind, made where the product makes it, if that needs no node.
CATALOGUE: dict[type[LamplighterError], Callable[[], LamplighterError]] = {
    LamplighterError: lambda: command._defect(command.Settings(Path("inventory")), ValueError("x")),
    errors.UsageError: lambda: caught(errors.UsageError, lambda: command.seconds_in("soon", "--wait")),
    errors.InventoryError: lambda: caught(
        errors.InventoryError, lambda: load_inventory(Path("/no/such"), PROJECT / "roles")
    ),
    errors.Unreachable: lambda: errors.Unreachable("gpu1 did not answer", why="timed out"),
    errors.SessionRefused: lambda: errors.SessionRefused("gpu1 takes no session", why="MaxSessions is 1"),
    errors.LoginFailed: lambda: errors.LoginFailed("gpu1 turned us away", why="no key fits"),
    errors.NodeRefused: lambda: errors.NodeRefused("gpu1 has no Python >= 3.9", why="python3 is 3.6"),
    errors.ContactLost: lambda: detached(Follower("gpu1", "kimi", "r1", lambda event: None)),
    errors.SilenceTimeout: lambda: errors.SilenceTimeout("gpu1 has been silent for 10 s", why="the wire is cut"),
    SecretMissing: lambda: SecretMissing("HF_TOKEN is not set", Origin("inventory/host_vars/gpu1.yml", 7)),
    HostKeyUnknown: lambda: HostKeyUnknown("gpu1: the host key is unknown", why="it showed SHA256:abc"),
    HostKeyChanged: lambda: HostKeyChanged("gpu1: the host key is another one", why="it showed SHA256:abc"),
    NoAnswer: lambda: NoAnswer("gpu1 said nothing", why="10 s have passed"),
    CommandTimedOut: lambda: CommandTimedOut("gpu1: the command did not end", why="10 s have passed"),
    TooMuchOutput: lambda: TooMuchOutput("gpu1: the command wrote too much", why="more than 16 MiB"),
    NoSuchRun: lambda: caught(NoSuchRun, no_such_run),
    NodeDefect: lambda: NodeDefect(
        "gpu1: our program failed", why="KeyError: 'x'", next_step="report it", trace="TRACE"
    ),
    LabFailed: lambda: LabFailed("the lab node did not answer", why="it printed nothing"),
}

#: What a reader finds of what serves now.
SERVES = re.compile(r"nothing was (touched|opened)|serving|SERVING|goes on|is not known")


def all_kinds() -> set[type[LamplighterError]]:
    for module in pkgutil.walk_packages(lamplighter.__path__, "lamplighter."):
        if not module.name.startswith(("lamplighter.node", "lamplighter.share")):
            importlib.import_module(module.name)
    found, todo = set(), [LamplighterError]
    while todo:
        found.add(kind := todo.pop())
        todo += kind.__subclasses__()
    # a private one is a signal between two functions, and never told
    return {kind for kind in found if not kind.__module__.startswith("tests") and not kind.__name__.startswith("_")}


def test_the_catalogue_is_complete() -> None:
    assert set(CATALOGUE) == all_kinds()


@pytest.mark.parametrize("kind", CATALOGUE, ids=lambda kind: str(kind.__name__))
def test_an_error_says_four_things_and_shows_no_traceback(
    kind: type[LamplighterError], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAMPLIGHTER_DEBUG", raising=False)
    error = CATALOGUE[kind]()
    # of a command that prints by itself
    with pytest.raises(Leave) as left, command.guarded(command.Settings(Path("inventory"))):
        raise error
    said = capsys.readouterr().err
    assert left.value.code == error.exit_code != 0
    assert said.startswith(str(error.origin) if error.origin else error.what.partition("\n")[0])
    assert "\n  next: " in said
    assert "Traceback" not in said
    assert "TRACE" not in said
    assert error.why in said
    # of a server in a report
    fold = Fold()
    fold.add_error("gpu1", "kimi", error)
    text = "\n".join(summary(fold.report()))
    report: dict[str, Any] = fold.report().to_json()["report"]["hosts"]["gpu1"]["servers"]["kimi"]
    assert report["exit_code"] == error.exit_code
    assert re.search(r"^  (what failed|contact) +\S", text, re.MULTILINE)
    assert re.search(r"^  next +\S", text, re.MULTILINE)
    assert SERVES.search(text), text
    if error.why:
        assert re.search(r"^  why +\S", text, re.MULTILINE)
