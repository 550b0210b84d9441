"""Lint of an inventory: places, what is ignored and why, what refuses a deploy, and the reports."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from invoke.program import Program
from sarif_pydantic import Sarif

from lamplighter.errors import InventoryError, Unreachable
from lamplighter.inventory import Host, load_inventory
from lamplighter.inventory.values import Lint, Origin
from lamplighter.lint import lint_of_node, lint_servers, load_rules
from lamplighter.node.events import Exit
from lamplighter.run import command
from lamplighter.run.lint import sarif, text
from tests.driver import PROJECT, signals_as_before

ROLES = PROJECT / "roles"
#: The mistakes that everybody makes first, and what is said of them.
NEWCOMER = (PROJECT / "tests" / "unit" / "golden" / "lint.txt").read_text()
HEAD = """\
all:
  hosts:
    gpu1:
      ansible_host: gpu1.invalid
      servers:
        s: {engine: demo, model: m, port: 8000}
"""


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("inventory/host_vars").mkdir(parents=True)
    monkeypatch.setenv("LAMPLIGHTER_INVENTORY", "inventory")


def host(variables: str, hosts: str = HEAD) -> Host:
    Path("inventory/hosts.yml").write_text(hosts)
    Path("inventory/host_vars/gpu1.yml").write_text(variables)
    return load_inventory(Path("inventory"), ROLES).host("gpu1")


def found(variables: str) -> list[str]:
    """Findings as ``line: level id variable``, by line."""
    one = host(variables)
    lints = sorted(lint_servers(one, one.servers.values(), ROLES), key=lambda each: each.origin or Origin(""))
    return [f"{each.origin.line if each.origin else 0}: {each.level} {each.id} {each.variable}" for each in lints]


@pytest.fixture
def inv(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command line in this process: its exit code and what it said. Nothing can be reached."""

    def unreachable(*_: Any) -> Any:
        raise Unreachable("somebody tried to reach it")

    monkeypatch.setattr(command, "open_session", unreachable)
    monkeypatch.setattr(command, "begin_session", unreachable)

    def run(*words: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["inv", *words])
        code: Any = Exit.OK
        try:
            with signals_as_before():
                Program().run(["inv", "--search-root", str(PROJECT), *words])
        except SystemExit as left:
            code = left.code
        told = capfd.readouterr()
        return SimpleNamespace(code=code, out=told.out, err=told.err)

    return run


def test_the_inventory_that_is_shipped_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    inventory = load_inventory(Path("inventory"), ROLES)
    hosts = [inventory.host(name) for name in inventory.hosts]
    assert [lint for one in hosts for lint in lint_servers(one, one.servers.values(), ROLES)] == []
    assert sum(len(one.servers) for one in hosts) >= 2


def test_what_a_newcomer_reads(inv: Callable[..., Any]) -> None:
    Path("inventory/hosts.yml").write_text(
        HEAD.replace(" {engine: demo, model: m, port: 8000}", "")
        + "          {engine: sglang, model: m, port: 8000, env: {\n\n"
        + "            NCCL_PROTOCOL: LL,\n            NCCL_PROTO: L1,\n            NCCL_P2P_LEVEL: sys,\n"
        + "            NCCL_IB_DISABLE: 'true'}}\n"
    )
    done = inv("lint")
    assert (done.code, done.out, done.err) == (Exit.USAGE, NEWCOMER, "")


def test_a_finding_stands_where_its_value_is_written() -> None:
    assert found(
        "servers:\n  s:\n    env:\n      NCCL_PROTO: LL128\n      NCCL_DEBUG: LOUD\n    secrets:\n"
        "      WORLD_SIZE: !secret env:X\n    args:\n      tp_size: 2\n    extra_args: [--tp-sise, '2']\n"
    ) == [
        "4: warning L15 servers.s.env.NCCL_PROTO",
        "5: error L14 servers.s.env.NCCL_DEBUG",
        "7: error L18 servers.s.secrets.WORLD_SIZE",
        "9: error L31 servers.s.args.tp_size",
        "10: warning L31 servers.s.extra_args",
    ]


