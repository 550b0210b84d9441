"""What a failure of a late stage means for the new server: it stays, or the old one comes back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lamplighter.node.events import Exit
from lamplighter.node.verbs import deploy
from lamplighter.node.worker import StageFailure


@pytest.mark.parametrize(
    ("stage", "code", "cause", "stays"),
    [
        ("confirm", Exit.DEGRADED, "environment", True),
        ("confirm", Exit.DEGRADED, "no_writes", True),
        ("confirm", Exit.CRASHED, "crashed", False),
        ("confirm", Exit.INTERRUPTED, "cancelled", False),
        ("commit", Exit.INTERRUPTED, "cancelled", False),
        ("commit", Exit.INTERNAL, "internal", True),
        ("commit", Exit.NOT_READY, "silent", False),
        ("ready", Exit.NOT_READY, "not_ready", False),
    ],
)
def test_which_failures_leave_the_new_server(
    monkeypatch: pytest.MonkeyPatch, stage: str, code: Exit, cause: str, stays: bool
) -> None:
    """Who cancels wants the old one back, whatever the inventory wishes for a failed confirmation."""
    monkeypatch.setattr(deploy.releases, "way_back", lambda home, failed: SimpleNamespace(name="old"))
    monkeypatch.setattr(deploy.Plan, "load", lambda request: SimpleNamespace(on_confirm_failure="keep"))
    replacement = deploy.Replacement(SimpleNamespace(request={}, home=None))  # type: ignore[arg-type]
    replacement.staged = SimpleNamespace(release=SimpleNamespace(name="new"))  # type: ignore[assignment]
    assert replacement._stays(stage, StageFailure(code, "it failed", cause=cause)) == stays
