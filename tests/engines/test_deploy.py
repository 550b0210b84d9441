"""A real LLM server, `transformers serve` with a tiny model, deployed to a node with real OpenSSH."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.events import Exit
from tests.driver import Driver, eventually
from tests.nodes.park import Node, NodePark

pytestmark = pytest.mark.timeout(1500)  # starts that import for as long as this machine's load makes it
PORT = 8000


class Served:
    """A node with the engine, and an inventory that wants it there."""

    def __init__(self, park: NodePark, node: Node, engine: Path, model: Path, directory: Path) -> None:
        self.node = node
        self.model = str(model)
        self.python = str(engine / "bin" / "python")
        self.driver = Driver(directory / "inventory", prefix=tuple(park.hub_words([])), home=park.home)

    def deploy(self, *words: str, **server: Any) -> Any:
        wanted = {
            "engine": "transformers",
            "model": self.model,
            "python": self.python,
            "port": PORT,
            "gpus": [],
            "args": {"device": "cpu"},
            "checks": {"shm_free_gib": 0, "disk_free_gib": 0},  # a test node is small
            "env": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MARK": "one"},
            **server,
        }
        self.driver.write("gpu1", {**self.node.connection(), "servers": {"tiny": wanted}})
        return self.driver.run("deploy", "--json", "--host", "gpu1", *words, timeout=600)

    def completion(self) -> str | None:
        body = json.dumps({"model": self.model, "prompt": "Hello", "max_tokens": 3})
        url = f"http://127.0.0.1:{PORT}/v1/completions"
        done = self.node.exec(
            ["curl", "-sf", "-m", "60", "-H", "Content-Type: application/json", "-d", body, url], check=False
        )
        return json.loads(done.stdout)["choices"][0]["text"] if done.returncode == 0 else None


def test_deployed_redeployed_crashed_and_rolled_back(
    park: NodePark, node: Node, transformers_engine: Path, tiny_model: Path, odd_model: Path, tmp_path: Path
) -> None:
    served = Served(park, node, transformers_engine, tiny_model, tmp_path)
    first = served.deploy()
    assert first.code == Exit.OK, first
    assert served.completion() is not None
    phases = [event["phase"] for event in first.events if event.get("phase")]
    assert phases[-1] == "ready"

    again = served.deploy()
    assert again.code == Exit.OK, again
    assert again.server("gpu1", "tiny")["downtime_seconds"] > 0
    said = [str(event.get("message")) for event in again.events if event.get("stage") == "prestart"]
    waited = next(words for words in said if "waits at its gate" in words)
    assert waited.endswith(f": pid {again.server('gpu1', 'tiny')['serving']['pid']}")
    assert not [words for words in said if "could not import" in words]
    assert any("own parser takes the words" in words for words in said)

    wrong = served.deploy(args={"device": "cpu", "no-such-flag": True}, parser="off")
    assert wrong.code == Exit.ROLLED_BACK, wrong
    report = wrong.server("gpu1", "tiny")
    assert report["cause"] == "unknown_flag"
    assert "no-such-flag" in report["evidence"]
    assert served.completion() is not None

    node.exec(["sh", "-c", "mkdir /opt/shadow && echo 'import not_installed_here' > /opt/shadow/tokenizers.py"])
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": "/opt/shadow"}
    ours = {"id": "L18", "variable": "PYTHONPATH", "reason": "a package that is not there"}
    for words, server in {
        "No module named 'not_installed_here'": {"env": environment, "lint": {"ignore": [ours]}},
        "/usr/bin/transformers": {"python": "/usr/bin/python3"},
        "--no-such-flag": {"args": {"device": "cpu", "no-such-flag": True}},
        "'foo' is not one of": {"args": {"device": "cpu", "reasoning": "foo"}},
        "does not recognize this architecture": {"model": str(odd_model)},
    }.items():
        refused = served.deploy(**server)
        assert refused.code == Exit.REFUSED, refused
        assert words in json.dumps(refused.server("gpu1", "tiny")), refused
        assert not [event for event in refused.events if event.get("stage") == "stop"]
        if "args" in server:  # else the model is named
            flag = [*server["args"]][-1]
            assert f"servers.tiny.args.{flag} is set in " in refused.server("gpu1", "tiny")["hint"], refused
    asked = served.driver.run("check", "--json", "--host", "gpu1", timeout=600)
    assert asked.code == Exit.REFUSED, asked
    assert "own parser refuses the words of the launch" in asked.stdout
    assert served.completion() is not None

    missing = served.deploy(model="/models/is-not-there")
    assert missing.code == Exit.REFUSED
    assert missing.server("gpu1", "tiny")["cause"] == "model_path"
    assert served.completion() is not None


def test_killed_while_serving_and_deployed_again(
    park: NodePark, node: Node, transformers_engine: Path, tiny_model: Path, tmp_path: Path
) -> None:
    served = Served(park, node, transformers_engine, tiny_model, tmp_path)
    pid = served.deploy().server("gpu1", "tiny")["serving"]["pid"]
    node.sh(f"kill -{signal.SIGKILL} {pid}")

    def killed() -> bool:
        status = served.driver.run("status", "--json", "--host", "gpu1")
        found = json.loads(status.stdout)["status"]["hosts"]["gpu1"]["servers"]["tiny"]
        return found["state"] == "stopped" and "SIGKILL" in found["message"]

    eventually(killed)
    assert served.deploy().code == Exit.OK
    eventually(lambda: served.completion() is not None)
