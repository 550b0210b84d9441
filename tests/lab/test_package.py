"""The package: built without a network, installed beside its dependencies, and used from an empty directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.driver import PROJECT

#: What asks bash what it would complete, of the words of a line.
COMPLETE = """\
source /dev/stdin
complete_line() {
    COMP_WORDS=("$@") COMPREPLY=()
    _complete_lamplighter lamplighter "${@: -1}"
    echo "${COMPREPLY[*]}"
}
complete_line lamplighter deplo
complete_line lamplighter lab.
complete_line lamplighter deploy --host gpu1 --if
complete_line lamplighter deploy \\'open
"""


class Installed:
    """The program in an environment of its own, below a path with a blank, as somebody with a home of his own."""

    def __init__(self, ground: Path) -> None:
        self.python = ground / "a venv" / "bin" / "python"
        self.program = self.python.with_name("lamplighter")
        self.home = ground / "a home"
        self.empty = ground / "an empty directory"
        for directory in (self.home, self.empty):
            directory.mkdir()

    def run(self, *words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        ours = ("LAMPLIGHTER", "PYTHON", "XDG")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return subprocess.run(
            list(map(str, words)), cwd=cwd or self.empty, env={**kept, "HOME": str(self.home), "TERM": "dumb"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    def ask(self, *words: str, cwd: Path | None = None) -> Any:
        """The JSON that a command of the program ends with."""
        done = self.run(self.program, *words, "--json", cwd=cwd)
        assert done.returncode == 0, done
        return json.loads(done.stdout.splitlines()[-1])


def python(*words: str | Path, cwd: Path = PROJECT) -> None:
    subprocess.run([sys.executable, *map(str, words)], cwd=cwd, check=True, capture_output=True, timeout=240)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The wheel that the sdist gives, installed where its dependencies are seen."""
    pytest.importorskip("pip", reason="an environment that uv made has no pip")
    ground = tmp_path_factory.mktemp("package")
    python("-m", "hatchling", "build", "-t", "sdist", "-d", ground)
    (sdist,) = ground.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(ground, filter="data")
    (source,) = ground.glob("lamplighter-*/")
    assert (source / "tests" / "lab" / "test_package.py").is_file()
    python("-m", "hatchling", "build", "-t", "wheel", "-d", ground, cwd=source)
    (wheel,) = ground.glob("*.whl")
    ours = Installed(ground)
    python("-m", "venv", "--without-pip", ours.python.parent.parent)
    (packages,) = ours.python.parent.parent.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python("-m", "pip", "--python", ours.python, "install", "--no-deps", "--no-index", wheel)
    _is_whole(wheel)
    before = sorted(path for path in packages.rglob("*") if "__pycache__" not in path.parts)
    yield ours
    ours.run(ours.program, "lab.down")
    assert sorted(path for path in packages.rglob("*") if "__pycache__" not in path.parts) == before
    assert list(ours.empty.iterdir()) == []
    shutil.rmtree(ours.home)


def _is_whole(wheel: Path) -> None:
    """Whatever is kept of roles, templates and the lab is in the wheel, and no top-level name but ours."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"lamplighter"}
    kept = subprocess.run(
        ["git", "ls-files", "lab", "roles", "templates"], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert {f"lamplighter/share/{name}" for name in kept} <= names
    assert not any(name.endswith(".pyc") for name in names)


def test_the_demo_runs_from_an_empty_directory_and_ones_own_repository_follows(
    installed: Installed, tmp_path: Path
) -> None:
    done = installed.run(installed.program, "deploy", "--host", "demo", "-q")
    assert done.returncode == 0, done
    assert done.stdout.startswith("demo/demo: release ")
    assert done.stdout.count("\n") == 1
    assert "warning" not in done.stderr
    assert (installed.home / ".local/state/lamplighter/lab/demo/home").is_dir()
    # a repository of one's own: what was deployed serves on, its own checks count, tasks.py is for a plain Invoke
    assert installed.run(installed.program, "init", tmp_path / "my servers").returncode == 0
    mine = tmp_path / "my servers"
    (mine / "roles" / "node" / "checks").mkdir(parents=True)
    (mine / "roles" / "node" / "checks" / "test_own.py").write_text(
        'def test_own(server):\n    """Is it the demo?"""\n    assert server.name == "demo"\n'
    )
    found = installed.ask("verify", "--host", "demo", "-k", "own", cwd=mine)
    (check,) = [each for each in found["verify"]["hosts"]["demo"]["servers"]["demo"]["checks"] if each["name"] == "own"]
    assert check["outcome"] == "passed"
    done = installed.run(installed.python, "-m", "invoke", "status", "--host", "demo", cwd=mine)
    assert (done.returncode, "serving" in done.stdout) == (0, True), done
    done = installed.run(installed.program, "rollback", "--host", "demo", "--to", "0" * 12, cwd=mine)
    assert done.returncode not in (0, 1)
    assert "./inv" not in done.stdout + done.stderr
    assert "lamplighter " in done.stdout


def test_bash_completes_tasks_and_options(installed: Installed) -> None:
    script = installed.run(installed.program, "--print-completion-script", "bash").stdout
    done = subprocess.run(
        ["bash", "-c", COMPLETE], input=script, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PATH": f"{installed.program.parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert (done.stdout.splitlines(), done.stderr) == (["deploy", "lab.down lab.up", "--if-changed", ""], "")
    for shell, words in (("zsh", "compctl -K _complete_lamplighter"), ("fish", "complete --command lamplighter")):
        script = installed.run(installed.program, "--print-completion-script", shell).stdout
        assert words in script
        if shutil.which(shell):
            subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_an_invoke_that_lacks_our_packages_goes_on_in_the_environment_of_the_checkout(tmp_path: Path) -> None:
    import invoke

    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "invoke").symlink_to(Path(invoke.__file__).parent)
    start = "import sys; sys.path.insert(0, sys.argv.pop(1)); sys.argv[0] = 'invoke'\n"
    start += "from invoke.main import program; program.run()"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start, tmp_path / "foreign", "config", "--host", "demo", "--json"],
        cwd=PROJECT / "docs", capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (done.returncode, json.loads(done.stdout)["host"]) == (0, "demo"), done
    (said,) = done.stderr.splitlines()
    assert "lacks fabric, jinja2" in said
    assert said.endswith(f"{PROJECT / 'inv'} goes on")


def test_inv_may_be_a_link_to_a_link(tmp_path: Path) -> None:
    (tmp_path / "a bin").mkdir()
    (tmp_path / "one").symlink_to(PROJECT / "inv")
    (tmp_path / "a bin" / "lamp").symlink_to("../one")
    done = subprocess.run(
        ["lamp", "config", "--host", "demo", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=240,
        check=False, env={**os.environ, "PATH": f"{tmp_path / 'a bin'}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert (done.returncode, json.loads(done.stdout)["host"]) == (0, "demo"), done
