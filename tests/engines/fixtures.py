"""Fixtures for real engines on the CPU: `transformers_engine`, the path of its environment, and `tiny_model`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.place import HERE, TRANSFORMERS, VLLM, Environment, NotBuildable, cache_directory, made
from tests.needs import is_required

Require = Callable[[str, "str | None"], None]


@pytest.fixture(scope="session")
def transformers_engine(require: Require) -> Path:
    """A virtual environment whose bin/transformers can serve on the CPU; nodes see it at the same path."""
    return environment(TRANSFORMERS, require)


@pytest.fixture(scope="session")
def vllm_engine(require: Require) -> Path:
    """The same for vLLM. It is large: where LAMPLIGHTER_REQUIRE does not list ``engine``, it is used if it is there."""
    if not VLLM.is_made and not is_required("engine"):
        require("engine", "vLLM is not there: python -m tests.engines.place vllm")
    return environment(VLLM, require)


def environment(wanted: Environment, require: Require) -> Path:
    try:
        return made(wanted)
    except NotBuildable as reason:
        require("engine", str(reason))
        raise


@pytest.fixture(scope="session")
def tiny_model(transformers_engine: Path) -> Path:
    """A directory with a tiny Llama, kept beside the engine so that nodes see it too."""
    model = cache_directory() / f"tiny-{transformers_engine.name.rpartition('-')[2]}"
    if not (model / "model.safetensors").exists():  # written last
        script = [transformers_engine / "bin/python", HERE / "tiny_model.py", model]
        subprocess.run(script, check=True, capture_output=True, timeout=600)
    return model


@pytest.fixture(scope="session")
def odd_model(tiny_model: Path) -> Path:
    """A directory that looks like a model, of a kind that no engine knows."""
    odd = tiny_model.parent / "odd-config"
    odd.mkdir(exist_ok=True)
    (odd / "config.json").write_text('{"model_type": "nonesuch"}')
    (odd / "model.safetensors").write_bytes(b"")
    return odd
