"""Drift: how a server differs from its release, from what it was when it became ready, and from the inventory.

Reads only. ``deployed.json`` tells what it was like when it became ready (stages/deployed.py writes that down).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from typing import Any, Dict, List, Mapping, Optional, Tuple

from lamplighter.node import arguments, confidential
from lamplighter.node.gpu import driver
from lamplighter.node.health import differences
from lamplighter.node.health.differences import Difference
from lamplighter.node.keeper import launcher, systemd
from lamplighter.node.keeper.launched import unit_in
from lamplighter.node.layout import ReleaseDirectory, ServerHome, read_json
from lamplighter.node.plan import Plan
from lamplighter.node.start import ground, startup
from lamplighter.node.system import distributions, ports, processes
from lamplighter.node.variables import scope


@dataclasses.dataclass(frozen=True)
class Drift:
    """Every difference found, and what could not be compared, with the reason."""

    differences: Tuple[Difference, ...] = ()
    unknown: Tuple[str, ...] = ()

    def to_json(self) -> Dict[str, Any]:
        return {
            "differences": [each.to_json() for each in self.differences],
            "unknown": list(self.unknown),
        }


def installed_engine(plan: Plan, release: Optional[ReleaseDirectory]) -> Dict[str, Any]:
    distribution = plan.engine.get("distribution")
    if not distribution:
        return {}
    try:
        found = ground.installed(ground.start_of(plan, release))
    except (startup.NoPython, ground.NoAnswer) as error:
        return {"error": str(error)}
    if not found.place:
        return {"error": found.trouble}
    return {"distribution": distribution, "dist_info": found.place, **distributions.engine_files(found.place)}


def find_drift(home: ServerHome, wanted: Optional[Mapping[str, Any]]) -> Drift:
    """Compare the server with its release and the inventory. ``wanted``: {digest, server, files} of the inventory now.

    Takes some calls of nvidia-smi and a look at every file of the engine (not into it, unless it was touched). Never
    raises: records of another version of ours are compared as far as they can be read.
    """
    try:
        return _find_drift(home, wanted)
    except Exception as error:
        return Drift(unknown=(f"the comparison failed: {type(error).__name__}: {error}",))


def _find_drift(home: ServerHome, wanted: Optional[Mapping[str, Any]]) -> Drift:
    record = launcher.read_record(home)
    if record is None:
        return Drift()
    release = home.release(record["release"])
    stored = release.read_request()
    if stored is None:
        return Drift(unknown=(f"release {release.name} is damaged, or not on the node any more",))
    written = _manifest(release)
    if written is not None and "files" not in written:
        return Drift(unknown=(f"release {release.name} was not made by lamplighter",))
    deployed = read_json(home.deployed) or {}
    if any(deployed.get(name) != record.get(name) for name in ("run", "attempt", "release")):
        deployed = {}
    now = launcher.present(record)
    found: List[Difference] = []
    unknown: List[str] = []
    if wanted is not None:
        found += _from_inventory(wanted, release, stored["server"])
    if written is None and (wanted is None or wanted["digest"] != release.digest):
        unknown.append(f"files of release {release.name}: its release.json cannot be read")
    found += [
        *in_release(release, wanted),
        *_in_env_mode(release),
        *_beside_the_release(release),
        *_in_current(home, record),
    ]
    if now.main is not None:
        found += _in_process(home, now.main, deployed, unknown)
        found += in_environment(scope.live_report(home), unknown)
    else:
        found += _in_its_place(record, deployed)
    found += _in_engine(deployed, unknown)
    found += _in_driver(deployed, unknown)
    found += [*_in_unit(home, record), *_in_drop_ins(home, deployed)]
    if not record.get("ready"):
        unknown.append("argv, engine and driver: the last start has not become ready")
    elif not deployed:
        unknown.append("argv, engine and driver: not written down when this release became ready")
    return Drift(tuple(found), tuple(unknown))


def since_deploy(home: ServerHome, found: Drift) -> List[Difference]:
    """Return the differences that another deploy could fix: not what was so right after the last one already.

    A variable that the server itself overwrites is so again after every deploy.
    """
    written = (read_json(home.deployed, environment=list) or {"environment": ()})["environment"]
    known = [tuple(pair) for pair in written if isinstance(pair, list)]
    return [
        each
        for each in found.differences
        if each.kind != differences.ENVIRONMENT or (each.name, each.found) not in known
    ]


def _from_inventory(
    wanted: Mapping[str, Any], release: ReleaseDirectory, deployed: Mapping[str, Any]
) -> List[Difference]:
    if wanted["digest"] == release.digest:
        return []
    found = differences.of_plans(wanted["server"], deployed)
    if not found:  # another template, or another version of lamplighter
        now = {name: entry["sha256"] for name, entry in recorded_files(release).items()}
        asked = {name: digest for name, digest in wanted["files"].items() if name != "release.json"}
        found = differences.of_digests(differences.INVENTORY, asked, dict(now))
    return found or [Difference(differences.INVENTORY, "release", wanted["digest"], release.digest)]


def _manifest(release: ReleaseDirectory) -> Optional[Dict[str, Any]]:
    """Return the release's ``release.json``; None where it is missing or damaged."""
    written = read_json(os.path.join(release.path, "release.json"))
    listed = (written or {}).get("files", {})
    entries = listed.values() if isinstance(listed, dict) else (None,)
    is_whole = all(
        isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and isinstance(entry.get("mode"), str)
        for entry in entries
    )
    return written if is_whole else None


