"""Taking over a server that somebody started by hand: written down as a release before it is stopped.

So a first deploy that fails can bring it back: the same arguments, in the same directory, with the same environment.
Writes one release directory, for its owner alone. The environment and the secrets of the command line are in its
``env`` and nowhere else: the launch script and the plan have their names.
What cannot be brought back is said before anything is stopped.

facts: ``/proc/PID/environ`` is the environment given at exec, which is what a new start needs; a process may belong to
another user, may have overwritten its command line, or lie in a container whose files are not the node's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shlex
import shutil
import time
from typing import Any, Iterable, Mapping, Optional, Union

from lamplighter.node import arguments
from lamplighter.node.keeper import ownership
from lamplighter.node.keeper.ownership import Claim
from lamplighter.node.layout import ReleaseDirectory, ServerHome, environment_text
from lamplighter.node.system import files, http, ports, processes
from lamplighter.node.system.processes import Process

ANSWER_SECONDS = 5.0

#: Names that a POSIX shell can export. Others (exported functions of bash) are left out, and said.
EXPORTABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

#: How the names begin of the words of a command line that are secrets; the place of the word follows. Not exported.
KEPT_APART = "LAMPLIGHTER_ARGS_"

#: The shell that starts the server sets these by itself.
SHELLS_OWN = frozenset({"_"})

_SCRIPT = """\
#!/bin/sh
# Starts server {name} as lamplighter found it, started by hand. Written by lamplighter before it was stopped.
# With arguments it runs these instead, in the same environment: launch.sh env

# Nothing of the caller's environment: the server had its own, which is in the file env.
for name in $(env | sed -n 's/^\\([A-Za-z_][A-Za-z0-9_]*\\)=.*/\\1/p'); do
    [ "$name" = name ] || unset "$name"
