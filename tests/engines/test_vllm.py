"""vLLM itself, on the CPU, deployed to a node with real OpenSSH. Opt-in (LAMPLIGHTER_REQUIRE=vllm): starts are slow.

facts: its API server ignores TERM while the engine loads; engine and workers outlive a killed API server; a second
start on a taken port prints its ready line and never listens; with a stopped engine /health still says 200.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.events import Exit
from tests.driver import Driver, eventually
from tests.nodes.park import Node, NodePark

pytestmark = pytest.mark.timeout(2400)
PORT = 8000
START_SECONDS = 600


class Served:
    """A node with vLLM, and an inventory that wants it there."""

    def __init__(self, park: NodePark, node: Node, engine: Path, model: Path, directory: Path) -> None:
        self.node = node
        self.model = str(model)
        self.python = str(engine / "bin" / "python")
        self.driver = Driver(directory / "inventory", prefix=tuple(park.hub_words([])), home=park.home)

    def configure(self, **server: Any) -> None:
        wanted = {
            "engine": "vllm",
            "model": self.model,
            "served_name": "tiny",
            "python": self.python,
            "port": PORT,
            "gpus": [],
            "args": {"max-model-len": 256, "dtype": "float32", "enforce-eager": True},
            "env": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
            **server,
        }
        self.driver.write("gpu1", {**self.node.connection(), "servers": {"tiny": wanted}})

    def deploy(self, **server: Any) -> Any:
        self.configure(**server)
        return self.driver.run("deploy", "--json", "--host", "gpu1", timeout=START_SECONDS)

    def titled(self, title: str) -> list[int]:
        return [int(pid) for pid in self.node.sh(f"pgrep -f '^{title}' || true").split()]

    def answers(self, path: str) -> bool:
        words = ["curl", "-sf", "-m", "5", "-o", "/dev/null", f"http://127.0.0.1:{PORT}{path}"]
        return self.node.exec(words, check=False).returncode == 0


def test_vllm_from_healthy_to_every_kind_of_death(
    park: NodePark, node: Node, vllm_engine: Path, tiny_model: Path, tmp_path: Path
) -> None:
    served = Served(park, node, vllm_engine, tiny_model, tmp_path)
    node.sh("mount -o remount,size=1g /dev/shm")  # a queue between its processes wants 160 MiB
    first = served.deploy()
    assert first.code == Exit.OK, first
    phases = [event["phase"] for event in first.events if event.get("phase")]
    assert phases[-1] == "ready"
    assert {"boot", "weights", "kv_cache"} <= set(phases)
    assert served.titled("VLLM::EngineCore")

    # the engine stopped: /health still answers, a redeploy removes it all the same
    served.node.sh(f"kill -STOP {served.titled('VLLM::EngineCore')[0]}")
    assert served.answers("/health")
    served.node.sh(f"kill -KILL {first.server('gpu1', 'tiny')['serving']['pid']}")
    orphans = served.titled("VLLM::EngineCore")
    assert orphans  # it outlives its API server
    again = served.deploy()
    assert again.code == Exit.OK, again
    assert not set(orphans) & set(served.titled("VLLM::EngineCore"))

    # killed while it loads: noticed at once, and the old one serves again
    served.configure(env={"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "MARK": "two"})
    with served.driver.started("deploy", "--json", "--host", "gpu1") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line).get("stage") == "ready":
                break
        victims = eventually(lambda: served.titled("VLLM::EngineCore"), START_SECONDS)
        served.node.sh(f"kill -KILL {victims[0]}")
        events = [json.loads(line) for line in process.stdout]
    failure = next(event for event in events if event.get("event") == "failure")
    assert failure["cause"] in ("worker_died", "host_oom", "crashed"), failure
    assert events[-1]["report"]["exit_code"] == Exit.ROLLED_BACK, events[-1]

    wrong = served.deploy(model="/models/is-not-there")
    assert (wrong.code, wrong.server("gpu1", "tiny")["cause"]) == (Exit.REFUSED, "model_path")
