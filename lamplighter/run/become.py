"""Root through sudo: the words, and what a refusal means."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lamplighter.errors import UNTOUCHED, LamplighterError, LoginFailed, NodeRefused


def become_words(words: Sequence[str]) -> list[str]:
    """``words`` as root: sudo never asks (-n), and HOME is root's (-H)."""
    return ["sudo", "-n", "-H", *words]


_LOGS_INPUT = re.compile(r"(?<![!\w])(log_input|log_stdin)\b|(?<!NO)(LOG_INPUT):")


def sudo_logs_input(listing: str) -> str:
    """The setting in the output of ``sudo -l`` by which input is logged; empty where there is none.

    facts: log_input stores all of a command's standard input below /var/log/sudo-io; a rule's own tag wins over the
    default, so NOLOG_INPUT: on the only rule makes it harmless.
    """
    found = _LOGS_INPUT.search(listing)
    if found is None or (found.group(1) and "NOLOG_INPUT:" in listing):
        return ""
    return found.group(0)


def sudo_refusal(user: str, stderr: bytes, exit_status: int | None) -> LamplighterError | None:
    """The error behind a ``become`` command that ended before it began, or None where sudo is not to blame.

    To be asked only when the command gave no sign of life of its own: a program's own stderr may speak of sudo too.
    """
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines()]
    said = next((line for line in reversed(lines) if "sudo" in line.lower() or "not allowed to" in line), "")
    if exit_status == 0 or not said:
        return None
    grant = f"{user} ALL=(root) NOPASSWD: ALL"
    add = "on the node, with `visudo -f /etc/sudoers.d/lamplighter`, add the line: "
    if "must have a tty" in said:
        return NodeRefused(
            "sudo on the node insists on a terminal (requiretty)",
            why=said,
            serving=UNTOUCHED,
            next_step=f"{add}Defaults:{user} !requiretty",
        )
    if exit_status == 127 or "not found" in said:
        return NodeRefused(
            "the node has no sudo",
            why=said,
            serving=UNTOUCHED,
            next_step="install sudo there, or log in as root and leave out become",
        )
    if "no new privileges" in said:
        return NodeRefused(
            "sudo cannot work in this login: it runs without new privileges",
            why=said,
            serving=UNTOUCHED,
            next_step="log in to the node itself, not to a container on it",
        )
    # Without -n's password, an unlisted user and a translated message all look alike; the cure is the same.
    if exit_status == 1:
        return LoginFailed(
            f"sudo on the node does not let {user} become root without a password",
            why=said,
            serving=UNTOUCHED,
            next_step=add + grant,
        )
    return None
