"""YAML files, read so that every value remembers the file and line it stands on, and merged so that it still does.

Pure: reads files, touches nothing else. What is wrong in a file is noted in ``Problems`` with its ``file:line``, so
that one load can report all mistakes together. Two YAML habits are switched off because they bite: a number that is not
written plainly (``010``, ``0x1f``, ``1_000``, ``12:30``) and a date stay the text that was written.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from lamplighter.errors import InventoryError
from lamplighter.paths import at_home

_TAG = "tag:yaml.org,2002:"
#: libyaml's, ten times as quick, where PyYAML was built with it.
_QUICK_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PLAIN_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_PLAIN_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SECRET = re.compile(r"(env|file):(.+)", re.DOTALL)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Far above any real inventory: stops a few aliases of aliases from growing into gigabytes.
_MOST_VALUES = 500_000


@dataclass(frozen=True, order=True)
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


Scalar = str | int | float | bool | SecretRef | None


@dataclass(frozen=True)
class Value:
    """One value of a YAML file: a scalar, a tuple of values or a mapping of values, and where it stands.

    ``text`` is a scalar as written. ``cut`` marks a mapping that replaced something other than a mapping, and so
    must not be merged with what lies further below; it is what makes ``merge`` associative.
    """

    data: Scalar | tuple[Value, ...] | Mapping[str, Value]
    origin: Origin
    text: str = ""
    cut: bool = False

    @property
    def entries(self) -> Mapping[str, Value] | None:
        """The entries of a mapping; None for anything else."""
        return self.data if isinstance(self.data, Mapping) else None

    def describe(self) -> str:
        """What this is, in the reader's words: ``the text '08000'``, ``true (written on)``, ``a list``."""
        if self.data is None:
            return "nothing"
        if isinstance(self.data, SecretRef):
            return "a secret (which may stand only under `secrets`)"
        if isinstance(self.data, Mapping):
            return "a mapping"
        if isinstance(self.data, tuple):
            return "a list"
        if isinstance(self.data, str):
            return f"the text {_short(self.data)!r}"
        shown = {True: "true", False: "false"}[self.data] if isinstance(self.data, bool) else f"the number {self.data}"
        return shown if str(self.data) == self.text or shown == self.text else f"{shown} (written {self.text})"


class Problems:
    """What is wrong with one load, each with its ``file:line``; raised together as one InventoryError."""

    def __init__(self) -> None:
        self._found: dict[tuple[Origin | None, str], None] = {}

    def add(self, origin: Origin | None, message: str) -> None:
        """Note one problem; the same one noted twice (a group value seen from many hosts) counts once."""
        self._found[origin, message] = None

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


def plain(value: Value) -> object:
    """The value as Python objects without origins; lists become tuples."""
    data = value.data
    if isinstance(data, Mapping):
        return {key: plain(each) for key, each in data.items()}
    if isinstance(data, tuple):
        return tuple(plain(each) for each in data)
    return data


def read_mapping(path: Path, problems: Problems) -> Value:
    """The mapping that a YAML file holds; an empty file is an empty mapping, a broken one too, with its problem."""
    file = shown_path(path)
    top = Value({}, Origin(file, 1))
    node = _compose(path, file, problems)
    if node is None:
        return top
    try:
        value = _Reading(path, file, problems).value(node)
    except RecursionError:
        problems.add(Origin(file), "values are nested too deeply")
        return top
    if value.data is None:
        return top
    if value.entries is None:
        problems.add(value.origin, f"the file must hold a mapping, not {value.describe()}")
        return top
    return value


