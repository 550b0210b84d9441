"""Values that remember the file and line they stand on, how they merge, and the problems found in them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from lamplighter.errors import InventoryError
from lamplighter.paths import at_home


@dataclass(frozen=True, order=True, slots=True)
class Origin:
    """Where a value is written; ``str()`` is ``file:line``, or the file alone when no line applies."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class SecretRef:
    """Names a secret without holding it: ``env:NAME`` of the control machine or ``file:PATH`` on it.

    A relative path counts from the directory of the YAML file. Only ``resolve`` ever sees the value.
    """

    source: str
    name: str
    origin: Origin = field(default=Origin("inventory"), compare=False)
    directory: Path = field(default=Path(), compare=False)

    def __str__(self) -> str:
        return f"!secret {self.source}:{self.name}"

    __repr__ = __str__

    def resolve(self) -> str:
        """The secret itself. Raises InventoryError (which never quotes it) when it is absent, empty or not text."""
        value = self._from_environment() if self.source == "env" else self._from_file()
        if not value:
            raise InventoryError(f"{self} is empty", origin=self.origin, next_step=self._advice())
        if "\0" in value:
            raise InventoryError(f"{self} holds a NUL byte, which no environment can carry", origin=self.origin)
        return value

    def _from_environment(self) -> str:
        if self.name not in os.environ:
            raise InventoryError(
                f"{self}: the environment variable is not set", origin=self.origin, next_step=self._advice()
            )
        value = os.environ[self.name]
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:  # `from None` below and here: the cause would carry the value into a traceback
            raise InventoryError(f"{self} is not UTF-8 text", origin=self.origin) from None
        return value

    def _from_file(self) -> str:
        path = self.directory / at_home(self.name)
        try:
            value = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            raise InventoryError(f"{self} is not UTF-8 text", origin=self.origin) from None
        except OSError as error:
            raise InventoryError(
                f"{self}: {path} cannot be read: {error.strerror}", origin=self.origin, next_step=self._advice()
            ) from None
        # Editors and `echo` end a file with a newline that is no part of the secret.
        return value.removesuffix("\n").removesuffix("\r")

    def _advice(self) -> str:
        if self.source == "env":
            return f"export {self.name} on this machine before the run"
        return "put the secret into that file on this machine, readable by you alone"


class SecretMissing(InventoryError):
    """A secret that cannot be had on this machine; never quotes it."""

    def __init__(self, what: str, origin: Origin | None, next_step: str = "") -> None:
        super().__init__(what, origin=origin, next_step=next_step)


@dataclass(frozen=True)
class Sealed:
    """What only a password or a program opens: one value, or a whole file; ``str()`` says where it lies.

    ``text`` is a vault's. What the program sops opens is a value of the file at ``path``, under ``keys``.
    """

    text: str = field(repr=False)
    origin: Origin
    path: Path | None = None
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{'sops' if self.path else '!vault'} ({self.origin})"


@dataclass(frozen=True)
class FilledSecret:
    """A secret that came out of a vault or a template; ``str()`` is the reference that is shown in its place.

    ``data`` is what it is with its type, for a place that holds no secret. ``missing`` is why there is none.
    """

    reference: str
    text: str = field(repr=False)
    origin: Origin
    missing: SecretMissing | None = None
    is_vaulted: bool = False
    data: str | int | float | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.reference

    def resolve(self) -> str:
        """The secret itself. Raises InventoryError (which never quotes it) when it is absent or empty."""
        if self.missing is not None:
            raise SecretMissing(self.missing.what, self.origin, self.missing.next_step)
        if not self.text:
            raise SecretMissing(f"{self.reference} is empty", self.origin)
        return self.text


class Omitted:
    """What ``omit`` of a template stands for: the setting is as if it were not written."""

    def __repr__(self) -> str:
        return "omit"


OMIT = Omitted()