done
unset name
case $0 in
    */*) here=${{0%/*}} ;;
    *) here=. ;;
esac
case $here in
    /*) ;;
    *) here=$(pwd)/$here ;;
esac
cd {directory} || exit 2
unset PWD OLDPWD  # some shells export them
. "$here/env" || exit 2
if [ "$#" -gt 0 ]; then
    exec "$@"
fi

# The server, one argument a line.
exec {command}
"""


@dataclasses.dataclass(frozen=True)
class Found:
    """A server that can be brought back: all that its start needs, and the address that it listens on."""

    process: Process
    argv: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    host: str
    left_out: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Impossible:
    """A server that will be stopped and cannot be brought back; ``reason`` continues "pid N cannot be adopted: "."""

    process: Process
    reason: str


def find(claims: Iterable[Claim], port: int) -> Union[Found, Impossible, None]:
    """Look for a server on ``port`` that is not ours and would be stopped. Reads only."""
    stoppable = {claim.process.pid: claim for claim in claims if claim.may_be_stopped}
    for listener in ports.listeners(port):
        for pid in listener.pids:
            claim = stoppable.get(pid)
            if claim is not None and claim.kind != ownership.OURS:
                return _read(_topmost(claim.process, stoppable), listener.address)
    return None


def _topmost(process: Process, stoppable: Mapping[int, Claim]) -> Process:
    """Climb to the process that the person started: servers fork and let a child listen."""
    seen = {process.pid}
    while process.ppid in stoppable and process.ppid not in seen:
        process = stoppable[process.ppid].process
        seen.add(process.pid)
    return process


def _read(process: Process, address: str) -> Union[Found, Impossible]:
    container = processes.container_of(process)
    if container is not None:
        return Impossible(process, f"it lives in {container.runtime or 'a'} container {container.id[:12]}".strip())
    if process.uid != os.geteuid():
        return Impossible(process, f"it belongs to {processes.user_name(process.uid)}, whom we cannot start it as")
    environment = processes.environ(process.pid)
    if not environment:
        return Impossible(process, "its environment cannot be read")
    directory = processes.working_directory(process.pid)
    if directory is None or not os.path.isdir(directory):
        return Impossible(process, "its working directory is gone or cannot be read")
    program = _program(process, directory, environment)
    if program is None:
        return Impossible(process, f"its command line does not say how it was started: {process.title!r}")
    left_out = tuple(sorted(filter(_is_left_out, environment)))
    kept = {name: environment[name] for name in environment if name not in (*left_out, *SHELLS_OWN)}
    return Found(process, (program, *process.argv[1:]), directory, kept, address, left_out)


def _is_left_out(name: str) -> bool:
    return not EXPORTABLE.fullmatch(name) or name.startswith(KEPT_APART)


def _program(process: Process, directory: str, environment: Mapping[str, str]) -> Optional[str]:
    """Return the word that starts the same program again: argv[0] as it stands, or the executable itself."""
    word = process.argv[0] if process.argv else ""
    found = shutil.which(os.path.join(directory, word) if "/" in word else word, path=environment.get("PATH", ""))
    if word and found is not None:
        return word
    is_retitled = len(process.argv) <= 1 and re.search(r"[\s:]", word) is not None
    if process.exe is None or is_retitled or not os.access(process.exe, os.X_OK):
        return None
    return process.exe


def reported_model(engine: Mapping[str, Any], found: Found, port: int, tls: str = "none") -> tuple[Optional[str], str]:
    """Ask the server itself which model it serves, as the engine's rule names it; (None, why) if it does not say."""
    host, key = ports.probe_host(found.host), api_key(engine, found)
    identity = engine.get("identity") or {}
    try:
        if identity.get("source") == "reply":
            model = arguments.model_of(engine, found.argv)
            reply = http.generate(engine, host, port, model or "", ANSWER_SECONDS, api_key=key, tls=tls)
            return (model, "") if model and reply.ok else (None, reply.error or "its arguments name no model")
        rule = http.identity_matches(engine, {"served_name": "", "model": ""}, _models(engine, host, port, key, tls))
    except http.HttpFailed as failed:
        return None, failed.reason
    return (rule.found[0], "") if rule.found else (None, rule.message)


def _models(engine: Mapping[str, Any], host: str, port: int, key: Optional[str], tls: str) -> http.Reply:
    return http.models(engine, host, port, ANSWER_SECONDS, api_key=key, tls=tls)


def api_key(engine: Mapping[str, Any], found: Found) -> Optional[str]:
    """Return the key that the server asks of its clients, from its arguments or its environment."""
    flag, variable = engine.get("api_key_flag"), engine.get("api_key_env")
    said = arguments.value_of((flag,), found.argv) if flag else None
    return said or (found.environment.get(variable) if variable else None)


def write(
    found: Found,
    home: ServerHome,
    server: Mapping[str, Any],
    engine: Mapping[str, Any],
    model: str,
    uuids: tuple[str, ...],
    run_id: str,
) -> ReleaseDirectory:
    """Write the release ``adopted-HASH``, marked good, and make it ``current``. Doing it twice changes nothing.

    ``server`` is what the request says of the server; what the one found does not share with it is replaced. ``model``
    is what it reports, ``uuids`` are the GPUs that it uses. Raises OSError.
    """
    places = {f"{KEPT_APART}{place}": place for place in arguments.secret_places(found.argv)}
    secrets = {name: found.argv[place] for name, place in places.items()}
    argv = list(found.argv)
    for name, place in places.items():
        argv[place] = f"${name}"
    script = _SCRIPT.format(
        name=re.sub(r"[^\w.-]", "_", home.name),
        directory=shlex.quote(found.directory),
        command=" \\\n    ".join(_in_script(word, secrets) for word in argv),
    )
    text = environment_text(found.environment, secrets)
    digest = hashlib.sha256((script + text).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    release = home.release(f"adopted-{digest}")
    files.make_directory(home.releases)
    fresh = os.path.join(home.releases, f"{files.TEMP_PREFIX}{release.name}.{os.getpid()}")
    try:
        files.make_directory(fresh)
        inside = ReleaseDirectory(fresh)
        files.write_file(inside.launch_script, script, 0o700)
        files.write_file(inside.env, text, 0o600)
        files.write_json(
            inside.plan,
            {
                "server": {**_plan(found, server, model, uuids), "argv": argv, "argv_secrets": places},
                "engine": dict(engine),
                "adopted": {"pid": found.process.pid, "t": time.time()},
            },
        )
        number = home.next_verdict()
        verdict = {"verdict": "good", "number": number, "t": time.time(), "run": run_id, "cause": None}
        files.write_json(inside.verdict, {**verdict, "message": "served when it was adopted"})
        files.place_directory(fresh, release.path)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    files.point(home.current, os.path.join("releases", release.name))
    files.write_json(home.record, _record(found, server, model, uuids, release, run_id))
    return release


def _in_script(word: str, secrets: Mapping[str, str]) -> str:
    return f'"{word}"' if word[1:] in secrets and word.startswith("$") else shlex.quote(word)


def _plan(found: Found, server: Mapping[str, Any], model: str, uuids: tuple[str, ...]) -> dict[str, Any]:
    python = found.argv[0] if "/" in found.argv[0] else shutil.which(found.argv[0], path=found.environment.get("PATH"))
    return {
        **server,
        "engine_version": None,
        "model": model,
        "served_name": model,
        "host": found.host,
        "gpus": list(uuids) if uuids else server["gpus"],
        "python": os.path.join(found.directory, python or found.argv[0]),
        "env": {},
        "secrets": sorted(found.environment),  # none of their values is ever shown
        "sitecustomize": {"scope": "none"},
        "launcher": "detached",
    }


def _record(
    found: Found,
    server: Mapping[str, Any],
    model: str,
    uuids: tuple[str, ...],
    release: ReleaseDirectory,
    run_id: str,
) -> dict[str, Any]:
    """What ``status`` reads: until it is stopped, the server found is the one that serves."""
    identity = found.process.identity
    output = (processes.open_files(identity.pid) or {}).get(1, "")
    return {
        **identity.to_json(),
        "port": server["port"],
        "host": found.host,
        "model": model,
        "gpus": list(uuids),
        "release": release.name,
        "run": run_id,
        "log": output if os.path.isfile(output) else "",
        "attempt": "adopted",
        "records": "",
        "ready": True,
        "since": time.time() - processes.age_seconds(found.process),
    }
