"""The program that runs on the node: ``lamplighter/node`` packed, and named by the digest of its content."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
BOOT = PACKAGE / "node" / "boot.py"

_ENTRY = b"from lamplighter.node.__main__ import main\n\nmain()\n"
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Runner:
    """The packed node side: ``digest`` as the boot stage computes it on the node, ``data`` a zip archive."""

    digest: str
    data: bytes


@functools.cache
def pack() -> Runner:
    """Pack the node side; the same source gives the same digest on every machine."""
    contents = {"__main__.py": _ENTRY, "lamplighter/__init__.py": b""}
    for path in sorted((PACKAGE / "node").rglob("*.py")):
        if path != BOOT:
            contents[path.relative_to(PACKAGE.parent).as_posix()] = path.read_bytes()
    total = hashlib.sha256()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            data = contents[name]
            total.update(b"%d %s %d\n" % (len(name), name.encode(), len(data)) + data)
            archive.writestr(zipfile.ZipInfo(name, _ZIP_TIME), data, zipfile.ZIP_DEFLATED)
    return Runner(total.hexdigest(), buffer.getvalue())


def boot_source(nonce: str) -> bytes:
    """Return stage 2 as it is streamed: the boot program with its nonce in front."""
    return b"NONCE = %r\n" % nonce + BOOT.read_bytes()
