"""The files of an engine's role: what they may say, and how they are read.

Pure: reads files of the roles directory. Every mistake is an InventoryError with its ``file:line``, several at once.
``extends`` takes another role's file as the ground: lists of log wording are added to it, the child's first; mappings
are merged; anything else is replaced. A file without ``launch`` is only such a ground, not an engine.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
)

from lamplighter.errors import InventoryError
from lamplighter.inventory.sources.yaml_file import read_mapping
from lamplighter.inventory.values import Origin, Problems, Value, did_you_mean, plain, shown_path
from lamplighter.node.events import PHASES
from lamplighter.node.log.rules import compiled as compiled_regex
from lamplighter.project import Roles

FILE = "engine.yml"
#: What a role may be called: the name of a directory, and nothing that leads elsewhere.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: What words of the command may stand for.
WORDS = ("python", "program", "bin", "model", "served_name", "host", "port")
#: Lists of wording: a child adds to them. All other lists, a child replaces.
ADDED = (
    "envelope", "prefix", "rank", "pids", "percent", "time", "error", "chain", "quiet", "consequences", "wrappers",
    "stopping", "benign", "idle", "warnings", "failures", "sentence", "outside", "ending", "advice", "advice_list",
)  # fmt: skip
#: What an engine must say, itself or through the file it extends.
NEEDED = ("launch", "identity", "generate", "processes", "stop", "phases", "failures")


def read_engine(name: str, roles: Roles) -> dict[str, Any]:
    """What ``roles/<name>/engine.yml`` says, complete and JSON-safe. Raises InventoryError, with file:line."""
    problems = Problems()
    merged = _merged(name, roles, problems, ())
    problems.raise_if_any()
    top = Origin(shown_path(roles / name / FILE), 1)
    for key in NEEDED:
        if merged.get(key) is None:
            reason = "it is shared wording, not an engine to start" if key == "launch" else ""
            problems.add(top, f"{key} is missing{': ' if reason else ''}{reason}")
    for location in _missing(merged):
        problems.add(top, f"{location} is missing")
    problems.raise_if_any()
    of_node = {key: _read_of_node(key, model, roles, problems) for key, model in _OF_NODE.items()}
    problems.raise_if_any()
    return {"name": name, **_complete(merged), **of_node}


def rule_place(name: str, roles: Roles, key: str, pattern: str) -> Origin | None:
    """Where ``pattern`` stands under ``key`` of an engine's file or of one that it extends; None where nowhere."""
    while True:
        entries = read_mapping(roles / name / FILE, Problems()).entries or {}
        found = _place_of(entries[key], pattern) if key in entries else None
        parent = entries.get("extends")
        if found is not None or parent is None:
            return found
        name = str(parent.data)


def _place_of(value: Value, pattern: str) -> Origin | None:
    data = value.data
    if isinstance(data, Mapping):
        inner = [each for each in data.values() if isinstance(each, Value)]
    elif isinstance(data, tuple):
        inner = [each for each in data if isinstance(each, Value)]
    else:
        return value.origin if data == pattern else None
    return next((place for each in inner if (place := _place_of(each, pattern)) is not None), None)


def engine_names(roles: Roles) -> list[str]:
    """The names that ``load_engine`` takes: roles whose engine.yml, with what it extends, has a launch."""
    names = []
    for path in sorted(roles.glob(f"*/{FILE}")):
        chain = [path.parent.name]
        while True:
            content = read_mapping(roles / chain[-1] / FILE, Problems()).entries or {}
            parent = content.get("extends")
            if "launch" in content:
                names.append(chain[0])
                break
            if parent is None or not isinstance(parent.data, str) or parent.data in chain:
                break
            chain.append(parent.data)
    return names


