"""What all tasks on hosts have in common: the words of their options, and those that every one of them takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from invoke.context import Context
from invoke.tasks import task

HELP = {
    "host": "host, group or pattern of the inventory, or @FILE with one a line; may be repeated",
    "server": "only this server of the host (default: all)",
    "json": "JSON on stdout, one object a line, the report last; human text on stderr",
    "wait": "how long to wait for a lock that another run holds: seconds, or 90s, 10m, 2h",
}


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


def on_hosts(flags: Mapping[str, str]) -> Callable[[Callable[..., None]], Callable[..., Any]]:
    """Make a task of a function that takes ``host``, with the options of EVERYWHERE beside its own.

    One that names TIMINGS among its ``flags`` takes that, too.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(body)
        def run(c: Context, *values: Any, **given: Any) -> None:
            for name in EVERYWHERE:
                said = given.pop(name, None)
                if said:
                    c.config.lamplighter[name] = said
            if given.pop("timings", False):
                c.config.lamplighter["timings"] = True
            limit = given.pop("limit", None)
            if limit:
                given["host"] = _named_hosts(c, given.get("host") or [], limit)
            body(c, *values, **given)

        own = inspect.signature(body)
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ("limit", *EVERYWHERE)
        ]
        if TIMINGS.keys() <= flags.keys():
            more.append(inspect.Parameter("timings", inspect.Parameter.KEYWORD_ONLY, default=False))
        vars(run)["__signature__"] = own.replace(parameters=[*own.parameters.values(), *more])
        words = {**flags, "limit": "the same as --host", **EVERYWHERE}
        return task(run, auto_shortflags=False, iterable=["host", "limit", *EVERYWHERE], help=words)

    return decorate


def _named_hosts(c: Context, host: list[str], limit: list[str]) -> list[str]:
    from lamplighter.run import command

    with command.guarded(command.settings_from(c)):
        return command.named_hosts(host, limit)
    raise AssertionError  # guarded() lets nothing else through
