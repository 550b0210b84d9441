"""The server itself: its release, process, port, model and unit, for every server that lamplighter put into service."""

from __future__ import annotations

import json

import pytest

from lamplighter.run.verify import ask_tool

#: Asks the server on the node, without any proxy. Arguments: method, host, port, path, body, tls.
ASK = """
import http.client, ssl, sys
c = http.client.HTTPConnection(sys.argv[2], int(sys.argv[3]), timeout=50)
if sys.argv[6] != "none":
    trust = ssl.create_default_context()
    if sys.argv[6] == "self-signed":
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    c = http.client.HTTPSConnection(sys.argv[2], int(sys.argv[3]), timeout=50, context=trust)
try:
    c.request(sys.argv[1], sys.argv[4], sys.argv[5] or None, {"Content-Type": "application/json"})
    r = c.getresponse()
    sys.stdout.write("%d %s" % (r.status, r.read(200000).decode("utf-8", "replace")))
except OSError as error:
    sys.stdout.write("0 %s" % error)
"""


def ask(host, server, method, path, body=""):
    probe = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)  # noqa: S104 - compared, not bound
    words = (server.python, ASK, method, probe, str(server.port), path, body, server.tls)
    status, _, text = ask_tool(host, "%s -I -S -c %s %s %s %s %s %s %s", *words).partition(" ")
    if status in ("401", "403"):
        pytest.skip(f"{path} wants an API key (answer {status}), which checks are not told")
    return int(status or 0), text


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


def test_process_is_alive(server, facts, evidence):
    """Is the server's process alive?"""
    assert server.pid, f"no process: {facts['server']['message'] or facts['server']['state']}"
    states = {each["pid"]: each["state"] for each in facts["processes"]}
    assert states.get(server.pid, "X") not in "ZX", f"pid {server.pid} has ended"
    evidence(f"pid {server.pid}, {len(states)} processes")


def test_port_is_held_by_the_server(server, facts, evidence):
    """Does the server, and nobody else, listen on its port?"""
    ours = {each["pid"] for each in facts["processes"]}
    listening = [each for each in facts["ports"] if each["port"] == server.port]
    assert listening, f"nobody listens on port {server.port}"
    for each in listening:
        if not each["pids"]:
            pytest.skip(f"whose port {server.port} is can't be seen: its user is {each['uid']}")
        strangers = sorted(set(each["pids"]) - ours)
        assert not strangers, f"port {server.port} on {each['address']} is held by pid {strangers[0]}, not the server's"
    evidence(", ".join(f"{each['address']} port {each['port']}" for each in listening))


def test_served_model_is_the_one_wanted(host, server, evidence):
    """Does it serve the model that the inventory names?"""
    rule = server.engine.get("identity") or {}
    if rule.get("source") != "models":
        pytest.skip("this engine tells its model only in an answer")
    status, text = ask(host, server, "GET", rule["path"])
    assert status == 200, f"{rule['path']} answers {status}: {text[:200]}"
    names = [entry.get("id") for entry in json.loads(text)["data"]]
    assert server.served_name in names, f"it serves {', '.join(map(str, names))}, not {server.served_name}"
    evidence(", ".join(map(str, names)))


def test_model_answers(host, server, evidence):
    """Does it answer a question?"""
    generate = server.engine["generate"]
    body = {"model": server.served_name, "max_tokens": 1, **(generate.get("body") or {})}
    if generate["kind"] == "chat":
        body.setdefault("messages", [{"role": "user", "content": "Say hello."}])
    else:
        body.setdefault("prompt", "Hello")
    wanted = json.dumps({name: value for name, value in body.items() if value is not None})
    status, text = ask(host, server, "POST", generate["path"], wanted)
    assert status == 200, f"{generate['path']} answers {status}: {text[:200]}"
    evidence(f"{generate['path']}: {status}")


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