Secret = SecretRef | FilledSecret
Scalar = str | int | float | bool | Secret | Sealed | Omitted | None


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a YAML file: a scalar, a tuple of values or a mapping of values, and where it stands.

    ``text`` is a scalar as written. ``cut`` marks a mapping that replaced something other than a mapping, and so
    must not be merged with what lies further below; it is what makes ``merge`` associative. ``is_text`` is never a
    template. ``sealed`` says where it lay encrypted, of a value out of a file that did.
    """

    data: Scalar | tuple[Value, ...] | Mapping[str, Value]
    origin: Origin
    text: str = ""
    cut: bool = False
    is_text: bool = False
    sealed: str = ""

    @property
    def entries(self) -> Mapping[str, Value] | None:
        """The entries of a mapping; None for anything else."""
        return self.data if isinstance(self.data, Mapping) else None

    def describe(self) -> str:
        """What this is, in the reader's words: ``the text '08000'``, ``true (written on)``, ``a list``."""
        if self.data is None:
            return "nothing"
        if isinstance(self.data, SecretRef | FilledSecret | Sealed) or self.sealed:
            return "a secret (which may stand only under secrets, env, args and extra_args)"
        if isinstance(self.data, Mapping):
            return "a mapping"
        if isinstance(self.data, tuple):
            return "a list"
        if isinstance(self.data, str):
            return f"the text {_short(self.data)!r}"
        shown = {True: "true", False: "false"}[self.data] if isinstance(self.data, bool) else f"the number {self.data}"
        return shown if str(self.data) == self.text or shown == self.text else f"{shown} (written {self.text})"


#: What says nothing.
EMPTY = Value({}, Origin("inventory"))


@dataclass(frozen=True)
class Lint:
    """What looks wrong: ``id`` names its kind, ``variable`` the dotted path, where there is one.

    ``level`` is ``warning``, or ``error`` for what stops a deploy; ``instead`` is what to write.
    """

    id: str
    variable: str
    message: str
    origin: Origin | None
    level: Literal["error", "warning"] = "warning"
    instead: str = ""
    source: str = ""
    """Where the reason comes from."""

    def __str__(self) -> str:
        return f"{self.origin}: {self.what}" if self.origin else self.what

    @property
    def what(self) -> str:
        """All but the place."""
        said = f"{self.variable}: {self.message}" if self.variable else self.message
        said += f"; instead: {self.instead}" if self.instead else ""
        return f"{said} ({self.id}: {self.source})" if self.source else said

    def to_json(self) -> dict[str, str]:
        """JSON-safe; empty fields are left out, but for the contract's own."""
        found = {name: str(getattr(self, name)) for name in ("id", "level", "variable", "message", "origin")}
        return {**found, **{name: said for name in ("instead", "source") if (said := str(getattr(self, name)))}}


def value_of(data: object, origin: Origin, text: str | None = None) -> Value:
    """Python data of a reader without lines of its own as values that all stand at ``origin``."""
    if isinstance(data, Mapping):
        return Value({str(key): value_of(each, origin) for key, each in data.items()}, origin)
    if isinstance(data, list | tuple | set | frozenset):
        return Value(tuple(value_of(each, origin) for each in data), origin)
    if isinstance(data, bytes):
        data = data.decode(errors="replace")
    if data is None or isinstance(data, str | bool | int | float):
        return Value(data, origin, text if text is not None else "" if data is None else _written(data))
    return Value(str(data), origin, str(data))


def _written(data: str | bool | int | float) -> str:
    return str(data).lower() if isinstance(data, bool) else str(data)


