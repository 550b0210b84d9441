"""The user interface: `./inv --list` shows the tasks, `./inv --help TASK` one of them.

Each task is flags -> library -> report -> exit code. Imports are made inside tasks, so that `--list`
and shell completion need none.
"""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from invoke.collection import Collection
from invoke.context import Context
from invoke.exceptions import Exit
from invoke.tasks import task

PROJECT = Path(__file__).resolve().parent

HELP = {
    "host": "host, group or pattern of the inventory, or @FILE with one a line; may be repeated",
    "server": "only this server of the host (default: all)",
    "json": "JSON on stdout, one object a line, the report last; human text on stderr",
    "wait": "how long to wait for a lock that another run holds: seconds, or 90s, 10m, 2h",
}
READING = {name: HELP[name] for name in ("host", "server", "json")}

#: Options of every task on hosts: they become settings of the tool, as if they stood in Invoke's configuration.
EVERYWHERE = {
    "inventory": "where the hosts stand: a file, a directory, a program or a list such as gpu1,gpu2; may be repeated "
    "(default: LAMPLIGHTER_INVENTORY, or inventory/)",
    "vault_password_file": "file or script that gives the password of vaulted values; may be repeated "
    "(default: ANSIBLE_VAULT_PASSWORD_FILE)",
    "vault_id": "ID@FILE: the password of the values sealed for that vault id; may be repeated",
}


def on_hosts(flags: Mapping[str, str]) -> Callable[[Callable[..., None]], Callable[..., Any]]:
    """Make a task of a function that takes ``host``, with the options of EVERYWHERE beside its own."""

    def decorate(body: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(body)
        def run(c: Context, *values: Any, **given: Any) -> None:
            for name in EVERYWHERE:
                said = given.pop(name, None)
                if said:
                    c.config.lamplighter[name] = said
            limit = given.pop("limit", None)
            if limit:
                given["host"] = _named_hosts(c, given.get("host") or [], limit)
            body(c, *values, **given)

        own = inspect.signature(body)
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ("limit", *EVERYWHERE)
        ]
        vars(run)["__signature__"] = own.replace(parameters=[*own.parameters.values(), *more])
        words = {**flags, "limit": "the same as --host", **EVERYWHERE}
        return task(run, auto_shortflags=False, iterable=["host", "limit", *EVERYWHERE], help=words)

    return decorate


def _named_hosts(c: Context, host: list[str], limit: list[str]) -> list[str]:
    from lamplighter.run import command

    with command.guarded(command.settings_from(c)):
        return command.named_hosts(host, limit)
    raise AssertionError  # guarded() lets nothing else through


