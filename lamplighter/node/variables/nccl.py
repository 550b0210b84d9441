"""What NCCL itself says of the variables that it has read: lines of a server's log, by process. Pure.

facts: ``gpu1:1631:1631 [0] NCCL INFO NCCL_PROTO set by environment to LL`` for words, a number ends with a full stop;
engines put their own prefix in front. With one rank NCCL_PROTO and NCCL_ALGO are not read. The lines of
/etc/nccl.conf look the same, and the environment wins over it.
"""

from __future__ import annotations

import re
from typing import Dict, Iterable

_LINE = re.compile(
    r"[\w.-]+:(?P<pid>\d+):\d+ (?:\[-?\d+\] )?NCCL INFO (?P<name>NCCL_\w+) set (?:by environment )?to (?P<value>.*)"
)


def variables(lines: Iterable[str]) -> Dict[int, Dict[str, str]]:
    """Return, for every pid that speaks, the variables that NCCL read and their values, as it writes them."""
    found: Dict[int, Dict[str, str]] = {}
    for line in lines:
        told = _LINE.search(line) if "NCCL INFO NCCL_" in line else None
        if told:
            found.setdefault(int(told.group("pid")), {})[told.group("name")] = told.group("value").rstrip()
    return found


def is_same(given: str, logged: str) -> bool:
    """Tell whether NCCL took ``given`` as it stands: numbers are read as C does, and logged in decimal with a stop."""
    if given == logged:
        return True
    number = re.fullmatch(r"(-?\d+)\.", logged)
    if number is None:
        return False
    text = given.strip()
    base = 16 if re.match(r"[+-]?0[xX]", text) else 8 if re.match(r"[+-]?0\d", text) else 10
    try:
        return int(text, base) == int(number.group(1))
    except ValueError:
        return False