def test_a_flag_of_extra_args_is_named_in_the_message() -> None:
    one = host("servers: {s: {extra_args: [--port, '9000']}}\n")
    (lint,) = lint_servers(one, one.servers.values(), ROLES)
    assert str(lint) == (
        "inventory/host_vars/gpu1.yml:1: servers.s.extra_args: --port says 9000, and `port` says 8000: the server "
        "would be waited for in vain; instead: port: 9000, and no --port (L35: docs/inventory.md)"
    )


def test_a_secret_that_comes_from_elsewhere_stands_nowhere_in_clear() -> None:
    extra = "servers: {s: {extra_args: [--api-key, !secret env:KEY, --admin-api-key"
    assert found(f"{extra}, !secret env:OTHER]}}}}\n") == []
    assert found(f"{extra}, sk-abc]}}}}\n") == ["1: warning L36 servers.s.extra_args"]


@pytest.mark.parametrize(
    ("server", "left"),
    [
        ("extra_args: [--host, 0.0.0.0]", []),
        ("host: 0.0.0.0, extra_args: [--host, 10.0.0.7]", ["1: error L35 servers.s.extra_args"]),
        ("extra_args: [--model-path, other]", ["1: error L35 servers.s.extra_args"]),
        ("served_name: n, extra_args: [--model-path, other]", []),
        ("served_name: n, extra_args: [--served-model-name, other]", ["1: error L35 servers.s.extra_args"]),
        ("served_name: n, extra_args: [--served-model-name, n]", []),
    ],
)
def test_readiness_waits_for_what_the_settings_say(server: str, left: list[str]) -> None:
    assert found(f"servers: {{s: {{{server}}}}}\n") == left


def test_a_server_without_a_command_line_is_told_with_all_else(inv: Callable[..., Any]) -> None:
    host("servers: {s: {args: {port: 9000}, env: {NCCL_DEBUG: LOUD}}}\n")
    done, place = inv("lint"), "inventory/host_vars/gpu1.yml:1"
    assert done.code == Exit.USAGE
    assert done.out.splitlines() == [
        f"{place}: error: servers.s.args.port: has a setting of its own: write servers.s.port instead",
        "1 error, 0 warnings in 1 server",
    ]
    deployed = inv("deploy", "--host", "gpu1")  # told of that server when its turn comes
    assert (deployed.code, deployed.err) == (Exit.UNREACHABLE, "")


# -- what is ignored

NOISY = "servers:\n  s:\n    env: {NCCL_PROTO: LL128, NCCL_DEBUG: LOUD}\n    lint:\n      ignore: ["


@pytest.mark.parametrize(
    ("ignored", "left"),
    [
        ("", ["3: error L14 servers.s.env.NCCL_DEBUG", "3: warning L15 servers.s.env.NCCL_PROTO"]),
        ("{id: L15, reason: measured here}", ["3: error L14 servers.s.env.NCCL_DEBUG"]),
        ("{id: L14, variable: NCCL_DEBUG, reason: a patched NCCL}", ["3: warning L15 servers.s.env.NCCL_PROTO"]),
        (
            "{id: L14, variable: NCCL_ALGO, reason: a patched NCCL}, {id: L15, reason: measured here}",
            ["3: error L14 servers.s.env.NCCL_DEBUG", "5: warning L37 servers.s.lint.ignore"],
        ),
        (
            "{id: L14, reason: a patched NCCL}, {id: L15, reason: measured here}, {id: L99, reason: no such rule}",
            ["5: error L37 servers.s.lint.ignore"],
        ),
        ("{id: L14, reason: x y}, {id: L15, reason: x y}, {id: nccl_file, reason: the node's own affair}", []),
    ],
)
def test_a_rule_is_ignored_for_a_reason(ignored: str, left: list[str]) -> None:
    assert found(f"{NOISY}{ignored}]\n") == left


@pytest.mark.parametrize(
    ("ignored", "said"),
    [
        ("{id: L15}", "servers.s.lint.ignore.0: `reason` is missing"),
        ("{id: L15, reason: because}", "servers.s.lint.ignore.0.reason: must say why, in words"),
        ("{id: L15, reson: of old}", "servers.s.lint.ignore.0: `reason` is missing"),
        ("L15", "servers.s.lint.ignore.0: must be a mapping, not the text 'L15'"),
        ("{id: L15, reason: measured here, variabel: X}", "unknown name (did you mean variable?)"),
    ],
)
def test_what_is_ignored_without_a_reason_is_refused(ignored: str, said: str) -> None:
    with pytest.raises(InventoryError) as caught:
        host(f"{NOISY}{ignored}]\n")
    assert said in str(caught.value)
    assert "inventory/host_vars/gpu1.yml:5" in str(caught.value)


