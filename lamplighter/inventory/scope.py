"""What a template may name, and which values are templates: what is known of them without Jinja.

Jinja costs 50 ms to import, and an inventory without templates does without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lamplighter.inventory.values import Sealed, Value

_MARKS = ("{{", "{%", "{#")
NO_TEMPLATE = " (!unsafe makes it mere text)"
#: How the message ends about a name that nobody has given a value.
UNDEFINED = f"is undefined{NO_TEMPLATE}"


@dataclass(frozen=True)
class Scope:
    """What the templates of one host may name: its variables, unfilled, and the names that Ansible itself gives it."""

    host: str
    variables: Mapping[str, Value]
    magic: Mapping[str, object] = field(default_factory=dict)


def is_template(text: str) -> bool:
    """Whether Jinja would do something to this text."""
    return any(mark in text for mark in _MARKS)


def is_open(value: Value) -> bool:
    """Whether there is something to fill in, or to open, in a value that has no parts."""
    if isinstance(value.data, Sealed) or value.sealed:
        return True
    return isinstance(value.data, str) and not value.is_text and is_template(value.data)


def has_open(value: Value) -> bool:
    """Whether there is something to fill in, or to open, in a value or a part of it."""
    if value.entries is not None:
        return any(map(has_open, value.entries.values()))
    if isinstance(value.data, tuple):
        return any(has_open(each) for each in value.data if isinstance(each, Value))
    return is_open(value)
