"""The releases that a node holds. Reads only."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Optional

from lamplighter.node.layout import ReleaseDirectory, ServerHome, server_home
from lamplighter.node.stages import releases as catalogue


def releases(request: dict[str, Any], root: str) -> dict[str, Any]:
    """List the releases of the servers asked for, newest first: what each is worth and what `rollback` would take."""
    return {"servers": [_releases_of(server_home(root, name)) for name in request["servers"]]}


def _releases_of(home: ServerHome) -> dict[str, Any]:
    current, earlier = home.current_release(), catalogue.earlier_release(home)
    rows: list[dict[str, Any]] = []
    for release in home.all_releases():
        verdict = release.read_verdict() or {}
        made_from = release.read_request() or {}
        rows.append(
            {
                "release": release.name,
                "verdict": verdict.get("verdict") or "unproven",
                "is_current": current is not None and release.name == current.name,
                "is_rollback_target": release == earlier,
                "is_adopted": bool(made_from.get("adopted")),
                "written": os.stat(release.plan).st_mtime,
                "judged": verdict.get("t"),
                "bytes": _size_of(release.path),
                "run": verdict.get("run"),
                "cause": verdict.get("cause"),
                "message": verdict.get("message") or "",
            }
        )
    rows.sort(key=lambda row: float(row["judged"] or row["written"]), reverse=True)
    return {"name": home.name, "releases": rows}


def _size_of(directory: str) -> int:
    total = 0
    for base, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(base, name)).st_size
    return total


def verdict_on(home: ServerHome, request: dict[str, Any]) -> dict[str, Any]:
    """Return what became of the very thing that is asked for when it ran last; {} where it never ran."""
    for release in reversed(home.releases_of(request["release"]["digest"])):
        is_same = (release.read_request() or {}).get("server") == request["server"]
        if is_same and not changed_secrets(release, request):
            return release.read_verdict() or {}
    return {}


def date_of(verdict: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(float(verdict.get("t") or 0)))


def changed_secrets(release: Optional[ReleaseDirectory], request: dict[str, Any]) -> list[str]:
    known = release.read_environment() if release is not None else {}
    return sorted(name for name, value in (request.get("secrets") or {}).items() if known.get(name) != value)
