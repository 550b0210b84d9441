"""What the exit codes mean: a contract with people and cron. What the operator does next decides the number."""

from __future__ import annotations

from dataclasses import dataclass

from lamplighter.node.events import Exit


@dataclass(frozen=True)
class Meaning:
    """One exit code. ``words`` and ``to_do`` stand in the README's table.

    ``outcome``: of a report that names none. ``next_step``: where the failure itself did not say one; ``{on}`` stands
    for the options that name host and server.
    """

    words: str
    to_do: str = ""
    outcome: str = "failed"
    next_step: str = ""


_TRY_AGAIN = "repair the cause and deploy again, or bring back an older release: ./inv rollback{on}"

MEANINGS = {
    Exit.OK: Meaning("deployed (or unchanged)"),
    Exit.INTERNAL: Meaning(
        "a defect of lamplighter, a task or flag that is mistyped to `./inv` (Invoke's own code; 2 as `lamplighter`), "
        "or a run that was killed on the node",
        "read the message; deploy again after a kill or reboot; report a defect",
        next_step="./inv status{on} says what serves",
    ),
    Exit.USAGE: Meaning(
        "usage or inventory is wrong; nothing was opened",
        "fix the file and line it names",
        outcome="refused",
        next_step="correct that, and run the command again; `./inv lint` looks over the inventory",
    ),
    Exit.REFUSED: Meaning(
        "refused by preflight or the environment proof; nothing was touched",
        "read the cause",
        outcome="refused",
        next_step="./inv check{on} asks the same questions again",
    ),
    Exit.UNREACHABLE: Meaning(
        "unreachable, login failed, host key unknown",
        "again later",
        outcome="unreachable",
        next_step="check the name, the network and the key, then run the same command again",
    ),
    Exit.NOT_FREED: Meaning(
        "the old server did not end, or the GPUs were not FREED",
        "page someone",
        next_step="./inv check{on} names who holds the GPUs or the port",
    ),
    Exit.CRASHED: Meaning(
        "crashed in start-up or right after it, nothing serving", "page someone", next_step=_TRY_AGAIN
    ),
    Exit.NOT_READY: Meaning(
        "not ready in time, or alive and answering nothing: nothing serving", "page someone", next_step=_TRY_AGAIN
    ),
    Exit.DEGRADED: Meaning(
        "serving, but a check failed",
        "in the morning",
        next_step="./inv verify{on} asks again; ./inv rollback{on} brings the last release back",
    ),
    Exit.ROLLED_BACK: Meaning(
        "failed and rolled back, the old release is serving",
        "in the morning",
        next_step="repair the cause and deploy again; the old release serves until then",
    ),
    Exit.LOCKED: Meaning(
        "another run holds the lock, or somebody has put the server on hold",
        "again later",
        outcome="refused",
        next_step="run the same command again later",
    ),
    Exit.MIXED: Meaning("several hosts or servers with different outcomes", "each one's code is in the JSON"),
    Exit.CHANGES: Meaning("`plan`: changes are pending; nothing was touched"),
    Exit.DETACHED: Meaning(
        "contact lost or detached; the node goes on",
        "`./inv attach`",
        outcome="detached",
        next_step="./inv attach{on} follows the run to its end",
    ),
    Exit.INTERRUPTED: Meaning("interrupted before anything was touched", outcome="refused"),
    Exit.TERMINATED: Meaning("interrupted before anything was touched", outcome="refused"),
}


def meaning_of(code: int) -> Meaning:
    """What a code means; a node may be newer than we are, and its code unknown here."""
    known = {int(each): meaning for each, meaning in MEANINGS.items()}
    return known.get(code, Meaning(""))
