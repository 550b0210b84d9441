"""An engine's role: how to start, recognise, ask and read one kind of LLM server, from ``roles/<name>/engine.yml``.

Pure: reads files of the roles directory. engine_file.py, which says what may stand there, costs more than all else that
a command does here, so what it made of the same files is kept.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter.errors import InventoryError
from lamplighter.inventory import secrets
from lamplighter.kept import kept
from lamplighter.project import Roles

if TYPE_CHECKING:
    from lamplighter.inventory import Server


@dataclass(frozen=True)
class Engine:
    """One kind of server. ``compiled`` is JSON-safe and complete: the node and the log reader need nothing else."""

    name: str
    launch: Mapping[str, Any]
    compiled: dict[str, Any]

    def argv(self, server: Server) -> list[str]:
        """The server's command line: the engine's command and flags, then ``args``, then ``extra_args`` as they are.

        In ``args`` true is a bare flag, a list repeats the flag, null and false leave it out. Raises InventoryError for
        a flag that has a setting of its own, for a program that nobody names, and for one without a directory where the
        engine needs what lies beside it. A word that is a secret is a SecretWord, which does not hold it.
        """
        beside = posixpath.dirname(self.program(server))
        values = {"python": server.python, "program": server.program or "", "bin": beside, **self.settings(server)}
        return [*(self._filled(word, values, server) for word in self.launch["command"]), *self.arguments(server)]

    @property
    def is_python(self) -> bool:
        """Whether what it starts is a Python, which a sitecustomize.py can reach."""
        return bool(self.launch["python"])

    def program(self, server: Server) -> str:
        """What must be on the node for it to start, beside which its other programs lie: its Python, or `program`."""
        return server.program or (server.python if self.is_python else "")

    def served_name(self, server: Server) -> str:
        """The name that the server answers to: the one that is set, or the engine's own rule."""
        if server.served_name is not None:
            return server.served_name
        values = {"model": server.model, "model_file": posixpath.basename(server.model.rstrip("/"))}
        return _with(values, str(self.launch["served_name"]))

    def _tells_its_name(self, server: Server) -> bool:
        """Whether the server is told its name: not where it goes by its model's anyway."""
        return server.served_name is not None or self.launch["served_name"] != "{model}"

    def settings(self, server: Server) -> dict[str, str]:
        """The settings that flags and words of the command may stand for, as text."""
        return {
            "model": server.model,
            "served_name": self.served_name(server),
            "host": server.host,
            "port": str(server.port),
        }

    def arguments(self, server: Server) -> list[str]:
        """What follows the command: the engine's flags, ``args``, ``extra_args``. Raises as ``argv`` does."""
        values, words = self.settings(server), list[str]()
        for setting, flag in self.launch["flags"].items():
            if flag is not None and (setting != "served_name" or self._tells_its_name(server)):
                words += [flag, values[setting]]
        for name, value in server.args.items():
            words += self._flag(name, value, server)
        extra = [secrets.extra_word(place, each) for place, each in enumerate(server.extra_args)]
        return [*words, *extra]

    def _filled(self, word: str, values: Mapping[str, str], server: Server) -> str:
        if "{program}" in word and not server.program:
            raise InventoryError(
                f"servers.{server.name}.program: is missing",
                why=f"{self.name} is started by it ({word})",
                next_step=f"write the path of the engine's program on the node under servers.{server.name}.program",
            )
        if "{bin}" in word and not values["bin"]:
            setting = "python" if self.is_python and not server.program else "program"
            raise InventoryError(
                f"servers.{server.name}.{setting}: must be a path, not {self.program(server)!r}",
                why=f"{self.name} is started by a program beside it ({word})",
                next_step=f"write its full path under servers.{server.name}.{setting}",
            )
        return _with(values, word)

    def _flag(self, name: str, value: object, server: Server) -> list[str]:
        flag = f"--{name}"
        for setting, taken in self.launch["flags"].items():
            if flag == taken:
                raise InventoryError(
                    f"servers.{server.name}.args.{name}: has a setting of its own",
                    next_step=f"write servers.{server.name}.{setting} instead",
                )
        if value is True:
            return [flag]
        if value is None or value is False:
            return []
        values = value if isinstance(value, tuple | list) else (value,)
        return [word for place, each in enumerate(values) for word in (flag, secrets.word(name, place, each))]


def _with(values: Mapping[str, str], word: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: values[match.group(1)], word)


def load_engine(name: str, roles: Roles) -> Engine:
    """The engine ``name`` of a roles directory. Raises InventoryError, with file:line where a file is at fault."""
    compiled = kept("engine", name, [*_files(roles), *_readers()], lambda: _read(name, roles))
    return Engine(name, compiled["launch"], compiled)


def _read(name: str, roles: Roles) -> dict[str, Any]:
    from lamplighter.release.engine_file import read_engine

    return read_engine(name, roles)


def _files(roles: Roles) -> list[Path]:
    """All that may have a say in an engine of ``roles``: whatever one extends, and what is about any node."""
    return sorted([*roles.glob("*/engine.yml"), *(roles / "node").glob("*.yml")])


def _readers() -> list[Path]:
    """The code that reads them."""
    ours = Path(__file__).parent.parent
    names = (
        "release/engine_file.py", "inventory/sources/yaml_file.py", "inventory/values.py", "node/log/rules.py",
        "node/events.py",
    )  # fmt: skip
    return [ours / name for name in names]


def load_engines(roles: Roles) -> dict[str, Engine]:
    """Every engine of a roles directory that can be started, by name. Raises InventoryError."""
    from lamplighter.release.engine_file import engine_names

    return {name: load_engine(name, roles) for name in engine_names(roles)}
