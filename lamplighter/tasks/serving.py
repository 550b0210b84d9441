"""Tasks that change what serves on a node, that keep others from it, and that reach into a run which does."""

from __future__ import annotations

from invoke.context import Context

from lamplighter.tasks.options import ACTING, READING, on_hosts
from lamplighter.tasks.reading import plan


@on_hosts(
    flags={
        **ACTING,
        "if-changed": "leave a server alone that is well, as the inventory wants it, and without drift",
        "max-age": "with --if-changed (implied): redeploy what has run that long: 7d, 12h, 30m or seconds",
        "dry-run": "only show what it would change, as `plan` does; exit 12 where changes are pending",
    },
)
def deploy(
    c: Context,
    host: list[str],
    server: str | None = None,
    if_changed: bool = False,
    max_age: str | None = None,
    json: bool = False,
    wait: str = "0",
    dry_run: bool = False,
) -> None:
    """Replace the LLM server of each host by the one in the inventory, or put the old one back and say why."""
    from lamplighter.run import command, verify, watching

    if dry_run:
        plan.body(c, host=host, server=server, json=json)
    settings = command.settings_from(c, as_json=json, host=host, server=server, max_age=max_age, wait=wait)
    with command.guarded(settings):
        unless = watching.conditions(if_changed, max_age)
    command.run(
        settings,
        host,
        server,
        "deploy",
        wait,
        verify.Verification(settings.inventory),
        **unless,
    )


@on_hosts(
    flags={**ACTING, "to": "release digest (default: the last other good one)"},
    dry="`./inv releases` shows what it takes",
)
def rollback(
    c: Context, host: list[str], server: str | None = None, to: str | None = None, json: bool = False, wait: str = "0"
) -> None:
    """Replace the server by an earlier release that is on the node already, and check it as a deploy does."""
    from lamplighter.run import command, verify

    settings = command.settings_from(c, as_json=json, host=host, server=server, to=to, wait=wait)
    afterwards = verify.Verification(settings.inventory, of_release=True)
    command.run(settings, host, server, "rollback", wait, afterwards, to=to)


@on_hosts(flags=ACTING, dry="`./inv check` shows who would be stopped")
def stop(c: Context, host: list[str], server: str | None = None, json: bool = False, wait: str = "0") -> None:
    """Stop the server and see its GPU memory freed; `start` brings the same release back."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, wait=wait)
    command.run(settings, host, server, "stop", wait)


@on_hosts(
    flags={**ACTING, "stop": "stop the server first; without it, a server that runs is a refusal"},
    dry="`./inv status` shows what runs",
)
def undeploy(
    c: Context, host: list[str], server: str | None = None, stop: bool = False, json: bool = False, wait: str = "0"
) -> None:
    """Take away what lies outside lamplighter's directory on the node: start-up files and the systemd unit."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, wait=wait)
    command.run(settings, host, server, "undeploy", wait, stop=stop)


@on_hosts(flags=ACTING, dry="`./inv releases` shows which one is current")
def start(c: Context, host: list[str], server: str | None = None, json: bool = False, wait: str = "0") -> None:
    """Start the current release where nothing is serving."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, wait=wait)
    command.run(settings, host, server, "start", wait)


@on_hosts(flags=ACTING, dry="`./inv check` shows who would be stopped")
def restart(c: Context, host: list[str], server: str | None = None, json: bool = False, wait: str = "0") -> None:
    """Stop the server and start its current release again, whatever the inventory says by now."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, wait=wait)
    command.run(settings, host, server, "restart", wait)


@on_hosts(
    flags={
        **READING,
        "message": "why",
        "m": "the same as --message",
        "until": "until when: 18:00, 2026-12-04, '2026-12-04 18:00', or 90m, 12h, 3d",
        "end": "end the hold",
    }
)
def hold(
    c: Context,
    host: list[str],
    server: str | None = None,
    message: str | None = None,
    m: str | None = None,
    until: str | None = None,
    end: bool = False,
    json: bool = False,
) -> None:
    """Keep every run, whoever asks for it, away from a server until a time (exit 10). Alone: show who holds what."""
    import datetime as dt

    from lamplighter.report.history import hold_text
    from lamplighter.run import command, holding

    settings = command.settings_from(c, as_json=json, host=host, server=server, message=message, m=m, until=until)
    with command.guarded(settings):
        order = holding.order(message or m, until, end, dt.datetime.now().astimezone())
    command.read(
        settings,
        host,
        server,
        "hold",
        lambda session, servers: session.hold(servers, order),
        hold_text,
        hosts=lambda: command.reach(settings, host, server),
    )


@on_hosts(flags={**READING, "run": "id of the run (default: the last one)"})
def attach(c: Context, host: list[str], server: str | None = None, run: str | None = None, json: bool = False) -> None:
    """Show a run from its first event, and follow it while it goes on. Reads only."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, run=run)
    command.act(
        settings,
        host,
        server,
        lambda session, one, listen: session.attach(one, listen, run),
        seeks_run=run is not None,
    )


@on_hosts(
    flags={**READING, "run": "id of the run (default: the one at work)"}, dry="`./inv status` shows the run at work"
)
def cancel(c: Context, host: list[str], server: str | None = None, run: str | None = None, json: bool = False) -> None:
    """End the run at work, from whatever machine: before `stop` nothing is touched, afterwards it rolls back."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, run=run)
    command.act(
        settings,
        host,
        server,
        lambda session, one, listen: session.cancel(one, listen, run),
        seeks_run=run is not None,
    )
