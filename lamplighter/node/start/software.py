"""What the software on this node makes of a server's variables and models: NCCL's own names and files, a draft model's
shape, files of the engine that somebody has changed. Reads only.

facts: the names that NCCL reads lie in its library, each between two NULs, and unknown ones are ignored without a word.
What NCCL takes from files it never overwrites with, the environment wins. A draft that taps hidden states of its target
takes those before layer id + 1, or before layers 2, n // 2 and n - 3 where its config names none.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from typing import Any, Dict, FrozenSet, Iterator, List, Mapping, Optional, Sequence, Tuple

from lamplighter.node import arguments
from lamplighter.node.finding import Finding
from lamplighter.node.start import ground, startup
from lamplighter.node.start.ground import Start
from lamplighter.node.system import distributions

#: Files from which NCCL takes variables that no inventory knows of. facts: they print the same lines in its log as the
#: environment does, and the environment wins.
NCCL_FILES = ("/etc/nccl.conf", "~/.nccl.conf")
_LIBRARY = "libnccl.so.2"
#: Below where Python keeps packages, and where a system keeps libraries.
_PACKAGED = "nvidia/nccl/lib"
_SYSTEM = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib", "/usr/lib")
_NAME = re.compile(rb"NCCL_[A-Z0-9_]+")
_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")


def examine(start: Start, lint: Mapping[str, Any]) -> Iterator[Finding]:
    """Ask what only the node can answer. ``lint``: {nccl: names to look for, ignore: [[id, name or null]]}."""
    ignored = [(kind, name) for kind, name in lint.get("ignore") or ()]
    for finding, name in (*_names(start, lint.get("nccl") or ()), *_files(start), *_draft(start)):
        if not {(finding.id, None), (finding.id, name)} & set(ignored):
            yield finding


def changed_files(start: Start, lint: Mapping[str, Any]) -> Iterator[Finding]:
    """Warn where the engine's files are not what was installed. Reads all of them: a second or more."""
    place = _place(start)
    known = distributions.engine_files(place) if place else {"changed": {}, "missing": []}
    odd = [*known["changed"], *known["missing"]]
    if not odd or ["engine_files", None] in (lint.get("ignore") or []):
        return
    more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
    message = (
        f"{len(odd)} file{'s' if len(odd) > 1 else ''} of {start.engine.get('distribution')} changed since installed"
    )
    hint = "install it again, or keep the change where others find it: variables belong under env, not into the engine"
    yield Finding("engine_files", "warning", message, ", ".join(odd[:3]) + more, hint)


def _place(start: Start) -> Optional[str]:
    try:
        return ground.installed(start).place if start.engine.get("distribution") else None
    except startup.NoPython:
        return None  # told by its own question


# ------------------------------------------------------------------------------------------------------ NCCL's names


def _names(start: Start, wanted: Sequence[str]) -> Iterator[Tuple[Finding, str]]:
    path = _library(start) if wanted else None
    if path is None:
        return
    known, version = read_library(path)
    for name in wanted if known else ():
        if name not in known:
            message = f"NCCL {version} of this node does not know {name}, and ignores it without a word"
            hint = f"remove it under {start.setting('env')}, or install an NCCL that knows it"
            yield Finding("nccl_name", "warning", message, path, hint), name


def _library(start: Start) -> Optional[str]:
    """Return the library that the server will load, by the loader's order."""
    place = _place(start)
    packaged = [os.path.join(os.path.dirname(place), _PACKAGED)] if place else []
    given = [each for each in start.environment.get("LD_LIBRARY_PATH", "").split(":") if each]
    paths = [os.path.join(each, _LIBRARY) for each in (*given, *packaged, *_SYSTEM)]
    return next((path for path in paths if os.path.isfile(path)), None)


