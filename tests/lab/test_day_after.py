"""The day after a deploy: holds, what was done, servers that the inventory has forgotten, logs that go on."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

from lamplighter.node.events import Exit
from tests.driver import Done, eventually, free_port, token
from tests.lab.conftest import Box

SERVER = {"engine": "demo", "model": "demo-model", "args": {"tp": 1}, "env": {"LAB_SPEED": "25"}}


def two_servers(box: Box, other: int, *names: str) -> None:
    """Have the inventory name these of the node's two servers."""
    both = {"demo": {**SERVER, "port": box.port, "gpus": [0]}, "other": {**SERVER, "port": other, "gpus": [1]}}
    box.configure(host={"servers": {name: both[name] for name in names}})


def answers_of(done: Done, verb: str) -> dict[str, Any]:
    servers: dict[str, Any] = done.lines[-1][verb]["hosts"]["box"]["servers"]
    return servers


def test_a_server_that_the_inventory_forgot_is_seen_read_and_ended(box: Box) -> None:
    port = free_port()
    two_servers(box, port, "demo", "other")
    assert box.deploy().code == Exit.OK
    two_servers(box, port, "demo")

    assert set(answers_of(box.run("status", "--json"), "status")) == {"demo"}
    found = answers_of(box.run("status", "--all", "--json"), "status")
    assert {name: (each["state"], each["unlisted"]) for name, each in found.items()} == {
        "demo": ("serving", False),
        "other": ("serving", True),
    }
    warned = [event for event in box.deploy("--server", "demo").events if event["event"] == "warning"]
    told = [event["hint"] for event in warned if "no server other" in event["message"]]
    ends = "`./inv undeploy --host box --server other --stop` ends it"
    assert told == [f"{ends}; where it has another name now, that says `was: other`"]

    about = ("--server", "other")
    assert "Uvicorn running" in box.run("logs", *about).stdout
    assert answers_of(box.run("releases", "--json", *about), "releases")["other"]["releases"]
    assert box.run("attach", "--json", *about).server("box", "other")["outcome"] == "deployed"
    assert box.run("stop", "--json", *about).server("box", "other")["outcome"] == "stopped"
    assert box.run("start", "--json", *about).server("box", "other")["outcome"] == "started"
    gone = box.run("undeploy", "--stop", "--json", *about)
    assert (gone.code, token(port)) == (Exit.OK, None), gone
    assert not [event for event in gone.events if event["event"] == "warning"]
    assert box.serves()
    stopped = answers_of(box.run("status", "--json", *about), "status")["other"]
    assert (stopped["state"], "(undeploy, " in stopped["message"]) == ("stopped", True)

    before = sorted(path.name for path in box.state.parent.iterdir())
    for words in (("stop",), ("logs",), ("hold", "--end")):
        typo = box.run(*words, "--server", "othr")
        assert (typo.code, "knows a server othr" in typo.stdout + typo.stderr) == (Exit.USAGE, True), typo
    assert sorted(path.name for path in box.state.parent.iterdir()) == before
    assert box.run("deploy", *about).code == Exit.USAGE  # for that the inventory has to know it


def test_a_server_with_another_name_takes_the_former_ones_place_and_has_it_as_its_way_back(box: Box) -> None:
    two_servers(box, free_port(), "demo")
    old = box.deploy().server("box", "demo")["serving"]
    new = {**SERVER, "port": box.port, "gpus": [0], "was": "demo"}
    box.configure(host={"servers": {"fresh": {**new, "args": {"tp": 1, "lab-fail": "die:weights"}}}})
    checked = answers_of(box.run("check", "--json"), "check")["fresh"]
    assert {each["id"]: each["level"] for each in checked["findings"]}["was"] == "ok"
    assert old["pid"] in {each["pid"] for each in checked["would_stop"] if each["action"] == "stop"}

    failed = box.deploy()
    report = failed.server("box", "fresh")
    assert (failed.code, report["outcome"], box.serves()) == (Exit.ROLLED_BACK, "rolled_back", True), failed
    box.configure(host={"servers": {"fresh": new}})
    done = box.deploy()
    assert (done.code, box.serves()) == (Exit.OK, True), done
    assert done.server("box", "fresh")["downtime_seconds"] > 0
    found = answers_of(box.run("status", "--all", "--json"), "status")
    assert (found["fresh"]["state"], found["demo"]["state"]) == ("serving", "stopped")
    assert f"run {report['run']} (deploy, " in found["demo"]["message"]
    assert not [event for event in done.events if "no server demo" in event.get("message", "")]


