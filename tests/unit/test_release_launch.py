"""launch.sh in real shells: every byte arrives, nothing runs, whatever the values, arguments and directories hold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamplighter.release.release import STANDARD_PATH, Release
from lamplighter.release.render import quote
from tests.unit.test_release import release

SHELLS = [words for words in (["dash"], ["bash"], ["bash", "--posix"], ["busybox", "sh"]) if shutil.which(words[0])]
PWN = f"/tmp/lamplighter-pwn-{os.getpid()}"

NASTY = [
    f"a b; touch {PWN} $(touch {PWN}) `touch {PWN}` 'x' \"y\"",
    "line one\nline two\n",
    "trailing backslash \\",
    "\\n \\\\ \\' \\\" \\\n",
    "wow! !! !$ ^a^b",
    "-n",
    "--flag=with 'quote",
    "~/models",
    "a=~:~root",
    "*? [a-z] {a,b}",
    "tab\there\rcarriage\x1b[31m\x01\x7f\x81\x88",
    "größe Á € 模型 😀 \u2018curly\u2019 \u201cdouble\u201d\u00a0nbsp\u2028",
    "# not a comment",
    "%s %d {{ 7 * 7 }} {% raw %}",
    "'",
    "''",
    "",
    " ",
    "$PATH ${IFS} $$ $? $0 $@",
    "&& exit 7 || exit 7 | cat > x & <y",
]

TELL = "import json, os, sys; print(json.dumps([sys.argv[1:], {k.decode(): list(v) for k, v in os.environb.items()}]))"


def place(built: Release, directory: Path) -> Path:
    for name, file in built.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text, encoding="utf-8", newline="")
        path.chmod(file.mode)
    return directory / "launch.sh"


def telling(tmp_path: Path, **changes: Any) -> Release:
    """A release whose server prints its arguments and environment."""
    return release(python=str(stand_in(tmp_path)), **changes)


def stand_in(tmp_path: Path) -> Path:
    """An interpreter that runs TELL, whatever else it is asked to run."""
    script = tmp_path / "bin" / "python"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec {quote(sys.executable)} -c {quote(TELL)} "$@"\n')
    script.chmod(0o755)
    return script


def run(words: Sequence[str | Path], **options: Any) -> tuple[list[str], dict[str, str]]:
    done = subprocess.run(words, capture_output=True, check=False, **options)
    assert done.returncode == 0, done.stderr.decode()
    arguments, environment = json.loads(done.stdout)
    return arguments, {name: bytes(value).decode("utf-8") for name, value in environment.items()}


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_every_byte_arrives_and_nothing_runs(tmp_path: Path, shell: list[str]) -> None:
    env = {f"V{number}": value for number, value in enumerate(NASTY)}
    built = telling(tmp_path, env=env, extra_args=NASTY, model=NASTY[0] + NASTY[1] + NASTY[2], served_name=None)
    home = tmp_path / f"root $(touch {PWN.replace('/', '-')}) 'a' \"b\" \\ é\n!* " / "releases" / built.digest
    arguments, environment = run([*shell, place(built, home)], cwd=tmp_path)
    assert arguments[arguments.index("--model-path") + 1] == NASTY[0] + NASTY[1] + NASTY[2]
    assert arguments[-len(NASTY) :] == NASTY
    assert {name: environment[name] for name in env} == env
    assert environment["PYTHONPATH"] == str(home / "pysite")
    assert not Path(PWN).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", home.parents[1].name]


@settings(max_examples=15, deadline=None)
@given(values=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1, max_size=60))
@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_the_quoter_makes_one_word_of_anything(shell: list[str], values: list[str]) -> None:
    script = "exec " + " ".join(map(quote, [sys.executable, "-I", "-S", "-c", TELL, *values]))
    arguments, _ = run([*shell, "-c", script])
    assert arguments == values


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
@pytest.mark.parametrize("call", ["./launch.sh", "launch.sh", "deep/../launch.sh", "../{home}/launch.sh", "{absolute}"])
def test_finds_its_release_however_it_is_called(tmp_path: Path, shell: list[str], call: str) -> None:
    home = tmp_path / "a release"
    script = place(telling(tmp_path), home)
    (home / "deep").mkdir()
    _, environment = run([*shell, call.format(home=home.name, absolute=script)], cwd=home)
    first = environment["PYTHONPATH"].split(":")[0]
    assert os.path.isabs(first)
    assert os.path.realpath(first) == str(home / "pysite")


def test_finds_its_release_through_the_current_link_and_on_path(tmp_path: Path) -> None:
    script = place(telling(tmp_path), tmp_path / "releases" / "r")
    (tmp_path / "current").symlink_to(script.parent)
    _, environment = run([tmp_path / "current" / "launch.sh"], cwd="/")
    assert environment["PYTHONPATH"] == str(tmp_path / "current" / "pysite")
    _, environment = run(["launch.sh"], cwd="/", env={"PATH": f"{script.parent}:/usr/bin:/bin"})
    assert environment["PYTHONPATH"] == str(script.parent / "pysite")


def test_a_stale_pwd_does_not_mislead_it(tmp_path: Path) -> None:
    script = place(telling(tmp_path), tmp_path / "r")
    _, environment = run(["./launch.sh"], cwd=script.parent, env={"PWD": "/usr"})
    assert os.path.normpath(environment["PYTHONPATH"]) == str(script.parent / "pysite")


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_refuses_to_run_from_elsewhere(tmp_path: Path, shell: list[str]) -> None:
    script = place(telling(tmp_path), tmp_path / "r")
    shutil.copy(script, tmp_path / "launch.sh")
    colon = place(telling(tmp_path), tmp_path / "r:2")
    for path, says in ((tmp_path / "launch.sh", "no pysite/sitecustomize.py"), (colon, "colon")):
        done = subprocess.run([*shell, path], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert says in done.stderr


def test_inherited_pythonpath_stays_behind_ours_and_there_is_no_empty_element(tmp_path: Path) -> None:
    script = place(telling(tmp_path), tmp_path / "r")
    ours = str(script.parent / "pysite")
    for inherited, result in (("/x:/y", f"{ours}:/x:/y"), ("", ours)):
        _, environment = run([script], env={"PYTHONPATH": inherited})
        assert environment["PYTHONPATH"] == result
    _, environment = run([script], env={})
    assert environment["PYTHONPATH"] == ours


def test_pythonpath_of_the_inventory_goes_behind_ours_and_not_into_sitecustomize(tmp_path: Path) -> None:
    built = telling(tmp_path, env={"PYTHONPATH": "/opt/plugins"})
    script = place(built, tmp_path / "r")
    _, environment = run([script], env={})
    assert environment["PYTHONPATH"] == f"{script.parent}/pysite:/opt/plugins"
    assert "PYTHONPATH'" not in built.files["pysite/sitecustomize.py"].text


def test_path_begins_with_the_interpreters_directory(tmp_path: Path) -> None:
    script = place(telling(tmp_path), tmp_path / "r")
    _, environment = run([script], env={"PATH": "/somewhere"})
    assert environment["PATH"] == f"{tmp_path}/bin:{STANDARD_PATH}"
    assert (environment["SPT_NOENV"], environment["PYTHONUNBUFFERED"]) == ("1", "1")


def test_an_interpreter_without_directory_is_found_on_the_callers_path(tmp_path: Path) -> None:
    stand_in(tmp_path)
    script = place(release(python="python"), tmp_path / "r")
    _, environment = run([script], env={"PATH": f"{tmp_path}/bin"})
    assert environment["PATH"] == f"{tmp_path}/bin:{STANDARD_PATH}"


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
@pytest.mark.parametrize("form", ["{}={}\n", "export {}={}\n"])
def test_env_file_of_the_node_is_exported_and_wins(tmp_path: Path, shell: list[str], form: str) -> None:
    script = place(telling(tmp_path, env={"CUDA_VISIBLE_DEVICES": "0"}), tmp_path / "r s")
    text = form.format("HF_TOKEN", quote(NASTY[0])) + form.format("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-2")
    (script.parent / "env").write_text(text)
    _, environment = run([*shell, script])
    assert (environment["HF_TOKEN"], environment["CUDA_VISIBLE_DEVICES"]) == (NASTY[0], "GPU-1,GPU-2")


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_a_damaged_env_file_starts_nothing(tmp_path: Path, shell: list[str]) -> None:
    script = place(telling(tmp_path), tmp_path / "r")
    (script.parent / "env").write_text("HF_TOKEN='never closed\n")
    done = subprocess.run([*shell, script], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stdout == ""


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_another_command_runs_in_the_servers_environment(tmp_path: Path, shell: list[str]) -> None:
    script = place(release(env={"A": "x y"}), tmp_path / "r")
    arguments, environment = run([*shell, script, sys.executable, "-S", "-c", TELL, *NASTY])
    assert arguments == NASTY
    assert environment["A"] == "x y"
    done = subprocess.run([*shell, script, "/nope/python"], capture_output=True, text=True, check=False)
    assert done.returncode == 127
    assert "/nope/python" in done.stderr


def test_the_server_keeps_the_pid_of_the_script(tmp_path: Path) -> None:
    built = release(python=sys.executable)
    script = place(built, tmp_path / "r")
    with subprocess.Popen(
        [script, sys.executable, "-S", "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE
    ) as process:
        output, _ = process.communicate()
    assert int(output) == process.pid


@pytest.mark.parametrize(
    "env", [{}, {f"V{number}": value for number, value in enumerate(NASTY)}], ids=["plain", "nasty"]
)
@pytest.mark.parametrize("python", ["/opt/sglang/bin/python", "python3"])
def test_shellcheck_finds_nothing(tmp_path: Path, require: Any, env: dict[str, str], python: str) -> None:
    require("shellcheck", None if shutil.which("shellcheck") else "shellcheck is not installed here")
    built = release(env=env, extra_args=list(env.values()), python=python)
    script = place(built, tmp_path / "r")
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.returncode == 0
