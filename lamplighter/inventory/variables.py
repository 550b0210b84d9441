"""Variables that stand in files beside the inventory: group_vars and host_vars."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from lamplighter.inventory.sources.yaml_file import read_mapping
from lamplighter.inventory.values import Origin, Problems, Value, did_you_mean, merge_all, shown_path

_YAML = (".yml", ".yaml", ".json")


def read_variables(directory: Path, known: Iterable[str], kind: str, problems: Problems) -> dict[str, Value]:
    """Variables by group or host: NAME.yml, .yaml, .json, NAME, or all such files of the directory NAME, by alphabet.

    A file for a name that hosts.yml does not have would be ignored without a word, so it is a problem.
    """
    names = set(known)
    found: dict[str, Value] = {}
    places: dict[str, Path] = {}
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        name = path.name if path.name in names or path.is_dir() else path.stem
        if _is_ignored(path) or (name not in names and not path.is_dir() and path.suffix not in _YAML):
            continue
        if name not in names:
            hint = did_you_mean(name, names)
            problems.add(Origin(shown_path(path)), f"there is no {kind} {name} in the inventory{hint}")
        elif name in places:
            problems.add(Origin(shown_path(path)), f"{kind} {name} has {shown_path(places[name])} too: keep one")
        else:
            places[name] = path
            files = _variable_files(path) if path.is_dir() else [path]
            found[name] = merge_all(canonical(read_mapping(file, problems), problems) for file in files)
    return found


def _variable_files(directory: Path) -> list[Path]:
    return [
        file
        for file in sorted(directory.rglob("*"))
        if file.is_file()
        and file.suffix in (*_YAML, "")
        and not any(_is_ignored(directory / part) for part in file.relative_to(directory).parts)
    ]


def _is_ignored(path: Path) -> bool:
    """Hidden files and what editors leave behind."""
    return path.name.startswith(".") or path.name.endswith("~")


def canonical(variables: Value, problems: Problems) -> Value:
    """One name a variable: ``ansible_become`` is ``become``, so that one overrides the other across files."""
    entries = dict(variables.entries or {})
    if "ansible_become" in entries:
        value = entries.pop("ansible_become")
        if "become" in entries:
            problems.add(value.origin, f"ansible_become: stands beside become ({entries['become'].origin}): keep one")
        entries["become"] = value
    return replace(variables, data=entries)
