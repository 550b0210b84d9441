"""A server that lives and does not answer, or has lost what it needs: no verb tells it as serving."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from lamplighter.node.events import Exit
from tests.driver import ask
from tests.lab.conftest import Box


def status(box: Box) -> dict[str, Any]:
    done = box.run("status", "--json")
    found: dict[str, Any] = json.loads(done.stdout)["status"]["hosts"]["box"]["servers"]["demo"]
    return found


@pytest.mark.parametrize("fault", ["silent", "wedge"])
def test_one_token_and_then_silence_is_no_server(box: Box, fault: str) -> None:
    box.configure(args={"lab-fail": fault})
    done = box.deploy()
    assert done.code == Exit.NOT_READY, done
    report = done.server("box", "demo")
    assert (report["outcome"], report["cause"], report["serving"]) == ("failed", "silent", None)
    assert "no second one" in report["message"]
    assert report["evidence"].startswith("no answer to 16 tokens within")
    assert status(box)["state"] == "stopped"  # it was never committed, and there is nothing else to go back to


def test_a_release_that_gives_one_token_alone_is_rolled_back(box: Box) -> None:
    box.configure(env={"AGE": "1"})
    assert box.deploy().code == Exit.OK
    box.configure(env={"AGE": "2"}, args={"lab-fail": "silent"})
    done = box.deploy()
    report = done.server("box", "demo")
    assert (done.code, report["outcome"], report["cause"]) == (Exit.ROLLED_BACK, "rolled_back", "silent"), done
    assert ask(box.port, "/lab/environ")[1]["processes"][0]["environ"]["AGE"] == "1"


@pytest.mark.timeout(600)  # two deploys, and a question of ten seconds that nobody answers
def test_a_stopped_scheduler_is_named_by_status_and_makes_a_deploy_that_asks_redeploy(box: Box) -> None:
    box.configure(args={"tp": 2}, gpus=[0, 1], timeouts={"stop": 2})
    assert box.deploy().code == Exit.OK
    assert box.deploy("--if-changed").server("box", "demo")["outcome"] == "unchanged"
    worker = next(each for each in ask(box.port, "/lab/environ")[1]["processes"] if each["role"].endswith("_TP1"))
    os.kill(worker["pid"], signal.SIGSTOP)
    named = f"sglang::scheduler_TP1 (pid {worker['pid']}, rank 1) is stopped by a signal"
    found = status(box)
    assert found["state"] == "unknown"
    assert named in found["message"]
    planned = json.loads(box.run("plan", "--json").stdout)["plan"]["hosts"]["box"]["servers"]["demo"]
    assert (planned["state"], planned["is_pending"]) == ("unknown", True)
    assert ask(box.port, "/v1/models")[0] == 200  # it lives
    verified = box.run("verify", "-k", "model_answers")
    assert verified.code == Exit.NOT_READY, verified
    done = box.deploy("--if-changed")
    assert done.server("box", "demo")["outcome"] == "deployed", done
    assert any(named in str(event.get("message")) for event in done.events)
    assert status(box)["state"] == "serving"
