"""The server itself: its release, process, port, model and unit, for every server that lamplighter put into service."""

from __future__ import annotations

import pytest


def test_release_files_are_in_place(facts, evidence):
    """Are the files of the current release as they were written?"""
    release = facts["release"]
    assert release["current"], "there is no current release"
    assert release["launch_mode"] == "0755", f"launch.sh has mode {release['launch_mode']}"
    wrong = [f"{each['name']} is {each['found'] or 'gone'}, not {each['wanted']}" for each in release["files"]]
    assert not wrong, "; ".join(wrong)
    evidence(f"release {release['current']}")


def test_environment_file_is_private(facts, evidence):
    """Can nobody else read the secrets of the release?"""
    mode = facts["release"].get("env_mode")
    assert mode, "the release has no env file"
    assert mode == "0600", f"mode {mode}: others can read the secrets"
    evidence(f"env has mode {mode}")


def test_current_release_is_the_one_that_runs(facts, evidence):
    """Does the current release run?"""
    release = facts["release"]
    assert release.get("current"), "there is no current release"
    assert release["current"] == release["running"], f"current is {release['current']}, {release['running']} runs"
    evidence(f"release {release['current']}")


@pytest.mark.serving
def test_process_is_alive(server, facts, evidence):
    """Is the server's process alive?"""
    assert server.pid, f"no process: {facts['server']['message'] or facts['server']['state']}"
    states = {each["pid"]: each["state"] for each in facts["processes"]}
    assert states.get(server.pid, "X") not in "ZX", f"pid {server.pid} has ended"
    evidence(f"pid {server.pid}, {len(states)} processes")


@pytest.mark.serving
def test_port_is_held_by_the_server(server, facts, evidence):
    """Does the server, and nobody else, listen on its port?"""
    ours = {each["pid"] for each in facts["processes"]}
    listening = [each for each in facts["ports"] if each["port"] == server.port]
    assert listening, f"nothing listens on port {server.port}"
    for each in listening:
        if not each["pids"]:
            pytest.skip(f"whose port {server.port} is can't be seen: its user is {each['uid']}")
        strangers = sorted(set(each["pids"]) - ours)
        assert not strangers, f"port {server.port} on {each['address']} is held by pid {strangers[0]}, not the server's"
    evidence(", ".join(f"{each['address']} port {each['port']}" for each in listening))


@pytest.mark.serving
def test_served_model_is_the_one_wanted(facts, evidence):
    """Does it serve the model that the inventory names?"""
    found = facts["answers"]["model"]
    assert found["ok"], found["message"]
    evidence(found["message"])


@pytest.mark.serving
def test_model_answers(facts, evidence):
    """Does it answer a question?"""
    found = facts["answers"]["token"]
    assert found["ok"], found["message"]
    evidence(found["message"])


def test_workers_are_alive(facts, evidence):
    """Does every process live that it had when it became ready?"""
    lost = facts["lost_workers"]
    assert not lost, "; ".join(lost)
    evidence(f"{len(facts['processes'])} processes")


def test_unit_is_enabled(facts, evidence):
    """Will a reboot bring the server back?"""
    unit = facts["unit"]
    if unit is None:
        pytest.skip("the server has no systemd unit (launcher detached)")
    state = unit.get("UnitFileState")
    if state is None:
        pytest.skip(f"systemd does not answer about {unit['name']}")
    assert state == "enabled", f"{unit['name']} is {state}"
    evidence(f"{unit['name']} is enabled")


@pytest.mark.warning
def test_unit_is_as_written(facts, evidence):
    """Is the unit file as lamplighter wrote it?"""
    unit = facts["unit"]
    if unit is None:
        pytest.skip("the server has no systemd unit (launcher detached)")
    assert unit["edited"] is None, f"{unit['name']}: {unit['edited']}"
    assert unit.get("NeedDaemonReload") != "yes", f"{unit['name']} was changed and not loaded: systemctl daemon-reload"
    evidence(unit["name"])


@pytest.mark.warning
def test_nothing_has_drifted(facts, evidence):
    """Is the live server what its release and the inventory say?"""
    found = facts["drift"]["differences"]
    said = [f"{each['name']}: wanted {each['wanted']}, found {each['found']}" for each in found]
    assert not found, "; ".join(said)
    unknown = facts["drift"]["unknown"]
    evidence("; ".join(f"not compared: {why}" for why in unknown) if unknown else "no difference")
