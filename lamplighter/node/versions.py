"""Versions of engines and libraries, compared by their numbers: 0.5.3.post1 counts as 0.5.3. Pure."""

from __future__ import annotations

import re
from typing import Optional, Tuple


def is_version_in(version: Optional[str], wanted: str) -> bool:
    """Say whether ``version`` lies in a range such as ``>=0.5.3,<0.5.5``; an unknown one lies in every range."""
    if version is None or wanted == "*":
        return True
    for part in wanted.split(","):
        operator, number = re.match(r"(<=|>=|<|>|==)(.*)", part).groups()  # type: ignore[union-attr]
        order = compare(version, number)
        if not {"<": order < 0, "<=": order <= 0, ">": order > 0, ">=": order >= 0, "==": order == 0}[operator]:
            return False
    return True


def compare(one: str, other: str) -> int:
    """Return -1, 0 or 1: the first is older, alike, newer."""
    mine, theirs = _numbers(one), _numbers(other)
    width = max(len(mine), len(theirs))
    mine, theirs = mine + (0,) * (width - len(mine)), theirs + (0,) * (width - len(theirs))
    return (mine > theirs) - (mine < theirs)


def _numbers(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version, maxsplit=1)[0]))