def _merged(name: str, roles: Roles, problems: Problems, children: tuple[str, ...]) -> dict[str, Any]:
    """The contents of one engine.yml on top of those it extends, each file checked by itself."""
    path = roles / name / FILE
    if not NAME.fullmatch(name) or not path.is_file():
        raise _unknown(name, roles)
    value = read_mapping(path, problems, is_ours=True)
    _check(value, problems)
    own = _as_json(plain(value))
    parent = own.pop("extends", None)
    if parent is None or not isinstance(parent, str):
        return {**own, "ancestors": []}
    origin = (value.entries or {})["extends"].origin
    if parent in (*children, name):
        problems.add(origin, f"extends: {' -> '.join((*children, name, parent))} goes round in a circle")
        return {**own, "ancestors": []}
    if not (roles / parent / FILE).is_file():
        known = [each.parent.name for each in roles.glob(f"*/{FILE}") if each.parent.name != name]
        problems.add(origin, f"extends: roles have no {parent}/{FILE}{did_you_mean(parent, known)}")
        return {**own, "ancestors": []}
    ground = _merged(parent, roles, problems, (*children, name))
    together = _over(ground, own)
    return {**together, "ancestors": [parent, *ground["ancestors"]]}


def _read_of_node(name: str, model: type[_Part], roles: Roles, problems: Problems) -> dict[str, Any]:
    """The content of a file of the role ``node``; {} in a directory of roles that has none."""
    path = roles / "node" / f"{name}.yml"
    if not path.is_file():
        return {}
    value = read_mapping(path, problems, is_ours=True)
    _check(value, problems, model)
    return dict(_as_json(plain(value)))


def _unknown(name: str, roles: Roles) -> InventoryError:
    known = engine_names(roles)
    return InventoryError(
        f"no engine {name[:80]!r}{did_you_mean(name, known)}",
        why=f"there is no {shown_path(roles / name[:64] / FILE)}; engines: {', '.join(known) or 'none'}",
        next_step="correct servers.NAME.engine, or write that file",
    )


