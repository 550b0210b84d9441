"""Where the inventory says what a node speaks of: file and line of the settings and flags that its words name.

A node knows no inventory. Who reads that it refuses `--tp 3` wants to know which file says so. Pure, but for the roles
that are read where a flag is known to nobody.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from lamplighter.errors import InventoryError
from lamplighter.inventory import Host, Server
from lamplighter.project import Roles

#: The fields of an event or finding that are words for people.
_WORDS = ("message", "evidence", "hint")
_SETTING = re.compile(r"\bservers(?:\.[\w-]+)+")
_FLAG = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*)")
#: The cause that engine.yml gives to a parser's words about a flag that it does not know.
_UNKNOWN_FLAG = "unknown_flag"
#: More places than these help nobody.
MOST = 3


def with_places(told: Mapping[str, Any], host: Host, server: Server, roles: Roles) -> dict[str, Any]:
    """Return an event or a finding whose hint ends on where the inventory says what it names.

    Where a flag is refused that nobody knows, and the ``roles`` know one of nearly the same name, the hint has that.
    """
    words = " ".join(str(told.get(name) or "") for name in _WORDS)
    found = [f"{path} is set in {place}" for path, place in dict(_places(words, host, server)).items()]
    close = _meant(words, server, roles) if _UNKNOWN_FLAG in (told.get("cause"), told.get("id")) else ""
    return {**told, "hint": "; ".join(filter(None, [str(told.get("hint") or ""), close, *found[:MOST]]))}


def _places(words: str, host: Host, server: Server) -> Iterator[tuple[str, str]]:
    """The settings that the words name, and the places that set them; of a flag the key in ``args``."""
    given = {_dashed(name): name for name in server.args}
    for flag in _FLAG.findall(words):
        if _dashed(flag) in given:
            path = f"servers.{server.name}.args.{given[_dashed(flag)]}"
        elif any(str(word).partition("=")[0] == f"--{flag}" for word in server.extra_args):
            path = f"servers.{server.name}.extra_args"
        else:
            continue
        if (origin := host.origin(path)) is not None:
            yield path, str(origin)
    for path in _SETTING.findall(words):
        if (origin := host.origins.get(path)) is not None:
            yield path, str(origin)


def _meant(words: str, server: Server, roles: Roles) -> str:
    """Return a question for the flag that was meant, where the roles know one that is nearly the same."""
    from lamplighter.lint import load_knowledge
    from lamplighter.release.engine import load_engine

    try:
        ancestors = load_engine(server.engine, roles).compiled["ancestors"]
        known = sorted(load_knowledge(roles, (server.engine, *ancestors)).flags)
    except InventoryError:  # lint tells of that
        return ""
    for flag in map(_dashed, _FLAG.findall(words)):
        close = get_close_matches(f"--{flag}", known, n=1, cutoff=0.8)
        if close and close[0] != f"--{flag}":
            return f"did you mean {close[0]}?"
    return ""


def _dashed(flag: str) -> str:
    return flag.replace("_", "-")