def recorded_files(release: ReleaseDirectory) -> Dict[str, Any]:
    return dict((_manifest(release) or {}).get("files") or {})


def in_release(release: ReleaseDirectory, wanted: Optional[Mapping[str, Any]]) -> List[Difference]:
    """Compare the files of the release with their digests; the inventory knows them, too, where it is the same."""
    recorded = recorded_files(release)
    digests = {name: entry["sha256"] for name, entry in recorded.items()}
    if wanted is not None and wanted["digest"] == release.digest:
        digests = dict(wanted["files"])
    now = {name: _sha256(os.path.join(release.path, name)) for name in digests}
    modes = {f"{name} mode": entry["mode"] for name, entry in recorded.items() if now.get(name) is not None}
    modes_now = {name: mode_of(os.path.join(release.path, name[: -len(" mode")])) for name in modes}
    found = differences.of_digests(differences.RELEASE, digests, now)
    return found + differences.of_digests(differences.RELEASE, modes, modes_now)


def damage(release: ReleaseDirectory) -> List[Difference]:
    """Return what of a release is no longer as it was written, or gone; nothing is known of what has no digests."""
    return in_release(release, None) + ([] if os.path.isfile(release.env) else _in_env_mode(release))


def _in_env_mode(release: ReleaseDirectory) -> List[Difference]:
    """The file of secrets, which every release has: no digest knows what is in it, its mode is always the same."""
    return differences.of_digests(differences.RELEASE, {"env mode": "0600"}, {"env mode": mode_of(release.env)})


def _beside_the_release(release: ReleaseDirectory) -> List[Difference]:
    """Find what was put where the server imports from; bytecode is Python's own."""
    directory = os.path.join(release.path, "pysite")
    try:
        added = sorted(set(os.listdir(directory)) - {"sitecustomize.py", "__pycache__"})
    except OSError:
        return []
    now = {f"pysite/{name}": _sha256(os.path.join(directory, name)) or "no file" for name in added}
    return differences.of_digests(differences.RELEASE, {}, dict(now))


def _in_current(home: ServerHome, record: Mapping[str, Any]) -> List[Difference]:
    """What the next start, and a rollback, take for the release that became ready last."""
    if not record.get("ready"):
        return []
    current = home.current_release()
    found = current.name if current is not None else None
    return [] if found == record["release"] else [Difference(differences.RELEASE, "current", record["release"], found)]


def _sha256(path: str) -> Optional[str]:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None


def mode_of(path: str) -> Optional[str]:
    try:
        return f"{os.stat(path).st_mode & 0o7777:04o}"
    except OSError:
        return None


def _in_process(
    home: ServerHome, main: processes.Identity, deployed: Mapping[str, Any], unknown: List[str]
) -> List[Difference]:
    process = processes.read_process(main.pid)
    if process is None or not deployed.get("argv"):
        return []
    if not process.argv:
        unknown.append(f"argv of pid {main.pid}: it shows none")
        return []
    shown = confidential.of_homes([home]).hide(process.argv)
    return differences.of_words(differences.ARGV, "argv", deployed["argv"], shown)


