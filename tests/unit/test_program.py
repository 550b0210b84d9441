"""The program ``lamplighter``: its help, what it refuses, and what a repository of one's own says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from invoke.exceptions import Exit as Leave
from invoke.parser.parser import Parser

from lamplighter.errors import InventoryError
from lamplighter.inventory import load_inventory
from lamplighter.project import PROJECT, LayeredRoles, Project, project_beside
from lamplighter.release.engine import load_engine
from lamplighter.release.engine_file import engine_names
from lamplighter.report import config_text
from lamplighter.run import command, repository, verify
from lamplighter.tasks import collection
from lamplighter.tasks.program import EXAMPLES, Lamplighter, overview

Say = Callable[..., tuple[int, str]]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a command line of the program in an empty directory; return its exit code and all that it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAMPLIGHTER_INVENTORY", raising=False)

    def run(*words: str) -> tuple[int, str]:
        argv = ["lamplighter", *words]
        monkeypatch.setattr(sys, "argv", argv)
        code: Any = 0
        try:
            Lamplighter(namespace=collection(), name="lamplighter", binary="lamplighter").run(argv)
        except SystemExit as left:
            code = left.code
        said = capsys.readouterr()
        return int(code or 0), said.out + said.err

    return run


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_help_has_every_task_in_a_group_with_an_example(width: int) -> None:
    tasks = collection()
    lines = overview(tasks, width)
    assert [line for line in lines if len(line) > width] == []
    for name in tasks.task_names:
        example = EXAMPLES[name]
        assert f"$ lamplighter {example}" in "\n".join(lines)
        (said,) = [each for each in Parser(contexts=tasks.to_contexts()).parse_argv(example.split()) if each.name]
        assert said.name == name
    heads = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert len(heads) == 5, heads


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["deplyo"], ["No idea what 'deplyo' is", "did you mean deploy?"]),
        (["deploy", "--hots", "x"], ["'--hots'", "did you mean --host?"]),
        (["deploy", "--qqqqq"], ["`lamplighter --help deploy` shows"]),
        (["status", "--host", "demo", "stop", "--host", "demo"], ["one task at a time: status and stop"]),
        (["rollback", "--host", "demo", "--dry-run"], ["rollback has no --dry-run", "`lamplighter releases` shows"]),
        (["status", "--host", "demo", "-v", "-q"], ["--verbose and --quiet exclude each other"]),
        (["config"], ["no host given"]),
        (["config", "--host", "gpu1"], ["this is the demo's", "no host or group 'gpu1'"]),
    ],
)
def test_what_cannot_be_meant_ends_with_2_and_a_next_step(say: Say, words: list[str], told: list[str]) -> None:
    code, said = say(*words)
    assert code == 2, said
    assert "next: " in said
    for each in told:
        assert each in said


def test_quiet_leaves_out_what_is_not_asked_for_and_verbose_says_where_things_are(say: Say, tmp_path: Path) -> None:
    assert "this is the demo's" not in say("config", "--host", "demo", "-q")[1]
    code, said = say("config", "--host", "demo", "-v")
    assert code == 0
    assert f"inventory: {command.DEMO}" in said
    code, said = say("--help", "deploy")
    assert code == 0
    assert "For example: lamplighter deploy --host gpu1" in said
    assert "-q, --quiet" in said


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [1", "Invoke's configuration cannot be read: while parsing"),
        ("lamplighter: 5", "Invoke's configuration cannot be read: Can't cleanly merge"),
        ("lamplighter: {inventory: 7}", "lamplighter.inventory is 7"),
        ("lamplighter: {inventroy: x}", "no setting lamplighter.inventroy (did you mean inventory?)"),
        ("lamplighter: {inventory: [nowhere]}", "nowhere: there is no inventory here"),
    ],
)
def test_a_configuration_that_is_wrong_is_told(say: Say, tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "invoke.yml").write_text(text)
    code, said = say("config", "--host", "demo")
    assert code == 2
    assert told in said
    assert "Traceback" not in said


def test_a_repository_of_ones_own_is_right_from_the_start_and_never_overwrites(say: Say, tmp_path: Path) -> None:
    code, said = say("init", "my servers")
    assert code == 0
    assert "cd 'my servers'" in said
    mine = tmp_path / "my servers"
    (mine / "tasks.py").write_text("mine")
    code, said = say("init", "my servers")
    assert (code, (mine / "tasks.py").read_text()) == (2, "mine")
    assert "init overwrites nothing" in said
    assert "inventory/hosts.yml" in said
    code, said = say("init", "my servers/tasks.py")
    assert (code, "is no directory" in said) == (2, True)
    code, said = say("lint", "--inventory", "my servers/inventory")  # from the working directory
    assert (code, said.strip()) == (0, "0 errors, 0 warnings in 1 server")
    # the commented host is a whole one: without the marks before it, it lints
    hosts, host = mine / "inventory" / "hosts.yml", mine / "inventory" / "host_vars" / "gpu1.yml"
    hosts.write_text(hosts.read_text().replace("# gpu1:", "gpu1:"))
    host.write_text("\n".join(line[2:] for line in host.read_text().partition("\n#\n")[2].splitlines()) + "\n")
    code, said = say("lint", "--inventory", "my servers/inventory")
    assert (code, said.strip()) == (0, "0 errors, 0 warnings in 2 servers")
    done = subprocess.run(["sh", "-n", mine / "ci" / "check.sh"], check=False)
    assert done.returncode == 0


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The roles of a repository with the demo's inventory."""
    shutil.copytree(repository.SKELETON, tmp_path / "mine")
    return tmp_path / "mine" / "roles"


