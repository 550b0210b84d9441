"""YAML files, read so that every value remembers the file and line it stands on.

Pure: reads files, touches nothing else. What is wrong in a file is noted in ``Problems`` with its ``file:line``, so
that one load can report all mistakes together. Two YAML habits are switched off because they bite: a number that is not
written plainly (``010``, ``0x1f``, ``1_000``, ``12:30``) and a date stay the text that was written.
"""

from __future__ import annotations

import contextlib
import math
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from lamplighter.inventory.values import Origin, Problems, Sealed, SecretRef, Value, marked, shown_path

_TAG = "tag:yaml.org,2002:"
#: libyaml's, ten times as quick, where PyYAML was built with it.
_QUICK_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PLAIN_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_PLAIN_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SECRET = re.compile(r"(env|file):(.+)", re.DOTALL)
#: Below this name everything is ours, and strict.
_OURS = "servers"
#: How a vault begins, of one value or of a whole file.
VAULT = "$ANSIBLE_VAULT;"
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Far above any real inventory: stops a few aliases of aliases from growing into gigabytes.
_MOST_VALUES = 500_000
#: Bytes of one file.
_LARGEST = 64 << 20


def read_mapping(path: Path, problems: Problems, *, is_ours: bool = False) -> Value:
    """The mapping that a YAML file holds; an empty file is an empty mapping, a broken one too, with its problem.

    ``is_ours``: it is a role's, in which a key given twice is a mistake.
    """
    file = shown_path(path)
    text = read_file(path, file, problems)
    if text is not None and text.startswith(VAULT):
        return Value(Sealed(text, Origin(file, 1)), Origin(file, 1))
    value = read_text(text or "", path, problems, is_ours=is_ours)
    return _sealed_by_sops(value, path, ()) if _is_of_sops(value) else value


def _is_of_sops(value: Value) -> bool:
    stamp = (value.entries or {}).get("sops")
    return stamp is not None and stamp.entries is not None and bool(stamp.entries.keys() & {"mac", "version"})


def _sealed_by_sops(value: Value, path: Path, keys: tuple[str, ...]) -> Value:
    """The value with everything in it that sops has encrypted sealed; its keys are readable as they are."""
    if value.entries is not None:
        entries = {key: _sealed_by_sops(each, path, (*keys, key)) for key, each in value.entries.items()}
        return replace(value, data={key: each for key, each in entries.items() if keys or key != "sops"})
    if isinstance(value.data, tuple):
        items = tuple(_sealed_by_sops(each, path, (*keys, str(place))) for place, each in enumerate(value.data))
        return replace(value, data=items)
    is_sealed = isinstance(value.data, str) and value.data.startswith("ENC[")
    return replace(value, data=Sealed("", value.origin, path, keys)) if is_sealed else value


def read_text(text: str, path: Path, problems: Problems, *, is_ours: bool = False) -> Value:
    """The mapping that the text of the file at ``path`` holds, as ``read_mapping`` reads it."""
    file = shown_path(path)
    value = read_any(text, path, problems, is_ours=is_ours)
    if value.data is None:
        return Value({}, Origin(file, 1))
    if value.entries is None:
        problems.add(value.origin, f"the file must hold a mapping, not {value.describe()}")
        return Value({}, Origin(file, 1))
    return value


def read_any(text: str, path: Path, problems: Problems, *, is_ours: bool = False) -> Value:
    """What the text of the file at ``path`` holds; nothing where it is empty or broken."""
    file = shown_path(path)
    node = _compose(text, file, problems)
    if node is None:
        return Value(None, Origin(file, 1))
    try:
        return _Reading(path, file, problems, is_ours).value(node)
    except RecursionError:
        problems.add(Origin(file, _deepest_line(text)), "values are nested too deeply")
        return Value(None, Origin(file, 1))


