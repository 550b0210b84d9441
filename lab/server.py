"""An SGLang-shaped server: a launcher with its HTTP endpoints, above the workers of lab.worker.

Promise: the order of events, the status codes, the log lines and the reactions to signals of SGLang 0.5.16 on an H200:
the port opens after the graphs; /v1/models and /model_info answer 200 while /health is 503; the ready line comes after
a warm-up request that goes through the port, whoever listens there; /health generates a token and takes a second; TERM
drains and ends with SIGKILL of the tree; a busy port is noticed last, after the ready line, with exit status 3.

Of its own it has one endpoint, /lab/environ: the arguments and environment of the launcher and of every worker.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import os
import queue
import random
import signal
import socket
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lab import worker
from lab.arguments import parse
from lab.wording import launcher_traceback, raw, say
from lab.worker import Pipes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from lab.arguments import Arguments

VERSION = "0.5.16"

#: Seconds at speed 1: imports before the first line, before the warm-up, /health's least time, /health's patience.
BOOT_SECONDS, WARMUP_SECONDS, HEALTH_SECONDS, HEALTH_TIMEOUT = 1.6, 1.0, 1.0, 20.0
#: Seconds between two looks while draining, until a dead worker is acted upon, and the same with a request running.
DRAIN_SECONDS, CRASH_SECONDS, COREDUMP_SECONDS = 1.0, 5.0, 60.0

WORDS = ("lamp", "light", "street", "evening", "glass", "flame", "ladder", "wick", "window", "river", "bridge", "night")


def main(words: Sequence[str]) -> int:
    """Run the server until a signal or an injected failure ends it. Returns the exit status."""
    arguments = parse(words, os.environ)
    if arguments.fault("fork") and os.fork():
        return 0
    if arguments.fault("ignore-term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # workers inherit that
    with socket.socket(socket.AF_INET6 if ":" in arguments.host else socket.AF_INET) as early:
        if arguments.fault("bind-early"):
            early.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            early.bind((arguments.host, arguments.port))
        _boot(arguments)
        _set_environment(arguments)
        launcher = Launcher(arguments)
        signal.signal(signal.SIGQUIT, launcher.on_child_failed)
        launcher.start_workers()
        try:
            return Front(arguments, launcher, launcher.await_workers()).run()
        finally:
            launcher.kill_children(include_parent=False)


def _boot(arguments: Arguments) -> None:
    worker.register(arguments)
    time.sleep(BOOT_SECONDS / arguments.speed)
    model = arguments.model_path
    if model.startswith(("/", "./", "~")) and not Path(model).exists():
        raw(
            launcher_traceback(
                "server_args.py",
                8224,
                "prepare_server_args",
                f"OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{model}'. Use "
                "`repo_type` argument if needed.",
            )
        )
        sys.exit(1)
    shown = ", ".join(f"{name}={value!r}" for name, value in _server_args(arguments).items())
    say(f"server_args=ServerArgs({shown})")
    say("Using default HuggingFace chat template with detected content format: string")
    meet(arguments, "boot")


def meet(arguments: Arguments, phase: str) -> None:
    """The launcher's own injected failures, in phases that no worker has."""
    if arguments.fault("die", phase):
        raw(
            launcher_traceback(
                "entrypoints/http_server.py", 2302, "launch_server", f"RuntimeError: injected failure in phase {phase}"
            )
        )
        sys.exit(1)
    if arguments.fault("kill", phase) or arguments.fault("vanish", phase):
        os.kill(os.getpid(), signal.SIGKILL)
    while arguments.fault("hang", phase):
        signal.pause()


def _server_args(arguments: Arguments) -> dict[str, Any]:
    resolved = {
        "tokenizer_path": arguments.model_path,
        "host": arguments.host,
        "port": arguments.port,
        "tp_size": arguments.tp_size,
        "mem_fraction_static": arguments.mem_fraction_static,
        "served_model_name": arguments.served_model_name,
    }
    return {**arguments.given, **resolved, "api_key": "******" if arguments.api_key else None}


