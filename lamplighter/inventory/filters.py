"""Ansible's everyday filters and tests for values of the inventory, so that what works there means the same here.

Pure functions of their arguments, known by their short names and as ``ansible.builtin.NAME``. Left out is what another
run would answer differently (``random``, ``now``) and what starts programs: the same inventory makes the same release.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import os
import posixpath
import re
import shlex
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from jinja2 import Undefined, pass_environment
from jinja2.filters import do_max, do_min, do_unique

_TRUE = ("true", "yes", "on", "1")
_UUIDS = uuid.UUID("361e6d51-faec-444a-9079-341386da8e2e")  # the name space that Ansible's to_uuid counts in
_BYTES = {unit: 1 << 10 * power for power, unit in enumerate("BKMGTPEZY")}
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    **dict.fromkeys(("==", "=", "eq"), lambda one, other: one == other),
    **dict.fromkeys(("!=", "<>", "ne"), lambda one, other: one != other),
    **dict.fromkeys(("<", "lt"), lambda one, other: one < other),
    **dict.fromkeys(("<=", "le"), lambda one, other: one <= other),
    **dict.fromkeys((">", "gt"), lambda one, other: one > other),
    **dict.fromkeys((">=", "ge"), lambda one, other: one >= other),
}


def realized(value: object) -> Any:
    """The value as plain Python: mappings as dicts, sequences and iterators as lists, however deep."""
    if isinstance(value, Mapping):
        return {key: realized(each) for key, each in value.items()}
    if isinstance(value, str | bytes) or not isinstance(value, Iterable) or isinstance(value, Undefined):
        return value
    return [realized(each) for each in value]


# -- truth and choice


def boolean(value: object) -> bool:
    """Whether Ansible takes this for true; anything else is false."""
    return value == 1 if isinstance(value, bool | int | float) else str(value).lower() in _TRUE


def ternary(value: object, true: object, false: object, none: object = None) -> object:
    """One of two by the truth of a value; ``none`` for nothing, where it is given."""
    if value is None and none is not None:
        return none
    return true if value else false


def mandatory(value: object, msg: str | None = None) -> object:
    """The value itself, which must be defined."""
    if isinstance(value, Undefined):
        if msg is not None:
            raise ValueError(msg)
        str(value)  # says which one
    return value


# -- text


def regex_replace(
    value: object = "",
    pattern: str = "",
    replacement: str = "",
    ignorecase: bool = False,
    multiline: bool = False,
    count: int = 0,
    mandatory_count: int = 0,
) -> str:
    """``re.subn`` with Ansible's names for its flags."""
    text, found = re.subn(pattern, replacement, str(value), count=count, flags=_flags(ignorecase, multiline))
    if found < mandatory_count:
        raise ValueError(f"{pattern!r} fits {found} times, {mandatory_count} are wanted")
    return text


def regex_search(
    value: object, pattern: str, *groups: str, ignorecase: bool = False, multiline: bool = False
) -> str | list[str] | None:
    r"""The first fit, or the groups of it that are named (``\1``, ``\g<name>``); None where nothing fits."""
    found = re.search(pattern, str(value), _flags(ignorecase, multiline))
    if found is None:
        return None
    if not groups:
        return found.group()
    named = [re.fullmatch(r"\\(?:g<(\w+)>|(\d+))", group) for group in groups]
    if None in named:
        raise ValueError("groups are named \\1 or \\g<name>")
    return [found.group(each[1] or int(each[2])) for each in named if each is not None]


def regex_findall(value: object, pattern: str, multiline: bool = False, ignorecase: bool = False) -> list[Any]:
    """All that fits."""
    return realized(re.findall(pattern, str(value), _flags(ignorecase, multiline)))  # type: ignore[no-any-return]


def regex_escape(value: object, re_type: str = "python") -> str:
    """The text as an expression that fits it alone."""
    if re_type != "python":
        raise ValueError("only re_type='python' is known")
    return re.escape(str(value))


def _flags(ignorecase: bool, multiline: bool) -> int:
    return (re.IGNORECASE if ignorecase else 0) | (re.MULTILINE if multiline else 0)


def split(value: str, separator: str | None = None, most: int = -1) -> list[str]:
    """The parts of a text."""
    return value.split(separator, most)


def quote(value: object) -> str:
    """The text as one word of a shell."""
    return shlex.quote("" if value is None else str(value))


def comment(value: object, prefix: str = "# ") -> str:
    """The lines of a text as a comment."""
    return "\n".join(f"{prefix}{line}".rstrip() for line in ["", *str(value).splitlines(), ""])


