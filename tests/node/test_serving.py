"""What serves is asked: who lives and listens may answer nothing, and who answers may not be ours."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lamplighter.node.health import serving, wayback
from lamplighter.node.layout import ServerHome
from lamplighter.node.plan import Plan
from lamplighter.node.system import ports
from lamplighter.node.verbs import status
from tests.node.living import Living, until
from tests.node.test_liveness import ENGINES, Server, deployed, plan_of, server

__all__ = ["server"]

SECONDS = 0.5


def plan_at(port: int) -> Plan:
    return Plan.load({"server": plan_of("vllm", port), "engine": ENGINES["vllm"]})


def note(home: ServerHome, **more: object) -> None:
    record = json.loads(Path(home.record).read_text())
    Path(home.record).write_text(json.dumps({**record, **more}))


@pytest.mark.parametrize("ready", [True, False])
def test_one_that_gives_a_token_serves_also_where_its_start_was_given_up(
    tmp_path: Path, server: Server, ready: bool
) -> None:
    home = deployed(tmp_path, server, "vllm")
    note(home, ready=ready)
    now = serving.look(home)
    assert now.record is not None
    assert now.record["port"] == server.server_port
    assert now.as_before.startswith(f"release {'a' * 12} serves as before")
    assert ("its start was given up" in str(now)) != ready


@pytest.mark.parametrize("ready", [True, False])
def test_one_that_lives_and_listens_and_gives_no_token_does_not_serve(
    tmp_path: Path, server: Server, ready: bool
) -> None:
    server.generates = False
    home = deployed(tmp_path, server, "vllm")
    note(home, ready=ready)
    now = serving.look(home, seconds=SECONDS)
    assert now.record is None
    assert now.is_alive
    assert str(now).startswith(f"nothing is serving: release {'a' * 12} (pid ")
    assert "is alive, but it does not answer a question" in str(now)


def test_a_busy_one_serves(tmp_path: Path, server: Server) -> None:
    server.generates, server.grows = False, True
    assert serving.look(deployed(tmp_path, server, "vllm"), seconds=SECONDS).record is not None


def test_a_stranger_who_gives_a_token_is_what_a_client_finds(tmp_path: Path, server: Server) -> None:
    home = ServerHome(str(tmp_path / "x"))
    plan = plan_at(server.server_port)
    now = serving.look(home, plan)
    assert now.record is not None
    assert now.record["release"].startswith("pid ")
    assert not now.is_alive
    assert "which lamplighter does not keep, is serving" in str(now)
    server.generates = False
    assert serving.look(home, plan, SECONDS).record is None


def test_a_listener_that_is_no_server_is_named_and_nothing_is_serving(tmp_path: Path, living: Living) -> None:
    port = living.port()
    words = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    other = living.start(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
    assert until(lambda: other.pid in ports.owners(port))
    now = serving.look(ServerHome(str(tmp_path / "x")), plan_at(port))
    assert now.record is None
    assert str(now).startswith(f"nothing is serving: pid {other.pid} (")
    assert "gives no token" in str(now)


def test_where_nobody_listens_nothing_is_serving(tmp_path: Path, living: Living) -> None:
    plan = plan_at(living.port())
    assert str(serving.look(ServerHome(str(tmp_path / "x")), plan)) == "nothing is serving"


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("generates", [True, False])
def test_of_one_whose_release_is_damaged_nobody_says_that_it_serves(
    tmp_path: Path, server: Server, ready: bool, generates: bool
) -> None:
    """It answers HTTP, which a hung one does as well: every verb says so, and none calls the node dark."""
    server.generates = generates
    home = deployed(tmp_path / "servers" / "x", server, "vllm")
    note(home, ready=ready)
    Path(home.release("a" * 12).plan).write_text("{")
    now = serving.look(home, plan_at(server.server_port), SECONDS)
    assert (now.record, now.is_alive, now.may_serve) == (None, True, True)
    assert str(now).startswith("what serves is not known: release aaaaaaaaaaaa (pid ")
    assert now.as_before == str(now)
    told = status.describe(home, "box", SECONDS)
    assert told["state"] == "unknown"
    for said in (str(now), told["message"]):
        assert "release aaaaaaaaaaaa is damaged, or not on the node any more: how to ask it is not known" in said


def test_one_of_which_it_is_not_known_whether_it_serves_is_not_given_up(tmp_path: Path, server: Server) -> None:
    """Its release is damaged, and the one to go back to cannot start: who stops it may find out in the dark."""
    home = deployed(tmp_path / "servers" / "x", server, "vllm")
    plan = plan_at(server.server_port)
    target = home.release("b" * 12)
    shutil.copytree(home.release("a" * 12).path, target.path)
    Path(home.release("a" * 12).plan).write_text("{")
    (found,) = wayback.examine(home, plan, "c" * 12, target, (), "box")
    assert (found.id, found.level) == ("way_back", "error")
    server.shutdown()
    server.server_close()
    (found,) = wayback.examine(home, plan, "c" * 12, target, (), "box")
    assert found.level == "warning"