def _compose(path: Path, file: str, problems: Problems) -> yaml.Node | None:
    """The node tree of a file, or None for an empty or broken one."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        problems.add(Origin(file), f"cannot be read: {error.strerror}")
        return None
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        problems.add(Origin(file, line), f"not UTF-8 text (byte 0x{raw[error.start]:02x}): save the file as UTF-8")
        return None
    with contextlib.suppress(yaml.YAMLError, RecursionError):  # whose words the other loader finds better
        return yaml.compose(text, Loader=_QUICK_LOADER)
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problems.add(
            Origin(file, line), f"a control character (0x{ord(text[error.position]):02x}) cannot stand in YAML"
        )
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problems.add(Origin(file, mark.line + 1 if mark else 0), _syntax_message(error))
    except RecursionError:
        problems.add(Origin(file), "values are nested too deeply")
    return None


def _syntax_message(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "broken"
    if "'\\t'" in problem:
        return "YAML does not allow a tab here: indent with spaces"
    if "expected a single document" in (error.context or ""):
        return "a second document begins here: keep one document a file"
    where = f" ({error.context}{_on_line(error)})" if error.context else ""
    hint = ": quote the value if it holds ': '" if "mapping values are not allowed" in problem else ""
    return f"not YAML: {problem}{where}{hint}"


def _on_line(error: yaml.MarkedYAMLError) -> str:
    return f" begun on line {error.context_mark.line + 1}" if error.context_mark else ""


class _Reading:
    """One file on its way from YAML nodes to values. Aliases share their value, so each node is read once."""

    def __init__(self, path: Path, file: str, problems: Problems) -> None:
        self.directory = path.parent
        self.file = file
        self.problems = problems
        self._values: dict[int, tuple[Value, int]] = {}
        self._open: set[int] = set()
        self._oversized = False

    def value(self, node: yaml.Node) -> Value:
        return self._sized(node)[0]

    def _sized(self, node: yaml.Node) -> tuple[Value, int]:
        """The value of a node, and how many values it holds once aliases are written out."""
        key = id(node)
        if key in self._open:
            self.problems.add(self._origin(node), "an alias holds itself")
            return Value(None, self._origin(node)), 1
        if key not in self._values:
            self._open.add(key)
            self._values[key] = self._read(node)
            self._open.discard(key)
        return self._values[key]

    def _read(self, node: yaml.Node) -> tuple[Value, int]:
        origin = self._origin(node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, origin), 1
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            items = [self._sized(each) for each in node.value]
            return self._within_limit(Value(tuple(item for item, _ in items), origin), sum(n for _, n in items) + 1)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, origin)
        self.problems.add(origin, f"the tag {node.tag.replace(_TAG, '!!')} cannot be used here")
        return Value(None, origin), 1

    def _within_limit(self, value: Value, size: int) -> tuple[Value, int]:
        if size <= _MOST_VALUES:
            return value, size
        if not self._oversized:
            self._oversized = True
            self.problems.add(value.origin, f"aliases grow into more than {_MOST_VALUES} values")
        return Value(None, value.origin), 1

    def _mapping(self, node: yaml.MappingNode, origin: Origin) -> tuple[Value, int]:
        own: dict[str, Value] = {}
        inherited: dict[str, Value] = {}
        lines: dict[str, int] = {}
        size = 1
        for key_node, value_node in node.value:
            name = self._key(key_node)
            if name is None:
                continue
            here = self._origin(key_node)
            if name in lines:
                self.problems.add(here, f"{name} is given twice in one mapping (first on line {lines[name]})")
                continue
            lines[name] = here.line
            each, count = self._sized(value_node)
            size += count
            if key_node.tag == _TAG + "merge":
                inherited = self._merged(each, here)
            else:
                own[name] = replace(each, origin=here)
        return self._within_limit(Value({**inherited, **own}, origin), size)

    def _merged(self, value: Value, here: Origin) -> dict[str, Value]:
        """What ``<<`` brings: of several mappings the first one wins, as YAML has it."""
        parts = value.data if isinstance(value.data, tuple) else (value,)
        merged: dict[str, Value] = {}
        for part in parts:
            if part.entries is None:
                self.problems.add(here, f"<< takes a mapping or a list of mappings, not {part.describe()}")
                continue
            merged = {**part.entries, **merged}
        return merged

    def _key(self, node: yaml.Node) -> str | None:
        """A key as written, whatever YAML would make of it: ``on``, ``NO`` and ``1`` are names here."""
        if not isinstance(node, yaml.ScalarNode):
            self.problems.add(
                self._origin(node), "a key must be a plain name (values are no templates: quote text that holds {{ }})"
            )
            return None
        if node.tag == _TAG + "null" or not node.value:
            self.problems.add(self._origin(node), "a key is empty")
            return None
        if not node.tag.startswith(_TAG):
            self.problems.add(self._origin(node), f"a key takes no tag ({node.tag})")
            return None
        text: str = node.value
        return text if self._is_carriable(text, self._origin(node)) else None

    def _scalar(self, node: yaml.ScalarNode, origin: Origin) -> Value:
        text: str = node.value
        if not self._is_carriable(text, origin):
            return Value(None, origin)
        if node.tag == "!secret":
            return self._secret(text, origin)
        kind = node.tag.removeprefix(_TAG)
        if kind in ("str", "timestamp", "value", "merge"):
            return Value(text, origin, text)
        if kind == "null":
            return Value(None, origin, text)
        if kind == "bool" and text.lower() in yaml.SafeLoader.bool_values:
            return Value(yaml.SafeLoader.bool_values[text.lower()], origin, text)
        if kind == "int":
            return Value(int(text) if _PLAIN_INTEGER.fullmatch(text) else text, origin, text)
        if kind == "float":
            number = float(text) if _PLAIN_FLOAT.fullmatch(text) else math.nan
            return Value(number if math.isfinite(number) else text, origin, text)
        hint = ""
        if node.tag in ("!vault", "!env", "!vault-encrypted"):
            hint = ": write !secret env:NAME or !secret file:PATH"
        self.problems.add(origin, f"unknown tag {node.tag.replace(_TAG, '!!')}{hint}")
        return Value(None, origin)

    def _secret(self, text: str, origin: Origin) -> Value:
        match = _SECRET.fullmatch(text.strip())
        # The text is not repeated: somebody may have put the secret itself here.
        if match is None:
            self.problems.add(origin, "!secret must be followed by env:NAME or file:PATH")
            return Value(None, origin)
        source, name = match.groups()
        if source == "env" and not _ENV_NAME.fullmatch(name):
            self.problems.add(origin, "!secret env: must be followed by the name of an environment variable")
            return Value(None, origin)
        return Value(SecretRef(source, name, origin, self.directory), origin)

    def _is_carriable(self, text: str, origin: Origin) -> bool:
        """Whether the text can be an argument, a path or an environment variable on a Linux node."""
        if "\0" in text:
            self.problems.add(origin, "a NUL byte (\\0) cannot stand in an argument, a path or a variable")
            return False
        if any("\ud800" <= each <= "\udfff" for each in text):
            self.problems.add(origin, "half a surrogate pair (\\ud800..\\udfff) is no text")
            return False
        return True

    def _origin(self, node: yaml.Node) -> Origin:
        return Origin(self.file, node.start_mark.line + 1)


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