def read_library(path: str) -> Tuple[FrozenSet[str], str]:
    """Return the names that a libnccl.so.2 reads, and its version ("" where it says none); none for what is no such."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            version = _VERSION.search(content)
            return frozenset(_between_nuls(content)), version.group(1).decode() if version else ""
    except (OSError, ValueError):  # an empty file cannot be mapped
        return frozenset(), ""


def _between_nuls(content: mmap.mmap) -> Iterator[str]:
    at = content.find(b"\0NCCL_")
    while at >= 0:
        end = content.find(b"\0", at + 1)
        found = _NAME.fullmatch(content[at + 1 : end if end >= 0 else len(content)])
        if found:
            yield found.group().decode()
        at = content.find(b"\0NCCL_", at + 1)


# ------------------------------------------------------------------------------------------------------ NCCL's files


def _files(start: Start) -> Iterator[Tuple[Finding, str]]:
    """Warn of what NCCL takes from files that no inventory knows of."""
    for path in _files_read(start):
        for name, value in read_settings(_text(path)):
            told = _about(name, value, start.environment.get(name), path)
            if told:
                hint = f"write it under {start.setting('env')}, and take it out of that file"
                yield Finding("nccl_file", "warning", told, f"{path}: {name}={value}", hint), name


def _files_read(start: Start) -> List[str]:
    own = start.environment.get("NCCL_CONF_FILE") or os.path.join(start.environment.get("HOME") or "~", ".nccl.conf")
    return [os.path.expanduser(own), NCCL_FILES[0]]


def _about(name: str, value: str, given: Optional[str], path: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return f"NCCL reads {path} to the letter, and {name!r} is no name: it has no effect"
    if given is None:
        return f"{path} adds {name}, of which the inventory says nothing"
    return f"{path} says otherwise of {name} than the inventory, which wins" if given != value else ""


def read_settings(text: str) -> List[Tuple[str, str]]:
    """Return the settings of a file of NCCL's, names and values to the letter: only the line's end is taken off."""
    lines = [line for line in text.splitlines() if "=" in line and not line.startswith("#")]
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


# ---------------------------------------------------------------------------------------------------- the draft model


def _draft(start: Start) -> Iterator[Tuple[Finding, str]]:
    """Hold the config of a model that drafts against its target's."""
    rule = start.needs.get("draft") or {}
    path, method = _drafting(rule, start.argv)
    target, draft = _config(start.model), _config(path)
    if not target or not draft:
        return
    for level, message in _misfits(rule, method, target, draft):
        hint = "take a draft model that was made for this target"
        yield Finding("draft_model", level, f"{path} does not fit {start.model}: {message}", "", hint), ""


def _drafting(rule: Mapping[str, Any], argv: Sequence[str]) -> Tuple[str, str]:
    """Return the path of the draft model, and the method, by flags or by a flag whose value is JSON."""
    text = arguments.value_of(rule.get("config") or (), argv)
    if text is None:
        path, method = (arguments.value_of(rule.get(key) or (), argv) or "" for key in ("flags", "method"))
        return path, method
    try:
        said = json.loads(text)
    except ValueError:
        return "", ""
    return (str(said.get("model") or ""), str(said.get("method") or "")) if isinstance(said, dict) else ("", "")


def _misfits(
    rule: Mapping[str, Any], method: str, target: Mapping[str, Any], draft: Mapping[str, Any]
) -> Iterator[Tuple[str, str]]:
    wanted, given = target.get("hidden_size"), draft.get("target_hidden_size") or draft.get("hidden_size")
    if method in (rule.get("sharing") or ()) and None not in (wanted, given) and wanted != given:
        yield "error", f"it takes hidden states of {given} numbers, the target's have {wanted}"
    words, known = draft.get("vocab_size"), target.get("vocab_size")
    if None not in (words, known) and words != known:
        yield "warning", f"its vocabulary has {words} tokens, the target's {known}"
    layers = target.get("num_hidden_layers")
    if method in (rule.get("tapping") or ()) and isinstance(layers, int):
        taps = _taps(draft, layers)
        if len(set(taps)) < len(taps) or not all(0 <= tap < layers for tap in taps):
            yield "error", f"it taps the target before layers {taps}, and those must be different ones of {layers}"


def _taps(draft: Mapping[str, Any], layers: int) -> List[int]:
    key = "eagle_aux_hidden_state_layer_ids"
    ids = (draft.get("eagle_config") or {}).get(key) or draft.get(key)
    return [each + 1 for each in ids] if ids else [2, layers // 2, layers - 3]


def _config(model: str) -> Dict[str, Any]:
    """Return the config of a model's language part; {} for what is no directory with one."""
    if not os.path.isabs(os.path.expanduser(model)):
        return {}
    try:
        found = json.loads(_text(os.path.join(os.path.expanduser(model), "config.json")))
    except ValueError:
        return {}
    return dict(found.get("text_config") or found) if isinstance(found, dict) else {}


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(16 << 20).decode("utf-8", "replace")
    except OSError:
        return ""
