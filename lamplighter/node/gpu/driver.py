"""Which NVIDIA driver the kernel has loaded. Reads /proc only."""

from __future__ import annotations

import re
from typing import Dict, Optional

from lamplighter.node.gpu import gpus
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


def versions() -> Dict[str, Optional[str]]:
    """Return the version of the loaded driver, and of the library that nvidia-smi speaks through."""
    versions = {cells["driver_version"] for cells in gpus.details(("driver_version",)).values()}
    return {"module": loaded_driver(), "library": ", ".join(sorted(versions)) or None}
