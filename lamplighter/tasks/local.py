"""Tasks that read the inventory and open no connection."""

from __future__ import annotations

from invoke.context import Context
from invoke.tasks import task

from lamplighter.tasks.options import HELP, on_hosts


@task(auto_shortflags=False, positional=["directory"], help={"directory": "where: made if it is not there"})
def init(c: Context, directory: str) -> None:
    """Begin a repository of your own: inventory, roles for own engines and checks, tasks.py, a script for CI."""
    from lamplighter.run import command, repository

    settings = command.settings_from(c, directory=directory)
    repository.begin(settings, directory)


@on_hosts(
    flags={
        "host": HELP["host"],
        "json": HELP["json"],
        "diff": "show in what this host differs from --host",
        "schema": "print the JSON Schema of our variables, for editors, and nothing else",
    }
)
def config(c: Context, host: list[str], json: bool = False, diff: str | None = None, schema: bool = False) -> None:
    """Show the resolved variables of each host with the file and line that set them. Opens no connection."""
    from lamplighter.run import command, local

    settings = command.settings_from(c, as_json=json, host=host, diff=diff)
    if schema:
        local.print_schema(settings)
    elif diff is not None:
        local.print_difference(settings, [*host, diff])
    else:
        command.print_config(settings, host)


@on_hosts(
    flags={
        "host": f"{HELP['host']} (default: all)",
        "server": HELP["server"],
        "format": "text, or sarif for forges and editors",
        "out": "write SARIF to this file",
    }
)
def lint(
    c: Context,
    host: list[str],
    server: str | None = None,
    format: str = "text",  # noqa: A002 - the flag that people know from other tools
    out: str | None = None,
) -> None:
    """Say which variables and arguments are wrong, with file and line. Opens no connection; exit 2 on an error."""
    from lamplighter.run import command
    from lamplighter.run import lint as linter

    linter.report(command.settings_from(c, host=host, server=server, format=format, out=out), host, server, format, out)


@on_hosts(
    flags={"host": HELP["host"], "server": HELP["server"], "out": "the directory to write to: HOST/SERVER below it"}
)
def render(c: Context, host: list[str], server: str | None = None, out: str | None = None) -> None:
    """Write launch.sh, sitecustomize.py and what else a deploy would send, without secrets. Opens no connection."""
    from lamplighter.run import command, local

    local.render(command.settings_from(c, host=host, server=server, out=out), host, server, out)