# -- data as text, and back


def to_json(value: object, indent: int | None = None, sort_keys: bool = False, **options: Any) -> str:
    """The value as JSON."""
    known = {name: options[name] for name in ("ensure_ascii", "separators") if name in options}
    return json.dumps(realized(value), indent=indent, sort_keys=sort_keys, **known)


def to_nice_json(value: object, indent: int = 4, sort_keys: bool = True) -> str:
    """The value as JSON for people."""
    return json.dumps(realized(value), indent=indent, sort_keys=sort_keys)


def from_json(value: str) -> object:
    """What a JSON text says."""
    return json.loads(value)


def to_yaml(value: object, indent: int | None = None, **options: Any) -> str:
    """The value as YAML."""
    return _dumped(value, default_flow_style=None, indent=indent, **_kept(options))


def to_nice_yaml(value: object, indent: int = 4, **options: Any) -> str:
    """The value as YAML for people."""
    return _dumped(value, default_flow_style=False, indent=indent, **_kept(options))


def _dumped(value: object, **options: Any) -> str:
    return str(yaml.dump(realized(value), allow_unicode=True, **options))


def _kept(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("width", "sort_keys", "explicit_start") if name in options}


def from_yaml(value: str) -> object:
    """What a YAML text says."""
    return yaml.safe_load(value)


def from_yaml_all(value: str) -> list[object]:
    """What each document of a YAML text says."""
    return list(yaml.safe_load_all(value))


def b64encode(value: object, encoding: str = "utf-8") -> str:
    """The text in base64."""
    return base64.b64encode(str(value).encode(encoding)).decode("ascii")


def b64decode(value: str, encoding: str = "utf-8") -> str:
    """The text out of base64."""
    return base64.b64decode(value).decode(encoding)


def digest(value: object, hashtype: str = "sha1") -> str:
    """The digest of a text, in hexadecimal."""
    if hashtype not in hashlib.algorithms_guaranteed:
        raise ValueError(f"no hash is called {hashtype!r}")
    return hashlib.new(hashtype, str(value).encode(), usedforsecurity=False).hexdigest()


def to_uuid(value: object, namespace: object = _UUIDS) -> str:
    """A UUID that follows from the text."""
    return str(uuid.uuid5(namespace if isinstance(namespace, uuid.UUID) else uuid.UUID(str(namespace)), str(value)))


def urlsplit(value: str, query: str = "") -> object:
    """The parts of a URL, or one of them."""
    found = urllib.parse.urlsplit(value)
    names = ("scheme", "netloc", "path", "query", "fragment", "username", "password", "hostname", "port")
    parts = {name: getattr(found, name) for name in names}
    return parts[query] if query else parts


# -- mappings and lists


def combine(*mappings: Any, recursive: bool = False, list_merge: str = "replace") -> dict[Any, Any]:
    """One mapping of several, later ones over earlier ones."""
    result: dict[Any, Any] = {}
    for mapping in _flat(mappings, None):
        if not isinstance(mapping, Mapping):
            raise TypeError(f"combine takes mappings, not {type(mapping).__name__}")
        result = _over(result, realized(mapping), recursive, list_merge)
    return result