def test_a_role_of_ones_own_is_found_first_and_told(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inventory = own.parent / "inventory"
    project = project_beside(inventory)
    assert isinstance(project, Project)
    assert project == project_beside(inventory / "hosts.yml")
    assert project_beside(own.parent / "gpu1,gpu2") == PROJECT
    roles = project / "roles"
    assert isinstance(roles, LayeredRoles)
    assert engine_names(roles) == engine_names(PROJECT / "roles")
    # a new one on the ground of a built-in one, with a failure of its own
    (own / "ours").mkdir()
    (own / "ours" / "engine.yml").write_text(
        "extends: demo\n"
        "failures:\n"
        "  - {id: our_license, patterns: ['LicenseServerError: .*'], hint: ask the platform team}\n"
    )
    assert "ours" in engine_names(roles)
    demo = inventory / "host_vars" / "demo.yml"
    theirs = load_inventory(inventory, roles).host("demo").servers["demo"]
    demo.write_text(demo.read_text().replace("engine: demo", "engine: ours"))
    ours = load_inventory(inventory, roles).host("demo").servers["demo"]
    assert ours == theirs.model_copy(update={"engine": "ours"})  # with all its defaults
    demo.write_text(demo.read_text().replace("engine: ours", "engine: demo"))
    compiled = load_engine("ours", roles).compiled
    assert compiled["failures"][0]["id"] == "our_license"
    # one with a built-in one's name replaces it whole; checks without an engine are added
    shutil.copytree(PROJECT / "roles" / "demo", own / "demo")
    for place in ("node", "demo"):
        (own / place / "checks").mkdir(parents=True, exist_ok=True)
        (own / place / "checks" / f"test_{place}.py").write_text(f"def test_of_{place}(): ...\n")
    (server,) = load_inventory(inventory, roles).host("demo").servers.values()
    names = verify.check_names(server, project, inventory)
    assert {"of_node", "of_demo", "model_answers"} <= set(names)
    with pytest.raises(Leave):
        command.print_config(command.Settings(inventory), ["no-such-host"])
    command.print_config(command.Settings(inventory), ["demo"])
    assert f"engine demo is one of your own, which replaces the built-in one: {own / 'demo'}" in capsys.readouterr().out
    # a directory of Ansible's roles may be there, too
    (own / "vllm" / "tasks").mkdir(parents=True)
    assert load_engine("vllm", roles).compiled == load_engine("vllm", PROJECT / "roles").compiled
    (own / "ours" / "engine.yml").write_text("extends: ours\n")
    with pytest.raises(InventoryError, match=r"roles/ours/engine.yml:1: extends: ours -> ours goes round"):
        load_engine("ours", roles)


def test_config_tells_nothing_of_engines_where_none_is_ones_own() -> None:
    assert "engine" not in config_text({"gpu1": {"host": "gpu1", "origins": {}, "lint": [], "engines": {}}})
