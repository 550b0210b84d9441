"""Templates into text: one shell quoter, one Jinja2 environment in which a missing variable is an error.

A role's own template wins over that of the role it extends, and over the shared one: ``roles/<role>/templates/NAME``,
..., ``templates/NAME``.
"""

from __future__ import annotations

import json
import shlex
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import jinja2

from lamplighter.errors import InventoryError
from lamplighter.project import Project


class FromVariable(str):
    """The name of a variable, whose value a script is to take as one word."""

    __slots__ = ()


def quote(value: str) -> str:
    """Return ``value`` as one word of POSIX sh that stands for exactly these bytes (UTF-8) and runs nothing.

    Raises ValueError for what no process can be given: NUL, and text that has no UTF-8 form.
    """
    if isinstance(value, FromVariable):
        return f'"${{{value}}}"'
    if "\0" in value:
        raise ValueError("a shell word cannot hold NUL")
    value.encode("utf-8")  # UnicodeEncodeError, a ValueError, on a lone surrogate
    return shlex.quote(value)


def python_bytes(value: str) -> str:
    """Return ``value`` as a bytes literal, ASCII only, that Python 2.7 and every Python 3 read as its UTF-8 bytes."""
    return repr(value.encode("utf-8"))


def one_line(value: str) -> str:
    """Return ``value`` for a comment: ASCII and on one line, whatever it holds."""
    return json.dumps(value)[1:-1]


class Templates:
    """The templates of ``roles``, the first one's first, the shared ones behind them."""

    def __init__(self, project: Path | Project, roles: Sequence[str]) -> None:
        self._project = project.built_in if isinstance(project, Project) else project
        self._directories = [*(project / "roles" / role / "templates" for role in roles), project / "templates"]
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(self._directories),
            undefined=jinja2.StrictUndefined,
            autoescape=False,  # noqa: S701 - shell and Python come out, not HTML; `sh` and `py` quote
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        self._environment.filters.update(sh=quote, py=python_bytes, line=one_line)

    def render(self, name: str, values: Mapping[str, object]) -> str:
        """Return template ``name`` filled with ``values``.

        Raises InventoryError with the template's file and line: not found, syntax, a variable that is not there, a
        value that cannot be quoted.
        """
        try:
            return self._environment.get_template(name).render(values)
        except jinja2.TemplateNotFound as error:
            raise InventoryError(
                f"no template {name}",
                why="looked in " + " and ".join(map(str, self._directories)),
                next_step="restore templates/ from the project's repository",
            ) from error
        except jinja2.TemplateSyntaxError as error:
            raise InventoryError(
                f"the template is not valid Jinja2: {error.message}",
                origin=self._origin(error.filename or name, error.lineno),
                next_step="correct the template",
            ) from error
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InventoryError(
                "the template cannot be filled",
                why=str(error),
                origin=self._origin_of(error.__traceback__, name),
                next_step="correct the template, or the value that it names",
            ) from error

    def _origin(self, file: str, line: int) -> str:
        path = Path(file)
        return f"{path.relative_to(self._project) if path.is_relative_to(self._project) else path}:{line}"

    def _origin_of(self, trace: TracebackType | None, name: str) -> str:
        """Return the innermost template line in ``trace``: Jinja2 rewrites tracebacks to the template's own lines."""
        for frame in reversed(traceback.extract_tb(trace)):
            if any(Path(frame.filename).is_relative_to(directory) for directory in self._directories):
                return self._origin(frame.filename, frame.lineno or 0)
        return name
