"""`transformers serve` itself, on the CPU: what the deploy tests and the recorded log rely on."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.driver import free_port

pytestmark = pytest.mark.timeout(900)  # the first test of a fresh checkout makes the environment

READY = "Uvicorn running on"
SECONDS = 600  # six on an idle machine, nearly all of them imports


@dataclass(frozen=True)
class Serving:
    process: subprocess.Popen[bytes]
    port: int
    model: Path
    log: Path


@pytest.fixture
def serving(transformers_engine: Path, tiny_model: Path, tmp_path: Path) -> Iterator[Serving]:
    port, log = free_port(), tmp_path / "server.log"
    words = [transformers_engine / "bin/transformers", "serve", tiny_model, "--device", "cpu", "--port", str(port)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield Serving(process, port, tiny_model, log)
    finally:
        process.kill()
        process.wait()


def test_it_becomes_ready_answers_and_ends_on_term(serving: Serving) -> None:
    wait_until_ready(serving)

    answer = post(
        serving.port, {"messages": [{"role": "user", "content": "Who keeps the lamps lit?"}], "max_tokens": 4}
    )

    assert answer["model"] == f"{serving.model}@main"
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["finish_reason"] == "length"
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(120) in (0, -signal.SIGTERM)


def wait_until_ready(serving: Serving) -> None:
    deadline = time.monotonic() + SECONDS
    while READY not in (said := serving.log.read_text(errors="replace")):
        assert serving.process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)


def post(port: int, body: dict[str, object]) -> dict[str, object]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read().decode()
        assert reply.status == 200, text
        return json.loads(text)
    finally:
        connection.close()
