"""The driver's numbers of GPU errors, as ``roles/node/faults.yml`` has them."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional


def fatal(engine: Mapping[str, Any]) -> Dict[str, str]:
    """Return the meaning of each number after which a GPU is not to be trusted; numbers are text, as JSON has it."""
    known = (engine.get("faults") or {}).get("xids") or {}
    return {code: xid["means"] for code, xid in known.items() if not xid.get("harmless")}


def is_fatal(engine: Mapping[str, Any], code: Optional[int]) -> bool:
    """Tell whether the GPU is not to be trusted after this number."""
    return str(code) in fatal(engine)