def _in_its_place(record: Mapping[str, Any], deployed: Mapping[str, Any]) -> List[Difference]:
    """Compare what listens on the port of a server that is gone: it may have been started by hand."""
    for pid in ports.owners(int(record["port"])):
        process = processes.read_process(pid)
        if process is not None:
            name = f"process on port {record['port']}"
            other = Difference(differences.PROCESS, name, f"pid {record['pid']}", f"pid {pid} ({process.title})")
            known, shown = deployed.get("argv"), arguments.without_secrets(process.argv, differences.HIDDEN)
            return [other, *(differences.of_words(differences.ARGV, "argv", known, shown) if known else ())]
    return []


def in_environment(report: Mapping[str, Any], unknown: List[str]) -> List[Difference]:
    if report["state"] == "inconclusive":
        unknown.append(f"environment: {report['message']}")
    return [
        Difference(
            differences.ENVIRONMENT,
            each["name"],
            each["expected"],
            each["found"],
            f"{each['title']}, pid {each['pid']}: {each['by']}",
        )
        for each in report["differences"]
    ]


def _in_engine(deployed: Mapping[str, Any], unknown: List[str]) -> List[Difference]:
    known = deployed.get("engine") or {}
    if not known:
        return []
    if known.get("error"):
        unknown.append(f"engine: {known['error']}")
    if not known.get("dist_info"):
        return []
    now = _engine_now(known)
    return differences.of_engine(known, now, known["distribution"])


def _engine_now(known: Mapping[str, Any]) -> Dict[str, Any]:
    """Look at the engine again; after an upgrade its metadata lies in a directory of another name beside the old."""
    site = os.path.dirname(known["dist_info"])
    place = distributions.find_distribution([site], known["distribution"])
    if place is None:
        return {"version": None}
    same = distributions.version_in(place) == known.get("version")
    return distributions.engine_files(place, known) if same else {"version": distributions.version_in(place)}


def _in_driver(deployed: Mapping[str, Any], unknown: List[str]) -> List[Difference]:
    known = deployed.get("driver") or {}
    if not any(known.values()):
        return []
    now = driver.versions()
    if known.get("library") is not None and now["library"] is None:
        unknown.append("driver: nvidia-smi does not tell its version")
        now["library"] = known["library"]
    names = {"module": "driver (kernel module)", "library": "driver (nvidia-smi)"}
    return [
        Difference(differences.DRIVER, names[key], known.get(key), now[key])
        for key in names
        if known.get(key) != now[key] and known.get(key) is not None
    ]


def _in_unit(home: ServerHome, record: Mapping[str, Any]) -> List[Difference]:
    committed = systemd.remembered(home)
    unit = unit_in(committed)
    if unit is None or not record.get("unit") or not committed.get("text"):
        return []
    path = os.path.join(systemd.Manager(unit.manager_uid).directory, unit.name)
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            text: Optional[str] = file.read()
    except OSError:
        text = None
    return differences.of_units(committed["text"], text, unit.name)


def drop_ins(home: ServerHome) -> Dict[str, str]:
    """Read what `systemctl edit` and administrators add to the unit; ours, there for a moment only, is none."""
    unit = unit_in(read_json(home.unit) or {})
    if unit is None:
        return {}
    manager = systemd.Manager(unit.manager_uid)
    found = {}
    for place in (manager.directory, manager.runtime_directory):
        directory = os.path.join(place, f"{unit.name}.d")
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(directory)):
                if name.endswith(".conf") and name != systemd.HOLD:
                    with open(os.path.join(directory, name), encoding="utf-8", errors="replace") as file:
                        found[f"{unit.name}.d/{name}"] = file.read()
    return found


def _in_drop_ins(home: ServerHome, deployed: Mapping[str, Any]) -> List[Difference]:
    before = deployed.get("drop_ins")
    if before is None:  # nothing was written down when the release became ready
        return []
    now = drop_ins(home)
    names = sorted({*before, *now})
    return [each for name in names for each in differences.of_drop_in(before.get(name), now.get(name), name)]


# ----------------------------------------------------------------------------------------------------------- facts
