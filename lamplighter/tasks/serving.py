"""Tasks that change what serves on a node, and those that reach into a run which does."""

from __future__ import annotations

from invoke.context import Context

from lamplighter.tasks.options import ACTING, READING, on_hosts


@on_hosts(
    flags={
        **ACTING,
        "if-changed": "leave a server alone that is well, as the inventory wants it, and without drift",
        "max-age": "with --if-changed (implied): redeploy what has run that long: 7d, 12h, 30m or seconds",
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
) -> None:
    """Replace the LLM server of each host by the one in the inventory, or put the old one back and say why."""
    from lamplighter.run import command, verify, watching

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


@on_hosts(flags={**ACTING, "to": "release digest (default: the last other good one)"})
def rollback(
    c: Context, host: list[str], server: str | None = None, to: str | None = None, json: bool = False, wait: str = "0"
) -> None:
    """Replace the server by an earlier release that is on the node already."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, to=to, wait=wait)
    command.run(settings, host, server, "rollback", wait, to=to)


@on_hosts(flags=ACTING)
def stop(c: Context, host: list[str], server: str | None = None, json: bool = False, wait: str = "0") -> None:
    """Stop the server and see its GPU memory freed; `start` brings the same release back."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, wait=wait)
    command.run(settings, host, server, "stop", wait)


@on_hosts(
    flags={**ACTING, "stop": "stop the server first; without it, a server that runs is a refusal"},
)
def undeploy(
    c: Context, host: list[str], server: str | None = None, stop: bool = False, json: bool = False, wait: str = "0"
) -> None:
    """Take away what lies outside lamplighter's directory on the node: start-up files and the systemd unit."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, wait=wait)
    command.run(settings, host, server, "undeploy", wait, stop=stop)


@on_hosts(flags=ACTING)
def start(c: Context, host: list[str], server: str | None = None, json: bool = False, wait: str = "0") -> None:
    """Start the current release where nothing is serving."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, wait=wait)
    command.run(settings, host, server, "start", wait)


@on_hosts(flags=ACTING)
def restart(c: Context, host: list[str], server: str | None = None, json: bool = False, wait: str = "0") -> None:
    """Stop the server and start its current release again, whatever the inventory says by now."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, wait=wait)
    command.run(settings, host, server, "restart", wait)


@on_hosts(flags={**READING, "run": "id of the run (default: the last one)"})
def attach(c: Context, host: list[str], server: str | None = None, run: str | None = None, json: bool = False) -> None:
    """Show a run from its first event, and follow it while it goes on. Reads only."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, run=run)
    command.act(settings, host, server, lambda session, one, listen: session.attach(one, listen, run))


@on_hosts(flags={**READING, "run": "id of the run (default: the one at work)"})
def cancel(c: Context, host: list[str], server: str | None = None, run: str | None = None, json: bool = False) -> None:
    """End the run at work, from whatever machine: before `stop` nothing is touched, afterwards it rolls back."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, run=run)
    command.act(settings, host, server, lambda session, one, listen: session.cancel(one, listen, run))
