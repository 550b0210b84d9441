"""Fixtures for real engines on the CPU: `transformers_engine`, the path of its environment, and `tiny_model`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.place import HERE, NotBuildable, cache_directory, transformers_venv, vllm_venv

Require = Callable[[str, "str | None"], None]


@pytest.fixture(scope="session")
def transformers_engine(require: Require) -> Path:
    """A virtual environment whose bin/transformers can serve on the CPU; nodes see it at the same path."""
    try:
        return transformers_venv()
    except NotBuildable as reason:
        require("engine", str(reason))
        raise


@pytest.fixture(scope="session")
def vllm_engine(require: Require) -> Path:
    """The same for vLLM, whose tests run only where LAMPLIGHTER_REQUIRE lists ``vllm``."""
    if "vllm" not in os.environ.get("LAMPLIGHTER_REQUIRE", "").split(","):
        pytest.skip("vllm: opt-in, with LAMPLIGHTER_REQUIRE=vllm (3.4 GB, and a start takes a minute)")
    try:
        return vllm_venv()
    except NotBuildable as reason:
        require("vllm", str(reason))
        raise


@pytest.fixture(scope="session")
def tiny_model(transformers_engine: Path) -> Path:
    """A directory with a tiny Llama, kept beside the engine so that nodes see it too."""
    model = cache_directory() / f"tiny-{transformers_engine.name.rpartition('-')[2]}"
    if not (model / "model.safetensors").exists():  # written last
        script = [transformers_engine / "bin/python", HERE / "tiny_model.py", model]
        subprocess.run(script, check=True, capture_output=True, timeout=120)
    return model
