"""Which release is worth going back to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lamplighter.node.events import Exit
from lamplighter.node.layout import ServerHome, read_json
from lamplighter.node.stages import releases
from lamplighter.node.worker import StageFailure
from tests.node.test_liveness import plan_of

PLAN: dict[str, Any] = {"server": plan_of("sglang", 1), "engine": {"name": "sglang"}}
GOOD = {"oldest": 1.0, "older": 2.0, "newest": 3.0}


@pytest.fixture
def home(tmp_path: Path) -> ServerHome:
    """Three good releases and a new one; the newest good one is current."""
    made = ServerHome(str(tmp_path))
    for name in (*GOOD, "unproven"):
        directory = tmp_path / "releases" / name
        directory.mkdir(parents=True)
        (directory / "launch.sh").touch()
        (directory / "plan.json").write_text(json.dumps(PLAN))
        if name in GOOD:
            (directory / "verdict.json").write_text(json.dumps({"verdict": "good", "t": GOOD[name]}))
    (tmp_path / "current").symlink_to("releases/newest")
    return made


def started_last(home: ServerHome, release: str) -> None:
    record = {"boot_id": "b", "pid": 1, "start": 1, "host": "h", "port": 1, "run": "r", "attempt": "new", "log": ""}
    Path(home.record).write_text(json.dumps({**record, "release": release}))


@pytest.mark.parametrize(("last", "taken"), [("newest", "older"), ("unproven", "newest"), ("older", "newest")])
def test_rollback_takes_the_last_good_one_other_than_what_was_started_last(
    home: ServerHome, last: str, taken: str
) -> None:
    started_last(home, last)
    found = releases.earlier_release(home)
    assert found is not None
    assert found.digest == taken


def test_without_a_record_current_is_what_is_left(home: ServerHome) -> None:
    found = releases.earlier_release(home)
    assert found is not None
    assert found.digest == "older"


@pytest.mark.parametrize("damage", ["launch.sh", "plan.json"])
def test_a_damaged_release_is_none(home: ServerHome, damage: str) -> None:
    Path(home.current, damage).unlink()
    assert home.current_release() is None
    assert [release.digest for release in releases.good_releases(home)] == ["older", "oldest"]


@pytest.mark.parametrize(
    "given",
    [
        *(
            {name: None}
            for name in ("name", "port", "gpus", "argv", "env", "stale", "allow", "timeouts", "sitecustomize")
        ),
        {"timeouts": []},
        {"timeouts": {"stop": 1, "free": 1, "ready": 1, "stall": []}},
        {"env": {"NCCL_PROTO": "LL"}},
        {"env": {"NCCL_PROTO": {"value": 1, "mode": "force"}}},
        {"argv": [1]},
        {"gpus": [None]},
        {"port": 1e999},
        {"secrets": 1},
    ],
)
def test_a_plan_that_cannot_be_used_counts_as_missing(home: ServerHome, given: dict[str, Any]) -> None:
    plan = {**PLAN["server"], **given}
    Path(home.current, "plan.json").write_text(json.dumps({**PLAN, "server": plan}))
    assert home.release("newest").read_plan() is None
    for name in given:
        plan.pop(name)
    Path(home.current, "plan.json").write_text(json.dumps({**PLAN, "server": plan}))
    assert (home.current_release() is None) == (given != {"secrets": 1})


@pytest.mark.parametrize(
    "text", ["[" * 100_000, json.dumps({**PLAN, "engine": {}}), json.dumps({**PLAN, "adopted": 1})]
)
def test_other_damage_to_a_plan(home: ServerHome, text: str) -> None:
    Path(home.current, "plan.json").write_text(text)
    assert home.current_release() is None


def test_a_record_counts_only_with_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"pid": 1, "name": "x"}')
    assert read_json(str(path)) == {"pid": 1, "name": "x"}
    assert read_json(str(path), pid=int, name=(int, str)) is not None
    assert read_json(str(path), pid=str) is None
    assert read_json(str(path), start=int) is None


def test_a_server_that_dies_while_its_release_is_committed_fails_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    for name in ("mark", "make_current", "_prune"):
        monkeypatch.setattr(releases, name, lambda *_, name=name, **__: done.append(name))

    def dead(*_: object) -> None:
        assert done == ["mark", "make_current", "_prune"]  # whatever takes time is over
        raise StageFailure(Exit.CRASHED, "the server died")

    monkeypatch.setattr(releases, "see_it_live", dead)
    started: Any = SimpleNamespace(release=SimpleNamespace(name="aaaa"), plan=SimpleNamespace(keep_releases=5))
    with pytest.raises(StageFailure, match="the server died"):
        releases.commit(SimpleNamespace(), started, 1.0)  # type: ignore[arg-type]


def test_the_release_to_go_back_to_is_never_pruned(home: ServerHome) -> None:
    """However old it is, and however few are to be kept."""
    for age, name in enumerate(("unproven", "newest", "oldest", "older")):
        os.utime(Path(home.path, "releases", name, "plan.json"), (1000 - age, 1000 - age))
    releases._prune(SimpleNamespace(home=home), 1, {"newest"})  # type: ignore[arg-type]
    assert sorted(path.name for path in Path(home.path, "releases").iterdir()) == ["newest", "older", "unproven"]


def test_a_clock_that_was_a_day_ahead_makes_no_release_the_newest(home: ServerHome) -> None:
    """Verdicts are in the order in which they were given; those without a number are the oldest."""
    run: Any = SimpleNamespace(home=home, directory=SimpleNamespace(run_id="r"))
    for name, t in (("oldest", 86400.0), ("older", 4.0), ("newest", 5.0)):
        release = next(each for each in home.all_releases() if each.name == name)
        releases.mark(run, release, "good", None)
        verdict = json.loads(Path(release.verdict).read_text())
        Path(release.verdict).write_text(json.dumps({**verdict, "t": t}))
    assert [release.name for release in releases.good_releases(home)] == ["newest", "older", "oldest"]
    Path(home.release("older").verdict).write_text(json.dumps({"verdict": "good", "t": 9e9}))
    assert [release.name for release in releases.good_releases(home)] == ["newest", "oldest", "older"]
