"""What is known of variables and flags, from ``lint.yml`` of the role ``node`` and of the engine's roles. Pure."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from lamplighter.errors import InventoryError
from lamplighter.inventory.sources.yaml_file import read_mapping
from lamplighter.inventory.values import Origin, Problems, plain, shown_path
from lamplighter.node.versions import compare
from lamplighter.project import Roles

FILE = "lint.yml"
COMMON = "node"


def _split(value: object) -> object:
    return tuple(value.split()) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_Model = TypeVar("_Model", bound=_Part)


class Words(_Part):
    """The words that a variable takes; ``old`` ones still work. ``why``: what becomes with another one."""

    what: str
    words: tuple[str, ...]
    why: str
    old: tuple[str, ...] = ()
    case: Literal["exact", "any"] = "exact"
    list: bool = False


class Nccl(_Part):
    """The names of one version of NCCL's library, and those of other times and places."""

    version: str
    integers: Names
    texts: Names
    newer: Names
    torch: dict[str, str]
    gone: dict[str, str]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names that the library of this version reads."""
        return frozenset((*self.integers, *self.texts))


class About(_Part):
    """One rule: what it is about, and where that comes from. ``node``: only the node can answer."""

    about: str
    source: str
    node: bool = False


class Common(_Part):
    """What is known whatever the engine."""

    rules: dict[str, About]
    prefixes: tuple[str, ...]
    nccl: Nccl
    words: dict[str, Words]
    functions: tuple[str, ...]
    owned: dict[str, str]
    not_forced: dict[str, str]
    known: Names
    proxies: tuple[str, ...]
    no_proxies: tuple[str, ...]


class Span(_Part):
    """Names, and the first and the last version that was looked into and has them."""

    names: Names
    since: str | None = None
    until: str | None = None


class Speculation(_Part):
    """The flags of speculative decoding: those of a tree of draft tokens, or the one that takes all as JSON."""

    algorithm: str = ""
    drafting: tuple[str, ...] = ()
    needs_draft: tuple[str, ...] = ()
    steps: str = ""
    topk: str = ""
    tokens: str = ""
    draft: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    config: tuple[str, ...] = ()


class OfEngine(_Part):
    """What is known of one engine: the fields are explained in the files themselves."""

    versions: tuple[str, ...] = ()
    underscores: bool = False
    negations: bool = False
    open_flags: tuple[str, ...] = ()
    proxy: Literal["error", "warning"] = "warning"
    literal_until: str | None = None
    speculation: Speculation = Speculation()
    flags: tuple[Span, ...] = ()
    variables: tuple[Span, ...] = ()


class Knowledge:
    """What is known for a server of one engine."""

    def __init__(self, common: Common, engine: OfEngine) -> None:
        self.common = common
        self.engine = engine
        self.flags = frozenset(name for span in engine.flags for name in span.names)
        self.variables = frozenset(name for span in engine.variables for name in span.names)

    @property
    def newest(self) -> str:
        """The newest version that was looked into; "0" where none was."""
        return self.engine.versions[-1] if self.engine.versions else "0"

    def absence(self, name: str, version: str) -> str:
        """Say since when, or until when, this version lacks a flag or variable that others have; "" where it does not.

        Between two versions that were looked into nothing is claimed.
        """
        spans = (*self.engine.flags, *self.engine.variables)
        span = next((each for each in spans if name in each.names), Span(names=()))
        versions = self.engine.versions
        if span.since and compare(version, versions[versions.index(span.since) - 1]) <= 0:
            return f"it came later: {span.since} has it"
        if span.until and compare(version, versions[versions.index(span.until) + 1]) >= 0:
            return f"it is gone: {span.until} had it, {versions[versions.index(span.until) + 1]} has not"
        return ""


@functools.cache
def load_knowledge(roles: Roles, engines: tuple[str, ...]) -> Knowledge:
    """What ``lint.yml`` of the role ``node`` says, and that of the engine's role over those that it extends.

    Raises InventoryError, with the file at fault.
    """
    files = [path for name in engines if (path := roles / name / FILE).is_file()]
    below: dict[str, Any] = {}
    for each in (_read(path, OfEngine) for path in reversed(files)):
        said: dict[str, Any] = {name: getattr(each, name) for name in each.model_fields_set}
        for name in said.keys() & {"flags", "variables"}:
            said[name] = (*below.get(name, ()), *said[name])
        below |= said
    return Knowledge(_read(roles / COMMON / FILE, Common), OfEngine(**below))


def load_rules(roles: Roles) -> dict[str, About]:
    """What each rule is about. Raises InventoryError."""
    return load_knowledge(roles, ()).common.rules


def _read(path: Path, model: type[_Model]) -> _Model:
    problems = Problems()
    value = read_mapping(path, problems, is_ours=True)
    problems.raise_if_any()
    try:
        return model.model_validate(plain(value))
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise InventoryError(said, origin=Origin(shown_path(path))) from error
