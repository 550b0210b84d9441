"""What is shown without a node: what a deploy would change, in what hosts differ, the schema, releases as files."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from invoke.exceptions import Exit as Leave

from lamplighter.inventory import Host, load_inventory
from lamplighter.inventory.editors import json_schema
from lamplighter.node.events import Exit
from lamplighter.project import PROJECT
from lamplighter.release.changes import Change, Changes, compare
from lamplighter.release.engine import load_engine
from lamplighter.release.release import Release, build_release
from lamplighter.report import plan_text
from lamplighter.run import local
from lamplighter.run.command import Settings, judge_plan

HOSTS = "all: {hosts: {gpu1: {ansible_user: ops}, gpu2: }}\n"
BASE = """\
servers:
  s:
    engine: demo
    model: m
    port: 8000
    args: {tp: 2, api-key: "{{ lookup('env', 'KEY') }}"}
    env: {A: plain, TOKEN: "{{ lookup('env', 'KEY') }}"}
"""


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEY", "sk-CANARY")
    (tmp_path / "inventory" / "group_vars").mkdir(parents=True)
    (tmp_path / "inventory" / "hosts.yml").write_text(HOSTS)
    (tmp_path / "inventory" / "group_vars" / "all.yml").write_text(BASE)


def host(changed: str = "") -> Host:
    Path("inventory/host_vars").mkdir(exist_ok=True)
    Path("inventory/host_vars/gpu1.yml").write_text(changed or "{}")
    return load_inventory(Path("inventory"), PROJECT / "roles").host("gpu1")


def release(changed: str = "") -> Release:
    one = host(changed)
    return build_release(one, one.servers["s"], load_engine("demo", PROJECT / "roles"), PROJECT)


def on_node(one: Release) -> dict[str, Any]:
    """What the node tells of a release that it has."""
    files = {name: file.text for name, file in one.files.items()}
    return {"digest": one.digest, "server": one.manifest["server"], "files": files}


def changes(changed: str, secrets: tuple[str, ...] = ()) -> Changes:
    old = on_node(release())
    return compare(release(changed), old, secrets)


def test_the_release_that_serves_changes_nothing() -> None:
    found = changes("")
    assert not found
    assert found.files == {}


def test_arguments_variables_and_files_that_would_change() -> None:
    found = changes("servers: {s: {args: {tp: 4, ep: true}, env: {A: null, B: {value: b, mode: force}}}}\n")
    assert found.argv == (Change("--tp", "2", "4"), Change("--ep", None, ""))
    assert found.variables == (Change("A", "plain", None), Change("B", None, "b (forced)"))
    assert (found.secrets, found.settings, found.restarts) == ((), (), True)
    script = found.files["launch.sh"].splitlines()
    assert "-    2 \\" in script
    assert "+    4 \\" in script
    assert not any("release " in line for line in script if line[:1] in "+-")  # the digest is no difference
    assert set(found.files) == {"launch.sh", "pysite/sitecustomize.py"}


def test_a_longer_timeout_restarts_nothing() -> None:
    found = changes("servers: {s: {timeouts: {ready: 99}}}\n")
    assert found.settings == (Change("timeouts.ready", "120.0", "99.0"),)
    assert (bool(found), found.restarts, found.files) == (True, False, {})


def test_a_secret_is_a_name_in_every_change() -> None:
    found = changes("servers: {s: {secrets: {NEW: !secret env:KEY}}}\n", ("TOKEN", "LAMPLIGHTER_ARGS_API_KEY"))
    assert found.secrets == (
        Change("LAMPLIGHTER_ARGS_API_KEY", "(secret)", "(another value)"),
        Change("NEW", None, "(secret)"),
        Change("TOKEN", "(secret)", "(another value)"),
    )
    one = release()
    assert one.manifest["server"]["argv"][-1] == "$LAMPLIGHTER_ARGS_API_KEY"
    assert "CANARY" not in repr(found) + repr(one)


def test_where_nothing_is_all_of_it_is_new() -> None:
    found = compare(release(), None, ())
    assert Change("--tp", None, "2") in found.argv
    assert found.restarts
    answer = {"release": "abc", "state": "stopped", "serving": None, "is_pending": True, "changes": found.to_json()}
    text = plan_text({"gpu1": {"s": {**answer, "checks": ["model_answers"]}}})
    assert "nothing serves (stopped): release abc would be started" in text
    assert "launch.sh: new, " in text
    assert "then 1 check:\n    model_answers" in text


@pytest.mark.parametrize(
    ("pending", "level", "code"),
    [(False, "ok", Exit.OK), (True, "warning", Exit.CHANGES), (True, "error", Exit.REFUSED)],
)
def test_the_exit_code_of_a_plan(pending: bool, level: str, code: Exit) -> None:
    assert judge_plan({"is_pending": pending, "findings": [{"level": level}]}) is code


def test_a_secret_argument_is_taken_from_its_variable_and_taken_away() -> None:
    files = release(
        "servers: {s: {args: {api-key: null}, extra_args: [--flag, \"{{ lookup('env', 'KEY') }}\"]}}\n"
    ).files
    place = Path("release")
    for name, file in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(file.text)
    secret = "a 'b' $(id) \"c\"\nsecond"
    (place / "env").write_text(f"export LAMPLIGHTER_EXTRA_ARGS_2={shlex.quote(secret)}\n")
    server = place / "bin" / "lamplighter-demo-server"
    server.parent.mkdir()
    server.write_text('#!/bin/sh\nfor last; do :; done\nprintf "%s" "$last"\nenv | grep -c LAMPLIGHTER_EXTRA >&2\n')
    server.chmod(0o755)
    path = f"{server.parent.absolute()}:{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/sh", str(place / "launch.sh")], env={"PATH": path}, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr.strip()) == (secret, "0")


# -- config and render


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_hosts_differ_in_what_is_said_of_one_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    host("servers: {s: {port: 8001}}\n")
    local.print_difference(Settings(Path("inventory"), as_json=True), ["gpu1", "gpu2"])
    found = {each["variable"]: each for each in json.loads(printed(capsys))["differences"]}
    assert set(found) == {"connection.host", "connection.user", "servers.s.port"}
    assert found["servers.s.port"]["values"] == [8001, 8000]
    assert found["servers.s.port"]["origins"] == ["inventory/host_vars/gpu1.yml:1", "inventory/group_vars/all.yml:5"]
    local.print_difference(Settings(Path("inventory")), ["gpu1", "gpu2"])
    assert "8001  inventory/host_vars/gpu1.yml:1" in printed(capsys)
    with pytest.raises(Leave) as left:
        local.print_difference(Settings(Path("inventory")), ["gpu1"])
    assert left.value.code == Exit.USAGE


def test_the_schema_knows_every_setting_and_takes_templates_and_other_peoples_names() -> None:
    schema = json_schema()
    assert schema["properties"]["servers"]["anyOf"][0]["additionalProperties"]["anyOf"][0] == {"$ref": "#/$defs/Server"}
    assert "additionalProperties" not in schema  # other people's variables
    server = schema["$defs"]["Server"]
    assert server["additionalProperties"] is False
    assert "required" not in server
    assert {"type": "string", "pattern": r"\{[{%#]"} in server["properties"]["port"]["anyOf"]
    assert {"type": "null"} in server["properties"]["port"]["anyOf"]
    assert json.loads(json.dumps(schema)) == schema


def test_render_writes_a_release_without_its_secrets_and_no_other_file(capsys: pytest.CaptureFixture[str]) -> None:
    host()
    settings = Settings(Path("inventory"))
    for _ in range(2):
        local.render(settings, ["gpu1"], None, "out")
    place = Path("out/gpu1/s")
    assert os.access(place / "launch.sh", os.X_OK)
    assert (place / "pysite" / "sitecustomize.py").is_file()
    assert "TOKEN=...   from {{ lookup('env', 'KEY') }}" in (place / "env.example").read_text()
    assert not any("CANARY" in path.read_text() for path in place.rglob("*") if path.is_file())
    assert "out/gpu1/s: launch.sh" in printed(capsys)


@pytest.mark.parametrize("kind", ["changed", "foreign", "link", "directory"])
def test_render_replaces_nothing_that_is_not_its_own(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    host()
    settings, place = Settings(Path("inventory")), Path("out/gpu1/s")
    if kind == "changed":
        local.render(settings, ["gpu1"], None, "out")
    place.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        Path("elsewhere").mkdir()
        place.rmdir()
        place.symlink_to(Path("elsewhere").absolute())
    elif kind == "directory":
        (place / "launch.sh").mkdir()
    else:
        (place / "launch.sh").write_text("mine")
    with pytest.raises(Leave) as left:
        local.render(settings, ["gpu1", "gpu2"], None, "out")
    assert left.value.code == Exit.USAGE
    assert not Path("out/gpu2").exists()
    assert not list(Path(".").glob("elsewhere/*"))
    if kind in ("changed", "foreign"):
        assert (place / "launch.sh").read_text() == "mine"
