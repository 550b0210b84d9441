"""What pip or uv has installed: where it is, which version, and whether its files are as recorded. Reads only."""

from __future__ import annotations

import os
import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from lamplighter.node.system import files

#: Larger files are compiled code: compared by size alone, which keeps a look at an engine below a second.
HASHED_BYTES = 8 << 20


#: One recorded file: path as RECORD writes it, digest as RECORD writes it ("" where it has none), size or None.
Row = Tuple[str, str, Optional[int]]


def find_distribution(directories: Iterable[str], name: str) -> Optional[str]:
    """Return the ``.dist-info`` directory of distribution ``name`` in the first of ``directories`` that has one."""
    wanted = _normal(name)
    for directory in directories:
        try:
            entries = sorted(os.listdir(directory))
        except OSError:
            continue
        for entry in entries:
            stem, dot, kind = entry.rpartition(".")
            if dot and kind == "dist-info" and _normal(stem.partition("-")[0]) == wanted:
                return os.path.join(directory, entry)
    return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def version_in(dist_info: str) -> Optional[str]:
    """Return the version that a ``.dist-info`` directory tells; None where it is gone or says nothing."""
    found = re.search(r"^Version: *(\S+)", files.read_text(os.path.join(dist_info, "METADATA")) or "", re.MULTILINE)
    return found.group(1) if found else None


def read_record(text: str) -> List[Row]:
    """Return the rows of a RECORD file that say what a file must hold; compiled bytecode is passed over.

    facts: CSV of path, ``sha256=`` with unpadded urlsafe base64, size; RECORD itself and signatures have no digest, and
    bytecode is rewritten by any import.
    """
    import csv

    return [
        (cells[0], cells[1], int(cells[2]) if cells[2].isdigit() else None)
        for cells in csv.reader(text.splitlines())
        if len(cells) == 3 and cells[1] and not cells[0].endswith(".pyc")
    ]


def engine_files(dist_info: str, known: Optional[Mapping[str, Any]] = None) -> Dict[str, Any]:
    """Compare the files of an installed distribution with its RECORD.

    Returns {"version", "files": how many, "changed": {path: digest now}, "missing": [path], "stats": {path: [size,
    ctime in ns]}, "error"}. ``known`` is an earlier answer: a file whose size and time are as they were then is not
    read again, and counts as it did.
    """
    text = files.read_text(os.path.join(dist_info, "RECORD"))
    answer: Dict[str, Any] = {"version": version_in(dist_info), "files": 0, "changed": {}, "missing": [], "stats": {}}
    if text is None:
        return {**answer, "error": f"{dist_info} has no RECORD: it was not installed by pip or uv"}
    if _is_editable(files.read_text(os.path.join(dist_info, "direct_url.json")) or ""):
        return {**answer, "error": f"{dist_info} is an editable install: no record says what its files should be"}
    rows = read_record(text)
    if not rows:
        return {**answer, "error": f"{dist_info} has a RECORD without digests"}
    stats: Mapping[str, Any] = (known or {}).get("stats") or {}
    before: Mapping[str, str] = (known or {}).get("changed") or {}
    site = os.path.dirname(dist_info)
    for path, digest, size in rows:
        try:
            state = os.stat(os.path.join(site, path))
            stamp = [state.st_size, state.st_ctime_ns]
            if stats.get(path) == stamp:
                now = before.get(path, digest)
            elif size is not None and state.st_size != size:
                now = f"{state.st_size} bytes, not {size}" if state.st_size > HASHED_BYTES else ""
                now = now or _digest(os.path.join(site, path), digest)
            elif state.st_size > HASHED_BYTES:
                now = digest
            else:
                now = _digest(os.path.join(site, path), digest)
        except OSError:
            answer["missing"].append(path)
            continue
        answer["stats"][path] = stamp
        if now != digest:
            answer["changed"][path] = now
    return {**answer, "files": len(rows), "error": None}


def _is_editable(direct_url: str) -> bool:
    """Read direct_url.json; facts: the RECORD of an editable install lists a .pth file, not the package's files."""
    import json

    try:
        return bool(json.loads(direct_url)["dir_info"]["editable"])
    except (ValueError, KeyError, TypeError):
        return False


def _digest(path: str, like: str) -> str:
    """Return the digest of a file, by the algorithm and in the writing of ``like``."""
    import base64
    import hashlib

    algorithm = like.partition("=")[0]
    try:
        state = hashlib.new(algorithm)
    except ValueError:
        return like  # nothing that we could compare
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 18), b""):
            state.update(piece)
    return f"{algorithm}={base64.urlsafe_b64encode(state.digest()).rstrip(b'=').decode()}"
