"""Ask an HTTP server on this node something and be done by the deadline, whatever it does.

The deadline (seconds) covers the whole exchange, connecting to last byte: a server that accepts and never answers, or
sends one byte a second, cannot hold us longer. Bodies are bounded, proxies of the environment never used, redirects
never followed. Transport trouble is HttpFailed; an answer with any status is a Reply.

``models``, ``identity_matches`` and ``generate`` read the keys ``identity`` and ``generate`` of an engine.yml.

``tls``: "none" asks over plain HTTP; "verify" over HTTPS, with a certificate that the node's own authorities vouch for
and that is the asked name's or address's; "self-signed" over HTTPS with any certificate at all.

facts: connection refused is the normal answer while a server loads; an HTTP proxy in the environment that lacks a
no_proxy for the probe host has answered 403 in the server's place.
"""

from __future__ import annotations

import errno
import http.client
import io
import json
import os
import re
import socket
import ssl
import struct
import time
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Tuple

from lamplighter.node.system import ports

#: Bytes of a body that are read at most; the answers asked for here have a few kilobytes.
MAX_BODY = 4 << 20

REFUSED, TIMED_OUT, CUT, TOO_LARGE, NOT_HTTP = "refused", "timed_out", "cut", "too_large", "not_http"
NOT_TRUSTED, NOT_TLS = "not_trusted", "not_tls"