def _over(below: dict[Any, Any], above: dict[Any, Any], recursive: bool, list_merge: str) -> dict[Any, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if recursive and isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _over(old, value, recursive, list_merge)
        elif isinstance(old, list) and isinstance(value, list):
            merged[key] = _lists(old, value, list_merge)
        else:
            merged[key] = value
    return merged


def _lists(old: list[Any], new: list[Any], how: str) -> list[Any]:
    ways: dict[str, Callable[[], list[Any]]] = {
        "replace": lambda: new,
        "keep": lambda: old,
        "append": lambda: [*old, *new],
        "prepend": lambda: [*new, *old],
        "append_rp": lambda: [*(each for each in old if each not in new), *new],
        "prepend_rp": lambda: [*new, *(each for each in old if each not in new)],
    }
    if how not in ways:
        raise ValueError(f"list_merge is one of {', '.join(ways)}")
    return ways[how]()


def dict2items(value: Mapping[Any, Any], key_name: str = "key", value_name: str = "value") -> list[dict[str, Any]]:
    """A mapping as a list of its pairs."""
    return [{key_name: key, value_name: each} for key, each in value.items()]


def items2dict(value: Iterable[Any], key_name: str = "key", value_name: str = "value") -> dict[Any, Any]:
    """A list of pairs as a mapping."""
    return {each[key_name]: each[value_name] for each in value}


def flatten(value: Iterable[Any], levels: int | None = None, skip_nulls: bool = True) -> list[Any]:
    """Lists within a list, laid out in one."""
    return [each for each in _flat(value, levels) if each is not None or not skip_nulls]


def _flat(value: Iterable[Any], levels: int | None) -> Iterator[Any]:
    for each in value:
        if isinstance(each, list | tuple) and levels != 0:
            yield from _flat(each, None if levels is None else levels - 1)
        else:
            yield each


def union(one: Iterable[Any], other: Iterable[Any]) -> list[Any]:
    """What is in either."""
    return _once([*one, *other])


def intersect(one: Iterable[Any], other: Iterable[Any]) -> list[Any]:
    """What is in both."""
    both = list(other)
    return _once(each for each in one if each in both)


def difference(one: Iterable[Any], other: Iterable[Any]) -> list[Any]:
    """What is in the first alone."""
    without = list(other)
    return _once(each for each in one if each not in without)


def symmetric_difference(one: Iterable[Any], other: Iterable[Any]) -> list[Any]:
    """What is in one of the two."""
    first, second = list(one), list(other)
    return [*difference(first, second), *difference(second, first)]


def _once(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for each in values:
        if each not in found:
            found.append(each)
    return found


def extract(key: Any, container: Any, more: Any = None) -> Any:
    """What a container has under a key, and under further keys within."""
    for each in (key, *(() if more is None else more if isinstance(more, list | tuple) else (more,))):
        container = container[each]
    return container


def zipped(*lists: Iterable[Any]) -> list[list[Any]]:
    """Lists side by side, as long as the shortest."""
    return [list(each) for each in zip(*lists, strict=False)]


def zipped_longest(*lists: Iterable[Any], fillvalue: object = None) -> list[list[Any]]:
    """Lists side by side, as long as the longest."""
    return [list(each) for each in itertools.zip_longest(*lists, fillvalue=fillvalue)]


def product(*lists: Iterable[Any]) -> list[list[Any]]:
    """Every combination of one item of each list."""
    return [list(each) for each in itertools.product(*lists)]


@pass_environment
def greatest(environment: Any, value: Iterable[Any], **options: Any) -> Any:
    """The greatest."""
    return do_max(environment, list(value), **options)


@pass_environment
def least(environment: Any, value: Iterable[Any], **options: Any) -> Any:
    """The least."""
    return do_min(environment, list(value), **options)


@pass_environment
def unique(environment: Any, value: Iterable[Any], case_sensitive: bool = True, attribute: Any = None) -> list[Any]:
    """Each item once, where it comes first."""
    if attribute is None and case_sensitive:
        return _once(value)
    return list(do_unique(environment, list(value), case_sensitive, attribute))


# -- numbers


def logarithm(value: float, base: float = math.e) -> float:
    """To which power the base is the number."""
    return math.log10(value) if base == 10 else math.log(value, base)


def root(value: float, base: float = 2) -> float:
    """The square root, or another one."""
    return math.sqrt(value) if base == 2 else math.pow(value, 1.0 / base)


def human_to_bytes(value: object, default_unit: str | None = None, isbits: bool = False) -> int:
    """How many bytes (or bits) ``4G`` are: units of 1024."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    unit = (found[2] or default_unit or "B")[0].upper() if found else ""
    if found is None or unit not in _BYTES or isbits != (found[2][-1:] == "b"):
        raise ValueError(f"{value!r} is no number of {'bits' if isbits else 'bytes'}")
    return round(float(found[1]) * _BYTES[unit])


def human_readable(value: float, isbits: bool = False, unit: str | None = None) -> str:
    """A number of bytes (or bits) for people."""
    word = "bits" if isbits else "Bytes"
    for name, size in reversed(_BYTES.items()):
        if (unit is None and value >= size) or (unit is not None and unit.upper()[:1] == name):
            return f"{value / size:.2f} {word if name == 'B' else name + word[0]}"
    return f"{value:.2f} {word}"


# -- tests


def matches(value: object, pattern: str, ignorecase: bool = False, multiline: bool = False) -> bool:
    """Whether the beginning fits."""
    return re.match(pattern, str(value), _flags(ignorecase, multiline)) is not None


def searches(value: object, pattern: str, ignorecase: bool = False, multiline: bool = False) -> bool:
    """Whether any part fits."""
    return re.search(pattern, str(value), _flags(ignorecase, multiline)) is not None


def regex(
    value: object, pattern: str, ignorecase: bool = False, multiline: bool = False, match_type: str = "search"
) -> bool:
    """Whether the text fits, as ``match_type`` says."""
    look = {"search": re.search, "match": re.match, "fullmatch": re.fullmatch}[match_type]
    return look(pattern, str(value), _flags(ignorecase, multiline)) is not None


def version(value: object, other: object, operator: str = "eq", strict: bool = False, version_type: str = "") -> bool:
    """Compare two versions number by number, as ``1.10 > 1.9``."""
    if operator not in _OPERATORS:
        raise ValueError(f"no comparison is called {operator!r}")
    if version_type not in ("", "loose", "strict"):
        raise ValueError(f"version_type {version_type!r} is not offered: only loose")
    return _OPERATORS[operator](_loose(value), _loose(other))


def _loose(value: object) -> list[tuple[int, Any]]:
    """The parts of a version: numbers come behind letters (1.0rc1 is no 1.0), a missing part before any."""
    return [(1, int(part)) if part.isdigit() else (0, part) for part in re.findall(r"\d+|[a-z]+", str(value).lower())]


def contains(value: Any, item: object) -> bool:
    """Whether the item is in the value."""
    return item in value


def is_subset(value: Iterable[Any], of: Sequence[Any]) -> bool:
    """Whether all items are among the others."""
    return all(each in of for each in value)


def is_superset(value: Sequence[Any], of: Iterable[Any]) -> bool:
    """Whether it has all items of the others."""
    return all(each in value for each in of)


def truthy(value: object, convert_bool: bool = False) -> bool:
    """Whether it counts as true."""
    return bool(boolean(value) if convert_bool and isinstance(value, str) else value)


def falsy(value: object, convert_bool: bool = False) -> bool:
    """Whether it counts as false."""
    return not truthy(value, convert_bool)


FILTERS: dict[str, Callable[..., Any]] = {
    "b64decode": b64decode,
    "b64encode": b64encode,
    "basename": posixpath.basename,
    "bool": boolean,
    "checksum": lambda value: digest(value, "sha1"),
    "combinations": lambda values, size: [list(each) for each in itertools.combinations(values, size)],
    "combine": combine,
    "comment": comment,
    "dict2items": dict2items,
    "difference": difference,
    "dirname": posixpath.dirname,
    "expanduser": os.path.expanduser,
    "extract": extract,
    "flatten": flatten,
    "from_json": from_json,
    "from_yaml": from_yaml,
    "from_yaml_all": from_yaml_all,
    "hash": digest,
    "human_readable": human_readable,
    "human_to_bytes": human_to_bytes,
    "intersect": intersect,
    "items2dict": items2dict,
    "log": logarithm,
    "mandatory": mandatory,
    "max": greatest,
    "md5": lambda value: digest(value, "md5"),
    "min": least,
    "path_join": lambda parts: posixpath.join(*([parts] if isinstance(parts, str) else parts)),
    "permutations": lambda values, *size: [list(each) for each in itertools.permutations(values, *size)],
    "pow": math.pow,
    "product": product,
    "quote": quote,
    "regex_escape": regex_escape,
    "regex_findall": regex_findall,
    "regex_replace": regex_replace,
    "regex_search": regex_search,
    "relpath": posixpath.relpath,
    "root": root,
    "sha1": lambda value: digest(value, "sha1"),
    "split": split,
    "splitext": lambda path: list(posixpath.splitext(path)),
    "symmetric_difference": symmetric_difference,
    "ternary": ternary,
    "to_json": to_json,
    "to_nice_json": to_nice_json,
    "to_nice_yaml": to_nice_yaml,
    "to_uuid": to_uuid,
    "to_yaml": to_yaml,
    "type_debug": lambda value: type(value).__name__,
    "union": union,
    "unique": unique,
    "urldecode": urllib.parse.unquote_plus,
    "urlsplit": urlsplit,
    "zip": zipped,
    "zip_longest": zipped_longest,
}

TESTS: dict[str, Callable[..., bool]] = {
    "abs": posixpath.isabs,
    "all": all,
    "any": any,
    "contains": contains,
    "directory": os.path.isdir,
    "exists": os.path.exists,
    "falsy": falsy,
    "file": os.path.isfile,
    "issubset": is_subset,
    "issuperset": is_superset,
    "match": matches,
    "regex": regex,
    "search": searches,
    "subset": is_subset,
    "superset": is_superset,
    "truthy": truthy,
    "version": version,
    "version_compare": version,
}
#: Filters and tests that may meet what is undefined, or an environment variable that is not set.
FORGIVING = ("mandatory",)
#: Filters that take a mapping as it is, of whose parts only some may be filled in (``hostvars``).
LAZY = ("extract",)
