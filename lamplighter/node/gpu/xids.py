"""The driver's numbers of GPU errors: what each means, and after which of them a GPU is not to be trusted.

facts: an Xid is the driver's word in the kernel's log. Many come from a program's own mistake (13, 31, 43), from our
own KILL (45), or only record a repair (63, 156; the check of remapped rows tells what is left to do). Numbers that are
not listed count as such. Source: NVIDIA's catalogue of Xids.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, Optional


@dataclasses.dataclass(frozen=True)
class Xid:
    """What a number means; a fatal one accuses the GPU, its link or its memory."""

    meaning: str
    is_fatal: bool = True


XIDS = {
    13: Xid("a program's fault in the graphics engine", is_fatal=False),
    31: Xid("a program's bad memory access", is_fatal=False),
    43: Xid("a program's fault that stopped its work", is_fatal=False),
    45: Xid("a program's channels were cleared away", is_fatal=False),
    48: Xid("a memory error that could not be corrected"),
    61: Xid("the GPU's own controller met a breakpoint"),
    62: Xid("the GPU's own controller halted"),
    63: Xid("a memory row is to be remapped", is_fatal=False),
    64: Xid("a memory row could not be remapped"),
    74: Xid("an NVLink error"),
    79: Xid("the GPU has fallen off the bus"),
    92: Xid("many memory errors that were corrected"),
    94: Xid("a memory error that was contained"),
    95: Xid("a memory error that was not contained"),
    119: Xid("the GPU's system processor does not answer"),
    120: Xid("the GPU's system processor failed"),
    140: Xid("a memory error that was not recovered from"),
    143: Xid("the GPU could not be initialised"),
    145: Xid("an NVLink error, in its link layer"),
    149: Xid("an NVLink error, in its network layer"),
    154: Xid("the GPU asks to be recovered"),
    155: Xid("an NVLink error, told by the driver"),
    156: Xid("a piece of memory was retired", is_fatal=False),
}


def is_fatal(code: Optional[int]) -> bool:
    """Whether the GPU is not to be trusted after this number."""
    return code is not None and code in XIDS and XIDS[code].is_fatal


def fatal() -> Dict[str, str]:
    """Return the meaning of each fatal number; numbers are text, as JSON has it."""
    return {str(code): xid.meaning for code, xid in XIDS.items() if xid.is_fatal}
