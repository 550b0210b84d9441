"""Who stands above a server and lives: a loop, a watchdog or a script that may start it again. Looks only.

A unit or a container is found by the cgroup (restarters.py); what a person wrote is found as a living parent alone.
Passed over is who surely starts nothing again: the prompt of a shell, sshd, tmux, the init process, and what lives only
for the program that it started. Which program is which is data, ``roles/node/programs.yml``; of any other it cannot be
told whether it starts the server again, and so it may.

facts: a script keeps its interpreter as ``exe`` and shows its own name as ``comm``; a loop in the background of a
prompt is a copy of the shell, with its arguments; sshd runs a command as ``bash -c``.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any, Collection, Iterator, Mapping, Optional, Sequence

from lamplighter.node.system import processes
from lamplighter.node.system.processes import Process

#: What a parent is: a shell that runs what was written, a program known to start things again, any other program,
#: a prompt with the server in its foreground.
SCRIPT, RESTARTER, UNKNOWN, PROMPT = "script", "restarter", "unknown", "prompt"

#: Of a script so much is read, in bytes.
LONGEST_SCRIPT = 256 << 10

#: What can make a shell run a command twice. A word in a comment counts as well: that errs on the safe side.
_AGAIN = re.compile(r"\b(?:while|until|for|select|repeat|trap|watch|forever|loop|goto)\b|\$0|\$\{0|BASH_SOURCE")

#: What runs a program that an argument names.
_INTERPRETER = re.compile(r"(?:python|pypy|perl|ruby|node|nodejs|bun|deno|lua|php|java)[0-9.]*")

#: Options of shells that take the next word.
_WITH_VALUE = frozenset(("-o", "+o", "-O", "+O", "--rcfile", "--init-file"))


@dataclasses.dataclass(frozen=True)
class Programs:
    """The names of ``roles/node/programs.yml``."""

    wrappers: frozenset[str] = frozenset()
    shells: frozenset[str] = frozenset()
    sessions: frozenset[str] = frozenset()
    restarters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    monitors: frozenset[str] = frozenset()
    watchers: frozenset[str] = frozenset()

    @classmethod
    def of(cls, engine: Mapping[str, Any]) -> Programs:
        """Take them from what the control side sent with the engine's role."""
        said = engine.get("programs") or {}
        lists = ("wrappers", "shells", "sessions", "monitors", "watchers")
        named = {name: frozenset(said.get(name) or ()) for name in lists}
        return cls(restarters=dict(said.get("restarters") or {}), **named)

    def is_shell(self, process: Process) -> bool:
        return os.path.basename(process.exe or "") in self.shells or bool(_plain_names(process) & self.shells)

    def is_wrapper(self, process: Process) -> bool:
        return bool(_plain_names(process) & self.wrappers)

    def is_session(self, process: Process) -> bool:
        return bool(names_of(process) & self.sessions) or process.title.startswith(("sshd:", "sshd-session:"))

    def is_monitor(self, name: str) -> bool:
        """Tell of a name as nvidia-smi shows it, which may be a path with arguments."""
        words = name.split()
        return bool(words) and os.path.basename(words[0]) in self.monitors


@dataclasses.dataclass(frozen=True)
class Parent:
    """A living ancestor of processes that would be stopped (``pids``), which may start them again."""

    process: Process
    kind: str
    pids: tuple[int, ...]
    why: str
    hint: str = ""
    #: Of a script: whether its text can run a command twice, or is not to be had.
    may_repeat: bool = False

    @property
    def name(self) -> str:
        """What `stale.kill` would call it: its script, else itself."""
        return os.path.basename(script_of(self.process) or "") or self.process.comm

    def __str__(self) -> str:
        return f"pid {self.process.pid} ({processes.user_name(self.process.uid)}, {self.name})"


def find(
    stoppable: Mapping[int, Process],
    table: Mapping[int, Process],
    programs: Programs,
    spared: Collection[int] = (),
) -> list[Parent]:
    """Return who stands above the processes ``stoppable``, the uppermost first.

    Each ancestor is asked, up to the first that starts nothing again by itself or is one of ``spared``.
    """
    found: dict[int, Parent] = {}
    below: dict[int, set[int]] = {}
    for process in stoppable.values():
        for child, parent in _line(process, table):
            if parent.pid in stoppable or parent.pid in spared or programs.is_session(parent):
                break
            if programs.is_wrapper(parent):
                continue
            judged = _judge(parent, child, table, programs)
            if judged is None:
                break
            found.setdefault(parent.pid, judged)
            below.setdefault(parent.pid, set()).add(process.pid)
            if judged.kind == PROMPT:
                break
    listed = (dataclasses.replace(each, pids=tuple(sorted(below[pid]))) for pid, each in found.items())
    return sorted(listed, key=lambda each: each.process.start)


