"""Names of hosts as they are written: ranges (``gpu[1:8]``), ports (``gpu1:2222``) and addresses.

Pure. ``split_port`` and ``expand_range`` take what Ansible takes; they raise ValueError with what is wrong.
"""

from __future__ import annotations

import ipaddress
import re
import string

_RANGE = re.compile(r"\[([^\[\]]*)\]")
_WITH_PORT = re.compile(r"((?:[^:\[\]]|\[[^\]]*\])*):([0-9]+)")
_IN_BRACKETS_WITH_PORT = re.compile(r"\[(.+)\]:([0-9]+)")
_LABEL = re.compile(
    r"(?:\w|\[(?:[a-z]:[a-z]|[0-9]+:[0-9]+)(?::[0-9]+)?\])"  # begins with no dash
    r"(?:[\w-]|\[(?:[a-z]:[a-z]|[0-9]+:[0-9]+)(?::[0-9]+)?\])*(?<![_-])",
    re.IGNORECASE,
)
#: What may stand where ssh wants a host: a name, an address, or either behind ``user@``.
PLACE = re.compile(r"[\w\[][\w.:%@\[\]-]*|::[\w.:%]*")
#: Far above any real inventory: a range with two digits too many is refused before it eats the memory.
MOST_HOSTS = 100_000


def split_port(written: str) -> tuple[str, int | None]:
    """``gpu1:2222`` as name and port; what is no such thing is all name, an address of IPv6 too."""
    found = _IN_BRACKETS_WITH_PORT.fullmatch(written) or _WITH_PORT.fullmatch(written)
    name, port = (found[1], int(found[2][-6:])) if found else (written, None)
    return (name, port) if is_address(name) else (written, None)


def is_address(written: str) -> bool:
    """Whether this is a host name or an IP address, ranges allowed."""
    try:
        ipaddress.ip_address(_RANGE.sub("1", written))
    except ValueError:
        return all(_LABEL.fullmatch(part) for part in written.split("."))
    return True


def expand_range(written: str) -> list[str]:
    """The names that ``gpu[1:8]``, ``gpu[01:16:5]`` or ``rack[a:c]`` stand for; both ends count. Raises ValueError."""
    if "[" not in written:
        return [written]
    match = _RANGE.search(written)
    parts = match[1].split(":") if match else []
    if match is None or len(parts) not in (2, 3):
        raise ValueError("a range is [first:last] or [first:last:step]")
    items = _between(parts[0] or "0", parts[1], parts[2] if len(parts) == 3 else "1")
    rest = expand_range(written[match.end() :])
    if len(items) * len(rest) > MOST_HOSTS:
        raise ValueError(f"the range stands for more than {MOST_HOSTS} hosts")
    return [f"{written[: match.start()]}{item}{tail}" for item in items for tail in rest]


def _between(first: str, last: str, step: str) -> list[str]:
    if not (step.isascii() and step.isdigit() and int(step[:9]) > 0):
        raise ValueError("the step of a range is a number above 0")
    if first.isascii() and first.isdigit() and last.isascii() and last.isdigit():
        padded = first.startswith("0") and len(first) > 1
        if padded and len(first) != len(last):
            raise ValueError("with a leading zero both ends of a range have the same number of digits")
        if max(len(first), len(last)) > 18:
            raise ValueError(f"the range stands for more than {MOST_HOSTS} hosts")
        numbers = range(int(first), int(last) + 1, int(step[:9]))
        # A range far too long must not be written out before it is refused.
        items = [str(each).zfill(len(first) if padded else 0) for each in numbers[: MOST_HOSTS + 1]]
    elif re.fullmatch("[a-zA-Z]{2}", first + last):
        letters = string.ascii_letters
        items = list(letters[letters.index(first) : letters.index(last) + 1 : int(step[:9])])
    else:
        raise ValueError("the ends of a range are two numbers or two letters")
    if not items:
        raise ValueError("the range is empty: its end comes before its beginning")
    return items