def read_file(path: Path, file: str, problems: Problems) -> str | None:
    """The text of a file; None after a problem. Nothing but a regular file is opened: others never end, or wait."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            problems.add(Origin(file), "is no regular file, so it is not opened")
            return None
        if about.st_size > _LARGEST:
            problems.add(Origin(file), f"is larger than {_LARGEST >> 20} MiB, so it is not opened")
            return None
        raw = path.read_bytes()
    except OSError as error:
        problems.add(Origin(file), f"cannot be read: {error.strerror}")
        return None
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        problems.add(Origin(file, line), f"not UTF-8 text (byte 0x{raw[error.start]:02x}): save the file as UTF-8")
        return None


def _deepest_line(text: str) -> int:
    """The line on which values are nested deeper than anywhere else; 0 where the text does not tell."""
    depth = deepest = line = 0
    with contextlib.suppress(yaml.YAMLError, RecursionError):
        for event in yaml.parse(text, Loader=_QUICK_LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > deepest:
                    deepest, line = depth, event.start_mark.line + 1 if event.start_mark else 0
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
    return line


def _compose(text: str, file: str, problems: Problems) -> yaml.Node | None:
    """The node tree of a text, or None for an empty or broken one."""
    try:
        return yaml.compose(text, Loader=_QUICK_LOADER)
    except RecursionError:
        problems.add(Origin(file, _deepest_line(text)), "values are nested too deeply")
        return None
    except yaml.YAMLError as error:  # the other loader finds better words, but not in a thousand brackets
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        if "nesting depth" in str(error) and mark is not None:
            problems.add(Origin(file, mark.line + 1), "values are nested too deeply")
            return None
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
        problems.add(Origin(file, _deepest_line(text)), "values are nested too deeply")
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

    def __init__(self, path: Path, file: str, problems: Problems, is_ours: bool) -> None:
        self.directory = path.parent
        self.file = file
        self.problems = problems
        self._values: dict[int, tuple[Value, int]] = {}
        self._open: set[int] = set()
        self._oversized = False
        self._below_ours = int(is_ours)

    def value(self, node: yaml.Node) -> Value:
        return self._sized(node)[0]

    def _sized(self, node: yaml.Node) -> tuple[Value, int]:
        """The value of a node, and how many values it holds once aliases are written out."""
        if isinstance(node, yaml.ScalarNode):
            return self._read(node)
        key = id(node)
        if key in self._open:
            self.problems.add(self._origin(node), "an alias holds itself")
            return Value(None, self._origin(node)), 1
        if key not in self._values:
            self._open.add(key)
            self._values[key] = self._read(node)
            self._open.discard(key)
            node.value = []  # a large file need not be in memory twice
        return self._values[key]

    def _read(self, node: yaml.Node) -> tuple[Value, int]:
        origin = self._origin(node)
        if isinstance(node, yaml.ScalarNode) and node.tag != "!unsafe":
            return self._scalar(node, origin), 1
        if node.tag == "!unsafe":
            return self._unsafe(node)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            items = [self._sized(each) for each in node.value]
            return self._within_limit(Value(tuple(item for item, _ in items), origin), sum(n for _, n in items) + 1)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, origin)
        self.problems.add(origin, f"the tag {node.tag.replace(_TAG, '!!')} cannot be used here")
        return Value(None, origin), 1

    def _unsafe(self, node: yaml.Node) -> tuple[Value, int]:
        """What no template is read in, however deep."""
        tags = {yaml.ScalarNode: "str", yaml.SequenceNode: "seq", yaml.MappingNode: "map"}
        node.tag = _TAG + tags[type(node)]
        value, size = self._read(node)
        return marked(value, is_text=True), size

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
        size = 1
        for key_node, value_node in node.value:
            name = self._key(key_node)
            if name is None:
                continue
            here = self._origin(key_node)
            is_ours = name == _OURS
            self._below_ours += is_ours
            each, count = self._sized(value_node)
            self._below_ours -= is_ours
            size += count
            if key_node.tag == _TAG + "merge":
                inherited |= self._merged(each, here)
                continue
            if name in own:
                self._complain_of_second(name, here, own[name].origin)
            own[name] = Value(each.data, here, each.text, each.cut, each.is_text, each.sealed)
        return self._within_limit(Value({**inherited, **own}, origin), size)

    def _complain_of_second(self, name: str, here: Origin, first: Origin) -> None:
        """Ansible takes the last of several with a warning, and so do we; what is ours must be said once."""
        message = f"is given twice in one mapping (first on line {first.line})"
        if self._below_ours:
            self.problems.add(here, f"{name} {message}")
        else:
            self.problems.warn(here, f"{message}: the last one counts", "given-twice", name)

    def _merged(self, value: Value, here: Origin) -> dict[str, Value]:
        """What ``<<`` brings: of several mappings the first one wins, as YAML has it."""
        parts = value.data if isinstance(value.data, tuple) else (value,)
        merged: dict[str, Value] = {}
        for part in parts:
            if part.entries is None and self._oversized:  # told already
                continue
            if part.entries is None:
                self.problems.add(here, f"<< takes a mapping or a list of mappings, not {part.describe()}")
                continue
            merged = {**part.entries, **merged}
        return merged

    def _key(self, node: yaml.Node) -> str | None:
        """A key as written, whatever YAML would make of it: ``on``, ``NO`` and ``1`` are names here."""
        if not isinstance(node, yaml.ScalarNode):
            self.problems.add(self._origin(node), 'a key must be a plain name (a template must be quoted: "{{ x }}")')
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
        if node.tag in ("!vault", "!vault-encrypted"):
            return Value(Sealed(text, origin), origin)
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
        if node.tag == "!env":
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
