"""What is said of a server by its records: when its run ended without a word of it, and when they are lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node import events
from lamplighter.node.events import Exit
from lamplighter.node.health import census, drift, serving
from lamplighter.node.keeper import launched as launches
from lamplighter.node.keeper import launcher, systemd
from lamplighter.node.layout import ServerHome
from lamplighter.node.system import processes
from lamplighter.node.verbs import status, unchanged
from tests.node.test_liveness import Server, deployed, server

__all__ = ["server"]

OLDER, NEWER = "20261129T000001Z-abcdef", "20261129T000002Z-abcdef"
DEAD = {"boot_id": "another", "pid": 1, "start": 1}


@pytest.fixture
def home(tmp_path: Path, server: Server) -> ServerHome:
    """A server that answers, and whose record says that it has not been ready."""
    made = deployed(tmp_path / "servers" / "x", server, "vllm")
    record = json.loads(Path(made.record).read_text())
    Path(made.record).write_text(json.dumps({**record, "ready": False, "run": NEWER}))
    return made


def status_of(home: ServerHome) -> dict[str, Any]:
    (found,) = status.status({"host": "box", "servers": [home.name]}, str(Path(home.path).parents[1]))["servers"]
    return dict(found)


def end(home: ServerHome, code: int, cause: str) -> None:
    journal = Path(home.run(NEWER).journal)
    journal.parent.mkdir(parents=True)
    told = {"event": events.END, "outcome": "failed", "exit_code": code, "cause": cause, "stage": "rollback", "seq": 1}
    journal.write_text(json.dumps(told) + "\n")
    os.utime(journal.parent, (0, 0))  # it begins no more


@pytest.mark.parametrize(
    ("code", "cause", "how"),
    [
        (7, "not_ready", "ended with exit code 7 and has not confirmed it"),
        (1, "abandoned", "was killed before it had confirmed it"),
        (None, "", "was killed before it had confirmed it"),
    ],
)
def test_a_run_that_ended_was_not_killed(home: ServerHome, code: int | None, cause: str, how: str) -> None:
    if code is not None:
        end(home, code, cause)
    found = status_of(home)
    assert found["state"] == "serving"
    assert found["message"].startswith(f"run {NEWER} {how}; `")


def test_one_that_was_given_up_and_gives_no_token_does_not_serve(home: ServerHome, server: Server) -> None:
    server.generates = False
    end(home, 7, "not_ready")
    (found,) = status.status({"host": "box", "servers": [home.name], "patience": 0.5}, str(Path(home.path).parents[1]))[
        "servers"
    ]
    assert found["state"] == "unknown"
    assert "it does not answer a question" in found["message"]


def launched(home: ServerHome, run: str, **more: Any) -> None:
    """Leave the record of a launch, and no ``server.json``."""
    Path(home.record).unlink(missing_ok=True)
    path = Path(home.run(run).launch("new").process)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"command": [home.release("a" * 12).launch_script], "t": 5.0, **more}))


def me() -> dict[str, Any]:
    found = processes.read_process(os.getpid())
    assert found is not None
    return {"boot_id": found.identity.boot_id, "pid": found.pid, "start": found.start}


def test_without_its_record_the_launch_that_lives_is_what_serves(home: ServerHome, server: Server) -> None:
    launched(home, OLDER, **me())
    launched(home, NEWER, **DEAD)
    verdict = {"verdict": "good", "t": 7.0, "run": OLDER}
    Path(home.release("a" * 12).verdict).write_text(json.dumps(verdict))
    record = launcher.read_record(home)
    assert record is not None
    assert (record["run"], record["ready"], record["since"], record["port"]) == (OLDER, True, 7.0, server.server_port)
    assert record["log"] == home.run(OLDER).launch("new").log
    now = serving.look(home)
    assert now.record is not None
    assert now.record["pid"] == os.getpid()
    assert status_of(home)["message"].startswith(f"{home.record} is missing; `")


def test_without_its_record_and_a_living_launch_the_last_one_is_told(home: ServerHome) -> None:
    launched(home, OLDER, **DEAD)
    launched(home, NEWER, **DEAD)
    record = launcher.read_record(home)
    assert record is not None
    assert (record["run"], record["ready"]) == (NEWER, False)
    assert status_of(home)["state"] == "stopped"


def test_without_its_record_the_committed_unit_goes_before_a_later_launch(
    home: ServerHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a reboot in the middle of a deploy."""
    launched(home, OLDER, **DEAD, unit="lamplighter-x.service", manager_uid=None)
    launched(home, NEWER, **DEAD, unit="lamplighter-x.service", manager_uid=None)
    monkeypatch.setattr(systemd, "committed", lambda home: {"run": OLDER, "attempt": "new"})
    record = launcher.read_record(home)
    assert record is not None
    assert (record["run"], record["ready"], record["unit"]) == (OLDER, True, "lamplighter-x.service")


