"""Secrets, known again in what is written down or sent, and replaced by the name of the variable that carries them.

What the inventory declares secret lies in the ``env`` of a release, and only that is hidden: by its value, wherever it
turns up. Of processes that were not declared to us, the values of flags called key, token and the like are hidden.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from lamplighter.node.layout import ReleaseDirectory, ServerHome

#: Characters of the shortest secret that is hidden in other text: of a shorter one every other word would be full.
LEAST = 6
#: What the node itself writes into ``env``.
_OURS = "CUDA_VISIBLE_DEVICES"
#: Last words of the names of flags and variables that carry a secret.
NAMED = "key|token|secret|password|passwd|passphrase"
_LAST_WORD = re.compile(rf"(?i)(?:^|[-_.])(?:api-?)?(?:{NAMED})$")
_NUMBER = re.compile(r"[-+]?[0-9.]+")
_CUT = "\u2026"


class Confidential:
    """Some secrets by name, and any data without them."""

    def __init__(self, values: Iterable[Tuple[str, str]] = ()) -> None:
        names: Dict[str, str] = {}
        for name, value in values:
            if _is_place(value):
                continue
            whole = (value, json.dumps(value)[1:-1], repr(value)[1:-1])
            for form in (*whole, *(line.strip() for line in value.splitlines())):
                if len(form) >= LEAST:
                    names.setdefault(form, f"${name}")
        self._names = names
        forms = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, forms))) if forms else None

    def hide(self, value: Any) -> Any:
        """Return ``value`` with every secret in it, however deep, replaced by its name."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self._hide_cut(self._pattern.sub(lambda found: self._names[found[0]], value))
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(each) for each in value]
        return value

    def _hide_cut(self, text: str) -> str:
        """Hide the beginning of a secret where a text that was shortened ends in it."""
        if not text.endswith(_CUT):
            return text
        for form, name in self._names.items():
            for length in range(len(form) - 1, LEAST - 1, -1):
                if text.endswith(form[:length] + _CUT):
                    return text[: -length - 1] + name + _CUT
        return text


def _is_place(value: str) -> bool:
    """Tell whether this is a path below a directory of this node: all that lies there would be hidden, too."""
    return re.fullmatch(r"(/[\w.+@ -]+)+/?", value) is not None and os.path.isdir("/" + value.split("/")[1])


def of_homes(homes: Iterable[ServerHome], request: Optional[Mapping[str, Any]] = None) -> Confidential:
    """Return the secrets of all releases of some servers, and those that a request brings."""
    brought = ((request or {}).get("secrets") or {}).items()
    return Confidential([*brought, *(pair for home in homes for pair in _of_home(home))])


def _of_home(home: ServerHome) -> List[Tuple[str, str]]:
    return [pair for release in home.all_releases() for pair in _of_release(release)]


def _of_release(release: ReleaseDirectory) -> List[Tuple[str, str]]:
    made_from = release.read_request() or {}
    words = (made_from.get("server") or {}).get("argv_secrets") or {}
    return [
        (name, _secret_in(value) if name in words else value)
        for name, value in release.read_environment().items()
        # The environment of a server that was adopted is all that its owner had; it is not known which of it is secret.
        if name != _OURS and (name in words or not made_from.get("adopted") or looks_secret(name, value))
    ]


def _secret_in(word: str) -> str:
    """Return the value alone of a word of an adopted command line that carries its name, too."""
    name, equals, value = word.partition("=")
    return value if equals and looks_secret(name, value) else word


def looks_secret(name: str, value: Optional[str]) -> bool:
    """Tell whether the value of this flag or variable of somebody else's is probably a secret."""
    return bool(value) and _LAST_WORD.search(name) is not None and not _NUMBER.fullmatch(value or "")
