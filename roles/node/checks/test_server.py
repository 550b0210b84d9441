"""The server itself: its release, process, port, model and unit, for every server that lamplighter put into service.

testinfra tells of files, processes, sockets and units. The node's own program alone tells which processes are the
server's, and so whose the port is; what the server answers, since the key that it wants is on no command line; and what
has changed since the release became ready.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath

import pytest

from lamplighter.run.checks import asked, mode_of, text_of, together

#: Addresses that `localhost` may stand for, and those that stand for all.
LOCAL = {"localhost": "127.0.0.1", "*": "0.0.0.0"}  # noqa: S104 - looked for only


@asked
def current(host, server):
    """The name of the current release, "" where there is none."""
    name = PurePosixPath(host.file(f"{server.directory}/current").linked_to).name
    return "" if name == "current" else name


@asked
def release_files(host, server):
    """Of each file of the current release: its name, what its list says of it, and what is there."""
    place = f"{server.directory}/current"
    listed = json.loads(text_of(host.file(f"{place}/release.json")) or "{}").get("files", {})
    files = [host.file(f"{place}/{name}") for name in listed]
    found = together(*(lambda file=file: seal(file) for file in files))
    return [
        (name, (said["sha256"], said["mode"]), now) for (name, said), now in zip(listed.items(), found, strict=True)
    ]


def seal(file):
    """The digest and the mode of a file; "" and None where it is gone.

    facts: sha256sum puts a backslash before the digest of a file whose name it has to quote.
    """
    return together(lambda: file.sha256sum.removeprefix("\\"), lambda: mode_of(file))


@asked
def secrets_mode(host, server):
    """The mode of the file that holds the secrets of the current release; None where it is not there."""
    return mode_of(host.file(f"{server.directory}/current/env"))


@asked
def main_process(host, server):
    """The state of the server's main process, as the kernel tells it; "" where it is gone."""
    told = text_of(host.file(f"/proc/{server.pid}/stat")) if server.pid else None
    return told.rpartition(")")[2].split()[0] if told else ""


@asked
def listening(host, server):
    """Whether a socket listens where the server is to listen; None where no tool of the node can tell."""
    try:
        return host.socket(f"tcp://{LOCAL.get(server.host, server.host)}:{server.port}").is_listening
    except RuntimeError:  # neither ss nor netstat is there, or the address is a name
        return None


@asked
def unit(host, facts):
    """What systemd says of the server's unit; None without one."""
    known = facts["unit"]
    if known is None or known.get("manager_uid") is not None:  # a user's own manager testinfra does not ask
        return known
    return {**host.service(known["name"]).systemd_properties, "name": known["name"], "edited": known["edited"]}


def test_release_files_are_in_place(current, release_files, evidence):
    """Are the files of the current release as they were written?"""
    assert current, "there is no current release"
    wrong = []
    for name, (digest, mode), (digest_now, mode_now) in release_files:
        if digest != digest_now:
            wrong.append(f"{name} is {digest_now or 'gone'}, not {digest}")
        elif mode != mode_now:
            wrong.append(f"{name} has mode {mode_now}, not {mode}")
    assert not wrong, "; ".join(wrong)
    evidence(f"release {current}, {len(release_files)} files")


def test_environment_file_is_private(secrets_mode, evidence):
    """Can nobody else read the secrets of the release?"""
    assert secrets_mode, "the release has no env file"
    assert secrets_mode == "0600", f"mode {secrets_mode}: others can read the secrets"
    evidence(f"env has mode {secrets_mode}")


def test_current_release_is_the_one_that_runs(current, server, evidence):
    """Does the current release run?"""
    assert current, "there is no current release"
    assert current == server.release, f"current is {current}, {server.release or 'none'} runs"
    evidence(f"release {current}")


@pytest.mark.serving
def test_process_is_alive(main_process, server, facts, evidence):
    """Is the server's process alive?"""
    assert server.pid, f"no process: {facts['server']['message'] or facts['server']['state']}"
    assert main_process not in ("", "Z", "X"), f"pid {server.pid} has ended"
    evidence(f"pid {server.pid}, {len(facts['processes'])} processes")


@pytest.mark.serving
def test_port_is_held_by_the_server(listening, server, facts, evidence):
    """Does the server, and nobody else, listen on its port?"""
    assert listening is not False, f"nothing listens on {server.host} port {server.port}"
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


def test_unit_is_enabled(unit, evidence):
    """Will a reboot bring the server back?"""
    if unit is None:
        pytest.skip("the server has no systemd unit (launcher detached)")
    state = unit.get("UnitFileState")
    if state is None:
        pytest.skip(f"systemd does not answer about {unit['name']}")
    assert state == "enabled", f"{unit['name']} is {state}"
    evidence(f"{unit['name']} is enabled")


@pytest.mark.warning
def test_unit_is_as_written(unit, evidence):
    """Is the unit file as lamplighter wrote it?"""
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
