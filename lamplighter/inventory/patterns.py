"""Ansible's host patterns over known hosts and groups."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from lamplighter.errors import UsageError
from lamplighter.inventory.values import did_you_mean

_SUBSCRIPT = re.compile(r"(.+)\[(?:(-?\d+)|(\d+)[:-](\d*))\]", re.DOTALL)


class Patterns:
    """Ansible's host patterns over known hosts and groups."""

    def __init__(self, hosts: Sequence[str], groups: Mapping[str, Sequence[str]]) -> None:
        self.hosts = hosts
        self.groups = groups

    def select(self, patterns: Sequence[str]) -> list[str]:
        pieces = [piece for pattern in patterns for piece in split_pattern(pattern)]
        if not pieces:
            raise UsageError("no host was named", next_step="name hosts, groups or patterns with --host; `all` for all")
        wanted = [piece for piece in pieces if piece[0] not in "!&"]
        chosen = list(dict.fromkeys(host for piece in wanted or ["all"] for host in self._matches(piece)))
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
                f"no host fits {','.join(patterns)!r}", next_step=f"the inventory has {_listed(self.hosts, 'no hosts')}"
            )
        return chosen

    def _matches(self, pattern: str) -> Sequence[str]:
        if pattern.startswith("~"):
            return self._by_expression(pattern[1:])
        subscript = _SUBSCRIPT.fullmatch(pattern)
        # gpu[12]* is a glob, gpu[12] counts: as Ansible has it.
        if subscript:
            found = self._matches(subscript[1])
            if subscript[2] is not None:
                index = int(subscript[2])
                return [found[index]] if -len(found) <= index < len(found) else []
            last = int(subscript[4]) + 1 if subscript[4] else len(found)
            return found[int(subscript[3]) : last]
        if any(each in pattern for each in "*?["):
            groups = [name for name in self.groups if fnmatchcase(name, pattern)]
            return self._all_of(groups, [host for host in self.hosts if fnmatchcase(host, pattern)])
        if pattern in self.groups:
            return self.groups[pattern]
        if pattern in self.hosts:
            return [pattern]
        hint = did_you_mean(pattern, [*self.hosts, *self.groups], cutoff=0.7)  # `nope` is not `ungrouped`
        raise UsageError(
            f"no host or group {pattern!r} in the inventory{hint}",
            next_step=f"the inventory has {_listed(self.hosts, 'no hosts')}",
        )

    def _by_expression(self, text: str) -> Sequence[str]:
        try:
            expression = re.compile(text)
        except re.error as error:
            raise UsageError(f"~{text} is no regular expression: {error}") from error
        groups = [name for name in self.groups if expression.match(name)]
        return self._all_of(groups, [host for host in self.hosts if expression.match(host)])

    def _all_of(self, groups: Sequence[str], hosts: Sequence[str]) -> Sequence[str]:
        members = {host for group in groups for host in self.groups[group]}.union(hosts)
        return [host for host in self.hosts if host in members]


def split_pattern(pattern: str) -> list[str]:
    """The pieces between ``,`` and ``:`` of a pattern, except inside brackets of any kind and after a backslash."""
    pieces, piece, depth, escaped = [], "", 0, False
    for each in pattern:
        if escaped:
            piece, escaped = piece + each, False
            continue
        escaped = each == "\\"
        depth = max(0, depth + (each in "[({") - (each in "])}"))
        if each in ",:" and depth == 0:
            pieces.append(piece)
            piece = ""
        else:
            piece += each
    pieces.append(piece)
    return [stripped for stripped in (piece.strip() for piece in pieces) if stripped.strip("!&")]


def _listed(names: Sequence[str], nothing: str) -> str:
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return shown or nothing
