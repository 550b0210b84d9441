"""Which NVIDIA driver the kernel has loaded. Reads /proc only."""

from __future__ import annotations

import re
from typing import Optional

from lamplighter.node.system import files

DRIVER_FILE = "/proc/driver/nvidia/version"


def loaded_driver() -> Optional[str]:
    """Return the version of the driver that the kernel has loaded, None where there is none."""
    return read_driver(files.read_text(DRIVER_FILE))


def read_driver(text: Optional[str]) -> Optional[str]:
    """Return the version of the loaded kernel module from /proc/driver/nvidia/version; None without one.

    facts: ``NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Wed ...``, or ``... Open Kernel Module for
    x86_64  590.44.01  Release Build ...``.
    """
    found = re.search(r"^NVRM version:.*?\s{2,}(\d+(?:\.\d+)+)\s", text or "", re.MULTILINE)
    return found.group(1) if found else None
