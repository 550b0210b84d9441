"""Rules about the names of variables: L1 to L6, L27, L28."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from lamplighter.lint.view import Finding, View, error, nearest, warning

_VALID = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Letters of the shortest name in which two mistakes are still one and the same name.
_LONG = 12


def misshapen(view: View) -> Iterator[Finding]:
    """L1, L6: a name in the wrong case, or that no process can be given."""
    for name in view.env:
        if not _VALID.fullmatch(name):
            yield error("L6", name, "is no name of a variable: letters, digits and _, not beginning with a digit")
        elif name != name.upper() and name.upper().startswith(view.known.common.prefixes):
            yield error(
                "L1", name, "names of variables are told apart by case: no program reads this one", name.upper()
            )


def unknown_to_nccl(view: View) -> Iterator[Finding]:
    """L2 to L5: names that NCCL does not read, and says nothing about."""
    nccl = view.known.common.nccl
    for name in _of_nccl(view):
        meant = nearest(name, nccl.names, 2)
        if name in nccl.names:
            continue
        if name in nccl.torch:
            yield warning("L4", name, "is read by torch, not by NCCL, and under another name today", nccl.torch[name])
        elif name in nccl.gone:
            yield warning("L5", name, "is gone from NCCL, which ignores it without a word", nccl.gone[name])
        elif name in nccl.newer:
            yield warning("L3", name, f"is not known to NCCL {nccl.version}: only a newer one reads it")
        elif meant:
            yield error("L2", name, f"NCCL ignores it without a word: its name is {meant}", meant)
        else:
            close = get_close_matches(name, sorted(nccl.names), n=1, cutoff=0.8)
            why = f"NCCL {nccl.version} does not know this name, and ignores it without a word"
            yield warning("L3", name, why, close[0] if close else "")


def _of_nccl(view: View) -> Iterator[str]:
    return (name for name in view.env if name.startswith("NCCL_") and _VALID.fullmatch(name) and name == name.upper())


def nearly_known(view: View) -> Iterator[Finding]:
    """L27: a name that is nearly one of the engine's, of torch's or of CUDA's."""
    common = view.known.common
    known = {*common.known, *view.known.variables, *common.words, *common.owned, *common.not_forced}
    known |= {each["name"] for each in view.engine.get("overwrites") or ()}
    for name in view.env:
        if name in known or name.startswith("NCCL_") or not name.startswith(common.prefixes):
            continue
        meant = nearest(name, known, 2 if len(name) >= _LONG else 1)
        if meant:
            yield warning("L27", name, f"is nearly {meant}, and nothing known to lamplighter reads it", meant)


def absent(view: View) -> Iterator[Finding]:
    """L28: a variable that other versions of the engine read."""
    for name in view.env:
        why = view.known.absence(name, view.version) if view.stated_version else ""
        if why:
            yield warning("L28", name, f"{view.called} does not read it: {why}")
