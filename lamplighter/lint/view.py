"""One server as the rules see it: engine, version, variables and arguments, immutable; and what a rule says of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lamplighter.lint.knowledge import Knowledge
from lamplighter.node import arguments

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Entry:
    """One variable: its text, None for a secret; ``forced`` is assigned by sitecustomize in every process."""

    value: str | None
    forced: bool = False


@dataclass(frozen=True)
class Finding:
    """What a rule found wrong with a variable, or with a flag (``--name``); ``instead`` is what to write."""

    id: str
    level: Level
    name: str
    message: str
    instead: str = ""


def error(kind: str, name: str, message: str, instead: str = "") -> Finding:
    """A finding that stops a deploy."""
    return Finding(kind, "error", name, message, instead)


def warning(kind: str, name: str, message: str, instead: str = "") -> Finding:
    """A finding that stops nothing."""
    return Finding(kind, "warning", name, message, instead)


@dataclass(frozen=True)
class View:
    """A server for the rules.

    ``argv`` begins behind the words that start the engine; ``extra`` are those of them that no setting gave a name.
    ``settings``: flags that have a setting of their own, with its name and what it says. ``gpus``: how many, where that
    is told.
    """

    engine: Mapping[str, Any]
    known: Knowledge
    argv: tuple[str, ...] = ()
    env: Mapping[str, Entry] = field(default_factory=dict)
    stated_version: str | None = None
    extra: tuple[str, ...] = ()
    settings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    gpus: int | None = None
    nccl_proof: bool = False

    @property
    def version(self) -> str:
        """The engine's version; the newest known one where nobody says."""
        return self.stated_version or self.known.newest

    @property
    def called(self) -> str:
        """The engine as messages name it."""
        return f"{self.engine['name']} {self.stated_version}" if self.stated_version else str(self.engine["name"])

    def text(self, name: str) -> str:
        """The value of a variable without blanks around it; "" for one that is not set, or secret."""
        entry = self.env.get(name)
        return ((entry.value if entry else None) or "").strip()

    def number(self, name: str) -> int | None:
        """The value of a variable as NCCL reads it; None where it is no number, or not set."""
        return c_number(self.text(name))

    def value_of(self, flags: Collection[str]) -> str | None:
        """The value of the last of these flags; None where none is given."""
        return arguments.value_of(flags, self.argv)

    def whole(self, flags: Collection[str]) -> int | None:
        """The value of a flag, where it is a whole number."""
        value = self.value_of(flags) or ""
        return int(value) if value.isascii() and value.isdigit() and len(value) < _LONGEST_NUMBER else None

    def has(self, flags: Collection[str]) -> bool:
        """Whether one of these flags is given."""
        return arguments.has_any(flags, self.argv)

    @property
    def ranks(self) -> Mapping[str, Any]:
        """What the engine says of its ranks."""
        found: Mapping[str, Any] = (self.engine.get("needs") or {}).get("ranks") or {}
        return found

    @property
    def tensor_parallel(self) -> int:
        """Over how many GPUs each layer is spread: the first factor of the engine's ranks."""
        factors = self.ranks.get("factors") or ()
        return (self.whole(factors[0]["flags"]) or 1) if factors else 1


#: Digits: above that a number is beyond 64 bits in any base.
_LONGEST_NUMBER = 60

Rule = Callable[[View], Iterator[Finding]]


def c_number(text: str) -> int | None:
    """Read text as C does with base 0 (``010`` is 8); None for what is no number to its end."""
    found = re.fullmatch(r"([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)", text.strip())
    if found is None:
        return None
    digits = found[2]
    if len(digits) > _LONGEST_NUMBER:
        return int(f"{found[1]}1") << 64
    base = 16 if digits[:2] in ("0x", "0X") else 8 if digits.startswith("0") else 10
    return int(found[1] + digits, base)


def distance(one: str, other: str, most: int) -> int:
    """How many letters to insert, delete, replace or swap with their neighbour; ``most`` + 1 for more than ``most``."""
    if abs(len(one) - len(other)) > most:
        return most + 1
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, beside in enumerate(other, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != beside)))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == beside:
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        if min(row) > most:
            return most + 1
        rows.append(row)
    return min(rows[-1][-1], most + 1)


def nearest(name: str, known: Collection[str], most: int) -> str:
    """The known name that ``most`` mistakes of typing lead to, the closest one; "" where there is none."""
    found = sorted((distance(name, each, most), each) for each in known if abs(len(each) - len(name)) <= most)
    return found[0][1] if found and found[0][0] <= most else ""