def test_a_hold_keeps_everybody_away_until_it_is_over_or_ended(box: Box) -> None:
    first = box.deploy().server("box", "demo")
    assert box.run("hold", "-m", "debugging", "--until", "2d").code == Exit.OK
    for words in (("deploy", "--if-changed"), ("rollback",), ("undeploy", "--stop")):
        kept = box.run(*words, "--json")
        report = kept.server("box", "demo")
        assert (kept.code, report["cause"], report["evidence"]) == (Exit.LOCKED, "hold", "debugging"), kept
        assert report["serving"]["pid"] == first["serving"]["pid"]
        assert report["hint"] == "./inv hold --host box --server demo --end ends it"
    held = answers_of(box.run("status", "--json"), "status")["demo"]
    assert held["hold"]["message"] == "debugging"
    assert held["hold"]["until"] - held["hold"]["since"] == 2 * 86400
    checked = box.run("check", "--json")
    assert [found["level"] for found in answers_of(checked, "check")["demo"]["findings"] if found["id"] == "hold"] == [
        "warning"
    ]
    assert "on hold until" in box.run("status").stdout

    past = json.loads((box.state / "hold.json").read_text()) | {"until": held["hold"]["since"]}
    (box.state / "hold.json").write_text(json.dumps(past))
    assert answers_of(box.run("hold", "--json"), "hold")["demo"]["hold"] is None
    assert box.run("hold", "-m", "again", "--until", "1h").code == Exit.OK
    ended = answers_of(box.run("hold", "--end", "--json"), "hold")["demo"]
    assert (ended["hold"], ended["ended"]["message"]) == (None, "again")
    assert box.deploy("--if-changed").server("box", "demo")["outcome"] == "unchanged"

    runs = answers_of(box.run("history", "--json"), "history")["demo"]["runs"]
    assert [(run["verb"], run["outcome"], run["exit_code"]) for run in runs] == [
        ("deploy", "deployed", 0),
        *((verb, "refused", 10) for verb in ("deploy", "rollback", "undeploy")),
    ]
    assert runs[0]["id"] == first["run"]
    assert box.run("attach", "--json", "--run", runs[0]["id"]).server("box", "demo")["outcome"] == "deployed"
    assert "Uvicorn running" in box.run("logs", "--run", runs[0]["id"]).stdout
    assert "no runs" in box.run("history", "--since", "0s").stdout


def test_a_rollback_is_checked_and_said_to_be_one_and_touches_nothing_where_it_is_there(box: Box) -> None:
    old = box.deploy().server("box", "demo")["release"]
    box.configure(env={"NUMBER": "2"})
    assert box.deploy().code == Exit.OK
    back = box.run("rollback", "--json")
    report = back.server("box", "demo")
    assert (back.code, report["outcome"], report["serving"]["release"]) == (Exit.OK, "rolled_back", old), back
    assert report["durations"]["verify"] > 0
    assert report["began"] < report["serving"]["since"] < report["ended"]
    assert not [event for event in back.events if event["event"] == "warning"], back  # its own release is its measure
    again = box.run("rollback", "--json", "--to", old)
    same = again.server("box", "demo")
    assert (again.code, same["outcome"], same["serving"]) == (Exit.OK, "unchanged", report["serving"]), again
    assert set(same["durations"]) == {"lock", "stage"}


def test_logs_of_several_are_followed_through_a_cut_and_a_launch_until_ctrl_c(box: Box) -> None:
    port = free_port()
    two_servers(box, port, "demo", "other")
    box.deploy()
    one = answers_of(box.run("history", "--json"), "history")["other"]["runs"][0]["id"]
    attached = box.run("attach", "--json", "--run", one)  # it is the server's that has it
    assert (attached.code, set(attached.report["hosts"]["box"]["servers"])) == (Exit.OK, {"other"}), attached
    both = box.run("logs", "--lines", "3").stdout.splitlines()
    assert {line.partition("  ")[0] for line in both} == {"box/demo", "box/other"}
    with box.driver.started("logs", "-f", "--lines", "1", "--host", "box", stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        heard: list[str] = []

        def hear(words: str) -> None:
            assert process.stdout is not None
            while not heard or words not in heard[-1]:
                line = process.stdout.readline()
                assert line, heard
                heard.append(line)

        for name in ("box/demo  ", "box/other  "):
            if not any(line.startswith(name) for line in heard):
                hear(name)
        log = (box.state / "current").resolve().parents[1] / "runs"
        [cut] = log.glob("*/server.log")
        cut.write_text("a line after the cut\n")
        hear("box/demo  -- the log was cut")
        hear("box/demo  a line after the cut")
        run = box.run("restart", "--json", "--server", "demo").server("box", "demo")["run"]
        hear(f"box/demo  -- the server was launched again, by run {run}: its log follows --")
        hear("box/demo  [")
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(60) == Exit.OK, rest
    assert "interrupted" not in rest
    eventually(box.serves)
