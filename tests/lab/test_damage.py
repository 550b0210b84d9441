"""What people, and half-done runs, do to the files on a node: no verb trips over them, and none leaves it dark."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lamplighter.node.events import Exit
from lamplighter.node.system import lock
from tests.driver import eventually
from tests.lab.conftest import Box
from tests.lab.test_runs import releases_of, status_of, wait_for_stage


def deploy_two(box: Box) -> tuple[str, str]:
    """Two good releases; the second one serves."""
    found = []
    for number in "12":
        box.configure(env={"NUMBER": number})
        deployed = box.deploy()
        assert deployed.code == Exit.OK, deployed
        found.append(deployed.server("box", "demo")["release"])
    return found[0], found[1]


def test_records_without_their_fields_hinder_no_verb(box: Box) -> None:
    first, second = deploy_two(box)
    runs = sorted((box.state / "runs").iterdir())
    (box.state / "server.json").write_text('{"ready": true}')
    (box.state / "releases" / first / "verdict.json").write_text('{"verdict": "good"}')
    (runs[0] / "worker.json").write_text("{}")
    (runs[0] / "process.json").write_text('{"boot_id": "x"}')
    (runs[0] / "events.jsonl").write_text('{"event": "progress", "seq": "7"}\n[1]\n{"event": 3, "seq": 8}\n')
    (runs[0] / "envproof" / ".tmp-1").touch()
    status = status_of(box)
    assert (status["state"], "server.json is damaged" in status["message"]) == ("serving", True)
    for verb in ("releases", "env", "check"):
        assert "Traceback" not in box.run(verb).stderr, verb
    assert box.run("attach", "--run", runs[0].name).code == Exit.INTERNAL  # killed, as far as it says
    again = box.deploy()
    assert again.code == Exit.OK, again
    assert box.run("attach", "--json", "--run", runs[0].name).server("box", "demo")["cause"] == "abandoned"
    assert not (runs[0] / "envproof" / ".tmp-1").exists()
    assert status_of(box)["state"] == "serving"
    assert {row["release"]: row["verdict"] for row in releases_of(box)} == {second: "good", first: "unproven"}


def test_of_a_run_whose_journal_was_removed_nobody_says_that_it_was_abandoned(box: Box) -> None:
    deploy_two(box)
    first, second = sorted((box.state / "runs").iterdir())
    for run in (first, second):
        (run / "events.jsonl").unlink()
    assert status_of(box)["last_run"]["state"] == "unknown"
    assert "killed" not in box.run("status").stdout
    assert box.deploy().code == Exit.OK
    for run in (first, second):
        assert run.exists()
        told = box.run("attach", "--run", run.name)
        assert "abandoned" not in told.stdout + told.stderr, told
        assert "no run" in told.stdout + told.stderr, told


PLANS = {
    "empty": lambda plan: "",
    "torn": lambda plan: plan[: len(plan) // 2],
    "without a server": lambda plan: json.dumps({**json.loads(plan), "server": {}}),
    "without an engine": lambda plan: json.dumps({**json.loads(plan), "engine": {}}),
}


def test_a_damaged_plan_hinders_no_verb(box: Box) -> None:
    """Of the release that serves; the last two are valid JSON."""
    box.deploy()
    plan = box.state / "current" / "plan.json"
    whole = plan.read_text()
    release = os.readlink(box.state / "current").partition("/")[2]
    for name, damage in PLANS.items():
        plan.write_text(damage(whole))
        status = status_of(box)
        assert (status["state"], f"release {release} is damaged" in status["message"]) == ("unknown", True), name
        env = box.run("env", "--json")
        assert env.code == Exit.OK, (name, env)
        found = json.loads(env.stdout)["env"]["hosts"]["box"]["servers"]["demo"]
        assert (found["state"], len(found["workers"]) > 1) == ("inconclusive", True), name
        verified = box.run("verify", "-k", "variables or sitecustomize")
        assert verified.code == Exit.OK, (name, verified)
        assert "is damaged or gone: what it gave to its server is not known" in verified.stdout + verified.stderr, name
    again = box.deploy()
    assert again.code == Exit.OK, again
    assert plan.read_text() == whole
    assert box.serves()


@pytest.mark.parametrize("damage", ["{}", None])
def test_a_server_is_ours_though_its_launch_record_is_damaged(box: Box, damage: str | None) -> None:
    box.configure(stale={"policy": "ours"})  # by its looks it is not ours
    run = box.deploy().server("box", "demo")["run"]
    record = box.state / "runs" / run / "process.json"
    record.unlink()
    if damage is not None:
        record.write_text(damage)
    pid = status_of(box)["pid"]
    again = box.deploy()
    assert again.code == Exit.OK, again
    assert status_of(box)["pid"] != pid


def test_a_server_whose_record_is_removed_is_told_and_undeploy_leaves_it(box: Box) -> None:
    release = box.deploy().server("box", "demo")["release"]
    before = status_of(box)
    (box.state / "server.json").unlink()
    status = status_of(box)
    told = {"state", "pid", "release", "port", "model"}
    assert {name: status[name] for name in told} == {name: before[name] for name in told}
    assert "server.json is missing; `./inv deploy" in status["message"]
    refused = box.run("undeploy", "--json")
    assert refused.code == Exit.REFUSED, refused
    assert f"demo is still there: its process {before['pid']} runs" in refused.server("box", "demo")["message"]
    assert refused.server("box", "demo")["serving"]["release"] == release
    assert box.run("logs").code == Exit.OK
    # Nothing but the processes' own records is left.
    (box.state / "current" / "plan.json").unlink()
    status = status_of(box)
    assert (status["state"], f"{before['pid']}, " in status["message"]) == ("unknown", True)
    assert box.run("undeploy").code == Exit.REFUSED
    assert box.serves()
    again = box.deploy()
    assert again.code == Exit.OK, again
    assert status_of(box)["message"] == ""


def test_a_removed_record_is_written_anew_by_a_run_that_touches_nothing(box: Box) -> None:
    box.deploy()
    before = status_of(box)
    (box.state / "server.json").unlink()
    box.configure(python="/nowhere/python3")
    refused = box.deploy()
    assert refused.code == Exit.REFUSED, refused
    status = status_of(box)
    assert (status["state"], status["pid"], status["message"]) == ("serving", before["pid"], "")


def test_directories_in_place_of_files_are_set_aside_before_anything_is_touched(box: Box) -> None:
    run = box.deploy().server("box", "demo")["run"]
    names = ["lock", "server.json", "deployed.json", "unit.json", *(f"current/{n}.json" for n in ("plan", "verdict"))]
    names += ["current/env", f"runs/{run}/events.jsonl"]
    for name in names:
        path = box.state / name
        path.unlink(missing_ok=True)
        path.mkdir()
        (path / "notes").write_text("of somebody")
    for verb in ("status", "releases", "env", "attach", "diagnose", "logs"):
        assert "Traceback" not in box.run(verb).stderr, verb
    again = box.deploy()
    assert again.code == Exit.OK, again
    for name in names:
        (aside,) = (box.state / name).parent.glob(f"{Path(name).name}.before-*")
        assert (aside / "notes").read_text() == "of somebody", name
        assert f"{name.rpartition('/')[2]} was a directory; it is " in again.stdout or name == "lock", name
    assert status_of(box)["state"] == "serving"
    assert [row["verdict"] for row in releases_of(box)] == ["good"]


def remove_script(current: Path) -> None:
    (current / "launch.sh").unlink()


def replace_link(current: Path) -> None:
    current.unlink()
    current.mkdir()
    (current / "notes").write_text("of somebody")


@pytest.mark.parametrize(("damage", "goes_back_to"), [(remove_script, 0), (replace_link, 1)])
def test_a_failed_deploy_goes_back_to_a_release_that_is_whole(
    box: Box, damage: Callable[[Path], None], goes_back_to: int
) -> None:
    good = deploy_two(box)
    damage(box.state / "current")
    box.configure(args={"lab-fail": "die:boot"})
    failed = box.deploy()
    assert failed.code == Exit.ROLLED_BACK, failed
    assert failed.server("box", "demo")["serving"]["release"] == good[goes_back_to]
    assert box.serves()
    assert os.readlink(box.state / "current") == f"releases/{good[goes_back_to]}"
    if damage is replace_link:
        (aside,) = box.state.glob("current.before-*")
        assert (aside / "notes").read_text() == "of somebody"


def test_a_defect_at_commit_leaves_the_server_that_answers(box: Box) -> None:
    box.configure(env={"LAB_SPEED": "5"})
    with box.driver.started("deploy", "--json", "--host", "box") as process:
        wait_for_stage(process, "ready")
        (box.state / "current").mkdir()
        assert process.stdout is not None
        *_, last = process.stdout
        assert process.wait(120) == Exit.DEGRADED, last
    report = json.loads(last)["report"]["hosts"]["box"]["servers"]["demo"]
    assert (report["stage"], report["cause"]) == ("commit", "internal")
    assert box.serves()


def test_a_release_that_serves_again_is_good_again(box: Box) -> None:
    """The same release, which fails once: it is no reason never to start it again."""
    box.configure(env={"LAB_SPEED": "5"})  # slow enough to be met while it loads
    release = box.deploy().server("box", "demo")["release"]
    with box.driver.started("deploy", "--json", "--host", "box") as process:
        run = wait_for_stage(process, "ready")["run"]
        os.kill(json.loads((box.state / "runs" / run / "process.json").read_text())["pid"], signal.SIGKILL)
        assert process.wait(240) == Exit.ROLLED_BACK
    assert {row["verdict"] for row in releases_of(box) if row["release"] == release} == {"good"}
    os.kill(status_of(box)["pid"], signal.SIGKILL)
    eventually(lambda: not box.serves())
    assert box.deploy("--if-changed").server("box", "demo")["outcome"] == "deployed"


def test_without_another_release_a_failed_confirmation_is_kept(box: Box) -> None:
    box.configure(env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, on_confirm_failure="rollback")
    for _ in range(2):
        done = box.deploy()
        assert done.code == Exit.DEGRADED, done
    assert [row["verdict"] for row in releases_of(box)] == ["good"]


def test_who_waits_for_a_gpu_or_a_port_is_named_as_the_holder_of_the_server(box: Box) -> None:
    held = lock.acquire("the port", lock.shared_path(f"port-{box.port}"))
    with box.driver.started("deploy", "--json", "--wait", "600", "--host", "box") as process:
        run = wait_for_stage(process, "lock")["run"]
        eventually(lambda: (status_of(box)["run"] or {}).get("id") == run)
        locked = box.deploy()
        assert locked.code == Exit.LOCKED
        assert f"server demo is locked by run {run} of " in locked.server("box", "demo")["message"]
        assert "at stage lock" in locked.server("box", "demo")["message"]
        held.release()
        assert process.wait(240) == Exit.OK
