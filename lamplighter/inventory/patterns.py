"""Ansible's host patterns over known hosts and groups.

A name that no host or group has is an error, where Ansible only warns: ``all:!gpu1`` with a typing
mistake would deploy to gpu1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from lamplighter.errors import UsageError
from lamplighter.inventory.names import is_address, split_port
from lamplighter.inventory.values import Origin, did_you_mean

_SUBSCRIPT = re.compile(r"(.+)\[(?:(-?\d+)|(\d+)[:-](\d*))\]", re.DOTALL)
_PIECE = re.compile(r"(?:[^\s:\[\]]|\[[^\]]*\])+")
_GLOB = (".", "?", "*", "[")


class Patterns:
    """What patterns choose; ``places`` says where each group is named, for those that turn out to be empty."""

    def __init__(
        self, hosts: Sequence[str], groups: Mapping[str, Sequence[str]], places: Mapping[str, Origin] | None = None
    ) -> None:
        self.hosts = hosts
        self.names = frozenset(hosts)
        self.groups = groups
        self.places = places or {}

    def select(self, patterns: Sequence[str]) -> list[str]:
        """The hosts that patterns name, in the order in which they name them, groups in their own order."""
        pieces = [piece for pattern in patterns for piece in _pieces_of(pattern)]
        if not pieces:
            raise UsageError("no host was named", next_step="name hosts, groups or patterns with --host; `all` for all")
        wanted = [piece for piece in pieces if piece[0] not in "!&"] or ["all"]
        chosen = list(dict.fromkeys(host for piece in wanted for host in self._matches(piece)))
        for piece in pieces:
            if piece[0] == "&":
                also = set(self._matches(piece[1:]))
                chosen = [host for host in chosen if host in also]
        for piece in pieces:
            if piece[0] == "!":
                never = set(self._matches(piece[1:]))
                chosen = [host for host in chosen if host not in never]
        if not chosen:
            raise UsageError(
                f"no host fits {','.join(patterns)!r}",
                why="; ".join(self._emptiness(piece.lstrip("!&")) for piece in pieces if self._is_empty(piece)),
                next_step=f"the inventory has {_listed(self.hosts)}",
            )
        return chosen

    def _matches(self, pattern: str) -> Sequence[str]:
        if pattern in self.names:  # before a group of the same name
            return [pattern]
        if pattern.startswith("~"):
            return self._by_expression(pattern[1:])
        subscript = _SUBSCRIPT.fullmatch(pattern)
        if subscript is None:
            return self._by_name(pattern)
        found = self._by_name(subscript[1])
        if subscript[2] is None:
            last = int(subscript[4]) + 1 if subscript[4] else len(found)
            return found[int(subscript[3]) : last]
        index = int(subscript[2])
        if found and not -len(found) <= index < len(found):
            raise UsageError(f"{pattern}: there is no such host: {subscript[1]} has {len(found)}, counted from 0")
        return [found[index]] if found else []

    def _by_name(self, pattern: str) -> Sequence[str]:
        """Members of the groups that fit, then hosts. A subscript counts in this order, also those that come again."""
        is_glob = any(each in pattern for each in _GLOB)
        groups = [name for name in self.groups if fnmatchcase(name, pattern)] if is_glob else [pattern]
        known = [name for name in groups if name in self.groups]
        found = [host for name in known for host in self.groups[name]]
        if is_glob:
            return found + [host for host in self.hosts if fnmatchcase(host, pattern)]
        if not known and pattern in self.names:
            return [pattern]
        if not known:
            raise self._unknown(pattern)
        return found

    def _by_expression(self, text: str) -> Sequence[str]:
        try:
            expression = re.compile(text)
        except re.error as error:
            raise UsageError(
                f"~{text} is no regular expression: {error}", next_step="`,` and `:` end a pattern, in brackets too"
            ) from error
        found = [host for name in self.groups if expression.match(name) for host in self.groups[name]]
        return found + [host for host in self.hosts if expression.match(host)]

    def _unknown(self, pattern: str) -> UsageError:
        hint = did_you_mean(pattern, [*self.hosts, *self.groups], cutoff=0.7)  # `nope` is not `ungrouped`
        return UsageError(
            f"no host or group {pattern!r} in the inventory{hint}",
            why="beside a comma, `:` parts nothing: write commas alone" if ":" in pattern else "",
            next_step=f"the inventory has {_listed(self.hosts)}",
        )

    def _is_empty(self, piece: str) -> bool:
        return piece[0] != "!" and piece.lstrip("&") in self.places and not self.groups[piece.lstrip("&")]

    def _emptiness(self, name: str) -> str:
        return f"{name} is a group without hosts ({self.places[name]}): a host stands under `hosts`"


def _pieces_of(pattern: str) -> list[str]:
    """The pieces of one ``--host``; those in a file for ``@FILE``, a pattern a line."""
    if not pattern.startswith("@"):
        return split_pattern(pattern)
    path = Path(pattern[1:])
    try:
        if not path.is_file():
            what = "that is no regular file" if path.exists() else "there is no such file"
            raise UsageError(f"{pattern}: {what}", next_step="a file has one host, group or pattern a line")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"{pattern} cannot be read: {why}") from error
    return [piece for line in lines if not line.lstrip().startswith("#") for piece in split_pattern(line)]


def split_pattern(pattern: str) -> list[str]:
    """The pieces of a pattern: between commas where it has some, else between ``:``, and an address is one piece.

    Raises UsageError for brackets that do not pair.
    """
    if "," in pattern:
        pieces = pattern.split(",")
    elif is_address(split_port(pattern.strip())[0]):
        pieces = [pattern]
    else:
        pieces = _PIECE.findall(pattern)
        if re.sub(r"[\s:]", "", _PIECE.sub("", pattern)):
            raise UsageError(f"{pattern}: a bracket has no other half", next_step="write group[0] or gpu[12]*")
    return [stripped for stripped in (piece.strip() for piece in pieces) if stripped.strip("!&:")]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return shown or "no hosts"
