"""``init``: a repository of the user's own, as ``templates/repository`` has it."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import NoReturn

from invoke.exceptions import Exit as Leave

from lamplighter.errors import UsageError
from lamplighter.node.events import Exit
from lamplighter.paths import at_home
from lamplighter.project import PROJECT
from lamplighter.run import command

SKELETON = PROJECT / "templates" / "repository"
#: Files that would mean something to our own repository under the names that they get.
RENAMED = {"gitignore": ".gitignore"}


def begin(settings: command.Settings, directory: str) -> NoReturn:
    """Write the repository into ``directory``, say what comes next and leave; a file that is there is a refusal."""
    with command.guarded(settings):
        place = at_home(directory)
        files = _files(place)
        if place.exists() and not place.is_dir():
            raise UsageError(f"{place} is no directory", next_step="name one that can be made, or is there")
        if there := [path for path in files if os.path.lexists(path)]:
            names = ", ".join(str(path.relative_to(place)) for path in there)
            raise UsageError(
                f"{place} has {names} already", why="init overwrites nothing", next_step="choose another directory"
            )
        try:
            for path, source in files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, path)
                path.chmod(0o755 if source.suffix == ".sh" else 0o644)
        except OSError as error:
            raise UsageError(f"{error.filename or place} cannot be written: {error.strerror}") from error
        command.say(_next(place, files))
    raise Leave(code=Exit.OK)


def _files(place: Path) -> dict[Path, Path]:
    found = sorted(path for path in SKELETON.rglob("*") if path.is_file() and path.suffix != ".pyc")
    named = {path: path.relative_to(SKELETON) for path in found}
    return {place / name.with_name(RENAMED.get(name.name, name.name)): path for path, name in named.items()}


def _next(place: Path, files: dict[Path, Path]) -> str:
    there = shlex.quote(str(place))
    lines = [f"{place}: {len(files)} files", "next:"]
    steps = (
        (f"cd {there}", ""),
        (f"{command.NAME} deploy --host demo", "the whole job on a node in a box, about 20 seconds"),
        ("edit inventory/hosts.yml, inventory/host_vars/gpu1.yml", "your first node"),
        (f"{command.NAME} lint", "is the inventory right? opens no connection"),
        (f"{command.NAME} check --host gpu1", "is the node ready? reads only"),
        (f"{command.NAME} deploy --host gpu1", ""),
    )
    return "\n".join([*lines, *(f"  {step:<56}{f'# {why}' if why else ''}".rstrip() for step, why in steps)])