def test_strict_makes_errors_of_warnings() -> None:
    assert found("lint: strict\nservers: {s: {env: {NCCL_PROTO: LL128}}}\n") == [
        "2: error L15 servers.s.env.NCCL_PROTO"
    ]


def test_the_node_is_asked_for_what_it_alone_knows() -> None:
    one = host(
        "servers: {s: {env: {NCCL_PROTO: LL, NCCL_BLOCKING_WAIT: '1', A: b}, lint: {ignore: "
        "[{id: nccl_name, variable: NCCL_X, reason: of another node}]}}}\n"
    )
    assert lint_of_node(one.servers["s"], ROLES) == {
        "nccl": ["NCCL_DEBUG", "NCCL_PROTO"],  # the first is the role's own
        "ignore": [["nccl_name", "NCCL_X"]],
    }


# -- what a command does with it

WRONG = "servers: {s: {env: {NCCL_DEBUG: LOUD, NCCL_PROTO: LL128}}}\n"
DOUBTFUL = "servers: {s: {env: {NCCL_PROTO: LL128}}}\n"


@pytest.mark.parametrize("verb", ["deploy", "plan", "check"])
def test_an_error_refuses_what_would_start_it_before_anything_is_opened(verb: str, inv: Callable[..., Any]) -> None:
    host(WRONG)
    done = inv(verb, "--host", "gpu1")
    assert done.code == Exit.USAGE
    told = done.out + done.err
    assert "inventory/host_vars/gpu1.yml:1: servers.s.env.NCCL_DEBUG: 'LOUD' is no log level of NCCL" in told
    assert "docs/lint.md" in told
    assert "somebody tried" not in told


@pytest.mark.parametrize("verb", ["deploy", "plan", "check"])
def test_an_error_keeps_the_node_in_a_box_down(verb: str, inv: Callable[..., Any], monkeypatch: Any) -> None:
    started: list[str] = []

    def bring_up(one: Host, servers: list[Any], _: Path) -> Any:
        started.append(one.name)
        return one, servers

    monkeypatch.setattr("lab.boxes.bring_up", bring_up)
    host("lab: demo\n" + WRONG)
    assert inv(verb, "--host", "gpu1").code == Exit.USAGE
    assert started == []
    assert inv("status", "--host", "gpu1").code == Exit.UNREACHABLE
    assert started == ["gpu1"]


@pytest.mark.parametrize("verb", ["restart", "start", "stop", "rollback", "status", "verify", "env"])
def test_what_starts_nothing_of_the_inventory_goes_on(verb: str, inv: Callable[..., Any]) -> None:
    host(WRONG)
    done = inv(verb, "--host", "gpu1")
    assert done.code == Exit.UNREACHABLE
    assert "LOUD" not in done.out + done.err


@pytest.mark.parametrize("verb", ["deploy", "check"])
def test_a_warning_is_told_once_and_stops_nothing(verb: str, inv: Callable[..., Any]) -> None:
    host(DOUBTFUL)
    done = inv(verb, "--host", "gpu1")
    assert done.code == Exit.UNREACHABLE
    assert done.err.count("servers.s.env.NCCL_PROTO: asks for LL128") == 1
    assert "warning: inventory/host_vars/gpu1.yml:1: " in done.err


def test_config_shows_it_with_all_else(inv: Callable[..., Any]) -> None:
    host(WRONG)
    line = json.loads(inv("config", "--host", "gpu1", "--json").out)
    assert [(each["id"], each["level"], each["variable"], each["origin"]) for each in line["lint"]] == [
        ("L14", "error", "servers.s.env.NCCL_DEBUG", "inventory/host_vars/gpu1.yml:1"),
        ("L15", "warning", "servers.s.env.NCCL_PROTO", "inventory/host_vars/gpu1.yml:1"),
    ]
    assert line["lint"][1]["instead"] == "leave LL128 to NCCL"


def test_what_was_probably_meant_to_be_a_secret_is_told_with_its_place_once(inv: Callable[..., Any]) -> None:
    host("servers: {s: {env: {HF_TOKEN: hf_abcdefgh, API_KEY: $API_KEY}}}\n")
    token, key = inv("lint").out.splitlines()[:2]
    assert "warning: servers.s.env.HF_TOKEN: stands here in clear" in token
    assert "warning: servers.s.env.API_KEY: no shell reads this" in key


