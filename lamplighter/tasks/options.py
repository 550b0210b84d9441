"""What all tasks on hosts have in common: the words of their options, and those that every one of them takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from invoke.context import Context
from invoke.parser.argument import Argument
from invoke.tasks import Task, task

HELP = {
    "host": "host, group or pattern of the inventory, or @FILE with one a line; may be repeated",
    "server": "only this server of the host (default: all)",
    "json": "JSON on stdout, one object a line, the report last; human text on stderr",
    "wait": "how long to wait for a lock that another run holds: seconds, or 90s, 10m, 2h",
}


#: More and less of the news: every task on hosts takes them, by their letters too.
VOLUME = {
    "verbose": "tell all that happens, and where the inventory and roles are",
    "quiet": "tell the result alone: no progress, no warnings",
}
LETTERS = {"verbose": "v", "quiet": "q"}

#: Options of every task on hosts: they become settings of the tool, as if they stood in Invoke's configuration.
EVERYWHERE = {
    "inventory": "where the hosts stand: a file, a directory, a program or a list such as gpu1,gpu2; may be repeated "
    "(default: LAMPLIGHTER_INVENTORY, or inventory/)",
    "vault_password_file": "file or script that gives the password of vaulted values; may be repeated "
    "(default: ANSIBLE_VAULT_PASSWORD_FILE)",
    "vault_id": "ID@FILE: the password of the values sealed for that vault id; may be repeated",
}


TIMINGS = {"timings": "say at the end where the time went: here, on the wire, on the node, in the server"}

#: Of tasks that reach hosts and say what came of it.
ACTING = {**HELP, **TIMINGS}
READING = {name: ACTING[name] for name in ("host", "server", "json", "timings")}


class HostTask(Task[Any]):
    """A task whose options have letters only where everybody knows them: a `-h` is for help, and no host."""

    def get_arguments(self, ignore_unknown_help: bool | None = None) -> list[Argument]:
        """The options as Invoke makes them, and the letters."""
        found = super().get_arguments(ignore_unknown_help)
        for argument in found:
            if argument.name in LETTERS:
                argument.names = (argument.name, LETTERS[argument.name])
        return found


def on_hosts(flags: Mapping[str, str], *, dry: str | None = None) -> Callable[[Callable[..., None]], HostTask]:
    """Make a task of a function that takes ``host``, with the options of EVERYWHERE beside its own.

    ``dry`` is for those that change a node: what to do instead of a --dry-run, which they have not.
    """

    def decorate(body: Callable[..., None]) -> HostTask:
        @functools.wraps(body)
        def run(c: Context, *values: Any, **given: Any) -> None:
            for name in EVERYWHERE:
                said = given.pop(name, None)
                if said:
                    c.config.lamplighter[name] = tuple(said)  # no list, as one of a configuration file would be
            if given.pop("timings", False):
                c.config.lamplighter["timings"] = True
            for name in VOLUME:
                if given.pop(name, False):
                    c.config.lamplighter[name] = True
            if dry is not None and given.pop("dry_run", False):
                _refuse_dry_run(c, body.__name__, dry)
            limit = given.pop("limit", None)
            if limit:
                given["host"] = _named_hosts(c, given.get("host") or [], limit)
            body(c, *values, **given)

        own = inspect.signature(body)
        switches = dict.fromkeys((*VOLUME, *(("dry_run",) if dry is not None else ())), False)
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in {"limit": None, **dict.fromkeys(EVERYWHERE), **switches}.items()
        ]
        if TIMINGS.keys() <= flags.keys():
            more.append(inspect.Parameter("timings", inspect.Parameter.KEYWORD_ONLY, default=False))
        vars(run)["__signature__"] = own.replace(parameters=[*own.parameters.values(), *more])
        words = {**flags, "limit": "the same as --host", **EVERYWHERE, **VOLUME}
        if dry is not None:
            words["dry_run"] = f"refused: {dry}"
        iterable = ["host", "limit", *EVERYWHERE]
        made = task(run, klass=HostTask, auto_shortflags=False, iterable=iterable, help=words)
        return cast("HostTask", made)

    return decorate


def _refuse_dry_run(c: Context, name: str, instead: str) -> None:
    from lamplighter.errors import UsageError
    from lamplighter.run import command

    with command.guarded(command.settings_from(c)):
        raise UsageError(f"{name} has no --dry-run", next_step=instead)


def _named_hosts(c: Context, host: list[str], limit: list[str]) -> list[str]:
    from lamplighter.run import command

    with command.guarded(command.settings_from(c)):
        return command.named_hosts(host, limit)
    raise AssertionError  # guarded() lets nothing else through
