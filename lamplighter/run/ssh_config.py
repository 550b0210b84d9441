"""Makes OpenSSH's client configuration readable for paramiko's parser, which knows neither Include nor all of Match.

`expand` gives one text with every Include in its place. Known deviation: a Host line inside a file that is included
from within a Host block holds for its own pattern alone, not for both.
"""

from __future__ import annotations

import glob
import shlex
from pathlib import Path

from lamplighter.errors import UsageError

#: OpenSSH gives up at the same depth.
MAX_DEPTH = 16

#: What paramiko can evaluate; a Match line with another keyword must not apply to everybody by accident.
_MATCH_WITHOUT_VALUE = frozenset({"all", "canonical", "final"})
_MATCH_WITH_VALUE = frozenset({"host", "originalhost", "user", "localuser", "exec"})


def expand(path: Path, directory: Path, depth: int = 0) -> str:
    """The text of ``path`` with its Includes in place; relative ones start at ``directory``. A missing file is empty.

    Raises UsageError (nothing was opened) for an unreadable file or Includes that go round in a circle.
    """
    if depth > MAX_DEPTH:
        raise UsageError("ssh_config files include each other more than 16 deep", origin=path)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise UsageError("cannot read the SSH client configuration", why=str(error), origin=path) from error
    lines: list[str] = []
    block = "Host *"
    for line in text.splitlines():
        key, value = _split(line)
        if key == "include":
            lines.extend(expand(included, directory, depth + 1) for included in _included(value, path, directory))
            lines.append(block)  # what follows belongs to the block in which the Include stands
            continue
        if key in ("host", "match"):
            block = line if key == "host" else _understood_match(value)
        lines.append(block if key in ("host", "match") else line)
    return "\n".join(lines) + "\n"


def _split(line: str) -> tuple[str, str]:
    words = line.strip().replace("=", " ", 1).split(None, 1)
    if not words or words[0].startswith("#"):
        return "", ""
    return words[0].lower(), words[1].strip() if len(words) > 1 else ""


def _included(value: str, path: Path, directory: Path) -> list[Path]:
    try:
        patterns = shlex.split(value)
    except ValueError as error:
        raise UsageError(f"cannot read the line Include {value}", why=str(error), origin=path) from error
    return [
        Path(name)
        for pattern in patterns
        for name in sorted(glob.glob(str(directory / Path(pattern).expanduser())))  # noqa: PTH207 - may be absolute
    ]


def _understood_match(value: str) -> str:
    """The Match line in paramiko's spelling, or a block that never applies where it would misread a condition."""
    never = "Host !*"
    try:
        words = shlex.split(value)
    except ValueError:
        return never
    told = []
    while words:
        word = words.pop(0).lower()
        told.append(word)
        if word.lstrip("!") in _MATCH_WITH_VALUE and words:
            told.append(words.pop(0))
        elif word.lstrip("!") not in _MATCH_WITHOUT_VALUE:
            return never
    if len(told) > 1 and told[-1] == "all":
        told.pop()  # Fedora's own file says `Match final all`, which paramiko refuses though it means `Match final`
    return f"Match {shlex.join(told)}"
