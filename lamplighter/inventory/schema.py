"""What a host and a server may say: the names are a contract, and anything else is an error with its ``file:line``.

Pure. ``check_host`` and ``check_server`` turn merged values into frozen objects and note what is wrong in
``Problems``. In ``args``, ``extra_args`` and ``env`` the text that was written is what the server gets: ``0.10`` stays
``0.10``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeGuard, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from lamplighter.inventory.connection import READ
from lamplighter.inventory.names import PLACE
from lamplighter.inventory.secrets import is_secret
from lamplighter.inventory.values import Problems, Secret, Value, did_you_mean, plain

#: What a check may be; numbers and lists beside them are thresholds.
LEVELS = ("blocker", "warning", "off")
NAME_OF_SERVER = re.compile(r"[a-z0-9][a-z0-9_.-]{0,39}")
#: Seconds that no setting reaches: some months.
_LONGEST = 1e7

# Keys that look reasonable and are not taken, with what to do instead.
_INSTEAD = {
    **dict.fromkeys(("hooks", "notify", "bench", "variants", "nodes"), "this version does not offer it"),
    "api_key": "put the key under `secrets`, or pass the engine's flag under `args`, from a vault or a lookup",
    "name": "the name of a server is the key above its settings",
    "environment": "variables go under `env`",
}

#: What looks like null and is none; a lower-case none is the value of many a flag.
_NOT_NULL = re.compile(r"None|NONE|[nN][uU][lL][lL]|[nN][iI][lL]")
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)*(\+[A-Za-z0-9.]+)?")
_WRONG_KIND = {"dict_type": "must be a mapping", "model_type": "must be a mapping", "tuple_type": "must be a list"}
#: Where another shape is the usual mistake: what to write.
_SHAPES = {
    ("model_type", "lint"): "a server has `lint: {ignore: [...]}`, and `lint: strict` stands beside `servers`",
    ("literal_error", "lint"): "`ignore` stands under a server",
    ("tuple_type", "lint", "ignore"): "write [{id: L15, reason: why it is right here}]",
    ("model_type", "lint", "ignore"): "write {id: L15, reason: why it is right here}",
}


class _Unfit(ValueError):
    """A value that a field does not take; pydantic collects it as a ValueError."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Unfit("must be text")
    if not value:
        raise _Unfit("must not be empty")
    if "\0" in value:
        raise _Unfit("must not hold a NUL byte")
    return value


def _line(value: object) -> str:
    if any(unicodedata.category(each) in ("Cc", "Zl", "Zp") for each in _text(value)):
        raise _Unfit("must be one line, without control characters")
    return _text(value)


def _address(value: object) -> str:
    if not PLACE.fullmatch(_line(value)):
        raise _Unfit("must be a host name or an address")
    return _line(value)


def _user(value: object) -> str:
    if not re.fullmatch(r"[^\s:/-][^\s:/]*", _line(value)):
        raise _Unfit("must be the name of a user")
    return _line(value)


def _lab(value: object) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}", _text(value)):
        raise _Unfit("must be 1 to 40 of A-Z a-z 0-9 _ . - and begin with a letter or digit")
    return _text(value)


def _server_name(value: object) -> str:
    if not NAME_OF_SERVER.fullmatch(_text(value)):
        raise _Unfit("must be the name of a server: 1 to 40 of a-z 0-9 _ . -, beginning with a letter or digit")
    return _text(value)


