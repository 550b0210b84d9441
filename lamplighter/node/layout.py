"""Where everything lies on the node; the one place that joins path names.

::

    <root>/bin/<digest>/                the runner, unpacked
    <root>/servers/<name>/
      releases/<digest12>[.N]/          release.json launch.sh env plan.json pysite/ verdict.json
      current -> releases/<name>        the last release that became ready
      runs/<run-id>/                    events.jsonl server.log process.json exit.json envproof/
      server.json                       what serves, or served last
      deployed.json                     what that was like when it became ready
"""

from __future__ import annotations

import calendar
import dataclasses
import json
import os
import re
import shlex
import time
from types import MappingProxyType
from typing import Any, Iterator, Mapping, Optional, Union

from lamplighter.node.plan import Plan


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """One run's directory: its journal, and the log and process records of the server that it started."""

    path: str

    @property
    def run_id(self) -> str:
        return os.path.basename(self.path)

    @property
    def journal(self) -> str:
        return os.path.join(self.path, "events.jsonl")

    @property
    def ballast(self) -> str:
        return os.path.join(self.path, "ballast")

    @property
    def cancel(self) -> str:
        """Written by ``cancel``; the worker looks for it between stages and while it waits."""
        return os.path.join(self.path, "cancel.json")

    def reserve(self, number: int) -> str:
        """Return the path of a file whose only use is the room that it gives back."""
        return os.path.join(self.path, f"reserve.{number}")

    @property
    def worker(self) -> str:
        return os.path.join(self.path, "worker.json")

    @property
    def began(self) -> float:
        """When its worker began, by this node's clock; else what its id says, which is by that of another machine."""
        record = read_json(self.worker, t=(int, float))
        if record is not None:
            return float(record["t"])
        try:
            return float(calendar.timegm(time.strptime(self.run_id[:16], "%Y%m%dT%H%M%SZ")))
        except ValueError:
            return 0.0

    @property
    def worker_errors(self) -> str:
        return os.path.join(self.path, "worker.err")

    @property
    def records(self) -> str:
        return os.path.join(self.path, "envproof")

    def launch(self, attempt: str) -> LaunchFiles:
        """Return the files of one launch within the run: ``new``, or ``old`` for the roll back."""
        return LaunchFiles(self.path, attempt)


@dataclasses.dataclass(frozen=True)
class LaunchFiles:
    """What one launch of a server leaves: its log, who its processes are, how it ended."""

    directory: str
    attempt: str

    def _file(self, stem: str, suffix: str) -> str:
        name = stem if self.attempt == "new" else f"{stem}.{self.attempt}"
        return os.path.join(self.directory, name + suffix)

    @property
    def log(self) -> str:
        return self._file("server", ".log")

    @property
    def process(self) -> str:
        return self._file("process", ".json")

    @property
    def exit(self) -> str:
        return self._file("exit", ".json")

    @property
    def gate(self) -> str:
        """At what it waits that was started early."""
        return self._file("gate", "")


@dataclasses.dataclass(frozen=True)
class ReleaseDirectory:
    """One release as it lies on the node."""

    path: str

    @property
    def name(self) -> str:
        """Its name on the node: its digest, with a number behind it where several have the same (``d1f0....2``)."""
        return os.path.basename(self.path)

    @property
    def digest(self) -> str:
        """What the inventory knows it by: of what it makes run. Secrets and how it is treated are not in it."""
        return self.name.partition(".")[0]

    @property
    def number(self) -> int:
        """Which of its digest it is, from 1; only for names that `ServerHome.releases_of` returns."""
        return int(self.name.partition(".")[2] or 1)

    @property
    def launch_script(self) -> str:
        return os.path.join(self.path, "launch.sh")

    @property
    def env(self) -> str:
        return os.path.join(self.path, "env")

    @property
    def plan(self) -> str:
        return os.path.join(self.path, "plan.json")

    @property
    def unit(self) -> str:
        """The systemd unit, but for what only the node knows."""
        return os.path.join(self.path, "server.service")

    @property
    def verdict(self) -> str:
        return os.path.join(self.path, "verdict.json")

    def is_complete(self) -> bool:
        """Tell whether it can be started: its launch script and its plan are there."""
        return os.path.exists(self.launch_script) and self.read_request() is not None

    def read_plan(self) -> Optional[Plan]:
        """Return the plan that it was made from; None if it is damaged."""
        stored = self.read_request()
        return None if stored is None else Plan.load(stored)

    def read_request(self) -> Optional[dict[str, Any]]:
        """Return what it was made from: ``server`` and ``engine`` as requested, and ``adopted``; None if damaged.

        What is returned can be used: ``Plan.load`` takes it.
        """
        stored = read_json(self.plan, server=dict, engine=dict)
        if stored is None or not isinstance(stored.get("adopted") or {}, dict):
            return None
        server, engine = stored["server"], stored["engine"]
        if not isinstance(engine.get("name"), str) or not isinstance(server.get("secrets", []), list):
            return None
        try:
            Plan.load(stored)
        except ValueError:
            return None
        return stored

    def read_environment(self) -> dict[str, str]:
        """Return the variables that ``env`` assigns; {} where it cannot be read.

        Byte for byte, as the server's shell reads them: what is no UTF-8 comes as surrogates. Those that the plan lists
        under ``argv_secrets`` are words of the command line, and not given to the server as variables.
        """
        try:
            with open(self.env, "rb") as file:
                words = shlex.split(file.read().decode("utf-8", "surrogateescape"))
        except (OSError, ValueError):
            return {}
        pairs = (word.partition("=") for word in words)
        return {name: value for name, equals, value in pairs if equals}

    def read_verdict(self) -> Optional[dict[str, Any]]:
        """Return what became of it when it ran last: ``verdict`` good or bad, ``number``, ``t``, ``run``, ``cause``."""
        return read_json(self.verdict, verdict=str, t=(int, float))


