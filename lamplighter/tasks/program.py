"""The program ``lamplighter``: the tasks under a name of their own, with help and completion of their own."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from invoke.collection import Collection
from invoke.config import AmbiguousMergeError
from invoke.exceptions import Exit, ParseError, UncastableEnvVar, UnknownFileType
from invoke.parser.argument import Argument
from invoke.program import Program
from invoke.tasks import Task
from invoke.vendor.yaml import YAMLError

from lamplighter import __version__
from lamplighter.tasks import collection

NAME = "lamplighter"
USAGE = 2

#: What Invoke's script for bash says, and what it should: a pattern is none of this shell's business.
BASH = {"-- ${COMP_WORDS[*]}`": '-- "${COMP_WORDS[@]}"`', "-- $2)": '-- "$2" 2>/dev/null)'}
#: The rooms of tasks, in the order in which a newcomer meets them: the module of a task decides where it is shown.
GROUPS = {
    "serving": "Change what serves",
    "reading": "Look, and change nothing on the node",
    "local": "Read the inventory alone",
    "box": "The GPU node in a box",
}
#: One line to paste for each task.
EXAMPLES = {
    "init": "init gpu-servers",
    "deploy": "deploy --host gpu1",
    "rollback": "rollback --host gpu1",
    "stop": "stop --host gpu1 --server chat",
    "start": "start --host gpu1 --server chat",
    "restart": "restart --host gpu1",
    "undeploy": "undeploy --host gpu1 --stop",
    "hold": "hold --host g1 -m why --until 3d",
    "attach": "attach --host gpu1",
    "cancel": "cancel --host gpu1",
    "status": "status --host all",
    "history": "history --host all --since 7d",
    "plan": "plan --host gpu1",
    "check": "check --host gpu1 --diff",
    "verify": "verify --host gpu1 -k memory",
    "env": "env --host gpu1",
    "logs": "logs --host gpu1 --lines 500",
    "releases": "releases --host gpu1",
    "diagnose": "diagnose --log server.log",
    "config": "config --host gpu1",
    "lint": "lint",
    "render": "render --host gpu1 --out rendered",
    "lab.up": "lab.up",
    "lab.down": "lab.down",
}


class Lamplighter(Program):
    """Invoke's program with our tasks, without those of its options that mean nothing to them."""

    def core_args(self) -> list[Argument]:
        """Only what our tasks obey."""
        return [
            Argument(names=("complete",), kind=bool, default=False, help="print what may follow, for shell completion"),
            Argument(
                names=(
                    "config",
                    "f",
                ),
                help="a file of settings, as invoke.yml in the working directory is one",
            ),
            Argument(
                names=(
                    "debug",
                    "d",
                ),
                kind=bool,
                default=False,
                help="show tracebacks with errors",
            ),
            Argument(
                names=(
                    "help",
                    "h",
                ),
                optional=True,
                help="show this, or the options of one task",
            ),
            Argument(
                names=(
                    "list",
                    "l",
                ),
                optional=True,
                help="list the tasks",
            ),
            Argument(
                names=(
                    "list-depth",
                    "D",
                ),
                kind=int,
                default=0,
                help="with --list: only so many levels",
            ),
            Argument(
                names=(
                    "list-format",
                    "F",
                ),
                default="flat",
                help="with --list: flat, nested or json",
            ),
            Argument(
                names=("print-completion-script",),
                kind=str,
                default="",
                help="print what makes bash, zsh or fish complete",
            ),
            Argument(
                names=(
                    "version",
                    "V",
                ),
                kind=bool,
                default=False,
                help="show the version",
            ),
            # What Invoke's own parsing asks for: compiled files are kept, as by any program.
            Argument(names=("write-pyc",), kind=bool, default=True),
        ]

    def parse_core(self, argv: list[str] | None) -> None:
        """Read the options before the task; settings of the working directory are read before it is known."""
        try:
            here = str(Path.cwd())
        except OSError:
            refuse("the working directory is gone", "cd to one that is there")
        self.config.set_project_location(here)
        self.config.load_project()
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                super().parse_core(argv)
        finally:  # what --print-completion-script prints; a word as it stands, patterns and open quotes included
            script = said.getvalue()
            for theirs, ours in BASH.items():
                script = script.replace(theirs, ours)
            sys.stdout.write(script)

    def update_config(self, merge: bool = True) -> None:
        """Lay over the configuration what the command line says."""
        if self.args.debug.value:
            self.config.load_overrides({NAME: {"debug": True}}, merge=False)
        said = self.args.config.value or os.environ.get("INVOKE_RUNTIME_CONFIG")
        self.config.set_runtime_path(Path(said) if said else None)
        self.config.load_runtime(merge=False)
        if merge:
            self.config.merge()

    def print_help(self) -> None:
        """The tasks in groups, an example with each, and what all of them share."""
        print("\n".join(overview(self.collection, _width())))

    def print_task_help(self, name: str) -> None:
        """What one task promises, an example, and its options."""
        from lamplighter.report.wording import spoken

        promise = inspect.cleandoc(self.collection[name].__doc__ or "")
        print(f"Usage: {NAME} {name} [options]\n")
        print(spoken("\n".join(textwrap.wrap(promise, _width()))))
        if example := EXAMPLES.get(name):
            print(f"\nFor example: {NAME} {example}")
        if options := self.parser.contexts[name].help_tuples():
            print("\nOptions:")
            self.print_columns([(flags, spoken(words or "")) for flags, words in options])

    def print_version(self) -> None:
        print(f"{NAME} {__version__}")

    def run(self, argv: list[str] | None = None, exit: bool = True) -> None:  # noqa: A002 - Invoke's name
        """Do what the command line says; one that cannot be read ends with 2, as any other mistake of usage does."""
        try:
            self.create_config()
            self.parse_core(argv)
            self.parse_collection()
            self.parse_tasks()
            self.parse_cleanup()
            self.update_config()
            if len(self.tasks) > 1:  # the first one leaves with its exit code
                names = " and ".join(str(task.name) for task in self.tasks)
                refuse(f"one task at a time: {names}", "join two commands with &&")
            self.execute()
        except ParseError as error:
            refuse(str(error), self.hint(error))
        except (YAMLError, AmbiguousMergeError, UncastableEnvVar, UnknownFileType) as error:
            said = " ".join(str(error).split())
            refuse(f"Invoke's configuration cannot be read: {said}", "correct invoke.yml, or the variable INVOKE_...")
        except Exit as left:
            if left.message:
                print(left.message, file=sys.stderr)
            sys.exit(left.code)

    def hint(self, error: ParseError) -> str:
        """What the user may have meant."""
        found = re.search(r"No idea what '(.+?)' is", str(error))
        context = error.context
        if found is None:
            task = f" {context.name}" if context is not None and context.name else ""
            return f"`{NAME} --help{task}` shows what there is"
        word = found.group(1)
        if word.startswith("-") and context is not None and context.name:
            known, where = list(context.flags), f"--help {context.name}"
        else:
            known, where = [*self.collection.task_names], "--help"
        close = get_close_matches(word, known, n=1)
        return f"did you mean {close[0]}?" if close else f"`{NAME} {where}` shows what there is"


