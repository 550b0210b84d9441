"""What a run demands: LAMPLIGHTER_REQUIRE lists the kinds of test that must not be skipped."""

from __future__ import annotations

import os

REQUIRE_VARIABLE = "LAMPLIGHTER_REQUIRE"


def is_required(kind: str) -> bool:
    return kind in os.environ.get(REQUIRE_VARIABLE, "").replace(" ", "").split(",")
