"""Root through sudo: the words, and what a refusal means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from lamplighter.errors import UNTOUCHED, NodeRefused

#: The last word counts in sudoers too, and its files are read by name: ours should come last.
SUDOERS_FILE = "/etc/sudoers.d/zz-lamplighter"


def become_words(words: Sequence[str]) -> list[str]:
    """``words`` as root: sudo never asks (-n), and HOME is root's (-H)."""
    return ["sudo", "-n", "-H", *words]


#: One default, one command of a rule: they end at a comma that is not escaped, nor quoted where quotes mean something.
_DEFAULT = re.compile(r'(?:"(?:\\.|[^"\\])*"|\\.|[^,])+')
_COMMAND = re.compile(r"(?:\\.|[^,])+")
#: ``(root : ALL) CWD=/tmp NOPASSWD: NOLOG_INPUT: ``: what may stand before a command.
_RUNAS = re.compile(r"\([^)]*\)\s*")
_OPTION_OR_TAG = re.compile(r"(?:[A-Z]\w*=\S+|([A-Z_]+):)(?:\s+|$)")


#: What a default is for that is not for the user as such.
_FOR_SOME = "for some commands or targets"


def sudo_logs_input(listing: str) -> str:
    """The setting in the output of ``sudo -l`` by which input is logged; empty where there is none.

    facts: log_input stores all of a command's standard input below /var/log/sudo-io. Of several defaults the last one
    counts, and a rule's own tag wins over them: NOLOG_INPUT: on every rule makes them harmless. Which rule will be
    ours is not asked, nor what a default for some commands or targets is for: where it may be ours, it counts.
    """
    lines = [line.strip() for line in listing.splitlines() if line[:1].isspace()]
    rules = [line for line in lines if line.startswith("(")]
    tags = [_tag_in_force(command) for rule in rules for command in _commands_with_their_tags(rule)]
    if "LOG_INPUT" in tags:
        return "LOG_INPUT:"
    if tags and all(tag == "NOLOG_INPUT" for tag in tags):
        return ""
    return _default_that_logs([line for line in lines if not line.startswith("(")])


def stop_logging_input(user: str, found: str) -> str:
    """What to do about what `sudo_logs_input` found: a default for the user beats no rule and no special default."""
    if found == "LOG_INPUT:":
        cure = f"on the node, with `visudo`, take LOG_INPUT: from the rules for {user}"
    elif found.endswith(_FOR_SOME):
        cure = "on the node, with `visudo`, take log_input and log_stdin from the Defaults! and Defaults> lines"
    else:
        cure = (
            f"on the node, with `visudo -f {SUDOERS_FILE}`, add the line: Defaults:{user} !log_input,!log_stdin "
            "(sudo before 1.9.14 knows the first alone)"
        )
    return f"{cure}, or log in as root and leave out become"


def _commands_with_their_tags(rule: str) -> Iterator[list[str]]:
    """The tags of each command of ``rule``: they hold for the commands after them too."""
    tags: list[str] = []
    for word in _COMMAND.findall(_RUNAS.sub("", rule, count=1)):
        rest = word.lstrip()
        while before := _OPTION_OR_TAG.match(rest):
            tags.append(before.group(1) or "")
            rest = rest[before.end() :]
        yield list(tags)


def _tag_in_force(tags: Sequence[str]) -> str:
    return next((tag for tag in reversed(tags) if tag in ("LOG_INPUT", "NOLOG_INPUT")), "")


def _default_that_logs(lines: Sequence[str]) -> str:
    general = [line for line in lines if not line.startswith("Defaults")]
    special = re.search(r"(?<![!\w])(log_input|log_stdin)\b", " ".join(set(lines) - set(general)))
    if special:
        return f"{special.group(0)} {_FOR_SOME}"
    said = [word.strip() for line in general for word in _DEFAULT.findall(line)]
    # sudo before 1.9.14 lists log_stdin and knows nothing of it: !log_stdin alone takes nothing back there.
    for names in (("log_input",), ("log_input", "log_stdin")):
        last = next((word for word in reversed(said) if word.lstrip("!") in names), "!")
        if not last.startswith("!"):
            return last
    return ""


#: ``sudo: /opt/py/bin/python3: command not found``; the last words may be translated.
_MISSING_PROGRAM = re.compile(r"sudo: (?:(\S*python[\d.]*|\S+(?=: command not found)): |unable to execute (\S+): )")


def sudo_refusal(node: str, user: str, stderr: bytes, exit_status: int | None) -> NodeRefused | None:
    """The error behind a ``become`` command on ``node`` that ended before it began; None where sudo is not to blame.

    To be asked only when the command gave no sign of life of its own: a program's own stderr may speak of sudo too.
    """
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines()]
    said = next((line for line in reversed(lines) if "sudo" in line.lower() or "not allowed to" in line), "")
    if exit_status == 0 or not said:
        return None
    grant = f"{user} ALL=(root) NOPASSWD: ALL"
    add = f"on the node, with `visudo -f {SUDOERS_FILE}`, add the line: "
    if "must have a tty" in said:
        return NodeRefused(
            f"{node}: sudo insists on a terminal (requiretty)",
            why=said,
            serving=UNTOUCHED,
            next_step=f"{add}Defaults:{user} !requiretty",
        )
    missing = _MISSING_PROGRAM.search(said)
    if missing:
        return NodeRefused(
            f"{node}: sudo cannot start {missing.group(1) or missing.group(2)}",
            why=said,
            serving=UNTOUCHED,
            next_step="set the host variable ansible_python_interpreter to a path that exists there, or add its "
            f"directory to secure_path in sudoers (`visudo -f {SUDOERS_FILE}`)",
        )
    if exit_status == 127 or re.search(r"\bsudo: (command )?not found", said, re.IGNORECASE):  # csh gives 1
        return NodeRefused(
            f"{node}: there is no sudo",
            why=said,
            serving=UNTOUCHED,
            next_step="install sudo there, or log in as root and leave out become",
        )
    if "no new privileges" in said:
        return NodeRefused(
            f"{node}: sudo cannot work in this login: it runs without new privileges",
            why=said,
            serving=UNTOUCHED,
            next_step="log in to the node itself, not to a container on it",
        )
    # Without -n's password, an unlisted user and a translated message all look alike; the cure is the same.
    if exit_status == 1:
        return NodeRefused(
            f"{node}: sudo does not let {user} become root without a password",
            why=said,
            serving=UNTOUCHED,
            next_step=add + grant,
        )
    return None
