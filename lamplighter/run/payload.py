"""The program that runs on the node: ``lamplighter/node`` packed, and named by the digest of its content."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
BOOT = PACKAGE / "node" / "boot.py"

_ENTRY = b"from lamplighter.node.__main__ import main\n\nmain()\n"
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Runner:
    """The node side: ``digest`` as the boot stage computes it on the node, ``contents`` by name."""

    digest: str
    contents: Mapping[str, bytes]

    @functools.cached_property
    def data(self) -> bytes:
        """A zip archive of it, made only for a node that has not got it yet."""
        import zipfile

        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in self.contents.items():
                archive.writestr(zipfile.ZipInfo(name, _ZIP_TIME), data, zipfile.ZIP_DEFLATED)
        return buffer.getvalue()


@functools.cache
def pack() -> Runner:
    """Pack the node side; the same source gives the same digest on every machine."""
    contents = {"__main__.py": _ENTRY, "lamplighter/__init__.py": b""}
    for path in sorted((PACKAGE / "node").rglob("*.py")):
        if path != BOOT:
            contents[path.relative_to(PACKAGE.parent).as_posix()] = path.read_bytes()
    total = hashlib.sha256()
    for name in sorted(contents):
        data = contents[name]
        total.update(b"%d %s %d\n" % (len(name), name.encode(), len(data)) + data)
    return Runner(total.hexdigest(), dict(sorted(contents.items())))


def boot_source(nonce: str) -> bytes:
    """Return stage 2 as it is streamed: the boot program with its nonce in front."""
    return b"NONCE = %r\n" % nonce + BOOT.read_bytes()