class Problems:
    """What is wrong with one load, each with its ``file:line``; raised together as one InventoryError.

    ``warnings`` are what looks wrong and stops nothing.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Origin | None, str], None] = {}
        self._warnings: dict[Lint, None] = {}

    def add(self, origin: Origin | None, message: str) -> None:
        """Note one problem; the same one noted twice (a group value seen from many hosts) counts once."""
        self._found[origin, message] = None

    def warn(self, origin: Origin | None, message: str, kind: str, variable: str = "") -> None:
        """Note what looks wrong; as with problems, once."""
        self._warnings[Lint(kind, variable, message, origin)] = None

    @property
    def warnings(self) -> tuple[Lint, ...]:
        """Everything that looks wrong and is no error, in the order in which it was found."""
        return tuple(self._warnings)

    @property
    def messages(self) -> tuple[str, ...]:
        """What is wrong, each with its place."""
        return tuple(f"{where}: {message}" if where else message for where, message in self._found)

    def take(self, other: Problems, but_for: tuple[str, ...] = ()) -> None:
        """Note all that ``other`` has found, too, except messages that end with ``but_for``."""
        self._found |= {each: None for each in other._found if not (but_for and each[1].endswith(but_for))}
        self._warnings |= other._warnings

    def take_as_warnings(self, other: Problems, kind: str) -> None:
        """Note all that ``other`` has found, each about the variable that it begins with, as what stops nothing."""
        for origin, message in other._found:
            variable, _, said = message.partition(": ")
            self.warn(origin, said, kind, variable)
        self._warnings |= other._warnings

    def __len__(self) -> int:
        return len(self._found)

    def raise_if_any(self, next_step: str = "") -> None:
        """Raise InventoryError whose text has one ``file:line: message`` a line."""
        if not self._found:
            return
        (origin, first), *others = self._found
        lines = [first, *(f"{where}: {message}" if where else message for where, message in others)]
        raise InventoryError("\n".join(lines), origin=origin, next_step=next_step)


def shown_path(path: Path) -> str:
    """The path as a person would type it from here: relative below the current directory, else as it is."""
    absolute = Path(os.path.normpath(Path.cwd() / path))
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`` (did you mean x?)``, or nothing when no known name is close: 1 is alike, ``cutoff`` is close enough."""
    close = get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]}?)" if close else ""


def merge(low: Value, high: Value) -> Value:
    """``high`` over ``low``: mappings entry by entry, all else replaced; a null stays until ``strip`` drops it."""
    above, below = high.entries, low.entries
    if above is None or high.cut:
        return high
    if below is None:
        return replace(high, cut=True)
    entries = dict(below)
    for key, value in above.items():
        entries[key] = merge(entries[key], value) if key in entries else value
    return Value(entries, high.origin, cut=low.cut)


def overlaid(low: Value, high: Value) -> Value:
    """Variables over variables of the same host or group: each is replaced whole, ``servers`` merges key by key."""
    below, above = low.entries or {}, high.entries or {}
    both = {"servers": merge(below["servers"], above["servers"])} if "servers" in below.keys() & above.keys() else {}
    return Value({**below, **above, **both}, high.origin)


def merge_all(layers: Iterable[Value]) -> Value:
    """All layers, lowest first, as one mapping."""
    result = Value({}, Origin("inventory"))
    for layer in layers:
        result = merge(result, layer)
    return result


def strip(value: Value) -> Value:
    """The value without the entries whose final word is null: to say null is to drop what lies below."""
    entries = value.entries
    if entries is None:
        return value
    return replace(value, data={key: strip(each) for key, each in entries.items() if each.data is not None})


def walk(value: Value, path: str = "") -> Iterator[tuple[str, Value]]:
    """Every entry of a mapping, however deep, with its dotted path; lists count as one value."""
    for key, each in (value.entries or {}).items():
        dotted = f"{path}.{key}" if path else key
        yield dotted, each
        yield from walk(each, dotted)


def marked(value: Value, *, is_text: bool = False, sealed: str = "") -> Value:
    """The value with a mark on every part of it, however deep."""
    data = value.data
    if isinstance(data, Mapping):
        data = {key: marked(each, is_text=is_text, sealed=sealed) for key, each in data.items()}
    elif isinstance(data, tuple):
        data = tuple(marked(each, is_text=is_text, sealed=sealed) for each in data)
    return replace(value, data=data, is_text=value.is_text or is_text, sealed=value.sealed or sealed)


def plain(value: Value) -> object:
    """The value as Python objects without origins; lists become tuples."""
    data = value.data
    if isinstance(data, Mapping):
        return {key: plain(each) for key, each in data.items()}
    if isinstance(data, tuple):
        return tuple(plain(each) for each in data)
    return data


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