def _version(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise _Unfit("YAML reads this version as a number, and 0.10 would become 0.1: quote it")
    if not _VERSION.fullmatch(_text(value)):
        raise _Unfit("must be a version as `pip show` writes it, such as 0.5.16, or left out: then the node is asked")
    return _text(value)


def _whole(low: int, high: int) -> BeforeValidator:
    def check(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _Unfit(f"must be a whole number from {low} to {high}, in plain digits")
        return value

    return BeforeValidator(check)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _seconds(value: object) -> float:
    if not _is_number(value) or not 0 < value < _LONGEST:
        raise _Unfit("must be a number of seconds above 0")
    return float(value)


def _stall(value: object) -> float | str:
    if value == "by phase":
        return "by phase"
    try:
        return _seconds(value)
    except ValueError:
        raise _Unfit("must be a number of seconds above 0, or `by phase`") from None


def _gpus(value: object) -> object:
    if value == "all":
        return value
    if not isinstance(value, list | tuple):
        raise _Unfit("must be `all`, a list of indices [0, 1], or a list of UUIDs [GPU-..., ...]")
    numbers = [each for each in value if isinstance(each, int) and not isinstance(each, bool) and each >= 0]
    uuids = [each for each in value if isinstance(each, str) and re.fullmatch(r"(GPU|MIG)-[0-9A-Za-z/-]+", each)]
    if len(value) not in (len(numbers), len(uuids)):
        raise _Unfit("must hold only indices (0, 1) or only UUIDs (GPU-...)")
    if len(set(value)) != len(value):
        raise _Unfit("names a GPU twice")
    return tuple(value)


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise _Unfit("must be true or false")
    return value


def _root(value: object) -> str:
    if not re.match(r"/|~(/|$)", _text(value)):
        raise _Unfit("must begin with / or ~/")
    return _text(value)


def _env_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise _Unfit("is no name for an environment variable: letters, digits and _, not beginning with a digit")
    return value


def _arg_name(value: str) -> str:
    if value.startswith("-"):
        raise _Unfit(f"is written without dashes here: {value.lstrip('-')}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", value):
        raise _Unfit("is no name for a flag: put unusual ones under `extra_args`")
    return value


def _arg(value: object) -> object:
    if isinstance(value, list | tuple):
        if not all(_is_word(each) or is_secret(each) for each in value):
            raise _Unfit("a list here may hold only text and numbers")
        return tuple(value)
    if value is None or isinstance(value, bool) or _is_word(value) or is_secret(value):
        return value
    raise _Unfit("must be text, a number, true (a bare flag), a list (the flag repeated) or null (no flag)")


def _extra_arg(value: object) -> object:
    if is_secret(value):
        return value
    if not _is_word(value):
        raise _Unfit("must be text: quote it")
    return str(value)


def _shown(value: object) -> object:
    """A setting as it may be printed: a secret is its reference."""
    if isinstance(value, tuple):
        return [_shown(each) for each in value]
    return str(value) if is_secret(value) else value


def _is_word(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool) and "\0" not in str(value)


def _env_text(value: object) -> str:
    if isinstance(value, bool):
        raise _Unfit(
            f"YAML reads this as a boolean and the server would see {str(value)!r}: "
            f'write "{value:d}", or the text that is meant, in quotes'
        )
    if isinstance(value, list | tuple):
        raise _Unfit("must be one text, with commas or whatever the server takes between its parts")
    if not _is_word(value):
        raise _Unfit("must be text or a number, or {value: ..., mode: default|force}")
    return str(value)


def _check_name(value: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", value):
        raise _Unfit("is no name of a check or a threshold: a-z, digits and _, beginning with a letter")
    return value


def _check(value: object) -> object:
    if value is False:  # YAML reads the bare word off as false
        return "off"
    if value in LEVELS or _is_number(value):
        return value
    if isinstance(value, list | tuple) and all(_is_word(each) for each in value):
        return tuple(value)
    raise _Unfit("must be blocker, warning or off for a check, a number or a list for a threshold")


def _warning(value: str) -> str:
    if len(value.strip()) < _SHORTEST_WARNING or value.strip().lower().rstrip(":") == "warning":
        raise _Unfit("must name one warning by a part of its words, like `infoROM is corrupted`")
    return value.strip()


def _reason(value: str) -> str:
    if len(value.split()) < _FEWEST_WORDS:
        raise _Unfit("must say why, in words")
    return value


def _secret(value: object) -> object:
    if not is_secret(value):
        raise _Unfit(
            "must be a reference, !secret env:NAME or !secret file:PATH, a vault, or a template with a lookup: no "
            "secret is written down here"
        )
    return value


#: A reason for others to read has more than one.
_FEWEST_WORDS = 2
#: Characters: what is shorter would accept warnings that nobody has read.
_SHORTEST_WARNING = 5

_Model = TypeVar("_Model", bound=BaseModel)
Text = Annotated[str, BeforeValidator(_text)]
Line = Annotated[str, BeforeValidator(_line)]
Address = Annotated[str, BeforeValidator(_address)]
ServerName = Annotated[str, BeforeValidator(_server_name)]
EnvName = Annotated[str, AfterValidator(_env_name)]
ArgName = Annotated[str, AfterValidator(_arg_name)]
ArgValue = Annotated[
    bool | int | float | str | Secret | tuple[str | int | float | Secret, ...] | None,
    PlainValidator(_arg),
    PlainSerializer(_shown),
]
CheckName = Annotated[str, AfterValidator(_check_name)]
CheckValue = Annotated[str | int | float | tuple[str | int | float, ...], PlainValidator(_check)]
ExtraArg = Annotated[str | Secret, PlainValidator(_extra_arg), PlainSerializer(_shown)]
SecretValue = Annotated[Secret, PlainValidator(_secret), PlainSerializer(str)]
Seconds = Annotated[float, BeforeValidator(_seconds)]


class _Frozen(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, hide_input_in_errors=True, defer_build=True
    )


class EnvValue(_Frozen):
    """One variable of a server: ``default`` sets it where it is unset, ``force`` wins over the server itself."""

    value: Annotated[str, BeforeValidator(_env_text)]
    mode: Literal["default", "force"] = "default"

    @model_validator(mode="before")
    @classmethod
    def _from_scalar(cls, given: Any) -> Any:
        return given if isinstance(given, Mapping | EnvValue) else {"value": given}


class Sitecustomize(_Frozen):
    """How the variables reach the server's workers, beyond the launch script's own exports.

    ``server``: a directory of the release on PYTHONPATH, seen by this server alone. ``pth`` and ``interpreter`` reach a
    Python that ignores PYTHONPATH: by start-up files in its site-packages, by a block in the sitecustomize that it
    imports. ``none``: by nothing.
    """

    scope: Literal["server", "pth", "interpreter", "none"] = "server"


class Stale(_Frozen):
    """Which processes of others count as ours to stop.

    ``engine``: those of our user that look like this engine, on our GPUs or ports; ``ours``: only what we started.
    ``kill`` names more; ``report`` leaves these too, and names them all.
    """

    policy: Literal["engine", "ours", "report"] = "engine"
    kill: tuple[Text, ...] = ()


class GpuWarnings(_Frozen):
    """Warnings of nvidia-smi that may stay, each named by a part of its words; its numbers count as printed."""

    accept: tuple[Annotated[str, AfterValidator(_warning)], ...] = ()


class Ignored(_Frozen):
    """A rule of `lint` that is not heeded here, for one variable or flag or for all, and why."""

    id: Text
    variable: Text | None = None
    reason: Annotated[Line, AfterValidator(_reason)]


class LintSettings(_Frozen):
    """What `lint` may leave untold of a server."""

    ignore: tuple[Ignored, ...] = ()


class Timeouts(_Frozen):
    """Seconds: TERM until KILL, GPUs until FREED, start until ready, and silence that counts as a stall."""

    stop: Seconds = 30.0
    free: Seconds = 120.0
    ready: Seconds = 2700.0
    stall: Annotated[float | Literal["by phase"], BeforeValidator(_stall)] = "by phase"


class Stop(_Frozen):
    """``drain``: seconds to wait until the engine counts no request, then it is ended at once; None: it ends itself."""

    drain: Seconds | None = None


@dataclass(frozen=True)
class _Treatment:
    """Marks a setting of how lamplighter treats a server: it reaches the node, and a change of it restarts nothing."""


@dataclass(frozen=True)
class ControlOnly:
    """Marks a setting that the node's plan of a server does not have, and says why."""

    why: str


#: A setting of how lamplighter treats a server.
TREATED = _Treatment()


class Server(_Frozen):
    """One LLM server of a host, as the inventory wants it. ``name`` is its key under ``servers``.

    This is the one declaration of a setting. Unless it is marked otherwise it says what runs: the node is told it (and
    reads it in ``node.plan.Plan``), and it is part of the release's digest.
    """

    name: str
    engine: Text
    engine_version: Annotated[str, BeforeValidator(_version)] | None = None
    model: Text
    served_name: Text | None = None
    host: Address = "127.0.0.1"
    port: Annotated[int, _whole(1, 65535)]
    gpus: Annotated[Literal["all"] | tuple[int, ...] | tuple[str, ...], BeforeValidator(_gpus)] = "all"
    python: Line = "python3"
    program: Annotated[Line | None, ControlOnly("the node is told argv")] = None
    args: Annotated[Mapping[ArgName, ArgValue], ControlOnly("the node is told argv")] = {}
    extra_args: Annotated[tuple[ExtraArg, ...], ControlOnly("the node is told argv")] = ()
    env: Mapping[EnvName, EnvValue] = {}
    secrets: Annotated[Mapping[EnvName, SecretValue], ControlOnly("their names are told")] = {}
    sitecustomize: Sitecustomize = Sitecustomize()
    launcher: Literal["auto", "systemd", "detached"] = "auto"
    stale: Annotated[Stale, TREATED] = Stale()
    timeouts: Annotated[Timeouts, TREATED] = Timeouts()
    stop: Annotated[Stop, TREATED] = Stop()
    keep_releases: Annotated[int, _whole(1, 1000), TREATED] = 5
    gpus_unified: Annotated[Literal["refuse", "accept"], TREATED] = "refuse"
    on_confirm_failure: Annotated[Literal["keep", "rollback"], TREATED] = "keep"
    on_verify_failure: Annotated[
        Literal["auto", "keep", "rollback"], ControlOnly("`deploy` goes by it; the node is asked for a rollback")
    ] = "auto"
    allow: Annotated[tuple[Text, ...], TREATED] = ()
    nccl_proof: Annotated[bool, BeforeValidator(_switch)] = False
    tls: Annotated[Literal["none", "verify", "self-signed"], TREATED] = "none"
    gpu_warnings: Annotated[GpuWarnings, TREATED] = GpuWarnings()
    parser: Annotated[Literal["auto", "off"], TREATED] = "auto"
    prestart: Annotated[Literal["auto", "off"], TREATED] = "auto"
    prefetch: Annotated[Literal["auto", "off"], TREATED] = "auto"
    was: Annotated[ServerName | None, ControlOnly("the request has it, for the first deploy alone")] = None
    checks: Annotated[Mapping[CheckName, CheckValue], ControlOnly("`verify` goes by them; the request has them")] = {}
    lint: Annotated[LintSettings, ControlOnly("`lint` goes by it; the request has it")] = LintSettings()

    def to_json(self) -> dict[str, Any]:
        """JSON-safe; secrets appear as their reference."""
        return self.model_dump(mode="json")


def _settings(*, marked: type) -> tuple[str, ...]:
    return tuple(
        name for name, field in Server.model_fields.items() if any(isinstance(each, marked) for each in field.metadata)
    )


#: How lamplighter treats a server, as opposed to what the server is: a change of these needs no restart.
TREATMENT = _settings(marked=_Treatment)
#: What the node is told of a server in the inventory's own words.
TOLD = tuple(name for name in Server.model_fields if name not in _settings(marked=ControlOnly))


class HostVariables(_Frozen):
    """What a host may say beside its servers; the defaults are documented in roles/node/defaults.yml."""

    ansible_host: Address | None = None
    ansible_port: Annotated[int, _whole(1, 65535)] | None = None
    ansible_user: Annotated[str, BeforeValidator(_user)] | None = None
    ansible_ssh_private_key_file: Line | None = None
    ansible_python_interpreter: Line = "python3"
    become: Annotated[bool, BeforeValidator(_switch)] = False
    root: Annotated[str, BeforeValidator(_root)] | None = None
    lab: Annotated[str, BeforeValidator(_lab)] | None = None
    host_key_checking: Literal["strict", "accept-new", "off"] = "strict"
    known_hosts: Line | None = None
    connect_timeout: Seconds = 10.0
    transport: Literal["auto", "fabric", "openssh"] = "auto"
    merge: Literal["deep", "replace"] = "deep"
    lint: Literal["warn", "strict"] = "warn"


#: The variable behind each part of a ConnectionSpec.
CONNECTION = {
    "host": "ansible_host",
    "port": "ansible_port",
    "user": "ansible_user",
    "key_file": "ansible_ssh_private_key_file",
    "python": "ansible_python_interpreter",
    "become": "become",
    "host_key_checking": "host_key_checking",
    "known_hosts": "known_hosts",
    "connect_timeout": "connect_timeout",
    "transport": "transport",
    "ssh_options": "ansible_ssh_common_args",
    "ssh_config": "ansible_ssh_common_args",
}
#: Text that a login alone needs.
_FOR_LOGIN = ("ansible_host", "ansible_port", "ansible_user", "ansible_ssh_private_key_file", "transport")
#: The variables that are ours: what templates in others come to is nothing to us.
OURS = READ | {"servers"}


@dataclass(frozen=True)
class ConnectionSpec:
    """How to reach a host over SSH. Paths are as written (``~`` is the control machine's); the timeout is seconds."""

    host: str
    port: int | None = None
    user: str | None = None
    key_file: str | None = None
    python: str = "python3"
    become: bool = False
    host_key_checking: Literal["strict", "accept-new", "off"] = "strict"
    known_hosts: str | None = None
    connect_timeout: float = 10.0
    transport: Literal["auto", "fabric", "openssh"] = "auto"
    """Fabric, or the system's ssh; ``auto`` takes the second for what paramiko cannot do."""
    ssh_options: tuple[tuple[str, str], ...] = ()
    """Lines of ssh_config for this login alone, before those of the files: keyword in lower case, and value."""
    ssh_config: str | None = None
    """The file of ssh_config that counts instead of the user's and the system's, as with `ssh -F`."""


def check_host(
    name: str, value: Value, problems: Problems, *, is_idle: bool
) -> tuple[ConnectionSpec, str | None, str | None] | None:
    """Connection, root and lab of a host from its merged variables, ``servers`` aside; None after a problem.

    Nobody logs in to a host that ``is_idle``: what cannot be an address, a port or a user is a warning there.
    """
    value, placeholders = _without_placeholders(value, problems) if is_idle else (value, {})
    found = _validate(HostVariables, value, "", problems)
    if found is None:
        return None
    spec = ConnectionSpec(
        host=placeholders.get("ansible_host", found.ansible_host or name),
        port=found.ansible_port,
        user=placeholders.get("ansible_user", found.ansible_user),
        key_file=placeholders.get("ansible_ssh_private_key_file", found.ansible_ssh_private_key_file),
        python=found.ansible_python_interpreter,
        become=found.become,
        host_key_checking=found.host_key_checking,
        known_hosts=found.known_hosts,
        connect_timeout=found.connect_timeout,
        transport=found.transport,
    )
    return spec, found.root, found.lab


def _without_placeholders(value: Value, problems: Problems) -> tuple[Value, dict[str, str]]:
    """The variables without text such as ``<your address>`` where only a login needs it, and that text.

    What begins with a dash, or holds what nobody sees, is no placeholder.
    """
    kept, placeholders = dict(value.entries or {}), dict[str, str]()
    for variable in _FOR_LOGIN:
        text = kept[variable].data if variable in kept else None
        if isinstance(text, int) and variable == "ansible_port":
            text = str(text)
        if not isinstance(text, str) or text.startswith("-") or not text.isprintable():
            continue
        doubts = Problems()
        if _validate(HostVariables, replace(value, data={variable: kept[variable]}), "", doubts) is None:
            problems.take_as_warnings(doubts, "placeholder")
            placeholders[variable] = text
            del kept[variable]
    return replace(value, data=kept), placeholders


def check_server(name: str, value: Value, problems: Problems) -> Server | None:
    """The server of this name from its merged settings; None after a problem."""
    path = f"servers.{name}"
    before = len(problems)
    if not NAME_OF_SERVER.fullmatch(name):
        problems.add(
            value.origin, f"{path}: the name must be 1 to 40 of a-z 0-9 _ . - and begin with a letter or digit"
        )
    written = _as_written(value, path, problems)
    server = _validate(Server, written, path, problems, name=name)
    return server if len(problems) == before else None


def check_thresholds(path: str, defaults: Value, checks: Value, problems: Problems) -> None:
    """Note each threshold of a role (``defaults``) that a null drops from ``checks``, or that is of another kind."""
    below = {name: each for name, each in (defaults.entries or {}).items() if not _is_level(each)}
    given = checks.entries or {}
    dropped = [name for name in below if name not in given]
    if dropped and (checks.data is None or checks.entries is not None):
        names = ", ".join(dropped)
        problems.add(checks.origin, f"{path}: a null drops {names}, which checks go by: change single ones instead")
    for name, default in below.items():
        value = given.get(name, default)
        kind, fits = _kind_of_threshold(name, default)
        if not fits(plain(value)):
            role = f"as the role's {default.text or 'own'} ({default.origin})"
            problems.add(value.origin, f"{path}.{name}: must be {kind}, {role}; found {value.describe()}")


def _is_level(value: Value) -> bool:
    return value.data is False or value.data in LEVELS


def _kind_of_threshold(name: str, default: Value) -> tuple[str, Callable[[object], bool]]:
    if isinstance(default.data, tuple):
        return "a list", lambda value: isinstance(value, tuple)
    if name.endswith("_seconds"):
        return "a number of seconds above 0", lambda value: _is_number(value) and 0 < value < _LONGEST
    return "a number", _is_number


def _as_written(value: Value, path: str, problems: Problems) -> Value:
    """The settings with the numbers of args, extra_args and env as the text that stands in the file, where it differs.

    YAML would turn ``--revision 1.10`` into 1.1. A switch written ``on`` or ``no`` is ambiguous and refused.
    """
    entries = dict(value.entries or {})
    if value.entries is None:
        return value
    for key in ("args", "extra_args", "env"):
        if key in entries:
            entries[key] = _keep_text(entries[key])
    for name, each in (entries["args"].entries or {}).items() if "args" in entries else ():
        if isinstance(each.data, bool) and each.text.lower() not in ("true", "false"):
            problems.add(
                each.origin,
                f"{path}.args.{name}: write true for a bare flag, or quote the text that is meant: '{each.text}'",
            )
        elif isinstance(each.data, str) and _NOT_NULL.fullmatch(each.data):
            problems.add(
                each.origin,
                f"{path}.args.{name}: {each.data} is text to YAML: write null for no flag, or put the flag with this "
                "text under `extra_args`",
            )
    return replace(value, data=entries)


def _keep_text(value: Value) -> Value:
    data = value.data
    if isinstance(data, Mapping):
        return replace(value, data={key: _keep_text(each) for key, each in data.items()})
    if isinstance(data, tuple):
        return replace(value, data=tuple(_keep_text(each) for each in data))
    if isinstance(data, int | float) and not isinstance(data, bool) and str(data) != value.text:
        return replace(value, data=value.text)
    return value


def _validate(model: type[_Model], value: Value, path: str, problems: Problems, **given: object) -> _Model | None:
    """The model of these values, or None after noting every pydantic error in our words with its ``file:line``."""
    if value.entries is None:
        problems.add(value.origin, f"{path}: must be a mapping, not {value.describe()}")
        return None
    before = len(problems)
    for key in given.keys() & value.entries.keys():
        problems.add(value.entries[key].origin, f"{_dotted(path, (key,))}: {_unknown(key, ())}")
    try:
        result = model.model_validate({**{key: plain(each) for key, each in value.entries.items()}, **given})
    except ValidationError as error:
        for each in error.errors(include_url=False):
            loc = tuple(part for part in each["loc"] if part != "[key]")
            found, depth = _find(value, loc)
            problems.add(found.origin, f"{_dotted(path, loc[:depth])}: {_sentence(each, loc, found, model)}")
        return None
    return result if len(problems) == before else None


def _find(value: Value, loc: tuple[int | str, ...]) -> tuple[Value, int]:
    """The value that pydantic's path leads to, as far as it is written, and how many steps that took.

    A list item keeps the path of its list: its own line is the better half of the answer.
    """
    depth = 0
    for step in loc:
        if isinstance(value.data, Mapping) and step in value.data:
            value = value.data[str(step)]
        elif isinstance(value.data, tuple) and isinstance(step, int) and step < len(value.data):
            value = value.data[step]
        else:
            break
        depth += 1
    return value, depth


def _sentence(error: Any, loc: tuple[int | str, ...], found: Value, model: type[BaseModel]) -> str:
    kind = error["type"]
    # Somebody may have written the secret itself: what stands under `secrets` is never repeated.
    what = "something else" if loc[0] == "secrets" else found.describe()
    if kind == "missing":
        return f"`{loc[-1]}` is missing"
    if kind == "extra_forbidden":
        return _unknown(str(loc[-1]), _known_names(model, loc[:-1]))
    if kind == "literal_error":
        return f"must be {error['ctx']['expected'].replace(chr(39), '`')}, not {what}{_shape(kind, loc, found)}"
    if kind in _WRONG_KIND:
        return f"{_WRONG_KIND[kind]}, not {what}{_shape(kind, loc, found)}"
    if kind == "value_error":
        said = str(error["ctx"]["error"])
        return f"{said}; found {what}" if said.startswith(("must", "YAML")) else said
    return f"{error['msg']}; found {what}"


def _shape(kind: str, loc: tuple[int | str, ...], found: Value) -> str:
    """What to write, where another shape is the usual mistake."""
    is_other = kind != "literal_error" or found.entries is not None
    said = _SHAPES.get((kind, *(step for step in loc if isinstance(step, str)))) if is_other else None
    return f": {said}" if said else ""


def _unknown(name: str, known: Iterable[str]) -> str:
    """The sentence about a name that is not taken: what to write instead, or the closest name that is."""
    return f"unknown name: {_INSTEAD[name]}" if name in _INSTEAD else f"unknown name{did_you_mean(name, known)}"


def _known_names(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    for step in loc:
        field = model.model_fields.get(str(step))
        model = _model_in(field.annotation) or model if field is not None else model
    return [name for name in model.model_fields if name != "name"]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a setting's value is, or consists of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _dotted(path: str, loc: Iterable[int | str]) -> str:
    return ".".join([*([path] if path else []), *(str(step) for step in loc)])
