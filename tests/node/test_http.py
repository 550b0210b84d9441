"""Deadlines against servers that misbehave on purpose; identity and generation as the engines answer."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from lamplighter.node.system import http
from lamplighter.node.system.http import HttpFailed, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


class Server:
    """One thread, one connection at a time; ``talk`` says what it sends. ``asked`` keeps the requests."""

    def __init__(self, talk: Callable[[socket.socket, bytes, threading.Event], None], host: str = "127.0.0.1") -> None:
        self.talk = talk
        self.asked: list[bytes] = []
        self.over = threading.Event()
        self.listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.over.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                try:
                    self.asked.append(read_request(connection))
                    self.talk(connection, self.asked[-1], self.over)
                except OSError:  # the client has hung up, as it should
                    continue

    def close(self) -> None:
        self.over.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(60)
        assert not self.thread.is_alive()


def read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def serving(talk: Any, host: str = "127.0.0.1") -> Iterator[Server]:
    server = Server(talk, host)
    try:
        yield server
    finally:
        server.close()


def says(*pieces: bytes, every: float = 0.0) -> Callable[[socket.socket, bytes, threading.Event], None]:
    def talk(connection: socket.socket, _: bytes, over: threading.Event) -> None:
        for piece in pieces:
            connection.sendall(piece)
            if every and over.wait(every):
                return

    return talk


def trickle(start: bytes, drop: bytes) -> Callable[[socket.socket, bytes, threading.Event], None]:
    """Send ``start``, then ``drop`` again and again, each well within any timeout of a single read."""

    def talk(connection: socket.socket, _: bytes, over: threading.Event) -> None:
        connection.sendall(start)
        while not over.wait(0.1):
            connection.sendall(drop)

    return talk


def silence(_: socket.socket, __: bytes, over: threading.Event) -> None:
    over.wait(600)


def ask(server: Server, **options: Any) -> Reply:
    return http.request("GET", "127.0.0.1", server.port, "/health", **options)


# -------------------------------------------------------------------------------------------------- plain answers


def test_an_answer_of_known_length() -> None:
    with serving(says(HEAD + b"Content-Length: 11\r\n\r\n", b'{"a": ', b'"b"}\n')) as server:
        reply = ask(server)
    assert (reply.status, reply.json(), reply.headers["Content-Type"]) == (200, {"a": "b"}, "application/json")
    assert 0 < reply.seconds < 60
    assert server.asked[0].startswith(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:")


def test_an_answer_in_chunks_and_one_up_to_the_end() -> None:
    with serving(says(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n")) as server:
        assert ask(server).body == b"abcde"
    with serving(says(HEAD + b"\r\nall ", b"of it")) as server:
        assert ask(server).body == b"all of it"


def test_any_status_is_an_answer_and_redirects_are_not_followed() -> None:
    with serving(says(b"HTTP/1.1 503 Down\r\nContent-Length: 0\r\n\r\n")) as server:
        assert ask(server).status == 503
    with serving(says(b"HTTP/1.1 307 Away\r\nLocation: http://192.0.2.1/\r\nContent-Length: 0\r\n\r\n")) as server:
        assert ask(server).status == 307
        assert len(server.asked) == 1


def test_an_ipv6_server_is_asked_by_its_address() -> None:
    try:
        with serving(says(HEAD + b"Content-Length: 2\r\n\r\nok"), "::1") as server:
            assert http.request("GET", "::1", server.port, "/").body == b"ok"
            assert f"Host: [::1]:{server.port}".encode() in server.asked[0]
    except OSError:
        pytest.skip("no IPv6 on this machine")


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving(says(HEAD + b"Content-Length: 2\r\n\r\nok")) as server:
        assert ask(server).body == b"ok"


def test_the_api_key_is_sent_and_never_told() -> None:
    with serving(says(b"nonsense\r\n\r\n")) as server:
        with pytest.raises(HttpFailed) as failed:
            ask(server, api_key="s3cret-key")
        assert b"Authorization: Bearer s3cret-key\r\n" in server.asked[0]
        assert "s3cret" not in str(failed.value)
        for broken in ("s3cret\r\nX: y", "s3cret\n", "s3cr\N{EURO SIGN}t", "s3 cret"):
            with pytest.raises(HttpFailed) as failed:
                ask(server, api_key=broken)
            assert "s3" not in str(failed.value)
            assert failed.value.__cause__ is None
        assert len(server.asked) == 1


# ------------------------------------------------------------------------------------------------ servers that do not


@pytest.mark.parametrize(
    "talk",
    [
        pytest.param(silence, id="never answers"),
        pytest.param(trickle(b"", b"H"), id="status line by the byte"),
        pytest.param(trickle(HEAD, b"X-More: y\r\n"), id="headers without end"),
        pytest.param(trickle(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), id="continue without end"),
        pytest.param(trickle(HEAD + b"Content-Length: 100000\r\n\r\n", b"x"), id="body by the byte"),
        pytest.param(trickle(HEAD + b"\r\n", b"x"), id="body of unknown length"),
        pytest.param(trickle(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"), id="chunks without end"),
        pytest.param(trickle(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0"), id="a chunk size without end"),
    ],
)
def test_the_deadline_holds(talk: Any) -> None:
    with serving(talk) as server:
        began = time.monotonic()
        with pytest.raises(HttpFailed) as failed:
            ask(server, timeout=0.4)
        assert time.monotonic() - began < 60
    assert failed.value.kind == http.TIMED_OUT
    assert "within 0.4 s" in failed.value.reason


def test_the_deadline_holds_against_a_server_that_does_not_even_accept() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        waiting = []
        try:
            for _ in range(4):  # fill the queue, so that the next connection is not answered at all
                client = socket.socket()
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
                waiting.append(client)
            began = time.monotonic()
            with pytest.raises(HttpFailed) as failed:
                http.request("GET", "127.0.0.1", port, "/", timeout=0.4)
            assert time.monotonic() - began < 60
            assert failed.value.kind == http.TIMED_OUT
        finally:
            for client in waiting:
                client.close()


def test_the_deadline_holds_for_a_request_that_nobody_reads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        began = time.monotonic()
        with pytest.raises(HttpFailed) as failed:
            http.request("POST", "127.0.0.1", deaf.getsockname()[1], "/", b"x" * (64 << 20), timeout=0.4)
        assert time.monotonic() - began < 60
        assert failed.value.kind == http.TIMED_OUT


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([b""], http.CUT),
        ([HEAD + b"Content-Length: 10\r\n\r\nhalf"], http.CUT),
        ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"], http.CUT),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], http.NOT_HTTP),
        ([b"\x00\xff\x00\r\n\r\n"], http.NOT_HTTP),
        ([HEAD + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n"], http.CUT),
        ([HEAD + b"X: " + b"y" * 70000 + b"\r\n\r\n"], http.NOT_HTTP),
        ([HEAD + b"X: y\r\n" * 200 + b"\r\n"], http.NOT_HTTP),
    ],
)
def test_an_answer_that_is_none(pieces: list[bytes], kind: str) -> None:
    with serving(says(*pieces)) as server, pytest.raises(HttpFailed) as failed:
        ask(server, timeout=60)
    assert failed.value.kind == kind, failed.value.reason
    assert f"127.0.0.1:{server.port}/health" in failed.value.reason


@pytest.mark.parametrize("head", [b"Content-Length: 5000\r\n\r\n", b"\r\n"])
def test_a_body_that_is_too_large_is_not_read_to_its_end(head: bytes) -> None:
    with serving(says(HEAD + head + b"x" * 5000)) as server:
        with pytest.raises(HttpFailed) as failed:
            ask(server, max_body=4999)
        assert failed.value.kind == http.TOO_LARGE
        assert len(ask(server, max_body=5000).body) == 5000


def test_a_port_where_nobody_listens_refuses() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(HttpFailed) as failed:
            http.request("GET", "127.0.0.1", free.getsockname()[1], "/")
    assert failed.value.kind == http.REFUSED


def test_a_host_that_does_not_exist_is_a_failure_too() -> None:
    with pytest.raises(HttpFailed):
        http.request("GET", "no-such-host.invalid", 80, "/", timeout=5)


# -------------------------------------------------------------------------------------- identity and one generation

SGLANG = {
    "identity": {"source": "models", "path": "/v1/models", "field": "data.*.id", "equals": ["{served_name}"]},
    "generate": {"kind": "completion", "path": "/v1/completions", "body": {"prompt": "Hello"}},
}
TRANSFORMERS = {"identity": {"source": "reply", "field": "model", "equals": ["{model}@main", "{model}"]}}
SERVER = {"served_name": "kimi", "model": "/models/kimi-k2"}


def reply(document: object, status: int = 200) -> Reply:
    return Reply(status, json.dumps(document).encode(), 0.1)


@pytest.mark.parametrize(
    ("engine", "answer", "ok"),
    [
        (SGLANG, reply({"data": [{"id": "kimi"}]}), True),
        (SGLANG, reply({"data": [{"id": "lora"}, {"id": "kimi"}]}), True),
        (SGLANG, reply({"data": [{"id": "kimi-k2"}]}), False),
        (SGLANG, reply({"data": [{"id": "/models/kimi-k2"}]}), False),
        (SGLANG, reply({"data": []}), False),
        (SGLANG, reply({"data": [{"id": None}, {"id": 7}, "kimi", {}]}), False),
        (SGLANG, reply({"data": [{"id": "kimi"}]}, 401), False),
        (SGLANG, reply(["kimi"]), False),
        (SGLANG, Reply(200, b"<html>kimi</html>", 0.1), False),
        (SGLANG, Reply(200, b"\xff\xfe", 0.1), False),
        (SGLANG, Reply(200, b"[" * 200000, 0.1), False),
        (TRANSFORMERS, reply({"model": "/models/kimi-k2@main"}), True),
        (TRANSFORMERS, reply({"model": "/models/kimi-k2"}), True),
        (TRANSFORMERS, reply({"model": "kimi@main"}), False),
        ({}, reply({"data": [{"id": "kimi"}]}), True),
    ],
)
def test_the_model_is_the_one_wanted_by_the_engines_own_rule(engine: Any, answer: Reply, ok: bool) -> None:
    match = http.identity_matches(engine, SERVER, answer)
    assert match.ok is bool(match) is ok
    assert match.message


def test_a_wrong_model_is_named_beside_the_one_wanted() -> None:
    match = http.identity_matches(SGLANG, SERVER, reply({"data": [{"id": "other"}]}))
    assert (match.found, match.wanted) == (("other",), ("kimi",))
    assert match.message == "serves other, not kimi"


def test_models_asks_where_the_engine_says() -> None:
    with serving(says(HEAD + b'Content-Length: 25\r\n\r\n{"data":[{"id": "kimi"}]}')) as server:
        engine = {"identity": {"path": "/model_info", "field": "data.0.id"}}
        assert http.identity_matches(engine, SERVER, http.models(engine, "127.0.0.1", server.port, api_key="k"))
    assert server.asked[0].startswith(b"GET /model_info ")
    assert b"Authorization: Bearer k\r\n" in server.asked[0]


EMBED = {"generate": {"kind": "embedding"}}
CHAT = {"generate": {"kind": "chat", "path": "/v1/chat/completions", "body": {"temperature": 0}}}


@pytest.mark.parametrize(
    ("engine", "answer", "ok"),
    [
        (SGLANG, reply({"model": "m", "choices": [{"text": " a"}], "usage": {"completion_tokens": 1}}), True),
        (SGLANG, reply({"choices": [{"text": " a"}]}), True),
        (SGLANG, reply({"choices": [{"text": ""}], "usage": {"completion_tokens": 1}}), True),
        (SGLANG, reply({"choices": [{"text": ""}], "usage": {"completion_tokens": 0}}), False),
        (SGLANG, reply({"choices": [{"text": ""}]}), False),
        (SGLANG, reply({"choices": [{"text": None}], "usage": {"completion_tokens": True}}), False),
        (SGLANG, reply({"choices": [], "usage": None}), False),
        (SGLANG, reply({}), False),
        (SGLANG, reply([]), False),
        (SGLANG, reply(None), False),
        (SGLANG, Reply(200, b"", 0.1), False),
        (SGLANG, Reply(200, b"ok", 0.1), False),
        (SGLANG, reply({"choices": [{"text": " a"}], "usage": {"completion_tokens": 1}}, 500), False),
        (SGLANG, reply({"error": {"message": "no"}, "usage": {"completion_tokens": 1}}), False),
        (CHAT, reply({"choices": [{"message": {"content": "Hi"}}]}), True),
        (CHAT, reply({"choices": [{"message": {"content": None, "reasoning_content": "Hm"}}]}), True),
        (CHAT, reply({"choices": [{"message": {"content": "", "reasoning": "Hm"}}]}), True),
        (CHAT, reply({"choices": [{"message": {"content": ""}}]}), False),
        ({"generate": {"reply_field": "meta.count"}}, reply({"meta": {"count": 1}}), True),
        ({"generate": {"reply_field": ["meta.count", "out.*.words"]}}, reply({"out": [{"words": "x"}]}), True),
        ({"generate": {"reply_field": "meta.count"}}, reply({"meta": {"count": 0}}), False),
        (EMBED, reply({"data": [{"embedding": [0.1, 0.2]}]}), True),
        (EMBED, reply({"data": [{"embedding": []}]}), False),
        (EMBED, reply({"data": []}), False),
    ],
)
def test_a_generation_has_a_token_or_text_in_it(engine: Any, answer: Reply, ok: bool) -> None:
    generation = http.read_generation(engine, answer)
    assert generation.ok is ok
    assert bool(generation.error) is not ok
    assert generation.status == answer.status


def test_one_token_is_asked_for() -> None:
    body = b'{"model": "kimi", "choices": [{"text": " a"}], "usage": {"completion_tokens": 1}}'
    with serving(says(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)) as server:
        generation = http.generate(SGLANG, "127.0.0.1", server.port, "kimi", 60, api_key="k")
        assert (generation.ok, generation.tokens, generation.text, generation.model) == (True, 1, " a", "kimi")
        assert generation.seconds > 0
        http.generate(CHAT, "127.0.0.1", server.port, "kimi", 60, "How are you?")
        http.generate({"generate": {"body": {"model": None, "max_tokens": 2}}}, "127.0.0.1", server.port, "kimi", 60)
        http.generate(EMBED, "127.0.0.1", server.port, "kimi", 60)
    sent = [json.loads(asked.partition(b"\r\n\r\n")[2]) for asked in server.asked]
    assert sent == [
        {"model": "kimi", "max_tokens": 1, "prompt": "Hello"},
        {
            "model": "kimi",
            "max_tokens": 1,
            "temperature": 0,
            "messages": [{"role": "user", "content": "How are you?"}],
        },
        {"max_tokens": 2, "prompt": "Hello"},
        {"model": "kimi", "input": "Hello"},
    ]
    assert server.asked[0].startswith(b"POST /v1/completions ")
    assert server.asked[1].startswith(b"POST /v1/chat/completions ")
    assert server.asked[3].startswith(b"POST /v1/embeddings ")
    assert b"Authorization: Bearer k\r\n" in server.asked[0]


def test_a_hung_engine_is_a_failure_in_time() -> None:
    with serving(silence) as server:
        began = time.monotonic()
        with pytest.raises(HttpFailed) as failed:
            http.generate(SGLANG, "127.0.0.1", server.port, "kimi", 0.3)
        assert failed.value.kind == http.TIMED_OUT
        assert time.monotonic() - began < 60