@on_hosts(
    flags={
        **HELP,
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


@on_hosts(flags={**HELP, "to": "release digest (default: the last other good one)"})
def rollback(
    c: Context, host: list[str], server: str | None = None, to: str | None = None, json: bool = False, wait: str = "0"
) -> None:
    """Replace the server by an earlier release that is on the node already."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, to=to, wait=wait)
    command.run(settings, host, server, "rollback", wait, to=to)


@on_hosts(flags=HELP)
def stop(c: Context, host: list[str], server: str | None = None, json: bool = False, wait: str = "0") -> None:
    """Stop the server and see its GPU memory freed; `start` brings the same release back."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, wait=wait)
    command.run(settings, host, server, "stop", wait)


@on_hosts(
    flags={**HELP, "stop": "stop the server first; without it, a server that runs is a refusal"},
)
def undeploy(
    c: Context, host: list[str], server: str | None = None, stop: bool = False, json: bool = False, wait: str = "0"
) -> None:
    """Take away what lies outside lamplighter's directory on the node: start-up files and the systemd unit."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, wait=wait)
    command.run(settings, host, server, "undeploy", wait, stop=stop)


@on_hosts(flags=HELP)
def start(c: Context, host: list[str], server: str | None = None, json: bool = False, wait: str = "0") -> None:
    """Start the current release where nothing is serving."""
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server, wait=wait)
    command.run(settings, host, server, "start", wait)


@on_hosts(flags=HELP)
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


@on_hosts(flags=READING)
def releases(c: Context, host: list[str], server: str | None = None, json: bool = False) -> None:
    """List the releases on the node: good or bad, current, adopted, age, size, what `rollback` takes. Reads only."""
    from lamplighter.report import releases_text
    from lamplighter.run import command

    command.read(
        command.settings_from(c, as_json=json, host=host, server=server),
        host,
        server,
        "releases",
        lambda session, servers: session.releases([one.name for one in servers]),
        releases_text,
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
            one.name: {**session.plan(one), "checks": checks.check_names(one, PROJECT, settings.inventory)}
            for one in servers
        },
        plan_text,
        command.judge_plan,
    )


@on_hosts(flags={**READING, "diff": "show what a deploy would change, too, as `plan` does"})
def check(c: Context, host: list[str], server: str | None = None, json: bool = False, diff: bool = False) -> None:
    """Ask everything a deploy asks before it touches the node, and show who would be stopped. Reads only."""
    from lamplighter.report import check_text, plan_text
    from lamplighter.run import command

    settings = command.settings_from(c, as_json=json, host=host, server=server)
    command.read(
        settings,
        host,
        server,
        "check",
        lambda session, servers: {one.name: session.plan(one) if diff else session.check(one) for one in servers},
        (lambda found: f"{check_text(found)}\n\n{plan_text(found)}") if diff else check_text,
        command.judge_plan if diff else command.judge_findings,
    )


@on_hosts(
    flags={**READING, "watch": "ask again every so many seconds, over the same connections, until Ctrl-C"},
)
def status(
    c: Context, host: list[str], server: str | None = None, json: bool = False, watch: str | None = None
) -> None:
    """Show what serves and since when, its drift, and a run in progress with its stage. Reads only."""
    from lamplighter.report import status_text
    from lamplighter.run import command, watching

    settings = command.settings_from(c, as_json=json, host=host, server=server, watch=watch)
    if watch is not None:
        watching.watch(settings, host, server, watch)
    command.read(
        settings,
        host,
        server,
        "status",
        lambda session, servers: session.standings(servers),
        status_text,
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
        verify_text,
        checks.judge_checks,
    )


@on_hosts(
    flags={
        "host": HELP["host"],
        "server": HELP["server"],
        "lines": "how many of the last lines",
        "follow": "go on as the log grows, until Ctrl-C",
        "run": "the log of the server that this run started (default: what serves, or served last)",
    },
)
def logs(
    c: Context,
    host: list[str],
    server: str | None = None,
    lines: str = "100",
    follow: bool = False,
    run: str | None = None,
) -> None:
    """Print the server's log as the node keeps it. Reads only."""
    from lamplighter.run import command

    settings = command.settings_from(c, host=host, server=server, lines=lines, run=run)
    command.print_logs(settings, host, server, lines, follow, run)


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


@task(auto_shortflags=False, help={"name": "which node in a box (the host variable `lab`)"})
def up(c: Context, name: str = "demo") -> None:
    """Start the GPU node in a box, if it is not up, and say how to log in."""
    from lab import node
    from lamplighter.run import command

    with command.guarded(command.settings_from(c, name=name)):
        end = node.ensure_up(name, PROJECT / ".lab")
        command.say(f"{name} is up: {end.ssh_line}")


@task(auto_shortflags=False, help={"name": "which node in a box (the host variable `lab`)"})
def down(c: Context, name: str = "demo") -> None:
    """Stop the GPU node in a box and every process on it."""
    from lab import node
    from lamplighter.run import command

    with command.guarded(command.settings_from(c, name=name)):
        command.say(f"{name} is down" if node.down(name, PROJECT / ".lab") else f"{name} was not up")


@task(auto_shortflags=False, help={"args": "arguments for pytest, as one word: --args '-k gpus -x'"})
def test(c: Context, args: str = "") -> None:
    """Run the tests; levels that cannot run here are skipped with the reason."""
    import shlex

    from lamplighter.errors import UsageError
    from lamplighter.run import command

    with command.guarded(command.settings_from(c)):
        try:
            words = shlex.split(args)
        except ValueError as error:
            raise UsageError(f"--args {args}: {error}", next_step="close each quote") from error
    _tool("tests.run", *words)


@task(auto_shortflags=False, name="lint")
def style(c: Context) -> None:
    """Check style: ruff over the Python, shellcheck over the shell scripts."""
    _tool("ruff", "check", ".")
    _tool("ruff", "format", "--check", ".")
    _command("shellcheck", "inv", ".ci/run")


@task(auto_shortflags=False)
def types(c: Context) -> None:
    """Check types: mypy, strict."""
    _tool("mypy")


@task(
    auto_shortflags=False,
    help={
        "points": "how many kill points of a deploy's worker",
        "kills": "how many random kills beside a second deploy and a cancel",
        "seed": "which ones",
    },
)
def soak(c: Context, points: str = "1000", kills: str = "200", seed: str = "20240") -> None:
    """Try every fault at every stage, on both kinds of node, and kill what takes part at many moments. Takes hours."""
    from lamplighter.run import command

    with command.guarded(command.settings_from(c, points=points, seed=seed)):
        command.whole_number(points, "--points")
        command.whole_number(kills, "--kills")
        command.whole_number(seed, "--seed")
    os.environ.update(LAMPLIGHTER_SOAK=points, LAMPLIGHTER_KILLS=kills, LAMPLIGHTER_SEED=seed)
    _tool("pytest", "tests/faults", "tests/lab/test_drift.py", "tests/lab/test_random_moments.py")


@task(style, types, test, auto_shortflags=False, name="check")
def check_all(c: Context) -> None:
    """Lint, types and tests: what must be green before a commit lands."""


def _box(host: Any, servers: list[Any]) -> tuple[Any, list[Any]]:
    from lab import boxes

    return boxes.bring_up(host, servers, PROJECT / ".lab")


def _tool(module: str, *words: str) -> None:
    _command(sys.executable, "-m", module, *words)


def _command(*words: str) -> None:
    try:
        status = subprocess.run(words, cwd=PROJECT, check=False).returncode
    except FileNotFoundError:
        print(f"{words[0]} is not installed; apt-get install {words[0]}", file=sys.stderr)
        raise Exit(code=1) from None
    if status:
        raise Exit(code=status if 0 < status < 128 else 1)


ns = Collection(
    deploy,
    rollback,
    releases,
    stop,
    start,
    restart,
    undeploy,
    attach,
    cancel,
    plan,
    check,
    env,
    status,
    verify,
    logs,
    diagnose,
    config,
    lint,
    render,
    test,
)
ns.add_collection(Collection("lab", up, down))
ns.add_collection(Collection("dev", test, style, types, check_all, soak))
ns.configure(
    {
        "lamplighter": {
            "inventory": "inventory",
            "debug": False,
            "vault_password_file": [],
            "vault_id": [],
            "box": _box,
        }
    }
)
