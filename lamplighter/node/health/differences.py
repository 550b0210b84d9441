"""Where a server is not what it should be any more: every difference with a name and both values. Pure.

Three things are held against each other: what the inventory wants now, what was written down when the release became
ready (*deployed*), and what lives on the node. Which of the two sides of a difference is right is for people to say.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Mapping, Optional, Sequence

from lamplighter.node import arguments
from lamplighter.node.confidential import looks_secret

#: Kinds, in the order in which they are told.
INVENTORY, PROCESS, ARGV, ENVIRONMENT, RELEASE, ENGINE, DRIVER, UNIT = (
    "inventory", "process", "argv", "environment", "release", "engine", "driver", "unit",
)  # fmt: skip

HIDDEN = "(hidden)"
#: How a word of a command line looks that is a secret of the inventory's.
_HELD = "$LAMPLIGHTER_"


@dataclasses.dataclass(frozen=True)
class Difference:
    """``name`` should be ``wanted`` and is ``found``; None: there is none. ``by`` says more where that is known."""

    kind: str
    name: str
    wanted: Optional[str]
    found: Optional[str]
    by: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {_said(self.wanted)} -> {_said(self.found)}" + (f" ({self.by})" if self.by else "")

    def to_json(self) -> Dict[str, Any]:
        return dataclasses.asdict(self)


def _said(value: Optional[str]) -> str:
    return "nothing" if value is None else value if value.startswith("(") else repr(value)


def of_plans(wanted: Mapping[str, Any], deployed: Mapping[str, Any]) -> List[Difference]:
    """Compare what the inventory says now with what it said when the release was made; only keys of ``wanted``."""
    found: List[Difference] = []
    for key in sorted(wanted.keys() - {"argv_secrets"}):  # places of words, which argv shows itself
        if key == "argv":
            found += of_words(INVENTORY, "args", wanted[key], deployed.get(key) or ())
        elif wanted[key] != deployed.get(key):
            found += _of_mappings(INVENTORY, _flat(key, wanted[key]), _flat(key, deployed.get(key)))
    return found


def of_words(kind: str, prefix: str, wanted: Sequence[str], found: Sequence[str]) -> List[Difference]:
    """Compare two command lines flag by flag.

    Beside the name of a secret of the inventory's no value is shown, nor one that looks like a secret itself.
    """
    one, two = (arguments.by_flag(words, "(set)") for words in (wanted, found))
    differences = _of_mappings(kind, one, two)
    if not differences and list(wanted) != list(found):
        differences = [Difference(kind, "order of arguments", " ".join(wanted), " ".join(found))]
    return [
        dataclasses.replace(
            each,
            name=f"{prefix} {each.name}",
            wanted=_hide(each.name, each.wanted, each.found),
            found=_hide(each.name, each.found, each.wanted),
        )
        for each in differences
    ]


def _hide(flag: str, value: Optional[str], other: Optional[str]) -> Optional[str]:
    if value is None or value.startswith(_HELD):
        return value
    is_beside_secret = other is not None and other.startswith(_HELD)
    return HIDDEN if is_beside_secret or looks_secret(flag, value) else value


def _flat(name: str, value: Any) -> Dict[str, str]:
    """Turn nested values into dotted names; an {value, mode: default} of the environment is its value."""
    if isinstance(value, Mapping):
        if set(value) == {"value", "mode"}:
            return {name: value["value"] + (" (forced)" if value["mode"] == "force" else "")}
        return {deep: text for key in value for deep, text in _flat(f"{name}.{key}", value[key]).items()}
    return {} if value is None else {name: value if isinstance(value, str) else str(value)}


def _of_mappings(kind: str, wanted: Mapping[str, str], found: Mapping[str, str]) -> List[Difference]:
    names = dict.fromkeys([*wanted, *found])
    differing = [name for name in names if wanted.get(name) != found.get(name)]
    return [Difference(kind, name, wanted.get(name), found.get(name)) for name in differing]


def of_digests(kind: str, wanted: Mapping[str, str], found: Mapping[str, Optional[str]]) -> List[Difference]:
    """Compare digests of files, by name; None: the file is gone. Digests are shown short."""
    return [
        Difference(kind, name, _short(wanted.get(name)), _short(found.get(name)))
        for name in sorted({*wanted, *found})
        if wanted.get(name) != found.get(name)
    ]


def _short(digest: Optional[str]) -> Optional[str]:
    if digest is None:
        return None
    word = digest.partition("=")[2] or digest
    return word if " " in word else word[:12]


def of_engine(deployed: Mapping[str, Any], now: Mapping[str, Any], distribution: str) -> List[Difference]:
    """Compare the installed engine with what was installed when the release became ready: version, then its files."""
    if deployed.get("version") != now.get("version"):
        by = "the server still runs what it has loaded" if now.get("version") else "it is not where it was"
        return [Difference(ENGINE, f"{distribution} version", deployed.get("version"), now.get("version"), by)]
    if bool(now.get("error")) != bool(deployed.get("error")):
        known = "(files as in RECORD)"
        name = f"{distribution} installation"
        return [Difference(ENGINE, name, deployed.get("error") or known, now.get("error") or known)]
    if now.get("error"):
        return []
    return of_changes(deployed, now)


def of_changes(deployed: Mapping[str, Any], now: Mapping[str, Any]) -> List[Difference]:
    """Compare two answers of ``facts.engine_files``: which files hold something else than they did then."""
    before, after = dict(deployed.get("changed") or {}), dict(now.get("changed") or {})
    gone = set(now.get("missing") or ()) - set(deployed.get("missing") or ())
    back = set(deployed.get("missing") or ()) - set(now.get("missing") or ())
    as_recorded = "(as in RECORD)"
    return [
        Difference(
            ENGINE,
            name,
            None if name in back else _short(before.get(name)) or as_recorded,
            None if name in gone else _short(after.get(name)) or as_recorded,
        )
        for name in sorted({*before, *after, *gone, *back})
        if before.get(name) != after.get(name) or name in gone or name in back
    ]


def of_units(committed: str, now: Optional[str], name: str) -> List[Difference]:
    """Compare a unit file with what we wrote, setting by setting; comments and the order of lines do not count."""
    if now is None:
        return [Difference(UNIT, name, "(as committed)", None)]
    return [
        dataclasses.replace(each, name=f"{name} {each.name}")
        for each in _of_mappings(UNIT, _settings(committed), _settings(now))
    ]


def of_drop_in(before: Optional[str], now: Optional[str], name: str) -> List[Difference]:
    """Compare a unit's drop-in with what it was at the deploy, setting by setting; None: there is, or was, none."""
    found = of_units(before or "", now or "", name)
    return found or ([Difference(UNIT, name, before, now)] if (before is None) != (now is None) else [])


def _settings(text: str) -> Dict[str, str]:
    found: Dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.strip().partition("=")
        if equals and key[:1] not in "#;":
            found[key] = f"{found[key]} | {value}" if key in found else value
    return found
