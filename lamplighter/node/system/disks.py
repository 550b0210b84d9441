"""File systems: what is mounted where, how much room is left, and whether programs may run there. Looks only."""

from __future__ import annotations

import os
import re
from typing import Any, Dict, List

#: File systems that hold no files of anybody.
_PSEUDO = re.compile(
    r"autofs|bpf|cgroup2?|configfs|debugfs|devpts|efivarfs|fusectl|hugetlbfs|mqueue|nsfs|proc|pstore|ramfs"
    r"|rpc_pipefs|securityfs|selinuxfs|squashfs|sysfs|tracefs"
)


def forbids_programs(path: str) -> bool:
    """Tell whether ``path`` lies on a file system that is mounted ``noexec``: then no program there can start."""
    try:
        return bool(os.statvfs(os.path.realpath(os.path.expanduser(path))).f_flag & os.ST_NOEXEC)
    except OSError:
        return False


def read_mounts(text: str) -> List[Dict[str, str]]:
    """Return the mounts that hold files. The kernel writes blanks in names as octal."""
    found = []
    for line in text.splitlines():
        cells = [re.sub(r"\\([0-7]{3})", lambda code: chr(int(code.group(1), 8)), cell) for cell in line.split(" ")]
        if len(cells) >= 4 and not _PSEUDO.fullmatch(cells[2]):
            found.append({"device": cells[0], "point": cells[1], "type": cells[2], "options": cells[3]})
    return found


def places(home: str, model: str) -> List[str]:
    """Name the places whose free room a server needs, beside /dev/shm: releases and logs, caches, /tmp, its model."""
    path = os.path.expanduser(model)
    return [home, "~/.cache", "/tmp", *([path] if os.path.isabs(path) else [])]  # noqa: S108 - looked at only


def space(path: str) -> Dict[str, Any]:
    """Return the free and total bytes and inodes of the file system that ``path`` lies on, or will lie on.

    facts: btrfs and some network file systems count no inodes; both are 0 then.
    """
    place = os.path.abspath(os.path.expanduser(path))
    while not os.path.exists(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    try:
        state = os.statvfs(place)
    except OSError as error:
        return {"error": error.strerror}
    return {
        "at": place,
        "free": state.f_bavail * state.f_frsize,
        "total": state.f_blocks * state.f_frsize,
        "free_inodes": state.f_favail,
        "inodes": state.f_files,
        "error": None,
    }
