"""What a deploy would change: a release held against the one that is on the node. Pure; no secret is in either.

The node tells of its release the plan and the files; of a secret both sides know only the name, and the node says which
have another value.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lamplighter.inventory.schema import TREATMENT
from lamplighter.node import arguments
from lamplighter.release.release import Release

#: Told apart from the other settings, or made of them.
_APART = ("argv", "argv_secrets", "env", "secrets")


@dataclass(frozen=True)
class Change:
    """One thing that would change: None where there was, or will be, nothing."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Changes:
    """All that would change, by what it is; ``files`` are unified diffs by name. False where there is nothing."""

    argv: tuple[Change, ...]
    variables: tuple[Change, ...]
    secrets: tuple[Change, ...]
    settings: tuple[Change, ...]
    files: Mapping[str, str]
    restarts: bool

    def __bool__(self) -> bool:
        return bool(self.argv or self.variables or self.secrets or self.settings or self.files)

    def to_json(self) -> dict[str, Any]:
        """JSON-safe."""
        return asdict(self)


def _secret(name: str, old: Collection[str], new: Collection[str]) -> Change:
    after = "(another value)" if name in old else "(secret)"
    return Change(name, "(secret)" if name in old else None, after if name in new else None)


def compare(release: Release, current: Mapping[str, Any] | None, changed_secrets: Sequence[str]) -> Changes:
    """What of ``current`` (``digest``, ``server`` and ``files`` of a release on the node) ``release`` would change.

    ``changed_secrets`` are names of secrets that have another value there, or none.
    """
    old: Mapping[str, Any] = (current or {}).get("server") or {}
    new: Mapping[str, Any] = release.manifest["server"]
    argv = _changes(arguments.by_flag(old.get("argv") or (), ""), arguments.by_flag(new["argv"], ""))
    if not argv and list(old.get("argv") or ()) != list(new["argv"]):
        argv = (Change("order of arguments", " ".join(old["argv"]), " ".join(new["argv"])),)
    names = {*changed_secrets, *(set(old.get("secrets") or ()) ^ set(new["secrets"]))}
    secrets = tuple(_secret(name, _secret_names(old), _secret_names(new)) for name in sorted(names))
    settings = _changes(_flat(old), _flat(new))
    files = _diffs(current or {}, release)
    treated = all(change.name.partition(".")[0] in TREATMENT for change in settings)
    variables = _changes(_variables(old), _variables(new))
    return Changes(
        argv, variables, secrets, settings, files, bool(argv or variables or secrets or files or not treated)
    )


def _secret_names(plan: Mapping[str, Any]) -> set[str]:
    return {*(plan.get("secrets") or ()), *(plan.get("argv_secrets") or ())}


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Change, ...]:
    names = dict.fromkeys([*before, *after])
    return tuple(
        Change(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)
    )


def _variables(plan: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: entry["value"] + (" (forced)" if entry["mode"] == "force" else "")
        for name, entry in (plan.get("env") or {}).items()
    }


def _flat(plan: Mapping[str, Any], above: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in plan.items():
        if not above and key in _APART:
            continue
        if isinstance(value, Mapping):
            found |= _flat(value, f"{above}{key}.")
        elif value is not None:
            found[f"{above}{key}"] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return found


def _diffs(current: Mapping[str, Any], release: Release) -> dict[str, str]:
    """Unified diffs of the files. Each names its own release, which is no difference; release.json only repeats."""
    old: Mapping[str, str] = current.get("files") or {}
    was, will = str(current.get("digest") or ""), release.digest
    found = {}
    for name in sorted({*old, *release.files} - {"release.json"}):
        before = old[name].replace(was, will) if was and name in old else old.get(name, "")
        after = release.files[name].text if name in release.files else ""
        lines = difflib.unified_diff(
            before.splitlines(), after.splitlines(), f"{name} on the node", f"{name} to deploy", lineterm="", n=2
        )
        if text := "\n".join(lines):
            found[name] = text
    return found
