"""Paths of this machine as its users write them."""

from __future__ import annotations

import os
from pathlib import Path


def at_home(path: str) -> Path:
    """``path`` with a leading ``~`` or ``~user`` replaced; that of an unknown user stays, as in a shell.

    Never raises: whoever opens the file tells that it is not there, with its name and where that was written.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for an unknown user
