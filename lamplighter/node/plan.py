"""What a request, or a release on the node, says about one server and its engine: the typed view of that JSON.

The fields are the settings of the inventory that the node goes by, under the inventory's own names. A field with a
default is one that the releases of earlier versions do not have.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
from typing import Any, Mapping, Optional, Union, get_args, get_origin, get_type_hints

#: What ``engine`` has of the role `node` (roles/node/*.yml): it is about the node, whichever release is started.
OF_NODE = ("programs", "faults")


@dataclasses.dataclass(frozen=True)
class Variable:
    """``mode``: ``default`` or ``force``."""

    value: str
    mode: str


@dataclasses.dataclass(frozen=True)
class Sitecustomize:
    """How the variables reach the server's processes: ``server``, ``pth``, ``interpreter`` or ``none``."""

    scope: str


@dataclasses.dataclass(frozen=True)
class Stale:
    """Which processes of others may be stopped: by ``policy`` (``engine``, ``ours`` or ``report``), and by name."""

    policy: str
    kill: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class GpuWarnings:
    """Warnings of nvidia-smi that may stay, each by a part of its words."""

    accept: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Stop:
    """``drain``: seconds to wait until the engine counts no request, then it is ended at once; None: it ends itself."""

    drain: Optional[float] = None


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Seconds. ``stop``: from TERM to KILL; ``free``: cap of the wait for FREED; ``ready``: cap of the start."""

    stop: float
    free: float
    ready: float
    stall: Union[float, str] = "by phase"

    @property
    def silence(self) -> Optional[float]:
        """Return the silence that counts as a stall, in every phase; None: as the engine says for each."""
        return None if isinstance(self.stall, str) else self.stall


@dataclasses.dataclass(frozen=True)
class Plan:
    """One server as the inventory wants it, and ``engine``, what its role says of how such servers behave (engine.yml).

    ``gpus``: "all", indexes or UUIDs; empty means that it uses none. ``argv_secrets``: the places of words in ``argv``
    that are secrets, by the variable of the release's ``env`` that holds each.
    """

    name: str
    engine: Mapping[str, Any]
    engine_version: Optional[str]
    model: str
    served_name: str
    host: str
    port: int
    gpus: Union[str, tuple[Union[int, str], ...]]
    #: "": the engine is no Python.
    python: str
    argv: tuple[str, ...]
    env: Mapping[str, Variable]
    sitecustomize: Sitecustomize
    launcher: str
    stale: Stale
    timeouts: Timeouts
    keep_releases: int
    gpus_unified: str
    allow: tuple[str, ...]
    on_confirm_failure: str = "keep"
    nccl_proof: bool = False
    tls: str = "none"
    gpu_warnings: GpuWarnings = GpuWarnings()
    stop: Stop = Stop()
    parser: str = "auto"
    prestart: str = "auto"
    prefetch: str = "auto"
    argv_secrets: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, said: Mapping[str, Any]) -> Plan:
        """Read ``server`` and ``engine`` of a request or a plan.json. Raises ValueError where they are of no plan."""
        try:
            plan: Plan = _fields(cls, {**said["server"], "engine": said["engine"]})
        except (KeyError, TypeError) as error:
            raise ValueError(f"no plan of a server: {type(error).__name__}: {error}") from error
        return plan

    @property
    def exports(self) -> dict[str, str]:
        """The plain variables that the launch script exports; what only the node knows comes on top."""
        return {name: variable.value for name, variable in self.env.items()}

    @property
    def faults(self) -> Mapping[str, Any]:
        """What roles/node/faults.yml says."""
        return self.engine.get("faults") or {}

    @property
    def uses_gpus(self) -> bool:
        return self.gpus == "all" or bool(self.gpus)


#: The types of a dataclass's fields; a node reads many plans.
_types = functools.lru_cache(maxsize=None)(get_type_hints)


def _fields(kind: Any, said: Mapping[str, Any]) -> Any:
    """Read a dataclass by the types of its fields; what it has no field for is left out."""
    fields = [each for each in dataclasses.fields(kind) if each.name in said or _is_needed(each)]
    return kind(**{each.name: _value(_types(kind)[each.name], said[each.name], each.name) for each in fields})


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _value(kind: Any, said: Any, name: str) -> Any:
    """Return a value of JSON as ``kind``. Raises TypeError: everything else relies on the types."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return said
    if dataclasses.is_dataclass(kind) and isinstance(said, Mapping):
        return _fields(kind, said)
    if origin is tuple and isinstance(said, (list, tuple)):
        return tuple(_value(inner[0], each, name) for each in said)
    if origin is collections.abc.Mapping and isinstance(said, Mapping):
        return {_value(inner[0], key, name): _value(inner[1], each, name) for key, each in said.items()}
    if origin is Union:
        for one in inner:
            try:
                return _value(one, said, name)
            except TypeError:
                continue
    if kind is float and type(said) is int:
        return float(said)
    if type(said) is kind:
        return said
    raise TypeError(f"{name}: {said!r} is no {getattr(kind, '__name__', kind)}")
