"""The tasks of a checkout: those of `lamplighter.tasks`, and dev.* for who works on it. `./inv --list` shows them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

#: One of each part of what we need: an Invoke that has none of them is not the one of our environment.
_NEEDED = ("fabric", "jinja2", "pydantic", "rich", "testinfra", "yaml")


def _go_on_in_environment() -> None:
    """Hand the command line to `./inv`, which has all that we need, where this Python lacks some of it."""
    here = Path(__file__).resolve().parent
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        return
    said = f"tasks.py: {sys.executable} lacks {', '.join(missing)}"
    is_ours = Path(sys.prefix).resolve() == here / ".venv"
    is_command = Path(sys.argv[0]).name in ("invoke", "inv", "__main__.py")
    if is_ours or not is_command:
        advice = f"remove {here / '.venv'}: ./inv makes it anew" if is_ours else f"run {here / 'inv'} instead"
        print(f"{said}; {advice}", file=sys.stderr)
        sys.exit(2)
    print(f"{said}; {here / 'inv'} goes on", file=sys.stderr)
    os.execv(here / "inv", ["inv", *sys.argv[1:]])  # noqa: S606 - a path of ours, and no shell's line


_go_on_in_environment()

from invoke.collection import Collection
from invoke.context import Context
from invoke.exceptions import Exit
from invoke.tasks import task

from lamplighter.project import PROJECT
from lamplighter.tasks import collection


@task(auto_shortflags=False, help={"args": "arguments for pytest, as one word: --args '-k gpus -x'"})
def test(c: Context, args: str = "") -> None:
    """Run the tests; levels that cannot run here are skipped with the reason."""
    import shlex

    from lamplighter.errors import UsageError
    from lamplighter.run import command

    with command.guarded(command.settings_from(c)):
        try:
            words = shlex.split(args)
        except ValueError as error:
            raise UsageError(f"--args {args}: {error}", next_step="close each quote") from error
    _tool("tests.run", *words)


@task(auto_shortflags=False, name="lint")
def style(c: Context) -> None:
    """Check style: ruff over the Python, shellcheck over the shell scripts."""
    _tool("ruff", "check", ".")
    _tool("ruff", "format", "--check", ".")
    _command("shellcheck", "inv", ".ci/run", "templates/repository/ci/check.sh")


@task(auto_shortflags=False)
def types(c: Context) -> None:
    """Check types: mypy, strict."""
    _tool("mypy")


@task(
    auto_shortflags=False,
    help={
        "points": "how many kill points of a deploy's worker",
        "kills": "how many random kills beside a second deploy and a cancel",
        "seed": "which ones",
    },
)
def soak(c: Context, points: str = "1000", kills: str = "200", seed: str = "20240") -> None:
    """Try every fault at every stage, on both kinds of node, and kill what takes part at many moments. Takes hours."""
    from lamplighter.run import command

    with command.guarded(command.settings_from(c, points=points, seed=seed)):
        command.whole_number(points, "--points")
        command.whole_number(kills, "--kills")
        command.whole_number(seed, "--seed")
    os.environ.update(LAMPLIGHTER_SOAK=points, LAMPLIGHTER_KILLS=kills, LAMPLIGHTER_SEED=seed)
    _tool("pytest", "tests/faults", "tests/lab/test_drift.py", "tests/lab/test_random_moments.py")


@task(style, types, test, auto_shortflags=False, name="check")
def check_all(c: Context) -> None:
    """Lint, types and tests: what must be green before a commit lands."""


def _tool(module: str, *words: str) -> None:
    _command(sys.executable, "-m", module, *words)


def _command(*words: str) -> None:
    try:
        status = subprocess.run(words, cwd=PROJECT, check=False).returncode
    except FileNotFoundError:
        print(f"{words[0]} is not installed; apt-get install {words[0]}", file=sys.stderr)
        raise Exit(code=1) from None
    if status:
        raise Exit(code=status if 0 < status < 128 else 1)


ns = collection(__file__)
ns.add_task(test)
ns.add_collection(Collection("dev", test, style, types, check_all, soak))
