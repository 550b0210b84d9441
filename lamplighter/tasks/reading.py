"""Tasks that look at nodes and change nothing there."""

from __future__ import annotations

import functools

from invoke.context import Context

from lamplighter.tasks.options import HELP, READING, on_hosts


@on_hosts(flags=READING)
def releases(c: Context, host: list[str], server: str | None = None, json: bool = False) -> None:
    """List the releases on the node: good or bad, current, adopted, age, size, what `rollback` takes. Reads only."""
    from lamplighter.report import releases_text
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server)
    command.read(
        settings,
        host,
        server,
        "releases",
        lambda session, servers: session.releases(servers),
        functools.partial(releases_text, width=command.columns()),
        hosts=lambda: command.reach(settings, host, server),
    )


@on_hosts(
    flags={
        **READING,
        "since": "only runs that began within this time: 7d, 12h, 30m or seconds",
        "all": "of servers that the inventory does not name, too",
    }
)
def history(
    c: Context,
    host: list[str],
    server: str | None = None,
    since: str | None = None,
    all: bool = False,  # noqa: A002 - the flag that people know from other tools
    json: bool = False,
) -> None:
    """List what was done: when, by whom, how it ended, downtime, cause, and ids for `attach` and `logs`. Reads only."""
    from lamplighter.report.history import history_text
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, since=since)
    with command.guarded(settings):
        span = None if since is None else command.seconds_in(since, "--since")
    command.read(
        settings,
        host,
        server,
        "history",
        lambda session, servers: session.history(servers, span, everything=all),
        functools.partial(history_text, width=command.columns()),
        hosts=lambda: command.reach(settings, host, server, everything=all),
    )


@on_hosts(flags=READING)
def env(c: Context, host: list[str], server: str | None = None, json: bool = False) -> None:
    """Look into every live worker: does it carry the variables? Reads only; exit 8 on a difference."""
    from lamplighter.report.environment import env_text
    from lamplighter.run import command

    command.read(
        command.settings_from(c, as_json=json, host=host, server=server),
        host,
        server,
        "env",
        lambda session, servers: {one.name: session.env(one) for one in servers},
        env_text,
        command.judge_environment,
    )


@on_hosts(flags=READING)
def plan(c: Context, host: list[str], server: str | None = None, json: bool = False) -> None:
    """Show what a deploy would change against what serves, and stop. Reads only; exit 12 where changes are pending."""
    from lamplighter.report import plan_text
    from lamplighter.run import command
    from lamplighter.run import verify as checks

    settings = command.settings_from(c, as_json=json, host=host, server=server)
    command.read(
        settings,
        host,
        server,
        "plan",
        lambda session, servers: {
            one.name: {**session.plan(one), "checks": checks.check_names(one, settings.project, settings.inventory)}
            for one in servers
        },
        functools.partial(plan_text, width=command.columns()),
        command.judge_plan,
    )


@on_hosts(flags={**READING, "diff": "show what a deploy would change, too, as `plan` does"})
def check(c: Context, host: list[str], server: str | None = None, json: bool = False, diff: bool = False) -> None:
    """Ask everything a deploy asks before it touches the node, and show who would be stopped. Reads only."""
    from lamplighter.report import check_text, plan_text
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server)
    texts = (check_text, plan_text) if diff else (check_text,)
    command.read(
        settings,
        host,
        server,
        "check",
        lambda session, servers: {one.name: session.plan(one) if diff else session.check(one) for one in servers},
        lambda found: "\n\n".join(text(found, command.columns()) for text in texts),
        command.judge_plan if diff else command.judge_findings,
    )


@on_hosts(
    flags={
        **READING,
        "watch": "ask again every so many seconds, over the same connections, until Ctrl-C",
        "all": "servers that the inventory does not name, too: all that lies on the node",
    },
)
def status(
    c: Context,
    host: list[str],
    server: str | None = None,
    json: bool = False,
    watch: str | None = None,
    all: bool = False,  # noqa: A002 - the flag that people know from other tools
) -> None:
    """Show what serves and since when, its drift, and a run in progress with its stage. Reads only."""
    from lamplighter.report import status_text
    from lamplighter.run import command, watching

    settings = command.settings_from(c, as_json=json, host=host, server=server, watch=watch)
    if watch is not None:
        watching.watch(settings, host, server, watch, everything=all)
    command.read(
        settings,
        host,
        server,
        "status",
        lambda session, servers: session.standings(servers, everything=all),
        functools.partial(status_text, width=command.columns()),
        hosts=lambda: command.reach(settings, host, server, everything=all),
    )


@on_hosts(
    flags={
        **READING,
        "only": "pytest -k expression: run only these checks",
        "k": "the same as --only",
        "junit": "write the results there as JUnit XML, too",
    },
)
def verify(
    c: Context,
    host: list[str],
    server: str | None = None,
    only: str | None = None,
    k: str | None = None,
    junit: str | None = None,
    json: bool = False,
) -> None:
    """Run the testinfra checks of the node's roles against each server. Reads only; exit 8 when a blocker fails."""
    from lamplighter.report import verify_text
    from lamplighter.run import command
    from lamplighter.run import verify as checks

    settings = command.settings_from(c, as_json=json, host=host, server=server, only=only, k=k, junit=junit)
    with command.guarded(settings):
        results = checks.Results(junit)
    command.read(
        settings,
        host,
        server,
        "verify",
        lambda session, servers: checks.verify_all(session, servers, settings.inventory, only or k or "", results),
        functools.partial(verify_text, width=command.columns()),
        checks.judge_checks,
    )


@on_hosts(
    flags={
        "host": HELP["host"],
        "server": HELP["server"],
        "lines": "how many of the last lines",
        "follow": "go on as the log grows, and with the next launch, until Ctrl-C",
        "f": "the same as --follow",
        "run": "the log of the server that this run started (default: what serves, or served last)",
    },
)
def logs(
    c: Context,
    host: list[str],
    server: str | None = None,
    lines: str = "100",
    follow: bool = False,
    f: bool = False,
    run: str | None = None,
) -> None:
    """Print the server's log as the node keeps it; of several with their names before each line. Reads only."""
    from lamplighter.run import command
    from lamplighter.run import logs as server_logs

    settings = command.settings_from(c, host=host, server=server, lines=lines, run=run)
    server_logs.print_logs(settings, host, server, lines, follow or f, run)


@on_hosts(
    flags={
        "log": "a server's log: a file, gzip or not, or - for stdin; nothing else is opened",
        "engine": "whose log it is (default: guessed from it)",
        "engine_version": "of which version (default: guessed)",
        "host": "instead of --log: diagnose the last run on these hosts",
        "server": "only this server of the host; with --log, the name to use in the hint",
        "explain": "name the rule that decided, with its file and line",
        "json": "the answer as one JSON object",
    },
)
def diagnose(
    c: Context,
    host: list[str],
    log: str | None = None,
    engine: str | None = None,
    engine_version: str | None = None,
    server: str | None = None,
    explain: bool = False,
    json: bool = False,
) -> None:
    """Say what a server's log shows: ready, failed or running, the phase, the first cause and one next step."""
    from lamplighter.run import command
    from lamplighter.run import diagnose as doctor

    settings = command.settings_from(
        c, as_json=json, host=host, log=log, engine=engine, engine_version=engine_version, server=server
    )
    doctor.diagnose(settings, log=log, engine=engine, version=engine_version, host=host, server=server, explain=explain)