def _line(process: Process, table: Mapping[int, Process]) -> Iterator[tuple[Process, Process]]:
    """Yield each ancestor with its child, up to the init process or to another container."""
    child = process
    while True:
        parent = table.get(child.ppid)
        if parent is None or parent.pid <= 1 or parent.is_dead or parent.start > child.start:
            return
        if processes.container_of(parent) != processes.container_of(child):
            return
        yield child, parent
        child = parent


def _judge(parent: Process, child: Process, table: Mapping[int, Process], programs: Programs) -> Optional[Parent]:
    """Judge one ancestor; None: a prompt that started this and goes on by itself."""
    known = next((name for name in sorted(names_of(parent)) if name in programs.restarters), None)
    if known is not None:
        hint = f"stop the server through it (`{programs.restarters[known]}`)"
        return Parent(parent, RESTARTER, (), f"{known} starts again what ends", hint)
    if not programs.is_shell(parent):
        return Parent(parent, UNKNOWN, (), "it started the server, lives, and may start it again")
    text, is_prompt = _script(parent, table)
    if is_prompt:
        if processes.foreground_group(parent.pid) != child.pgid:
            return None
        why = "the server runs in the foreground of its prompt; a loop that was typed there starts it again"
        return Parent(parent, PROMPT, (), why, "if it is a loop, end it there first (Ctrl-C twice)")
    if text is None:
        return Parent(parent, SCRIPT, (), "it runs commands that cannot be read", may_repeat=True)
    again = _AGAIN.search(text)
    if again is None:
        return Parent(parent, SCRIPT, (), "it runs a script that starts the server")
    return Parent(parent, SCRIPT, (), f"it runs a script that may start it again ({again.group(0)})", may_repeat=True)


def _script(shell: Process, table: Mapping[int, Process]) -> tuple[Optional[str], bool]:
    """Return what a shell runs, None where that cannot be read, and whether it is a prompt."""
    kind, word = _argument(shell.argv)
    if kind == "text":
        return word, False
    if kind == "file":
        return _content(shell, word), False
    above = table.get(shell.ppid)
    if above is not None and above.argv == shell.argv and above.exe == shell.exe and above.sid == shell.sid:
        return None, False  # a part of what was typed there, in the background
    stdin = (processes.open_files(shell.pid) or {}).get(0)
    return None, stdin is None or stdin.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))


def _argument(argv: Sequence[str]) -> tuple[str, str]:
    """Return what the command line of a shell says that it runs: ("text", it), ("file", its path) or ("", "")."""
    is_busybox = os.path.basename(argv[0] if argv else "") == "busybox"
    words = iter(argv[2 if is_busybox else 1 :])
    kind = "file"
    for word in words:
        if word in _WITH_VALUE:
            next(words, None)
        elif word == "--":
            break
        elif word[:1] not in ("-", "+"):
            return kind, word
        elif not word.startswith("--") and "c" in word:
            kind = "text"
        elif not word.startswith("--") and "s" in word:
            return "", ""
    rest = next(words, "")
    return (kind, rest) if rest else ("", "")


def _content(shell: Process, path: str) -> Optional[str]:
    directory = processes.working_directory(shell.pid)
    if not os.path.isabs(path) and directory is None:
        return None
    try:
        with open(os.path.join(directory or "/", path), "rb") as file:
            return file.read(LONGEST_SCRIPT).decode("utf-8", "replace")
    except OSError:
        return None


def script_of(process: Process) -> Optional[str]:
    """Return the file that an interpreter or a shell runs, as its command line names it; None where there is none."""
    program = os.path.basename(process.exe or (process.argv[0] if process.argv else ""))
    if _INTERPRETER.fullmatch(program):
        skips = 0
        for word in process.argv[1:]:
            if word in ("-c", "-m", "-e"):
                return None
            if skips == 0 and not word.startswith("-"):
                return word
            skips = 1 if word in ("-W", "-X") else 0
        return None
    kind, word = _argument(process.argv)
    is_file = kind == "file" and program != os.path.basename(word)
    return word if is_file and re.fullmatch(r"(?:[a-z]*sh|busybox|xonsh)", program) else None


def names_of(process: Process) -> set[str]:
    """Return all that a person may call a process by: itself, its title, and the script that it runs."""
    script = script_of(process)
    return _plain_names(process) | ({script, os.path.basename(script)} if script else set())


def _plain_names(process: Process) -> set[str]:
    first = process.title.split()[:1]
    titles = {process.title, os.path.basename(process.title), *first, *(word.rstrip(":") for word in first)}
    return {process.comm, *titles} - {""}