def _set_environment(arguments: Arguments) -> None:
    """What SGLang writes over its environment before it starts workers: facts of 0.5.5 and later."""
    environ = os.environ
    symmetric = arguments.given["enable_symm_mem"]
    for name, wanted in (
        ("NCCL_CUMEM_ENABLE", symmetric),
        ("NCCL_NVLS_ENABLE", symmetric or arguments.given["enable_nccl_nvls"]),
    ):
        if wanted or name not in environ:
            environ[name] = str(int(wanted))
    environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    environ["CUDA_MODULE_LOADING"] = "AUTO"
    if environ.get("TRTLLM_ENABLE_PDL") != "0":
        environ["TRTLLM_ENABLE_PDL"] = "1"
    if arguments.given["enable_deterministic_inference"] and arguments.tp_size > 1:
        environ["NCCL_ALGO"] = "allreduce:tree"
    environ["SGLANG_RUN_ID"] = f"sglang-run-{time.time()}-{random.randrange(10**8)}"


class Launcher:
    """The parent of the workers: starts them, and ends itself with all of them when one fails."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.schedulers: list[SpawnProcess] = []
        self.detokenizer: SpawnProcess | None = None
        self.connections: list[Connection] = []
        self.is_serving = False
        self.is_ending = False

    @property
    def children(self) -> list[SpawnProcess]:
        return [*self.schedulers, *([self.detokenizer] if self.detokenizer else [])]

    def start_workers(self) -> None:
        context = multiprocessing.get_context("spawn")
        arguments = self.arguments
        links = [context.Pipe() for _ in range(arguments.tp_size - 1)]
        for rank in range(arguments.tp_size):
            ours, theirs = context.Pipe()
            ranks = tuple(link[0] for link in links) if rank == 0 else (links[rank - 1][1],)
            process = context.Process(target=worker.scheduler, args=(arguments, rank, Pipes(theirs, ranks)))
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.schedulers.append(process)
        ours, theirs = context.Pipe()
        self.detokenizer = context.Process(target=worker.detokenizer, args=(arguments, Pipes(theirs)))
        self.detokenizer.start()
        theirs.close()
        self.connections.append(ours)
        for link in links:
            for end in link:
                end.close()
        if arguments.fault("orphans"):
            time.sleep(0.5 / arguments.speed)
            os.kill(os.getpid(), signal.SIGKILL)

    def await_workers(self) -> list[dict[str, Any]]:
        """What each worker reports when it is up: role, pid, argv, environ. Ends with rc 1 when one dies before."""
        infos: dict[int, dict[str, Any]] = {}
        while len(infos) < len(self.connections):
            open_ones = [link for index, link in enumerate(self.connections) if index not in infos]
            for link in wait(open_ones):
                index = self.connections.index(link)  # type: ignore[arg-type]
                try:
                    infos[index] = self.connections[index].recv()
                except (EOFError, ConnectionResetError):
                    self.report_death(index)
        return [infos[index] for index in range(len(infos))]

    def report_death(self, index: int) -> NoReturn:
        process = self.children[index]
        process.join()
        raw(
            launcher_traceback(
                "entrypoints/engine.py",
                1349,
                "_wait_for_scheduler_ready\n    raise _scheduler_died_error(j, scheduler_procs[j])",
                f"RuntimeError: Rank {index} scheduler died during initialization (exit code: {process.exitcode}). If "
                "exit code is -9 (SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to "
                "check.",
            )
        )
        sys.exit(1)

    def on_child_failed(self, *_: object) -> None:
        """SIGQUIT, which a failing scheduler sends."""
        if self.is_serving:
            say("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        else:
            say("Received sigquit from a child process. It usually means the child failed.")
        self.kill_tree()

    def kill_tree(self) -> NoReturn:
        self.kill_children(include_parent=True)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def kill_children(self, *, include_parent: bool) -> None:
        self.is_ending = True
        pid = os.getpid()
        say(f"kill_process_tree called: parent_pid={pid}, include_parent={include_parent}, pid={pid}")
        for process in self.children:
            if process.is_alive():
                process.kill()
        for process in self.children:
            process.join()


@dataclass
class Running:
    """A request that the scheduler works on: what it has produced so far arrives in ``news``."""

    identity: str
    news: queue.SimpleQueue[tuple[int, bool]] = field(default_factory=queue.SimpleQueue)


class Front:
    """The HTTP side: endpoints, warm-up, draining, watching the workers."""

    def __init__(self, arguments: Arguments, launcher: Launcher, infos: list[dict[str, Any]]) -> None:
        self.arguments = arguments
        self.launcher = launcher
        self.infos = infos
        self.leader = launcher.connections[0]
        self.model = "some-other-model" if arguments.fault("wrong-model") else arguments.served_model_name
        self.created = int(time.time())
        self.has_tried_to_bind = threading.Event()
        self.is_ready = False
        self.is_draining = False
        #: A client has had its answer; what is injected then begins.
        self.has_answered = False
        self.running: dict[str, Running] = {}
        self.tokens = 0
        self.answers: dict[str, queue.SimpleQueue[bool]] = {}
        self._lock = threading.Lock()  # of the pipe to the scheduler, and of _handles_term
        self._handles_term = False
        #: What the main thread shall do next: only it may install signal handlers or end the process.
        self.orders: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run(self) -> int:
        meet(self.arguments, "http")
        self.launcher.is_serving = True
        say(f"INFO:     Started server process [{os.getpid()}]")
        say("INFO:     Waiting for application startup.")
        say("Using fallback token IDs for yes/no (9693/2152)")
        for target in (self.relay, self.watch_workers, self.warm_up):
            threading.Thread(target=target, daemon=True).start()
        say("INFO:     Application startup complete.")
        server = self.bind()
        self.has_tried_to_bind.set()
        if server is None:
            return self.lose_the_port()
        say(f"INFO:     Uvicorn running on http://{self.authority()} (Press CTRL+C to quit)")
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        signal.signal(signal.SIGINT, lambda *_: self.orders.put("interrupt"))
        while True:
            order = self.orders.get()
            if order == "handle-term":
                signal.signal(signal.SIGTERM, self.on_term)
            elif order == "end":
                self.launcher.kill_tree()
            elif order == "interrupt":
                return self.shut_down(server)

    def bind(self) -> Server | None:
        if not self.arguments.fault("port-in-use"):
            try:
                host = "::1" if self.arguments.fault("bind-v6") else self.arguments.host
                return Server((host, self.arguments.port), self)
            except OSError:
                pass
        say(
            f"ERROR:    [Errno 98] error while attempting to bind on address "
            f"('{self.arguments.host}', {self.arguments.port}): address already in use"
        )
        return None

    def lose_the_port(self) -> int:
        """The warm-up goes on, and whoever has the port answers it: the ready line comes and means nothing."""
        say("INFO:     Waiting for application shutdown.")
        deadline = time.monotonic() + 2 * WARMUP_SECONDS / self.arguments.speed + 1
        while not self.is_ready and time.monotonic() < deadline:
            time.sleep(0.01)
        say("INFO:     Application shutdown complete.")
        return 3

    def shut_down(self, server: Server) -> int:
        server.shutdown()
        server.server_close()
        say("INFO:     Shutting down")
        say("INFO:     Waiting for application shutdown.")
        say("INFO:     Application shutdown complete.")
        say(f"INFO:     Finished server process [{os.getpid()}]")
        return 0

    def authority(self) -> str:
        host = self.arguments.host
        return f"[{host}]:{self.arguments.port}" if ":" in host else f"{host}:{self.arguments.port}"

    # Threads.

    def relay(self) -> None:
        """Bring the scheduler's news to the requests that wait for them."""
        while True:
            try:
                kind, identity, *rest = self.leader.recv()
            except (EOFError, OSError):
                return
            if kind == "info":
                self.answers[identity].put(True)
                continue
            count, ended = rest
            request = self.running.get(identity)
            if request is not None:
                request.news.put((count, ended))

    def watch_workers(self) -> None:
        """A worker that ends takes the server with it, after a while."""
        sentinels = {process.sentinel: index for index, process in enumerate(self.launcher.children)}
        index = sentinels[wait(list(sentinels))[0]]  # type: ignore[index]
        process = self.launcher.children[index]
        if self.launcher.is_ending:
            return
        process.join()
        name = f"scheduler_{index}" if index < len(self.launcher.schedulers) else "detokenizer"
        say(
            f"Subprocess {name} (pid={process.pid}) crashed with exit code {process.exitcode}. "
            "Triggering SIGQUIT for cleanup..."
        )
        if self.running and self.arguments.tp_size > 1:
            say(f"Waiting {COREDUMP_SECONDS} seconds for CUDA coredumps before exiting.")
            time.sleep(COREDUMP_SECONDS / self.arguments.speed)
        else:
            time.sleep(CRASH_SECONDS / self.arguments.speed)
        os.kill(os.getpid(), signal.SIGQUIT)

    def warm_up(self) -> None:
        """Ask the port for a first token, as SGLang does, and print the ready line."""
        self.has_tried_to_bind.wait()  # the original asks for two minutes; a busy machine must not decide
        if self.arguments.fault("port-in-use"):
            time.sleep(WARMUP_SECONDS / self.arguments.speed)  # as if the other server had answered
        elif not self.arguments.skip_server_warmup:
            time.sleep(WARMUP_SECONDS / self.arguments.speed)
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.arguments.host, self.arguments.host)
            host = "::1" if self.arguments.fault("bind-v6") else host
            key = {"Authorization": f"Bearer {self.arguments.api_key}"} if self.arguments.api_key else {}
            prompt = {"text": "The capital city of France is", "sampling_params": {"max_new_tokens": 8}}
            try:
                for method, path, body in (("GET", "/model_info", None), ("POST", "/generate", json.dumps(prompt))):
                    connection = http.client.HTTPConnection(host, self.arguments.port, timeout=600)
                    connection.request(method, path, body, {"Content-Type": "application/json", **key})
                    reply = connection.getresponse()
                    reply.read()
                    if reply.status != HTTPStatus.OK:
                        raise OSError(f"<Response [{reply.status}]>")
            except (OSError, http.client.HTTPException) as error:
                say(f"Initialization failed. warmup error: {error}")
                os.kill(os.getpid(), signal.SIGKILL)
        self.is_ready = True
        say("The server is fired up and ready to roll!")
        self.tell("ready")

    def on_term(self, *_: object) -> None:
        if self.is_draining:
            return
        self.is_draining = True
        say("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        threading.Thread(target=self.drain, daemon=True).start()

    def drain(self) -> None:
        while True:
            time.sleep(DRAIN_SECONDS / self.arguments.speed)
            left = list(self.running)
            say(
                f"Gracefully exiting... Remaining number of requests {len(left)}. Remaining requests "
                f"remaining_rids={left}."
            )
            if not left:
                self.orders.put("end")
                return

    # What endpoints use.

    def tell(self, *message: object) -> None:
        """Tell the scheduler; a dead one does not answer, like the original's."""
        with self._lock, contextlib.suppress(OSError):
            self.leader.send(message)

    def generate(self, prompt_tokens: int, wanted: int, timeout: float | None = None) -> Iterator[int]:
        """Numbers of new tokens as they come, ``wanted`` in all. Raises TimeoutError after ``timeout`` seconds."""
        with self._lock:
            if not self._handles_term:  # installed with the first request, not before
                self._handles_term = True
                if not self.arguments.fault("ignore-term"):
                    self.orders.put("handle-term")
        request = Running(uuid.uuid4().hex)
        self.running[request.identity] = request
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            self.tell("generate", request.identity, prompt_tokens, wanted)
            ended = False
            while not ended:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    count, ended = request.news.get(timeout=left)
                except queue.Empty:
                    raise TimeoutError from None
                self.tokens += count
                yield count
        finally:
            del self.running[request.identity]
            self.tell("abort", request.identity)

    def is_healthy(self) -> bool:
        """One token, in at least a second and at most twenty."""
        speed = self.arguments.speed
        started = time.monotonic()
        if self.has_answered and self.arguments.fault("silent"):
            time.sleep(HEALTH_TIMEOUT / speed)
            return False
        if self.has_answered and self.arguments.fault("wedge"):
            return True
        try:
            for _ in self.generate(1, 1, timeout=HEALTH_TIMEOUT / speed):
                pass
        except (TimeoutError, OSError):
            return False
        time.sleep(max(0.0, HEALTH_SECONDS / speed - (time.monotonic() - started)))
        return True

    def metrics(self) -> str:
        """What SGLang counts, as far as anybody here reads it."""
        name = f'{{engine_type="unified",model_name="{self.model}",tp_rank="0"}}'
        counts = {"num_running_reqs": len(self.running), "num_queue_reqs": 0, "generation_tokens_total": self.tokens}
        return "".join(f"sglang:{key}{name} {float(value)}\n" for key, value in counts.items())

    def server_info(self) -> dict[str, Any]:
        """Waits for the scheduler, without limit."""
        identity = uuid.uuid4().hex
        self.answers[identity] = queue.SimpleQueue()
        self.tell("info", identity)
        self.answers[identity].get()
        tokens = self.infos[0].get("max_total_num_tokens")
        return {
            **_server_args(self.arguments),
            "version": VERSION,
            "max_total_num_tokens": tokens,
            "internal_states": [{"max_total_num_tokens": tokens, "last_gen_throughput": 0.0}],
        }


class Server(ThreadingHTTPServer):
    """Listens like uvicorn: SO_REUSEADDR, a long queue, one thread a connection."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], front: Front) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.front = front
        super().__init__(address, Endpoints)

    def server_bind(self) -> None:
        # HTTPServer's own would look up the name of the host, which can take seconds without a network.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""


class Endpoints(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    @property
    def front(self) -> Front:
        return self.server.front

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        front = self.front
        if self.is_locked_out(path):
            self.answer(401, {"error": "Unauthorized"})
        elif path in ("/health", "/health_generate"):
            self.health()
        elif path == "/ping":
            self.answer(200)
        elif path == "/":
            self.answer(200, "SGLang is running")
        elif path == "/v1/models":
            self.answer(200, {"object": "list", "data": [self.card()]})
        elif path == f"/v1/models/{front.model}":
            self.answer(200, self.card())
        elif path in ("/model_info", "/get_model_info"):
            self.deprecated(path, "/get_model_info", "/model_info")
            model = front.arguments.model_path
            self.answer(
                200,
                {
                    "model_path": model,
                    "tokenizer_path": model,
                    "is_generation": True,
                    "preferred_sampling_params": None,
                    "weight_version": "default",
                    "has_image_understanding": False,
                    "has_audio_understanding": False,
                    "model_type": "llama",
                    "architectures": ["LlamaForCausalLM"],
                },
            )
        elif path in ("/server_info", "/get_server_info"):
            self.deprecated(path, "/get_server_info", "/server_info")
            self.answer(200, front.server_info())
        elif path == "/metrics" and front.arguments.given["enable_metrics"]:
            self.answer(200, front.metrics().encode())
        elif path == "/lab/environ":
            launcher = {"role": "launcher", "pid": os.getpid(), "argv": list(sys.argv), "environ": dict(os.environ)}
            self.answer(200, {"processes": [launcher, *front.infos]})
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.is_locked_out(path):
            self.answer(401, {"error": "Unauthorized"})
            return
        complete = {
            "/v1/chat/completions": self.chat_completions,
            "/v1/completions": self.completions,
            "/generate": self.generate,
        }.get(path)
        if complete is None:
            self.answer(404, {"detail": "Not Found"})
            return
        try:
            body = json.loads(data)
            complete(body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.answer(400, _error(f"{type(error).__name__}: {error}"))

    # Endpoints.

    def health(self) -> None:
        if self.front.is_draining:
            say("Health check request received during shutdown. Returning 503.")
            self.answer(503)
        else:
            self.answer(200 if self.front.is_ready and self.front.is_healthy() else 503)

    def chat_completions(self, body: dict[str, Any]) -> None:
        prompt = " ".join(str(message["content"]) for message in body["messages"])
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or 128
        self.complete(body, _count(prompt) + 2, int(wanted), "chat.completion")

    def completions(self, body: dict[str, Any]) -> None:
        prompt = body["prompt"]
        length = len(prompt) if isinstance(prompt, list) else _count(prompt)
        self.complete(body, length, int(body.get("max_tokens") or 16), "text_completion")

    def generate(self, body: dict[str, Any]) -> None:
        prompt = _count(str(body["text"])) if "text" in body else len(body["input_ids"])
        wanted = int(body.get("sampling_params", {}).get("max_new_tokens", 128))
        if not self.fits(prompt, wanted):
            return
        started = time.monotonic()
        done = sum(self.front.generate(prompt, wanted))
        meta = {
            "id": uuid.uuid4().hex,
            "finish_reason": {"type": "length", "length": done},
            "prompt_tokens": prompt,
            "weight_version": "default",
            "completion_tokens": done,
            "cached_tokens": 0,
            "e2e_latency": time.monotonic() - started,
        }
        self.answer(200, {"text": _text(0, done), "output_ids": list(range(done)), "meta_info": meta})

    def complete(self, body: dict[str, Any], prompt: int, wanted: int, kind: str) -> None:
        """Both OpenAI endpoints. A wrong model name is answered like the right one: so does SGLang."""
        if not self.fits(prompt, wanted) or self.is_refused():
            return
        if self.front.has_answered and (self.front.arguments.fault("silent") or self.front.arguments.fault("wedge")):
            threading.Event().wait()
        self.front.has_answered = True
        head = {
            "id": uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": body.get("model", "default"),
        }
        if body.get("stream"):
            self.stream(body, head, prompt, wanted)
            return
        done = sum(self.front.generate(prompt, wanted))
        choice: dict[str, Any] = {"index": 0}
        if kind == "chat.completion":
            choice["message"] = {
                "role": "assistant",
                "content": _text(0, done),
                "reasoning_content": None,
                "tool_calls": None,
            }
        else:
            choice["text"] = _text(0, done)
        choice |= {"logprobs": None, "finish_reason": "length", "matched_stop": None}
        metadata = {"weight_version": "default"}
        self.answer(200, {**head, "choices": [choice], "usage": _usage(prompt, done), "metadata": metadata})

    def stream(self, body: dict[str, Any], head: dict[str, Any], prompt: int, wanted: int) -> None:
        chat = head["object"] == "chat.completion"
        head = {**head, "object": "chat.completion.chunk"} if chat else head
        options = body.get("stream_options") or {}
        self.log_access(200)
        self.send_response_only(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

        def choice(text: str, finish: str | None, *, first: bool = False) -> dict[str, Any]:
            delta = {"role": "assistant" if first else None, "content": text, "reasoning_content": None}
            part = {"delta": delta} if chat else {"text": text}
            return {"index": 0, **part, "logprobs": None, "finish_reason": finish, "matched_stop": None}

        if chat:
            self.event({**head, "choices": [choice("", None, first=True)], "usage": None})
        done = 0
        for count in self.front.generate(prompt, wanted):
            done += count
            text = _text(done - count, done)
            finish = "length" if done >= wanted else None
            self.event({**head, "choices": [choice(text, None if chat else finish)], "usage": None})
        if chat:
            self.event({**head, "choices": [choice("", "length")], "usage": None})
        if options.get("include_usage"):
            self.event({**head, "choices": [], "usage": _usage(prompt, done)})
        self.event("[DONE]")
        self.chunk(b"")

    # Parts of answers.

    def is_locked_out(self, path: str) -> bool:
        key = self.front.arguments.api_key
        open_to_all = path.startswith(("/health", "/metrics", "/lab/"))
        return key is not None and not open_to_all and self.headers.get("Authorization") != f"Bearer {key}"

    def card(self) -> dict[str, Any]:
        front = self.front
        return {
            "id": front.model,
            "object": "model",
            "created": front.created,
            "owned_by": "sglang",
            "root": front.model,
            "parent": None,
            "max_model_len": front.arguments.context_length,
        }

    def fits(self, prompt: int, wanted: int) -> bool:
        limit = self.front.arguments.context_length
        if prompt < limit and wanted > 0:
            return True
        self.answer(
            400,
            _error(f"The input ({prompt} tokens) is longer than the model's context length ({limit} tokens)."),
        )
        return False

    def is_refused(self) -> bool:
        """Whether an injected refusal was the answer."""
        for fault, status, words in (
            ("forbid", 403, "Forbidden"),
            ("reject", 400, "This model answers no such thing."),
        ):
            if self.front.arguments.fault(fault):
                self.answer(status, {"error": words} if status == HTTPStatus.FORBIDDEN else _error(words))
                return True
        return False

    def deprecated(self, path: str, old: str, new: str) -> None:
        if path == old:
            say(f"Endpoint '{old}' is deprecated and will be removed in a future version. Please use '{new}' instead.")

    def answer(self, status: int, body: object = None) -> None:
        is_text = isinstance(body, bytes)
        data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
        data = b"" if body is None else data
        self.log_access(status)
        self.send_response_only(status)
        if data:
            self.send_header("Content-Type", "text/plain; version=0.0.4" if is_text else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def event(self, value: object) -> None:
        text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        self.chunk(f"data: {text}\n\n".encode())

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_access(self, status: int) -> None:
        peer = f"{self.client_address[0]}:{self.client_address[1]}"
        phrase = HTTPStatus(status).phrase
        say(f'INFO:     {peer} - "{self.requestline}" {status} {phrase}')

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  http.server's own lines are not ours
        """Silence."""


def _count(text: str) -> int:
    return max(1, len(text.split()))


def _text(start: int, end: int) -> str:
    return "".join(f" {WORDS[index % len(WORDS)]}" for index in range(start, end))


def _usage(prompt: int, done: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + done,
        "completion_tokens": done,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }


def _error(message: str) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}
