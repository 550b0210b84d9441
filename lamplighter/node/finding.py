"""What is said of one question about the node: in ``check``, and before anything is touched."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Finding:
    """One question about the node and its answer; ``level`` is ok, warning or error."""

    id: str
    level: str
    message: str
    evidence: str = ""
    hint: str = ""