class HttpFailed(Exception):
    """No complete answer. ``reason`` says it in words.

    ``kind``: refused, timed_out, cut, too_large, not_http, not_trusted, not_tls.
    """

    def __init__(self, reason: str, kind: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind


@dataclass(frozen=True)
class Reply:
    """A complete answer; ``seconds`` from connecting to its last byte."""

    status: int
    body: bytes
    seconds: float
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """Parse the body; raises HttpFailed when it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise HttpFailed(f"the answer is not JSON: {self.text[:200]!r}", NOT_HTTP) from error


def request(
    method: str,
    host: str,
    port: int,
    path: str,
    body: Optional[bytes] = None,
    headers: Optional[Mapping[str, str]] = None,
    timeout: float = 10.0,
    *,
    api_key: Optional[str] = None,
    max_body: int = MAX_BODY,
    tls: str = "none",
) -> Reply:
    """Send one request and read the whole answer within ``timeout`` seconds; raises HttpFailed.

    ``api_key`` goes into an Authorization header and into no message.
    """
    started = time.monotonic()
    connection = _Connection(host, port, started + timeout, tls)
    sent = {"Accept": "application/json", "Connection": "close", **(headers or {})}
    if api_key:
        if re.search(r"[^\x21-\x7e]", api_key):  # else the refusal of http.client would quote the key
            raise HttpFailed("the API key has characters that no header may carry", NOT_HTTP)
        sent["Authorization"] = f"Bearer {api_key}"
    scheme = "http" if tls == "none" else "https"
    where = f"{method} {scheme}://{f'[{host}]' if ':' in host else host}:{port}{path}"
    try:
        connection.request(method, path, body=body, headers=sent)
        with connection.getresponse() as response:
            data = _read_body(response, max_body)
            return Reply(response.status, data, time.monotonic() - started, dict(response.getheaders()))
    except HttpFailed as failed:
        raise HttpFailed(f"{where}: {failed.reason}", failed.kind) from None
    except (socket.timeout, TimeoutError) as error:
        raise HttpFailed(f"{where}: no complete answer within {timeout:g} s", TIMED_OUT) from error
    except ConnectionRefusedError as error:
        raise HttpFailed(f"{where}: connection refused", REFUSED) from error
    except ssl.SSLCertVerificationError as error:
        said = f"its certificate is not trusted: {error.verify_message}"
        raise HttpFailed(f"{where}: {said}", NOT_TRUSTED) from error
    except ssl.SSLError as error:
        raise HttpFailed(f"{where}: this is not TLS: {error.reason or error}", NOT_TLS) from error
    except (http.client.IncompleteRead, http.client.RemoteDisconnected, ConnectionError) as error:
        raise HttpFailed(f"{where}: the server closed the connection before its answer was complete", CUT) from error
    except OSError as error:
        raise HttpFailed(f"{where}: {error.strerror or error}", REFUSED) from error
    except (http.client.HTTPException, ValueError) as error:  # ValueError: a chunk size that is no number
        raise HttpFailed(f"{where}: this is not HTTP: {str(error)[:200]}", NOT_HTTP) from error
    finally:
        connection.close()


def talks_tls(host: str, port: int, timeout: float) -> bool:
    """Tell whether a TLS handshake succeeds there, with any certificate."""
    connection = _Connection(host, port, time.monotonic() + timeout, "self-signed")
    try:
        connection.connect()
    except OSError:
        return False
    finally:
        connection.close()
    return True


def _read_body(response: http.client.HTTPResponse, limit: int) -> bytes:
    parts: List[bytes] = []
    size = 0
    while True:
        part = response.read(min(1 << 16, limit + 1 - size))
        if not part:
            break
        parts.append(part)
        size += len(part)
        if size > limit:
            raise HttpFailed(f"the answer is larger than {limit} bytes", TOO_LARGE)
    if response.length:  # read(n) does not mind an answer shorter than its Content-Length
        raise HttpFailed("the server closed the connection before its answer was complete", CUT)
    return b"".join(parts)


class _Connection(http.client.HTTPConnection):
    """An HTTPConnection, or with ``tls`` an HTTPS one, whose every wait ends at ``until`` (monotonic seconds)."""

    def __init__(self, host: str, port: int, until: float, tls: str) -> None:
        super().__init__(host, port)
        self._until = until
        self._tls = tls

    def connect(self) -> None:
        plain = _connect(self.host, self.port, self._until)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self.sock = _DeadlineSocket(plain if self._tls == "none" else self._wrapped(plain), self._until)
        except BaseException:
            plain.close()
            raise

    def _wrapped(self, plain: socket.socket) -> socket.socket:
        """Shake hands by the deadline."""
        context = ssl.create_default_context()
        if self._tls == "self-signed":
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        plain.settimeout(_remaining(self._until))
        plain.getpeername()  # raises for a peer that has reset; wrap_socket would raise, too, and leave its socket open
        return context.wrap_socket(plain, server_hostname=self.host)


def _connect(host: str, port: int, until: float) -> socket.socket:
    """Connect to the first address that answers (create_connection would give each the whole time)."""
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        plain = socket.socket(family, kind, protocol)
        try:
            plain.settimeout(_remaining(until))
            plain.connect(address)
            if plain.getsockname() == plain.getpeername():
                # Nothing listens, the kernel picked the port itself as our end and connected it to itself; a reset
                # instead of a normal end keeps TIME_WAIT off the server's port.
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        except OSError as error:
            plain.close()
            failure = error
        else:
            return plain
    raise failure


class _DeadlineSocket:
    """What http.client uses of a socket, and nothing else: sendall, makefile, close."""

    def __init__(self, plain: socket.socket, until: float) -> None:
        self._plain = plain
        self._until = until

    def sendall(self, data: bytes) -> None:
        self._plain.settimeout(_remaining(self._until))  # the timeout of sendall covers the whole of it
        self._plain.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_DeadlineReader(self._plain, self._until))

    def close(self) -> None:
        self._plain.close()


class _DeadlineReader(io.RawIOBase):
    """Reads a socket; a timeout of the socket alone would begin again with every byte that trickles in."""

    def __init__(self, plain: socket.socket, until: float) -> None:
        super().__init__()
        self._plain = plain
        self._until = until
        self._file = plain.makefile("rb", buffering=0)  # keeps the socket open until the answer is read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> Optional[int]:
        self._plain.settimeout(_remaining(self._until))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


def _remaining(until: float) -> float:
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


# -------------------------------------------------------------------------------------- which model, and does it speak


@dataclass(frozen=True)
class ModelMatch:
    """Whether the server serves the model wanted: true when any name ``found`` is one of those ``wanted``."""

    ok: bool
    wanted: Tuple[str, ...]
    found: Tuple[str, ...]
    message: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Generation:
    """One short generation. ``ok``: 200 and at least one token or some text; ``error`` says what was wrong otherwise.

    ``tokens`` as the server counted them, None where it did not; ``model`` as the answer names it.
    """

    ok: bool
    status: int
    tokens: Optional[int]
    text: str
    model: Optional[str]
    error: str
    reply: Reply

    @property
    def seconds(self) -> float:
        return self.reply.seconds


def models(
    engine: Mapping[str, Any],
    host: str,
    port: int,
    timeout: float = 10.0,
    *,
    api_key: Optional[str] = None,
    tls: str = "none",
) -> Reply:
    """Ask for what ``identity_matches`` needs where the engine's ``identity.source`` is ``models``; raises HttpFailed.

    facts: /v1/models is answered by the HTTP process alone: it proves the identity, not that the engine works.
    """
    path = str(_section(engine, "identity").get("path") or "/v1/models")
    return request("GET", host, port, path, timeout=timeout, api_key=api_key, tls=tls)


def identity_matches(engine: Mapping[str, Any], server: Mapping[str, Any], reply: Reply) -> ModelMatch:
    """Compare the model named in ``reply`` with the one wanted, by the engine's own rule.

    ``reply``: from ``models`` where ``identity.source`` is ``models``, ``Generation.reply`` where it is ``reply``.
    ``server`` gives ``served_name`` and ``model``. Never raises: an answer that cannot be read does not match.

    facts: SGLang answers a wrong model name with 200, so its identity is in /v1/models; transformers lists the hub
    cache there, so its identity is the ``model`` of a reply.
    """
    rule = _section(engine, "identity")
    wanted = tuple(_filled(str(text), server) for text in rule.get("equals") or ["{served_name}"])
    path = str(rule.get("field") or ("model" if rule.get("source") == "reply" else "data.*.id"))
    try:
        found = tuple(str(value) for value in pick(reply.json(), path) if isinstance(value, str))
    except HttpFailed as failed:
        return ModelMatch(False, wanted, (), failed.reason)
    if reply.status != 200:
        return ModelMatch(False, wanted, found, f"HTTP {reply.status}: {reply.text[:200]}")
    if not set(wanted).isdisjoint(found):
        return ModelMatch(True, wanted, found, f"serves {', '.join(found)}")
    return ModelMatch(False, wanted, found, f"serves {', '.join(found) or 'no model'}, not {' or '.join(wanted)}")


def generate(
    engine: Mapping[str, Any],
    host: str,
    port: int,
    model: str,
    timeout: float = 60.0,
    prompt: Optional[str] = None,
    *,
    api_key: Optional[str] = None,
    tls: str = "none",
    tokens: int = 1,
) -> Generation:
    """Let the server generate one token; the proof that its engine works. Raises HttpFailed when no answer came.

    The request is the engine's ``generate``: its ``body`` plus ``model`` (unless the body has one; null drops it) and
    ``max_tokens``, or, for an embedding model, a word to embed. facts: a hung engine still answers /health and
    /v1/models with 200, but not this.
    """
    rule = _section(engine, "generate")
    is_chat, is_embedding = rule.get("kind") == "chat", rule.get("kind") == "embedding"
    usual = "/v1/chat/completions" if is_chat else "/v1/embeddings" if is_embedding else "/v1/completions"
    path = str(rule.get("path") or usual)
    asked = {"input": prompt or "Hello"} if is_embedding else {"max_tokens": tokens}
    body: Dict[str, Any] = {"model": model, **asked, **(rule.get("body") or {})}
    if is_chat and (prompt is not None or "messages" not in body):
        body["messages"] = [{"role": "user", "content": prompt or "Say hello."}]
    if rule.get("kind") in (None, "completion") and (prompt is not None or "prompt" not in body):
        body["prompt"] = prompt or "Hello"
    data = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
    headers = {"Content-Type": "application/json"}
    reply = request("POST", host, port, path, data, headers, timeout, api_key=api_key, tls=tls)
    return read_generation(engine, reply)


#: Where the count and the text are in the answers of the engines that are known; a thinking model's first token is
#: reasoning, which SGLang and vLLM name differently.
_COUNTS = ("usage.completion_tokens",)
_TEXTS = (
    "choices.*.text",
    "choices.*.message.content",
    "choices.*.message.reasoning_content",
    "choices.*.message.reasoning",
    "text",
)


def read_generation(engine: Mapping[str, Any], reply: Reply) -> Generation:
    """Judge the answer to ``generate``: a 200 with neither a token nor a character in it is no generation.

    A vector's numbers count as its tokens.
    """
    own = _section(engine, "generate").get("reply_field")
    own_fields = [own] if isinstance(own, str) else list(own or [])
    try:
        document = reply.json()
    except HttpFailed as failed:
        return Generation(False, reply.status, None, "", None, failed.reason, reply)
    values = [value for path in (*own_fields, *_COUNTS) for value in pick(document, path)]
    counts = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    texts = [value for path in (*own_fields, *_TEXTS) for value in pick(document, path) if isinstance(value, str)]
    tokens, text = (max(counts) if counts else None), next((text for text in texts if text), "")
    vectors = [value for value in pick(document, "data.*.embedding") if value and isinstance(value, (list, str))]
    if vectors and _section(engine, "generate").get("kind") == "embedding":
        tokens = len(vectors[0])
    named = [value for value in pick(document, "model") if isinstance(value, str)]
    error = ""
    if reply.status != 200:
        error = f"HTTP {reply.status}: {reply.text[:300]}"
    elif isinstance(document, dict) and document.get("error"):
        error = f"the server answered with an error: {str(document['error'])[:300]}"
    elif not text and (tokens is None or tokens < 1):
        error = f"the answer has no token in it: {reply.text[:300]}"
    return Generation(not error, reply.status, tokens, text, named[0] if named else None, error, reply)


def pick(document: Any, path: str) -> List[Any]:
    """Collect the values at a dotted path of parsed JSON; ``*`` is every element, a number one element of a list."""
    found = [document]
    for word in path.split("."):
        found = [inner for value in found for inner in _step(value, word)]
    return found


def _step(value: Any, word: str) -> List[Any]:
    if isinstance(value, dict):
        return list(value.values()) if word == "*" else [value[word]] if word in value else []
    if isinstance(value, list):
        if word == "*":
            return value
        return [value[int(word)]] if word.isdecimal() and int(word) < len(value) else []
    return []


def _section(engine: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = engine.get(name)
    return section if isinstance(section, dict) else {}


def _filled(text: str, server: Mapping[str, Any]) -> str:
    model = str(server.get("model") or "")
    return text.replace("{served_name}", str(server.get("served_name") or model)).replace("{model}", model)


def is_answering(host: str, port: int) -> bool:
    """Tell whether anybody answers HTTP there, whatever it says, within two seconds."""
    try:
        request("GET", ports.probe_host(host), port, "/v1/models", timeout=2.0)
    except HttpFailed:
        return False
    return True
