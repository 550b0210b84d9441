"""No server is stopped for one that cannot start, nor while it could not be started again itself: it serves on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lamplighter.node.events import Exit
from tests.driver import free_port
from tests.lab.conftest import Box
from tests.lab.test_adopt import by_hand


def with_model(box: Box, name: str, **server: Any) -> Path:
    """Make the inventory ask for a model that is a directory of the node, which the test may take away."""
    model = box.directory / name
    model.mkdir(exist_ok=True)
    box.configure(model=str(model), served_name=name, **server)
    return model


def findings(box: Box) -> dict[str, dict[str, Any]]:
    told = json.loads(box.run("check", "--json").stdout)["check"]["hosts"]["box"]["servers"]["demo"]
    return {found["id"]: found for found in told["findings"]}


def test_a_server_that_could_not_be_started_again_is_stopped_only_knowingly(box: Box) -> None:
    old = with_model(box, "old")
    assert box.deploy().code == Exit.OK
    assert findings(box)["way_back"]["level"] == "ok"

    old.rmdir()
    restarted = box.run("restart", "--json")
    assert restarted.code == Exit.REFUSED, restarted
    assert restarted.server("box", "demo")["cause"] == "model_path"

    new = with_model(box, "new", port=free_port())  # the old one answers where it was
    done = box.deploy()
    told = done.server("box", "demo")
    assert (done.code, told["stage"], told["cause"]) == (Exit.REFUSED, "preflight", "way_back"), done
    assert "could not be started again if this fails: the model path" in told["message"]
    assert "serves as before" in told["message"]
    assert "give it up knowingly" in done.stdout
    assert findings(box)["way_back"]["level"] == "error"
    assert box.serves()
    with_model(box, "new")

    assert box.run("stop", "--json").code == Exit.OK
    done = box.deploy()
    assert done.code == Exit.OK, done
    assert "there is no way back" in done.stdout

    back = box.run("rollback", "--json")
    assert back.code == Exit.REFUSED, back
    assert back.server("box", "demo")["cause"] == "model_path"
    assert new.exists()
    assert box.serves()


def test_nor_is_one_that_a_person_has_started(box: Box) -> None:
    model = box.directory / "of a person"
    model.mkdir()
    with by_hand(box, "shell", "--model-path", str(model), "--served-model-name", "hand-model"):
        model.rmdir()
        done = box.deploy()
        told = done.server("box", "demo")
        assert (done.code, told["cause"]) == (Exit.REFUSED, "way_back"), done
        assert f"the model path {model} does not exist" in told["message"]
        assert box.serves()


def test_what_is_known_to_fail_is_told_by_check(box: Box) -> None:
    assert box.deploy().code == Exit.OK
    box.configure(args={"lab-fail": "die:weights"}, checks={"disk_free_gib": 1_000_000})
    assert box.deploy().code == Exit.ROLLED_BACK
    found = findings(box)
    assert found["bad_release"]["level"] == "warning"
    assert "failed on 20" in found["bad_release"]["message"]
    assert "(run 20" in found["bad_release"]["evidence"]
    assert "verify will fail" in found["disk_low"]["message"]
    assert "shm_low" not in found or found["shm_low"]["level"] == "warning"

    box.configure()
    assert {"bad_release", "disk_low"}.isdisjoint(findings(box))
