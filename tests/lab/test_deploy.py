"""The main job against a node in a box: deploy, redeploy, crash, roll back, detach. Every command is the user's own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.events import STAGES, Exit
from tests.driver import ask, eventually
from tests.lab.conftest import Box

NASTY = "a b; touch /tmp/pwn $(id) 'x' \"y\"\nsecond line \\ `z` ! \u00e9"


def test_first_deploy_and_redeploy(box: Box) -> None:
    first = box.deploy()
    assert first.code == Exit.OK, first
    report = first.server("box", "demo")
    assert report["outcome"] == "deployed"
    assert set(report["durations"]) == {*STAGES, "verify"}
    assert report["ready_seconds"] > 0
    assert report["downtime_seconds"] is None  # nothing served before
    assert box.serves()

    second = box.deploy()
    report = second.server("box", "demo")
    assert report["outcome"] == "deployed"
    assert report["downtime_seconds"] > 0
    assert report["serving"]["pid"] != first.server("box", "demo")["serving"]["pid"]
    assert box.serves()


def test_status_logs_check_verify_config_speak_json_and_text(box: Box) -> None:
    box.deploy()
    status = json.loads(box.run("status", "--json").stdout)["status"]["hosts"]["box"]["servers"]["demo"]
    assert status["state"] == "serving"
    assert status["run"] is None
    assert "serving" in box.run("status").stdout
    assert "fired up and ready to roll" in box.run("logs").stdout
    checked = json.loads(box.run("check", "--json").stdout)["check"]["hosts"]["box"]["servers"]["demo"]
    assert {found["level"] for found in checked["findings"]} == {"ok"}
    assert {row["action"] for row in checked["would_stop"]} == {"stop"}
    verified = box.run("verify", "--json")
    assert verified.code == Exit.OK
    checks = json.loads(verified.stdout)["verify"]["hosts"]["box"]["servers"]["demo"]["checks"]
    assert len(checks) >= 30
    assert {check["outcome"] for check in checks} <= {"passed", "skipped", "warning"}
    config = json.loads(box.run("config", "--json").stdout)
    assert config["servers"]["demo"]["port"] == box.port
    assert config["origins"]["servers.demo.port"].endswith(
        ".yml:" + config["origins"]["servers.demo.port"].split(":")[-1]
    )


def test_crash_is_reported_at_once_and_the_old_server_serves_again(box: Box) -> None:
    box.deploy()
    box.configure(args={"lab-fail": "die:graphs"})
    done = box.deploy()
    assert done.code == Exit.ROLLED_BACK, done
    report = done.server("box", "demo")
    assert report["outcome"] == "rolled_back"
    assert report["stage"] == "ready"
    assert report["phase"] == "graphs"
    assert report["evidence"]
    assert report["serving"]["release"] != report["release"]
    assert box.serves()
    died_at = json.loads(next((box.state / "runs" / report["run"]).glob("exit.json")).read_text())["t"]
    told_at = next(event["t"] for event in done.events if event["event"] == "failure")
    assert told_at - died_at < 20.0  # not by the clock for stalls, which has 30 s


def test_check_tells_a_secret_that_a_deploy_would_miss(box: Box) -> None:
    variables = box.driver.inventory / "host_vars" / "box.yml"
    variables.parent.mkdir()
    variables.write_text("servers: {demo: {secrets: {HF_TOKEN: !secret env:LAMPLIGHTER_NO_SUCH}}}\n")
    done = box.run("check", "--json")
    assert done.code == Exit.REFUSED, done
    findings = json.loads(done.stdout)["check"]["hosts"]["box"]["servers"]["demo"]["findings"]
    (found,) = [each for each in findings if each["id"] == "secret"]
    assert found["level"] == "error"
    assert "servers.demo.secrets.HF_TOKEN" in found["message"]


def test_first_deploy_ever_that_crashes_says_that_nothing_serves(box: Box) -> None:
    box.configure(args={"lab-fail": "die:graphs"})
    done = box.deploy()
    assert done.code == Exit.CRASHED, done
    report = done.server("box", "demo")
    assert report["outcome"] == "failed"
    assert report["serving"] is None
    assert "nothing is serving" in report["message"]
    assert not box.serves()
    status = json.loads(box.run("status", "--json").stdout)["status"]["hosts"]["box"]["servers"]["demo"]
    assert (status["state"], status["since"]) == ("stopped", None)
    assert "the last start failed" in status["message"]
    assert "argv, engine and driver: the last start has not become ready" in status["drift"]["unknown"]
    box.configure()
    assert box.deploy().code == Exit.OK  # no cleaning up by hand


def how_it_stands(box: Box) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(box.run("status", "--json").stdout)["status"]["hosts"]["box"]["servers"]["demo"]
    return found


def test_what_we_ended_reads_so_and_what_others_killed_does_not(box: Box) -> None:
    box.deploy()
    os.kill(how_it_stands(box)["pid"], signal.SIGKILL)
    eventually(lambda: how_it_stands(box)["state"] == "stopped")
    box.run("stop", "--json")  # its workers are swept, but that did not end it
    assert "killed by SIGKILL" in how_it_stands(box)["message"]

    box.deploy()
    gone = box.run("undeploy", "--stop", "--json")
    assert gone.code == Exit.OK, gone
    assert box.run("undeploy", "--json").code == Exit.OK
    told = how_it_stands(box)
    assert (told["state"], told["since"]) == ("stopped", None)
    assert told["message"].startswith(f"run {gone.server('box', 'demo')['run']} (undeploy, ")


def test_out_of_time_rolls_back(box: Box) -> None:
    box.deploy()
    box.configure(args={"lab-fail": "hang:weights"}, timeouts={"ready": 15})
    done = box.deploy()
    assert done.code == Exit.ROLLED_BACK, done
    failure = next(event for event in done.events if event["event"] == "failure")
    assert "not ready after 15 s, in phase" in failure["message"]
    assert box.serves()


def test_wrong_model_is_not_waited_for(box: Box) -> None:
    box.configure(args={"lab-fail": "wrong-model"})
    done = box.deploy()
    assert done.code == Exit.NOT_READY, done
    assert "demo-model" in done.server("box", "demo")["message"]
    assert not box.serves()


def test_odd_values_arrive_byte_for_byte_and_run_nothing(box: Box) -> None:
    Path("/tmp/pwn").unlink(missing_ok=True)
    model = box.home / f"model {NASTY}"
    model.mkdir(parents=True)
    box.configure(
        host={"root": f"~/root {NASTY}"},
        model=str(model),
        env={"ODD": NASTY, "FORCED": {"value": NASTY, "mode": "force"}},
        args={"chat-template": NASTY},
    )
    done = box.deploy()
    assert done.code == Exit.OK, done
    status, seen = ask(box.port, "/lab/environ")
    assert status == 200
    assert len(seen["processes"]) >= 3
    for process in seen["processes"]:
        assert process["environ"]["ODD"] == NASTY
        assert process["environ"]["FORCED"] == NASTY
    words = next(process["argv"] for process in seen["processes"] if "--chat-template" in process["argv"])
    assert words[words.index("--chat-template") + 1] == NASTY
    assert words[words.index("--model-path") + 1] == str(model)
    assert (box.home / f"root {NASTY}" / "servers" / "demo" / "current").exists()
    assert not Path("/tmp/pwn").exists()


def test_control_process_killed_while_waiting_for_ready(box: Box) -> None:
    box.configure(env={"LAB_SPEED": "2"})
    with box.driver.started("deploy", "--json", "--host", "box") as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event.get("event") == "stage_start" and event["stage"] == "ready":
                process.send_signal(signal.SIGKILL)
                break
    assert not box.serves()
    attached = box.run("attach", "--json")
    assert attached.code == Exit.OK, attached
    assert attached.server("box", "demo")["outcome"] == "deployed"
    numbers = [event["seq"] for event in attached.events if "seq" in event]
    assert numbers == list(range(1, len(numbers) + 1))
    assert box.serves()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, Exit.DETACHED), (signal.SIGTERM, Exit.DETACHED)])
def test_interrupted_deploy_detaches(box: Box, number: signal.Signals, code: Exit) -> None:
    box.configure(env={"LAB_SPEED": "2"})
    with box.driver.started("deploy", "--json", "--host", "box") as process:
        assert process.stdout is not None
        line = ""
        for line in process.stdout:
            event = json.loads(line)
            if event.get("event") == "stage_start" and event["stage"] == "ready":
                process.send_signal(number)
                break
        line = process.stdout.readlines()[-1]
        assert process.wait(120) == code
    assert json.loads(line)["report"]["outcome"] == "detached"
    eventually(box.serves)


def test_second_deploy_meets_the_lock(box: Box) -> None:
    box.configure(
        args={"lab-fail": "hang:weights"}, timeouts={"stall": 600, "ready": 600}
    )  # it goes on until it is cancelled
    with box.driver.started("deploy", "--json", "--host", "box") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line).get("stage") == "free":
                break
        second = box.deploy()
        assert second.code == Exit.LOCKED, second
        report = second.server("box", "demo")
        assert "is locked by run" in report["message"]
        assert "at stage" in report["message"]
        status = json.loads(box.run("status", "--json").stdout)["status"]["hosts"]["box"]["servers"]["demo"]
        assert status["run"]["verb"] == "deploy"
        box.run("cancel", "--json")
        box.configure()
        waited = box.deploy("--wait", "120")
    assert waited.code == Exit.OK, waited


def test_stop_start_rollback(box: Box) -> None:
    first = box.deploy().server("box", "demo")["release"]
    box.configure(env={"NCCL_PROTO": "Simple"})
    second = box.deploy().server("box", "demo")["release"]
    assert first != second

    stopped = box.run("stop", "--json")
    assert stopped.code == Exit.OK
    assert stopped.server("box", "demo")["serving"] is None
    assert not box.serves()
    again = box.run("stop", "--json")
    assert again.code == Exit.OK  # twice changes nothing
    run = again.server("box", "demo")["run"]
    told = how_it_stands(box)
    assert (told["state"], told["since"]) == ("stopped", None)
    assert told["message"].startswith(f"run {stopped.server('box', 'demo')['run']} (stop, ")  # the other did nothing
    assert " stopped it at 20" in told["message"]

    told = json.loads(box.run("diagnose", "--json").stdout)["diagnose"]["hosts"]["box"]["servers"]["demo"]
    assert told["outcome"] == "ready"
    assert f"the newest run, {run}, started no server and ended stopped" in told["notes"]
    assert "nothing of it serves now" in told["notes"]

    started = box.run("start", "--json")
    assert started.server("box", "demo")["serving"]["release"] == second
    assert box.run("start", "--json").code == Exit.REFUSED
    assert box.serves()

    back = box.run("rollback", "--json")
    assert back.code == Exit.OK, back
    report = back.server("box", "demo")
    assert (report["outcome"], report["serving"]["release"]) == ("rolled_back", first)
    assert report["durations"]["verify"] > 0
    assert not [event for event in back.events if event["event"] == "warning"], back  # its own release is its measure
    assert report["began"] < report["serving"]["since"] < report["ended"]
    same = box.run("rollback", "--json", "--to", first).server("box", "demo")
    assert (same["outcome"], same["serving"], set(same["durations"])) == (
        "unchanged",
        report["serving"],
        {"lock", "stage"},
    )
    forth = box.run("rollback", "--json", "--to", second[:6])
    assert forth.server("box", "demo")["serving"]["release"] == second
    assert box.run("rollback", "--json", "--to", "ffff").code == Exit.REFUSED
    assert box.serves()


def test_taken_port_is_refused_and_its_owner_left_alone(box: Box) -> None:
    command = ["python3", "-m", "http.server", "--bind", "127.0.0.1", str(box.port)]
    owner = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: is_open(box.port))
        done = box.deploy()
        assert done.code == Exit.REFUSED, done
        report = done.server("box", "demo")
        assert report["cause"] == "port_in_use"
        assert str(owner.pid) in report["evidence"]
        assert owner.poll() is None
    finally:
        owner.kill()
        owner.wait()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_killed_worker_is_said_so_and_the_next_deploy_repairs(box: Box) -> None:
    box.deploy()
    box.configure(env={"LAB_SPEED": "1"})
    with box.driver.started("deploy", "--json", "--host", "box") as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event.get("event") == "stage_start" and event["stage"] == "ready":
                worker = json.loads((box.state / "runs" / event["run"] / "worker.json").read_text())
                os.kill(worker["pid"], signal.SIGKILL)
                break
        process.stdout.read()
        assert process.wait(120) == Exit.INTERNAL
    box.configure()
    done = box.deploy()
    assert done.code == Exit.OK, done
    assert box.serves()


def test_old_releases_are_pruned(box: Box) -> None:
    digests = []
    for number in range(4):
        box.configure(env={"NUMBER": str(number)}, keep_releases=2)
        digests.append(box.deploy().server("box", "demo")["release"])
    left = {path.name for path in (box.state / "releases").iterdir()}
    assert left == set(digests[-2:])
    assert not list(box.state.rglob(".tmp-*"))