@pytest.mark.parametrize("damage", ["[]", '{"boot_id": "x", "pid": 1, "start": 1, "command": []}', "{}"])
def test_launch_records_that_are_damaged_tell_nothing(home: ServerHome, damage: str) -> None:
    launched(home, NEWER, **DEAD)
    Path(home.run(NEWER).launch("new").process).write_text(damage)
    assert launcher.read_record(home) is None
    found = status_of(home)
    assert (found["state"], found["message"]) == ("stopped", "nothing has been deployed here")


@pytest.mark.parametrize("ending", ["{}", '{"all_gone": true}', '{"code": "x", "signal": 4711}', '{"result": 1}'])
def test_a_damaged_record_of_the_end_is_an_unknown_end(home: ServerHome, ending: str) -> None:
    launched(home, NEWER, **DEAD)
    launch = home.run(NEWER).launch("new")
    Path(launch.exit).write_text(ending)
    assert str(launcher.read_exit(launch)) == "exit status unknown"


def test_the_record_claims_its_server_but_none_that_was_adopted(home: ServerHome) -> None:
    record = json.loads(Path(home.record).read_text())
    table = processes.processes()
    assert [each.main.pid for each in census.recorded_launches(home, table)] == [os.getpid()]
    for other in ({"attempt": "adopted"}, {"start": 1}, {"boot_id": "another"}, {"unit": "x.service"}):
        Path(home.record).write_text(json.dumps({**record, **other}))
        assert census.recorded_launches(home, table) == [], other


@pytest.mark.parametrize("unit", [{"unit": 5}, {"unit": ""}, {"unit": "x.service", "manager_uid": "root"}])
def test_a_record_of_a_unit_that_cannot_be_one_names_none(unit: dict[str, Any]) -> None:
    assert launches.unit_in(unit) is None


def test_runs_are_in_the_order_in_which_they_began_on_this_node(home: ServerHome) -> None:
    """By its clock: the time in a run's id is another machine's. A damaged record leaves that alone to go by."""
    for run, record in {
        OLDER: '{"t": 1795900000.5}',
        NEWER: '{"t": 1795900000}',
        "20261129T000003Z-abcdef": "{}",
    }.items():
        Path(home.run(run).path).mkdir(parents=True)
        Path(home.run(run).worker).write_text(record)
    assert [run.run_id[:16] for run in home.all_runs()] == [f"20261129T00000{number}Z" for number in (2, 1, 3)]
    assert home.run("20261129T000003Z-abcdef").began == 1795910403.0
    assert home.run("20269999T999999Z-abcdef").began == 0.0


@pytest.mark.parametrize(("holder", "is_tried"), [({"run": OLDER}, True), (None, False)])
def test_a_bad_release_is_not_tried_again_unless_another_run_may_be_changing_that(
    home: ServerHome, monkeypatch: pytest.MonkeyPatch, holder: dict[str, Any] | None, is_tried: bool
) -> None:
    """With a run at work the deploy goes on, and waits for the lock or is told who has it."""
    monkeypatch.setattr(unchanged.drift, "find_drift", lambda home, wanted: drift.Drift())
    monkeypatch.setattr(unchanged, "_reasons", lambda *_: ["something differs"])
    monkeypatch.setattr(unchanged.serving, "look", lambda *_: serving.Serving())
    monkeypatch.setattr(unchanged.releases, "verdict_on", lambda *_: {"verdict": "bad", "t": 1.0, "message": "it died"})
    monkeypatch.setattr(unchanged.lock, "holder_of", lambda path: holder)
    request = {
        "server": home.release("a" * 12).read_request()["server"], "engine": {}, "wanted": None, "host": "box",  # type: ignore[index]
        "release": {"digest": "a" * 12},
    }  # fmt: skip
    found = unchanged.look_before(request, str(Path(home.path).parents[1]))
    assert found.reasons == ("something differs",)
    assert (found.end is None) == is_tried
    assert found.end is None or (found.end["exit_code"], found.end["cause"]) == (Exit.NOT_READY, "bad_release")