def overview(tasks: Collection, width: int) -> list[str]:
    """The help of the whole program, at most ``width`` wide."""
    lines = [f"Usage: {NAME} TASK [options]", f"       {NAME} TASK --help", ""]
    lines += textwrap.wrap(
        "Replaces the LLM server on a GPU node over SSH and never leaves the node dark. "
        f"`{NAME} deploy --host demo` shows it on a node in a box; `{NAME} init DIR` begins a repository of your own.",
        width,
    )
    groups: dict[str, list[tuple[str, Task[Any]]]] = {}
    for name, task in _named(tasks):
        groups.setdefault(task.body.__module__.rpartition(".")[2], []).append((name, task))
    for room in (*(room for room in GROUPS if room in groups), *(room for room in groups if room not in GROUPS)):
        lines += ["", f"{GROUPS.get(room, room)}:"]
        for name, task in groups[room]:
            promise = (task.__doc__ or "").strip().splitlines()[0]
            lines += textwrap.wrap(promise, width, initial_indent=f"  {name:<10} ", subsequent_indent=" " * 13)
            if example := EXAMPLES.get(name):
                lines.append(f"{'':13}$ {NAME} {example}")
    lines += ["", "Options of the program:"]
    for argument in Lamplighter().core_args():
        if argument.help:
            flags = ", ".join(f"--{name}" if len(name) > 1 else f"-{name}" for name in argument.names)
            lines += textwrap.wrap(f"{flags}  {argument.help}", width, initial_indent="  ", subsequent_indent=" " * 6)
    return lines


def _named(tasks: Collection, above: str = "") -> Iterator[tuple[str, Task[Any]]]:
    """All tasks with the names that the command line takes, in the order in which they were added."""
    for name, task in tasks.tasks.items():
        yield f"{above}{name}", task
    for name, below in tasks.collections.items():
        yield from _named(below, f"{above}{name}.")


def _width() -> int:
    return max(50, min(shutil.get_terminal_size((80, 24)).columns, 120))


def refuse(what: str, next_step: str) -> NoReturn:
    """Say what is wrong with the command line, and end with the code for that."""
    print(f"{what}\n  next: {next_step}", file=sys.stderr)
    sys.exit(USAGE)


def main() -> None:
    """Run the command line of this process; `lamplighter.start` has made it ready for that."""
    sys.argv[0] = NAME
    if "--complete" in sys.argv[1:2]:  # whatever stands on a line that is not finished: a shell shows no traceback
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - as long as this process lives
    try:
        Lamplighter(version=__version__, namespace=collection(), name=NAME, binary=NAME, binary_names=[NAME]).run()
    except BrokenPipeError:  # who reads no further sees no traceback
        os._exit(141)