# -- the task


@pytest.mark.parametrize(("variables", "code"), [(WRONG, Exit.USAGE), (DOUBTFUL, Exit.OK), ("{}", Exit.OK)])
def test_only_errors_make_the_task_fail(variables: str, code: Exit, inv: Callable[..., Any]) -> None:
    host(variables)
    assert inv("lint").code == code


def test_the_task_takes_hosts_and_servers(inv: Callable[..., Any]) -> None:
    host(WRONG)
    assert inv("lint", "--host", "gpu1", "--server", "s").code == Exit.USAGE
    assert inv("lint", "--host", "gpu2").code == Exit.USAGE


def test_a_server_that_nobody_has_is_no_clean_one(inv: Callable[..., Any]) -> None:
    host("{}")
    done = inv("lint", "--server", "t")
    assert done.code == Exit.USAGE
    assert "no host of all has server 't'" in done.err


def test_sarif_names_rule_level_and_line(inv: Callable[..., Any]) -> None:
    host(WRONG)
    assert inv("lint", "--format", "sarif", "--out", "report.sarif").out == ""
    report = Sarif.model_validate_json(Path("report.sarif").read_text())
    (run,) = report.runs
    assert report.version == "2.1.0"
    assert [rule.id for rule in run.tool.driver.rules] == ["L14", "L15"]
    told = [(one.rule_id, one.level.value, one.locations[0].physical_location) for one in run.results]
    assert [(rule, level) for rule, level, _ in told] == [("L14", "error"), ("L15", "warning")]
    assert {(place.artifact_location.uri, place.region.start_line) for _, _, place in told} == {
        ("inventory/host_vars/gpu1.yml", 1)
    }
    assert json.loads(inv("lint", "--format", "sarif").out) == json.loads(Path("report.sarif").read_text())
    assert inv("lint", "--format", "sarif", "--out", "report.sarif").code == Exit.USAGE  # and replaces its own


def test_a_finding_without_a_place_has_none_in_reports() -> None:
    report = Sarif.model_validate_json(sarif([Lint("L1", "x", "y", None)], load_rules(ROLES)))
    assert report.runs[0].results[0].locations == []
    assert text([Lint("L1", "x", "y", None)], 1).startswith("warning: x: y\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--format", "html"), "--format html: there is no such format"),
        (("--out", "x"), "--out is for --format sarif"),
        (
            ("--format", "sarif", "--out", "notes.txt"),
            "notes.txt: there is a file already, and it is no SARIF report",
        ),
        (("--format", "sarif", "--out", "."), "--out .: Is a directory"),
    ],
)
def test_the_task_refuses_what_can_only_be_a_mistake(
    words: tuple[str, ...], said: str, inv: Callable[..., Any]
) -> None:
    host("{}")
    Path("notes.txt").write_text("mine\n")
    done = inv("lint", *words)
    assert done.code == Exit.USAGE
    assert said in done.err
    assert Path("notes.txt").read_text() == "mine\n"


# -- its documentation


def test_the_documented_rules_are_the_rules() -> None:
    rows = re.findall(r"^\| (\w+) \| (.+?) \| (.+?) \| (.+?) \|$", (PROJECT / "docs" / "lint.md").read_text(), re.M)
    told = {row[0]: (row[2], row[3]) for row in rows if row[0] != "id"}
    assert told == {name: (rule.about, rule.source) for name, rule in load_rules(ROLES).items()}


def test_each_rule_at_the_desk_has_a_case_that_it_tells_of() -> None:
    text = (PROJECT / "tests" / "unit" / "test_lint.py").read_text()
    at_desk = {name for name, rule in load_rules(ROLES).items() if not rule.node}
    assert at_desk - set(re.findall(r"\"(L\d+)\b", text)) == {"L37"}  # above


def test_the_lists_of_the_roles_have_no_name_twice() -> None:
    for path in sorted(ROLES.glob("*/lint.yml")):
        data = yaml.safe_load(path.read_text())
        for key in ("flags", "variables"):
            names = [name for span in data.get(key) or () for name in span["names"].split()]
            assert len(names) == len(set(names)), (path, key)
