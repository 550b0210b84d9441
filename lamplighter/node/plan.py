"""What a request, or a release on the node, says about one server and its engine: the typed view of that JSON."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Optional, Union


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Seconds. ``stop``: from TERM to KILL; ``free``: cap of the wait for FREED; ``ready``: cap of the start.

    ``stall``: silence that counts as a stall, in every phase; None: as the engine says for each.
    """

    stop: float
    free: float
    ready: float
    stall: Optional[float] = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """One server as the inventory wants it, and ``engine``, what its role says of how such servers behave (engine.yml).

    ``gpus``: "all", indexes or UUIDs; empty means that it uses none.
    """

    name: str
    engine: Mapping[str, Any]
    engine_version: Optional[str]
    model: str
    served_name: str
    host: str
    port: int
    gpus: Union[str, tuple[Union[int, str], ...]]
    python: str
    argv: tuple[str, ...]
    env: dict[str, dict[str, str]]
    launcher: str
    stale_policy: str
    stale_kill: tuple[str, ...]
    timeouts: Timeouts
    keep_releases: int
    gpus_unified: str
    on_confirm_failure: str
    allow: tuple[str, ...]
    scope: str = "server"
    nccl_proof: bool = False
    tls: str = "none"
    gpu_warnings: tuple[str, ...] = ()
    #: Places of words in ``argv`` that are secrets, by the variable of the release's ``env`` that holds each.
    argv_secrets: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, said: Mapping[str, Any]) -> Plan:
        """Read ``server`` and ``engine`` of a request or a plan.json. Raises ValueError where they are of no plan."""
        try:
            plan = cls._load(said["server"], said["engine"])
            plan._check()
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"no plan of a server: {type(error).__name__}: {error}") from error
        return plan

    @classmethod
    def _load(cls, data: Mapping[str, Any], engine: Mapping[str, Any]) -> Plan:
        timeouts = data["timeouts"]
        return cls(
            name=data["name"],
            engine=engine,
            engine_version=data["engine_version"],
            model=data["model"],
            served_name=data["served_name"],
            host=data["host"],
            port=int(data["port"]),
            gpus=data["gpus"] if isinstance(data["gpus"], str) else tuple(data["gpus"]),
            python=data["python"],
            argv=tuple(data["argv"]),
            env=data["env"],
            launcher=data["launcher"],
            stale_policy=data["stale"]["policy"],
            stale_kill=tuple(data["stale"]["kill"]),
            timeouts=Timeouts(
                float(timeouts["stop"]),
                float(timeouts["free"]),
                float(timeouts["ready"]),
                None if isinstance(timeouts.get("stall", ""), str) else float(timeouts["stall"]),
            ),
            keep_releases=int(data["keep_releases"]),
            gpus_unified=data["gpus_unified"],
            on_confirm_failure=data.get("on_confirm_failure", "keep"),  # releases of 0.1 do not say
            allow=tuple(data["allow"]),
            scope=data["sitecustomize"]["scope"],
            nccl_proof=data.get("nccl_proof", False),
            tls=data.get("tls", "none"),
            gpu_warnings=tuple((data.get("gpu_warnings") or {}).get("accept", ())),
            argv_secrets={name: int(place) for name, place in (data.get("argv_secrets") or {}).items()},
        )

    def _check(self) -> None:
        """Raise TypeError where a name, a word or a variable is of another type than everything else relies on."""
        names = (self.name, self.model, self.served_name, self.host, self.python, self.launcher)
        choices = (self.stale_policy, self.gpus_unified, self.on_confirm_failure, self.scope, self.tls)
        values = [entry[key] for entry in self.env.values() for key in ("value", "mode")]
        lists = (*self.argv, *self.stale_kill, *self.allow, *self.gpu_warnings)
        words = [*names, *choices, *lists, *values, self.engine_version or ""]
        odd = [repr(word) for word in words if not isinstance(word, str)]
        odd += [repr(gpu) for gpu in self.gpus if not isinstance(gpu, (str, int))]
        if odd:
            raise TypeError(f"{odd[0]} is no text")
        if not isinstance(self.engine, Mapping):
            raise TypeError(f"{self.engine!r} is no description of an engine")

    @property
    def exports(self) -> dict[str, str]:
        """The plain variables that the launch script exports; what only the node knows comes on top."""
        return {name: entry["value"] for name, entry in self.env.items()}

    @property
    def uses_gpus(self) -> bool:
        return self.gpus == "all" or bool(self.gpus)