@dataclasses.dataclass(frozen=True)
class ServerHome:
    """``<root>/servers/<name>``: all that the node remembers of one server."""

    path: str

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def lock(self) -> str:
        return os.path.join(self.path, "lock")

    @property
    def record(self) -> str:
        return os.path.join(self.path, "server.json")

    @property
    def hold(self) -> str:
        """Who asked that no run touches the server, why and until when."""
        return os.path.join(self.path, "hold.json")

    @property
    def unit(self) -> str:
        """Which systemd unit is ours, and its text as it was committed last."""
        return os.path.join(self.path, "unit.json")

    @property
    def deployed(self) -> str:
        """What the running release was like when it became ready; drift is measured against it."""
        return os.path.join(self.path, "deployed.json")

    @property
    def baseline(self) -> str:
        return os.path.join(self.path, "..", "..", "gpu-baseline.json")

    @property
    def current(self) -> str:
        return os.path.join(self.path, "current")

    @property
    def releases(self) -> str:
        return os.path.join(self.path, "releases")

    @property
    def runs(self) -> str:
        return os.path.join(self.path, "runs")

    def release(self, name: str) -> ReleaseDirectory:
        return ReleaseDirectory(os.path.join(self.releases, name))

    def releases_of(self, digest: str) -> list[ReleaseDirectory]:
        """Return what lies here under a digest, complete or not, in the order in which it came."""
        names = [name for name in _names(self.releases) if re.fullmatch(rf"{re.escape(digest)}(\.[1-9]\d*)?", name)]
        return sorted(map(self.release, names), key=lambda release: release.number)

    def current_release(self) -> Optional[ReleaseDirectory]:
        """Return the release that became ready last, None when there is none (yet, or it is gone or damaged)."""
        try:
            release = self.release(os.path.basename(os.readlink(self.current)))
        except OSError:
            return None
        return release if release.is_complete() else None

    def next_verdict(self) -> int:
        """Return the number for the next verdict on a release here: clocks jump, numbers do not."""
        verdicts = [each.read_verdict() or {} for each in self.all_releases()]
        return 1 + max((number for each in verdicts if isinstance(number := each.get("number"), int)), default=0)

    def all_releases(self) -> list[ReleaseDirectory]:
        """Return all complete releases."""
        return [release for release in map(self.release, _names(self.releases)) if release.is_complete()]

    def run(self, run_id: str) -> RunDirectory:
        return RunDirectory(os.path.join(self.runs, run_id))

    def all_runs(self) -> list[RunDirectory]:
        """Return all runs, oldest first."""
        runs = [self.run(name) for name in _names(self.runs) if RUN_ID.match(name)]
        return sorted(runs, key=lambda run: (run.began, run.run_id))

    def launches(self) -> Iterator[LaunchFiles]:
        """Yield every launch that left a process record, newest run first."""
        for run in reversed(self.all_runs()):
            for attempt in ("old", "new"):
                launch = run.launch(attempt)
                if os.path.exists(launch.process):
                    yield launch


def environment_text(exported: Mapping[str, str], kept_apart: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return an ``env``: what the launch script reads before it becomes the server, and `ReleaseDirectory` again."""
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in sorted(exported.items())]
    return "".join([*lines, *(f"{name}={shlex.quote(value)}\n" for name, value in sorted(kept_apart.items()))])


#: Fields of every record of a process: its identity.
IDENTITY: dict[str, type] = {"boot_id": str, "pid": int, "start": int}

RUN_ID = re.compile(r"^\d{8}T\d{6}Z-[0-9a-f]{6}$")
SERVER_NAME = re.compile(r"^[a-z0-9][a-z0-9_.-]{0,39}$")


def server_home(root: str, name: str) -> ServerHome:
    """Return the home of server ``name``; a name that could leave the directory raises ValueError."""
    if not SERVER_NAME.match(name):
        raise ValueError(f"not a server name: {name!r}")
    return ServerHome(os.path.join(root, "servers", name))


def all_servers(root: str) -> list[ServerHome]:
    """Return the homes of all servers that the node knows."""
    return [
        server_home(root, name) for name in sorted(_names(os.path.join(root, "servers"))) if SERVER_NAME.match(name)
    ]


def read_json(path: str, **fields: Union[type, tuple[type, ...]]) -> Optional[dict[str, Any]]:
    """Return the JSON object in ``path``; None when the file is missing, or holds none with ``fields`` of these types.

    A file of ours that was edited or truncated by hand counts as missing, which every reader is prepared for.
    """
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    is_whole = isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in fields.items())
    return value if is_whole else None


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
