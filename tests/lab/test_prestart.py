"""What comes before the stop, and how the old server ends: a whole deploy with each, seen by a client of our own."""

from __future__ import annotations

import threading
from pathlib import Path

from lamplighter.node.events import Exit
from tests.driver import Done, ask, eventually, token
from tests.lab.conftest import Box


def said(done: Done, stage: str) -> list[str]:
    return [str(event["message"]) for event in done.events if event.get("stage") == stage and event.get("message")]


def launcher_of(box: Box) -> dict[str, object]:
    status, found = ask(box.port, "/lab/environ")
    assert status == 200
    return dict(found["processes"][0])


def test_a_server_that_waited_is_the_one_that_a_plain_start_makes(box: Box) -> None:
    first = box.deploy()
    assert first.code == Exit.OK, first
    assert said(first, "prestart") == []  # nothing served that could have been spared the wait
    plain = launcher_of(box)

    early = box.deploy()
    assert early.code == Exit.OK, early
    waited = next(words for words in said(early, "prestart") if "waits at its gate" in words)
    now = launcher_of(box)
    assert waited.endswith(f": pid {now['pid']}")
    assert now["argv"] == plain["argv"]
    for found in (plain, now):
        assert "LAMPLIGHTER_GATE" not in found["environ"]
    assert drop_own(now["environ"]) == drop_own(plain["environ"])
    assert Path(f"/proc/{now['pid']}/oom_score_adj").read_text() == Path("/proc/self/oom_score_adj").read_text()

    box.configure(prestart="off", parser="off", prefetch="off")
    again = box.deploy()
    assert again.code == Exit.OK, again
    assert any("prestart is off" in words for words in said(again, "prestart"))


def drop_own(environ: object) -> dict[str, str]:
    """What is another one for each start: where its records go, and SGLang's own number for it."""
    assert isinstance(environ, dict)
    return {name: value for name, value in environ.items() if name not in ("LAMPLIGHTER_RECORDS", "SGLANG_RUN_ID")}


def test_an_idle_server_is_ended_at_once_and_a_busy_one_is_waited_for(box: Box) -> None:
    box.configure(args={"enable-metrics": True}, stop={"drain": 120})
    assert box.deploy().code == Exit.OK
    idle = box.deploy()
    assert idle.code == Exit.OK, idle
    assert any("is ended at once" in words for words in said(idle, "stop"))

    client = Client(box)
    client.start()
    eventually(lambda: client.answers)
    busy = box.deploy()
    client.join()
    assert busy.code == Exit.OK, busy
    assert set(client.answers) == {200}, "a request was cut off"
    assert any("waiting for 1 requests to end" in words for words in said(busy, "stop"))
    assert any("is ended at once" in words for words in said(busy, "stop"))


class Client(threading.Thread):
    """Asks one question after the other until it has seen that the deploy waits for it; what each was answered."""

    def __init__(self, box: Box) -> None:
        super().__init__(daemon=True)
        self.box = box
        self.answers: list[int] = []

    def run(self) -> None:
        body = {"model": "demo-model", "prompt": "Hello", "max_tokens": 2000}
        while not any("waiting for" in file.read_text() for file in self.box.state.glob("runs/*/events.jsonl")):
            self.answers.append(ask(self.box.port, "/v1/completions", body)[0])


def test_without_counters_it_ends_by_itself(box: Box) -> None:
    box.configure(stop={"drain": 60})
    assert box.deploy().code == Exit.OK
    done = box.deploy()
    assert done.code == Exit.OK, done
    assert any("its engine does not count them" in words for words in said(done, "stop"))
    assert token(box.port) is not None
