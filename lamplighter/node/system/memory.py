"""What memory the node has and can spare, as the kernel says it. Looks only."""

from __future__ import annotations

import re
from typing import Dict, Optional

from lamplighter.node.system import files


def read_meminfo(text: str) -> Dict[str, int]:
    """Return the lines of /proc/meminfo, in bytes (pages are counts)."""
    found = re.findall(r"^(\w+):\s+(\d+)( kB)?$", text, re.MULTILINE)
    return {name: int(value) * (1024 if unit else 1) for name, value, unit in found}


def meminfo() -> Dict[str, int]:
    """Return ``read_meminfo`` of this node; empty where it cannot be read."""
    return read_meminfo(files.read_text("/proc/meminfo") or "")


def available_bytes() -> Optional[int]:
    """Return what could be had without swapping, the page cache of others included; None where that is not known."""
    return meminfo().get("MemAvailable")