def _over(ground: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(ground)
    for key, value in own.items():
        below = result.get(key)
        if key in ADDED and isinstance(value, list) and isinstance(below, list):
            result[key] = [*value, *below]
        elif isinstance(value, dict) and isinstance(below, dict) and key != "body":
            result[key] = _over(below, value)
        else:
            result[key] = value
    return result


def _complete(merged: Mapping[str, Any]) -> dict[str, Any]:
    """The merged file with its defaults, JSON-safe. It has been checked file by file, so that it can only be right."""
    launch, written, early = merged["launch"], merged.get("overwrites") or (), merged.get("prestart")
    return {
        **merged,
        "prestart": None if early is None else _Prestart.model_validate(early).model_dump(mode="json"),
        "launch": {"served_name": "{model}", "python": True, **launch, "flags": launch.get("flags") or {}},
        "stop": {"signal": "TERM", **merged["stop"]},
        "processes": {"titles": [], "entry_points": [], **merged["processes"]},
        "overwrites": [_Overwrite.model_validate(each).model_dump(mode="json") for each in written],
    }


def _as_json(value: object) -> Any:
    """Tuples as lists, all else as it is; what comes out is what the node gets out of the JSON."""
    return json.loads(json.dumps(value, default=str))


# -- the schema of one file, in which nothing is required: a child may say only what differs


def _regex(text: str) -> str:
    try:
        is_empty = compiled_regex(text).search("") is not None
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if is_empty:
        raise ValueError("matches an empty line, and so everything")
    return text


def _naming(*groups: str) -> AfterValidator:
    def check(text: str) -> str:
        if not set(groups) & set(compiled_regex(text).groupindex):
            raise ValueError(f"must have a group (?P<{groups[0]}>...)")
        return text

    return AfterValidator(check)


def _duration(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e6:
        raise ValueError("must be a number of seconds")
    return float(value)


def _word(value: str) -> str:
    for name in re.findall(r"\{(\w*)\}", value):
        if name not in WORDS:
            raise ValueError(f"{{{name}}} is not one of {' '.join(f'{{{word}}}' for word in WORDS)}")
    return value


def _own_name(value: str) -> str:
    for name in re.findall(r"\{(\w*)\}", value):
        if name not in ("model", "model_file"):
            raise ValueError(f"{{{name}}} is not {{model}} or {{model_file}}, the last part of its path")
    return value


def _hint(value: str) -> str:
    for name in re.findall(r"\{(\w*)\}", value):
        if name != "server":
            raise ValueError(f"{{{name}}} is not {{server}}, the only thing that is filled in")
    return value


def _phase(value: str) -> str:
    if value not in PHASES:
        raise ValueError(f"must be one of {', '.join(PHASES)}")
    return value


Regex = Annotated[StrictStr, AfterValidator(_regex)]
Sizes = Annotated[Regex, _naming("size"), _naming("unit")]
Seconds = Annotated[float, BeforeValidator(_duration)]
Word = Annotated[StrictStr, AfterValidator(_word)]
OwnName = Annotated[StrictStr, AfterValidator(_own_name)]
Hint = Annotated[StrictStr, AfterValidator(_hint)]
Phase = Annotated[StrictStr, AfterValidator(_phase)]
Cause = Annotated[StrictStr, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Regexes = tuple[Regex, ...]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Launch(_Part):
    command: Annotated[tuple[Word, ...], Field(min_length=1)]
    flags: dict[Literal["model", "served_name", "host", "port"], StrictStr | None] = {}
    served_name: OwnName = "{model}"
    python: StrictBool = True


class _PhasePart(_Part):
    name: Phase
    patterns: Annotated[Regexes, Field(min_length=1)]
    after: Phase | None = None


class _Memory(_Part):
    wanted: Sizes
    free: Sizes
    others: Annotated[Sizes, _naming("pid")]
    itself: Regex
    at_least: float


class _Failure(_Part):
    id: Cause
    patterns: Annotated[Regexes, Field(min_length=1)]
    hint: Hint = ""
    general: StrictBool = False
    vague: StrictBool = False
    consequence: StrictBool = False
    survivable: StrictBool = False
    early: StrictBool = False
    native: StrictBool = False
    passive: StrictBool = False
    only: Literal["loading", "serving"] | None = None
    silence: Annotated[int, Field(ge=1, le=100)] | None = None
    advice: Hint = ""
    after: Regex | None = None
    above: Regex | None = None
    unless: Regex | None = None
    block: Regex | None = None
    memory: _Memory | None = None


class _Ready(_Part):
    unless: tuple[Cause, ...] = ()


class _Identity(_Part):
    source: Literal["models", "reply"]
    path: StrictStr | None = None
    field: StrictStr
    equals: Annotated[tuple[Word, ...], Field(min_length=1)]


class _Generate(_Part):
    kind: Literal["chat", "completion", "embedding"]
    path: StrictStr
    body: dict[str, Any] = {}
    reply_field: StrictStr | None = None


class _Health(_Part):
    path: StrictStr
    timeout: Seconds = 10.0
    veto_status: tuple[int, ...] = (503,)


class _Refusals(_Part):
    transient: tuple[int, ...]


class _Counters(_Part):
    path: StrictStr
    tokens: Regex
    requests: Regexes = ()
    lines: Regex | None = None


class _Processes(_Part):
    titles: Regexes = ()
    entry_points: Regexes = ()
    needed_workers: Regexes = ()
    rank: Annotated[Regex, _naming("rank")] | None = None
    kills_itself: StrictBool = False


class _Warning(_Part):
    id: Cause
    patterns: Annotated[Regexes, Field(min_length=1)]
    hint: Hint = ""


def _script(text: str) -> str:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"is no Python: {error}") from None
    return text


Module = Annotated[StrictStr, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]


class _Parser(_Part):
    """``code`` reads the launch's words in sys.argv, fails where they are wrong, and ends with 77 where it cannot tell.

    ``passes`` are causes that say nothing of the words: what it needs there, only the server will have.
    """

    code: Annotated[StrictStr, AfterValidator(_script)]
    seconds: Seconds = 120.0
    passes: tuple[Cause, ...] = ()


class _Prestart(_Part):
    """``modules`` a launcher imports before it waits; ``memory_mib`` it then takes.

    ``behind_shell``: the program of the launch is a script of the shell, and becomes Python.
    """

    modules: tuple[Module, ...] = ()
    memory_mib: Annotated[int, Field(ge=0)] = 2048
    seconds: Seconds = 180.0
    behind_shell: StrictBool = False


class _Stop(_Part):
    signal: Literal["TERM", "INT"] = "TERM"


Flags = tuple[Annotated[StrictStr, Field(pattern=r"^-{1,2}[a-z][a-z0-9-]*$")], ...]


class _Loss(_Part):
    """What becomes of a value of ours, for `lint`: roles/sglang/engine.yml says what each field means."""

    id: Annotated[StrictStr, Field(pattern=r"^L\d+$")]
    value: StrictStr | None = None
    by_flag: dict[StrictStr, StrictStr | None] = {}
    when: Flags = ()
    ranks: StrictBool = False
    env: dict[StrictStr, StrictStr] = {}
    against: tuple[StrictStr, ...] = ()
    plain: Literal["error", "warning"]
    forced: Literal["error", "warning"] | None = None


class _Overwrite(_Part):
    name: StrictStr
    effect: StrictStr
    versions: Annotated[StrictStr, Field(pattern=r"^(\*|(<=|>=|<|>|==)\d[\w.]*(,(<=|>=|<|>|==)\d[\w.]*)*)$")] = "*"
    lint: _Loss | None = None


class _Room(_Part):
    tmp_mib: int = 0
    shm_mib: int = 0
    shm_mib_ranks: int = 0


class _Value(_Part):
    """A flag whose value a pattern is found in."""

    flags: Annotated[Flags, Field(min_length=1)]
    like: Regex


class _DerivedPorts(_Part):
    """Ports in a row, taken where one of ``when`` is given and ``only`` holds. Which the first is, ``flags`` or the
    variable ``env`` say; else it lies ``plus`` above the HTTP port, or is ``default``.
    """

    uses: Annotated[tuple[StrictStr, ...], Field(min_length=1)]
    flags: Flags = ()
    env: StrictStr | None = None
    plus: int | None = None
    default: int | None = None
    when: Flags = ()
    only: _Value | None = None
    rank: Flags = ()


class _Factor(_Part):
    flags: Annotated[Flags, Field(min_length=1)]
    unless: Flags = ()


class _Elsewhere(_Part):
    flags: Annotated[Flags, Field(min_length=1)]
    values: tuple[StrictStr, ...]


class _Ranks(_Part):
    factors: tuple[_Factor, ...] = ()
    nodes: Flags = ()
    first_gpu: Flags = ()
    elsewhere: tuple[_Elsewhere, ...] = ()


class _Draft(_Part):
    """A model that drafts: the flags of its path and of the method, or one that says both as JSON.

    ``sharing`` are the methods that take hidden states of the target, ``tapping`` those that take several layers'.
    """

    flags: Flags = ()
    method: Flags = ()
    config: Flags = ()
    sharing: tuple[StrictStr, ...] = ()
    tapping: tuple[StrictStr, ...] = ()


class _Needs(_Part):
    package: StrictStr | None = None
    model_files: tuple[StrictStr, ...] | None = ()
    model_reads: tuple[StrictStr, ...] = ()
    weights: tuple[StrictStr, ...] | None = ()
    files: Flags = ()
    room: _Room | None = None
    ports: tuple[_DerivedPorts, ...] = ()
    ranks: _Ranks | None = None
    draft: _Draft | None = None


class _Programs(_Part):
    wrappers: tuple[StrictStr, ...] = ()
    shells: tuple[StrictStr, ...] = ()
    sessions: tuple[StrictStr, ...] = ()
    restarters: dict[StrictStr, StrictStr] = {}
    monitors: tuple[StrictStr, ...] = ()
    watchers: tuple[StrictStr, ...] = ()


class _Xid(_Part):
    means: StrictStr
    harmless: StrictBool = False


class _Stuck(_Part):
    sleeps_in: Annotated[Regex, Field(alias="in")]
    advice: StrictStr


class _Faults(_Part):
    xids: dict[Annotated[StrictStr, Field(pattern=r"^\d+$")], _Xid] = {}
    explained_by_xid: tuple[Cause, ...] = ()
    explained_by_oom: tuple[Cause, ...] = ()
    stuck: tuple[_Stuck, ...] = ()
    hints: dict[Cause, Hint] = {}


#: What is about any node, by the file of the role `node` that says it: it reaches the node with the engine.
_OF_NODE: dict[str, type[_Part]] = {"programs": _Programs, "faults": _Faults}


class _File(_Part):
    extends: StrictStr | None = None
    distribution: StrictStr | None = None
    launch: _Launch | None = None
    needs: _Needs | None = None
    api_key_flag: StrictStr | None = None
    api_key_env: StrictStr | None = None
    identity: _Identity | None = None
    generate: _Generate | None = None
    health: _Health | None = None
    refusals: _Refusals | None = None
    counters: _Counters | None = None
    processes: _Processes | None = None
    stop: _Stop | None = None
    parser: _Parser | None = None
    prestart: _Prestart | None = None
    overwrites: tuple[_Overwrite, ...] = ()
    detect: Regexes = ()
    starts: Regexes = ()
    envelope: Regexes = ()
    version: tuple[Annotated[Regex, _naming("version")], ...] = ()
    prefix: Regexes = ()
    rank: tuple[Annotated[Regex, _naming("rank")], ...] = ()
    pids: tuple[Annotated[Regex, _naming("pid")], ...] = ()
    percent: tuple[Annotated[Regex, _naming("percent", "done")], ...] = ()
    time: tuple[Annotated[Regex, _naming("month"), _naming("second")], ...] = ()
    traceback: Regex | None = None
    frame: Regex | None = None
    error: Regexes = ()
    sentence: Regexes = ()
    outside: Regexes = ()
    ending: Regexes = ()
    advice: Regexes = ()
    advice_list: Regexes = ()
    advice_item: Regex | None = None
    chain: Regexes = ()
    settle: Seconds | None = None
    stall: dict[Phase, Seconds] = {}
    idle: Regexes = ()
    warnings: tuple[_Warning, ...] = ()
    measures: dict[Cause, tuple[Annotated[Regex, _naming("value")], ...]] = {}
    quiet: Regexes = ()
    consequences: Regexes = ()
    wrappers: Regexes = ()
    stopping: Regexes = ()
    benign: Regexes = ()
    ready: _Ready | None = None
    phases: tuple[_PhasePart, ...] = ()
    failures: tuple[_Failure, ...] = ()
    hints: dict[Cause, Hint] = {}


_KNOWN = sorted({field for part in _Part.__subclasses__() for field in part.model_fields})
_SAID = {
    "missing": "is missing",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "string_type": "must be text: quote it",
    "bool_type": "must be true or false",
    "too_short": "must not be empty",
}


def _check(value: Value, problems: Problems, model: type[_Part] | None = None) -> None:
    try:
        (model or _File).model_validate(plain(value))
    except ValidationError as error:
        for each in error.errors():
            location = each["loc"]
            if each["type"] == "missing" and _is_of_a_section(location):
                continue  # what this file extends may say it: asked again when all are merged
            path = ".".join(str(part) for part in location)
            if each["type"] == "extra_forbidden":
                problems.add(_origin(value, location), f"{path}: unknown key{did_you_mean(str(location[-1]), _KNOWN)}")
                continue
            said = _SAID.get(each["type"]) or each["msg"].removeprefix("Value error, ")
            problems.add(_origin(value, location), f"{path}: {said}")


def _missing(merged: Mapping[str, Any]) -> list[str]:
    try:
        _File.model_validate({key: each for key, each in merged.items() if key != "ancestors"})
    except ValidationError as error:
        return [".".join(map(str, each["loc"])) for each in error.errors() if each["type"] == "missing"]
    return []


def _is_of_a_section(location: tuple[int | str, ...]) -> bool:
    return not any(isinstance(part, int) for part in location)


def _origin(value: Value, location: tuple[int | str, ...]) -> Origin:
    """Where the innermost part of ``location`` that exists is written."""
    for part in location:
        data = value.data
        if isinstance(data, Mapping) and part in data:
            value = data[str(part)]
        elif isinstance(data, tuple) and isinstance(part, int) and part < len(data):
            value = data[part]
        else:
            break
    return value.origin
