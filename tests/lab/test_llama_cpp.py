"""A server that is no Python, by its role alone: llama.cpp's llama-server is deployed, verified, replaced, rolled back.

The real one where LAMPLIGHTER_LLAMA_SERVER and LAMPLIGHTER_LLAMA_MODEL name a build and a model for it; else one that
stands in, in Perl: the words of a start and the answers are the real one's, and that is all that it proves.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from lamplighter.node.events import Exit
from tests.driver import ask
from tests.lab.conftest import Box

STAND_IN = Path(__file__).parent / "llama-server"


def llama(box: Box) -> tuple[str, Path]:
    """The program, and a model of the node's own."""
    model = box.home / "tiny.gguf"
    if given := os.environ.get("LAMPLIGHTER_LLAMA_MODEL"):
        shutil.copy(given, model)
        return os.environ["LAMPLIGHTER_LLAMA_SERVER"], model
    model.write_bytes(b"GGUF\3\0\0\0")
    return str(STAND_IN), model


def served(box: Box, done: Any) -> str:
    return str(done.server("box", "demo")["serving"]["release"])


def name_at(box: Box) -> str | None:
    _, answer = ask(box.port, "/v1/models")
    return answer["data"][0]["id"] if answer else None


def test_a_server_that_is_no_python_deploys_verifies_and_comes_back(box: Box) -> None:
    program, model = llama(box)
    room = {"shm_free_gib": 0.01, "disk_free_gib": 0.01, "inodes_free_percent": 1, "open_files": 256}
    known: dict[str, Any] = {
        "engine": "llama_cpp", "program": program, "model": str(model), "gpus": [], "launcher": "detached",
        "env": {"LLAMA_LOG_COLORS": "off", "ANYTHING": "a 'word'"}, "checks": room,
    }  # fmt: skip
    box.configure(**known)
    checked = box.run("check", "--json")
    assert checked.code == Exit.OK, checked
    assert "llama_cpp is no Python" in checked.stdout

    first = box.deploy()
    assert first.code == Exit.OK, first.stderr
    assert name_at(box) == "tiny.gguf"
    told = [event.get("message", "") for event in first.events]
    assert any(each.startswith("4 variables proven in what the launch script starts") for each in told), told
    assert any("1/1 workers carry 4/4 variables" in each for each in told), told
    assert not [each for each in told if "interpreter" in each or "Python" in each]
    assert not [event for event in first.events if event["event"] == "warning" and "checks." not in event["message"]]
    phases = [event["phase"] for event in first.events if event.get("phase")]
    assert [*dict.fromkeys(phases)][-1] == "ready"

    verified = box.run("verify", "--json")
    assert verified.code == Exit.OK, verified
    found = json.loads(verified.stdout)["verify"]["hosts"]["box"]["servers"]["demo"]["checks"]
    checks = {each["name"]: each for each in found}
    for name in ("process_is_alive", "port_is_held_by_the_server", "served_model_is_the_one_wanted", "model_answers"):
        assert checks[name]["outcome"] == "passed", checks[name]
    assert checks["workers_carry_the_variables"]["outcome"] == "passed"
    assert checks["sitecustomize_is_in_force"]["outcome"] == "skipped"

    assert box.deploy("--if-changed").server("box", "demo")["outcome"] == "unchanged"
    box.configure(**known, served_name="lamp")
    second = box.deploy()
    assert second.code == Exit.OK, second
    assert name_at(box) == "lamp"
    assert served(box, second) != served(box, first)

    broken = model.with_name("broken.gguf")
    broken.write_bytes(b"GGML" * 100)
    box.configure(**{**known, "model": str(broken)}, served_name="lamp")
    third = box.deploy()
    assert third.code == Exit.ROLLED_BACK, third
    assert (third.server("box", "demo")["cause"], name_at(box)) == ("weights_incomplete", "lamp")
    assert served(box, third) == served(box, second)

    box.configure(**{**known, "program": "/nowhere/llama-server"}, served_name="lamp")
    fourth = box.deploy()
    assert fourth.code == Exit.REFUSED, fourth
    assert "/nowhere/llama-server is not there" in fourth.stderr
    assert "servers.demo.program" in fourth.stderr

    box.configure(**known, served_name="lamp")
    back = box.run("rollback", "--json")
    assert back.code == Exit.OK, back
    assert name_at(box) == "tiny.gguf"
    assert box.run("stop").code == Exit.OK
    assert name_at(box) is None
