"""What a person is told to do about GPUs that are not free."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from lamplighter.node.gpu import gpus
from lamplighter.node.gpu.freeing import NotFreed
from lamplighter.node.stages import swap

NOBODY = 2**22 + 1  # above the largest pid
PLAN: Any = SimpleNamespace(name="kimi")


@pytest.mark.parametrize(
    ("word", "holders", "advice"),
    [
        (gpus.HELD, (os.getpid(), NOBODY), "list its name in servers.kimi.stale.kill"),
        (gpus.HELD, (NOBODY,), "reset the GPU"),
        (gpus.HELD, (), "reset the GPU"),
        (gpus.UNKNOWN, (), "what keeps nvidia-smi from telling"),
    ],
)
def test_only_a_holder_that_lives_is_to_be_ended(word: str, holders: tuple[int, ...], advice: str) -> None:
    assert advice in swap._how_to_free(PLAN, NotFreed(word, "", holders))
