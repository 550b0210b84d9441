"""The demo server: phases, endpoints, processes, memory and signals of SGLang 0.5.16, and each way to fail."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import control, node
from tests.driver import free_port
from tests.lab.demo_server import Demo, demo, members, wait_until

MARKERS = [
    "server_args=ServerArgs(",
    "Init torch distributed begin.",
    "sglang is using nccl==2.28.9",
    "Init torch distributed ends. elapsed=",
    "Load weight begin. avail mem=",
    "Multi-thread loading shards:   0% Completed | 0/16 [00:00<?, ?it/s]",
    "Multi-thread loading shards: 100% Completed | 16/16 [",
    "Load weight end. elapsed=",
    "KV Cache is allocated. dtype: torch.bfloat16, #tokens: ",
    "Memory pool end. avail mem=",
    "Capture target decode CUDA graph begin. backend=full",
    "  0%|          | 0/8 [00:00<?, ?it/s]",
    "Capturing batches (bs=1 avail_mem=",
    "Capture target decode CUDA graph end. elapsed=",
    "max_total_num_tokens=",
    "INFO:     Started server process [",
    "INFO:     Application startup complete.",
    "INFO:     Uvicorn running on http://127.0.0.1:",
    '"GET /model_info HTTP/1.1" 200 OK',
    "Prefill batch, #new-seq: 1, ",
    '"POST /generate HTTP/1.1" 200 OK',
    "The server is fired up and ready to roll!",
]


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = node.prepare("box", tmp_path_factory.mktemp("a box"))
    control.inject(root, release=0)  # each test finds the GPUs free
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    root = node.prepare("serving", tmp_path_factory.mktemp("a box"))
    flags = ["--served-model-name", "lamp", "--lab-speed", "40", "--context-length", "100"]
    with demo(root, *flags, tp=2, NCCL_DEBUG="INFO", NCCL_PROTO="LL", NCCL_ALGO="Ring", NCCL_IB_HCA="mlx5") as running:
        yield running.wait_ready()


# A healthy server.


def test_phases_come_in_order_with_bars_on_carriage_returns(server: Demo) -> None:
    log = server.log
    place = 0
    for marker in MARKERS:
        found = log.find(marker, place)
        assert found >= 0, f"{marker!r} does not come after what should be before it"
        place = found
    assert "\rMulti-thread loading shards: " in log
    assert "[00:00<?, ?it/s]" in log  # what comes after it may be another rank's line
    for rank in ("TP0", "TP1"):
        assert re.search(
            rf"\[\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {rank}\] Load weight end", log
        )  # a bar may stand before it


def test_nccl_says_which_variables_reached_each_worker(server: Demo) -> None:
    pid = server.processes()["sglang::scheduler_TP1"]
    said = [
        line.partition(" NCCL INFO ")[2] for line in server.log.splitlines() if f":{pid}:{pid} [1] NCCL INFO" in line
    ]
    assert said == [
        "NCCL version 2.28.9+cuda13.0",
        "NCCL_ALGO set by environment to Ring",
        "NCCL_CUMEM_ENABLE set by environment to 0.",
        "NCCL_IB_HCA set by environment to mlx5",
        "NCCL_NVLS_ENABLE set by environment to 0.",
        "NCCL_PROTO set by environment to LL",
    ]


def test_processes_have_the_titles_and_the_group_of_the_original(server: Demo) -> None:
    titles = server.processes()
    assert sorted(title for title in titles if "::" in title) == [
        "sglang::detokenizer",
        "sglang::scheduler_TP0",
        "sglang::scheduler_TP1",
    ]
    assert len(titles) == 5  # and the launcher, and multiprocessing's resource tracker
    launcher = Path(f"/proc/{server.process.pid}/cmdline").read_bytes().split(b"\0")
    assert launcher[1].endswith(b"/lab/launch_server.py")


def test_each_rank_holds_its_gpu(server: Demo) -> None:
    pids = server.processes()
    held = {entry.gpu: (entry.pid, entry.mib) for entry in control.held(server.root)}
    first, second = control.uuids(server.root)
    assert [held[first][0], held[second][0]] == [pids["sglang::scheduler_TP0"], pids["sglang::scheduler_TP1"]]
    assert all(125_000 < mib < 140_000 for _, mib in held.values())
    assert set(server.processes().values()) - {*node.processes("serving", server.root.parent)} <= {
        pid for title, pid in pids.items() if "::" not in title
    }


@pytest.mark.parametrize(
    ("path", "status"),
    [("/health", 200), ("/health_generate", 200), ("/ping", 200), ("/v1/models", 200), ("/model_info", 200),
     ("/get_model_info", 200), ("/server_info", 200), ("/v1/models/lamp", 200), ("/", 200), ("/metrics", 404),
     ("/nosuch", 404)],
)  # fmt: skip
def test_endpoints_of_a_ready_server(server: Demo, path: str, status: int) -> None:
    wait_until(lambda: server.ask(path).status == status)  # /health has but half a second for its token


def test_the_model_is_named_by_models_and_not_checked_in_requests(server: Demo) -> None:
    (card,) = server.ask("/v1/models").json["data"]
    assert (card["id"], card["owned_by"], card["max_model_len"]) == ("lamp", "sglang", 100)
    assert server.ask("/model_info").json["model_path"] == "demo-model"
    request = {"model": "wrong", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    answer = server.ask("/v1/chat/completions", request)
    assert (answer.status, answer.json["model"]) == (200, "wrong")


def test_server_info_has_the_arguments_and_the_version(server: Demo) -> None:
    info = server.ask("/server_info").json
    assert (info["version"], info["tp_size"], info["served_model_name"]) == ("0.5.16", 2, "lamp")
    assert info["internal_states"][0]["max_total_num_tokens"] > 10_000_000


def test_chat_completion(server: Demo) -> None:
    request = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 7}
    answer = server.ask("/v1/chat/completions", request).json
    (choice,) = answer["choices"]
    assert (answer["object"], choice["message"]["role"], choice["finish_reason"]) == (
        "chat.completion",
        "assistant",
        "length",
    )
    assert len(choice["message"]["content"].split()) == 7
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 7


def test_completion_and_native_generation(server: Demo) -> None:
    answer = server.ask("/v1/completions", {"prompt": "one two", "max_tokens": 4}).json
    assert (answer["object"], len(answer["choices"][0]["text"].split())) == ("text_completion", 4)
    assert answer["usage"] | {"prompt_tokens_details": None} == answer["usage"]
    native = server.ask("/generate", {"text": "one two", "sampling_params": {"max_new_tokens": 5}}).json
    assert (native["meta_info"]["completion_tokens"], len(native["output_ids"])) == (5, 5)


@pytest.mark.parametrize("usage", [True, False])
def test_streaming(server: Demo, usage: bool) -> None:
    request = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "stream": True}
    request |= {"stream_options": {"include_usage": True}} if usage else {}
    events = server.ask("/v1/chat/completions", request).text.split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    if usage:
        last = chunks.pop()
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert (len(text.split()), chunks[-1]["choices"][0]["finish_reason"]) == (6, "length")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 200}]}),
     ("/v1/chat/completions", {}),
     ("/v1/completions", "no object")],
)  # fmt: skip
def test_bad_requests(server: Demo, path: str, body: object) -> None:
    answer = server.ask(path, body)
    assert (answer.status, answer.json["object"]) == (400, "error")


def test_a_client_that_goes_away_does_not_disturb(server: Demo) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = json.dumps({"prompt": "x", "max_tokens": 90, "stream": True})
    connection.request("POST", "/v1/completions", body)
    connection.getresponse().read(10)
    connection.close()
    wait_until(lambda: server.status("/health") == 200)


def test_lab_environ_tells_what_every_process_was_given(server: Demo) -> None:
    launcher, first, second, detokenizer = server.ask("/lab/environ").json["processes"]
    assert [one["role"] for one in (first, second, detokenizer)] == [
        "sglang::scheduler_TP0",
        "sglang::scheduler_TP1",
        "sglang::detokenizer",
    ] or detokenizer["role"] == "detokenizer"
    for worker in (first, second, detokenizer):
        assert worker["argv"][1:] == launcher["argv"][1:]
        assert worker["environ"]["NCCL_IB_HCA"] == "mlx5"
    assert launcher["argv"][launcher["argv"].index("--model-path") + 1] == "demo-model"


def test_the_launcher_overwrites_what_sglang_overwrites(box: Path) -> None:
    given = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "NCCL_CUMEM_ENABLE": "1",
        "TRTLLM_ENABLE_PDL": "0",
        "LAB_SPEED": "100",
    }
    with demo(box, "--enable-nccl-nvls", **given, ODD="a 'b' \"c\"\n\udcff") as running:
        running.wait_ready()
        environ = running.ask("/lab/environ").json["processes"][1]["environ"]
    assert environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert environ["CUDA_MODULE_LOADING"] == "AUTO"
    assert (environ["NCCL_CUMEM_ENABLE"], environ["NCCL_NVLS_ENABLE"]) == ("1", "1")
    assert environ["TRTLLM_ENABLE_PDL"] == "0"
    assert environ["ODD"] == "a 'b' \"c\"\n\udcff"


def test_statuses_while_it_starts(box: Path) -> None:
    """The port refuses until the graphs are captured; then the name is served long before the model: here for ever."""
    seen: list[tuple[int | None, ...]] = []
    with demo(box, "--lab-fail", "hang:warmup", tp=2, LAB_SPEED="10") as running:
        while not seen or seen[-1] != (503, 200, 200):
            # health first: where it is asked before the port opens, the others may be asked after that
            statuses = tuple(running.status(path) for path in ("/health", "/model_info", "/v1/models"))
            if not seen or statuses != seen[-1]:
                seen.append(statuses)
        assert "fired up" not in running.log
    assert seen[0] == (None, None, None)
    assert set(seen) <= {(None, None, None), (None, None, 200), (None, 200, 200), (503, 200, 200)}


def test_speculative_decoding_shows_in_phases_and_decode_lines(box: Path) -> None:
    with demo(box, "--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "2") as running:
        running.wait_ready()
        running.ask("/v1/completions", {"prompt": "x", "max_tokens": 300})
        assert running.log.count("Load weight begin") == 2
        assert "Capture draft decode CUDA graph begin" in running.log
        assert re.search(
            r"Decode batch, #running-req: 1, .* accept len: 1\.85, accept rate: 0\.43, cuda graph: True", running.log
        )


def test_an_api_key_guards_all_but_health(box: Path) -> None:
    with demo(box, "--api-key", "s3cret") as running:
        running.wait_ready()
        assert [running.status(path) for path in ("/v1/models", "/model_info")] == [401, 401]
        wait_until(lambda: running.status("/health") == 200)
        assert running.ask("/v1/models", headers={"Authorization": "Bearer s3cret"}).status == 200
        assert "s3cret" not in running.log


def test_visible_devices_choose_the_gpus(box: Path) -> None:
    second = control.uuids(box)[1]
    with demo(box, CUDA_VISIBLE_DEVICES=second) as running:
        running.wait_ready()
        assert {entry.gpu for entry in control.held(box) if entry.is_alive()} == {second}


def test_memory_of_others_shrinks_the_pool_without_an_error(box: Path) -> None:
    with control.stranger(box, 100_000), demo(box) as running:
        running.wait_ready()
        tokens = int(re.findall(r"max_total_num_tokens=(\d+)", running.log)[0])
    assert tokens < 5_000_000


# The end.


def test_term_drains_then_everything_is_killed_and_memory_comes_back(box: Path) -> None:
    with demo(box, tp=2) as running:
        running.wait_ready()
        running.process.terminate()
        assert running.wait_end() == -signal.SIGKILL
        assert "SIGTERM received. signum=None frame=None. Draining requests and shutting down..." in running.log
        assert "Gracefully exiting... Remaining number of requests 0" in running.log
        assert "crashed" not in running.log
        wait_until(lambda: not members(running.process.pid))
        wait_until(lambda: control.held(box) == [])


def test_a_running_request_is_finished_while_draining(box: Path) -> None:
    with demo(box, "--lab-speed", "10") as running:
        running.wait_ready()
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 4000}))
        wait_until(lambda: "Decode batch" in running.log)
        running.process.terminate()
        wait_until(lambda: "Draining" in running.log)
        assert running.status("/health") == 503
        assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] == 4000
        connection.close()
        assert running.wait_end() == -signal.SIGKILL
        assert "Remaining number of requests 1" in running.log


def test_int_closes_and_exits_zero(box: Path) -> None:
    with demo(box) as running:
        running.wait_ready()
        running.process.send_signal(signal.SIGINT)
        assert running.wait_end() == 0
        wait_until(lambda: not members(running.process.pid))


def test_term_before_the_first_request_is_the_default(box: Path) -> None:
    with demo(box, "--lab-fail", "hang:weights") as running:
        running.wait_line("Load weight begin")
        wait_until(lambda: "sglang::detokenizer" in running.processes())  # then PDEATHSIG is armed everywhere
        running.process.terminate()
        assert running.wait_end() == -signal.SIGTERM
        wait_until(lambda: not members(running.process.pid))


def test_a_killed_launcher_takes_its_workers_along(box: Path) -> None:
    with demo(box, tp=2) as running:
        running.wait_ready()
        running.process.kill()
        running.process.wait()
        wait_until(lambda: not members(running.process.pid))


def test_a_killed_rank_ends_the_server(box: Path) -> None:
    with demo(box, tp=2) as running:
        running.wait_ready()
        os.kill(running.processes()["sglang::scheduler_TP1"], signal.SIGKILL)
        assert running.wait_end() == -signal.SIGKILL
        assert re.search(r"Subprocess scheduler_1 \(pid=\d+\) crashed with exit code -9\.", running.log)
        assert "SIGQUIT received. signum=None, frame=None." in running.log


def test_a_stopped_rank_hangs_generation_but_not_the_name(box: Path) -> None:
    with demo(box, tp=2) as running:
        running.wait_ready()
        os.kill(running.processes()["sglang::scheduler_TP1"], signal.SIGSTOP)
        assert [running.status(path) for path in ("/v1/models", "/health")] == [200, 503]
        with pytest.raises(TimeoutError):
            running.ask("/v1/completions", {"prompt": "x", "max_tokens": 1}, timeout=0.5)


# Each way to fail.


@pytest.mark.parametrize(
    ("fault", "line", "rc", "last_phase"),
    [
        ("die:distributed", "Scheduler hit an exception: Traceback", -9, "Init torch distributed begin"),
        ("die:weights", "RuntimeError: injected failure in phase weights", -9, "Load weight begin"),
        ("die:kv_cache@0", "TP0] Scheduler hit an exception: Traceback", -9, "KV Cache is allocated"),
        ("die:graphs", "RuntimeError: injected failure in phase graphs", -9, "Capture target decode"),
        ("die:warmup", "Scheduler hit an exception: Traceback", -9, "Uvicorn running"),
        ("die:ready", "Scheduler hit an exception: Traceback", -9, "fired up and ready"),
        ("die:boot", "RuntimeError: injected failure in phase boot", 1, "server_args"),
        ("die:http", "RuntimeError: injected failure in phase http", 1, "Tree cache initialized"),
        ("oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", -9, "KV Cache is allocated"),
        ("oom:graphs", "torch.OutOfMemoryError: CUDA out of memory.", -9, "Capture target decode"),
        ("nccl", 'NCCL WARN Unrecognized element token "LLL" when parsing "LLL"', -9, "Init torch distributed"),
        ("kill:weights", "Rank 1 scheduler died during initialization (exit code: -9).", 1, "Load weight begin"),
        ("kill:ready", "crashed with exit code -9.", -9, "fired up and ready"),
        ("kill:http", "Tree cache initialized", -9, "Tree cache initialized"),
        ("vanish:weights", "Load weight begin", -9, "Load weight begin"),
        ("port-in-use", "[Errno 98] error while attempting to bind on address", 3, "fired up and ready"),
    ],
)  # fmt: skip
def test_injected_ends(box: Path, fault: str, line: str, rc: int, last_phase: str) -> None:
    with demo(box, "--lab-fail", fault, tp=2 if "TP0" in line or "Rank 1" in line or fault == "nccl" else 1) as running:
        assert running.wait_end() == rc
        assert line in running.log
        assert last_phase in running.log
        # A detokenizer that is still importing stays, as the original's does when its launcher dies early.
        wait_until(lambda: not any("scheduler" in title for title in running.processes()))
        if fault.startswith(("die", "oom", "nccl")) and "boot" not in fault and "http" not in fault:
            assert "kill_process_tree called: parent_pid=" in running.log


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("hang:boot", "server_args="),
        ("hang:weights", "Load weight begin"),
        ("hang:http", "Tree cache initialized"),
    ],
)
def test_injected_hangs_before_the_port(box: Path, fault: str, line: str) -> None:
    with demo(box, "--lab-fail", fault) as running:
        running.wait_line(line)
        wait_until(lambda: is_quiet(running))
        assert (running.process.poll(), running.status("/v1/models")) == (None, None)


def test_a_rank_that_hangs_holds_up_the_others(box: Path) -> None:
    with demo(box, "--lab-fail", "hang:weights@1", tp=2) as running:
        running.wait_line("TP0] Load weight end")
        wait_until(lambda: is_quiet(running))
        assert "KV Cache is allocated" not in running.log


def test_mute_listens_and_never_gets_ready(box: Path) -> None:
    with demo(box, LAB_FAIL="mute") as running:
        running.wait_line('"GET /model_info HTTP/1.1" 200 OK')
        wait_until(lambda: is_quiet(running))
        assert [running.status(path) for path in ("/v1/models", "/health")] == [200, 503]
        assert "fired up" not in running.log


def test_ready_and_then_no_answer(box: Path) -> None:
    with demo(box, "--lab-fail", "hang:ready") as running:
        running.wait_line("fired up and ready to roll")
        assert [running.status(path) for path in ("/v1/models", "/health")] == [200, 503]


def test_another_model_than_asked(box: Path) -> None:
    with demo(box, "--lab-fail", "wrong-model", "--served-model-name", "lamp") as running:
        running.wait_ready()
        assert running.ask("/v1/models").json["data"][0]["id"] == "some-other-model"


def test_term_ignored_by_all(box: Path) -> None:
    with demo(box, "--lab-fail", "ignore-term") as running:
        running.wait_ready()
        before = set(members(running.process.pid))
        os.killpg(running.process.pid, signal.SIGTERM)
        wait_until(lambda: running.status("/health") == 200)  # it answers after the signal: nobody has ended
        assert {pid for title, pid in running.processes().items() if "::" in title} <= before
        os.killpg(running.process.pid, signal.SIGKILL)
        assert running.wait_end() == -signal.SIGKILL


def test_orphans_stay_and_take_memory_after_their_launcher_died(box: Path) -> None:
    wait_until(lambda: control.held(box) == [])
    with demo(box, "--lab-fail", "orphans", tp=2, LAB_SPEED="0.5") as running:
        assert running.wait_end() == -signal.SIGKILL
        assert control.held(box) == []
        wait_until(lambda: sum(entry.mib for entry in control.held(box)) > 250_000)
        pids = {entry.pid for entry in control.held(box)}
        assert pids <= set(members(running.process.pid))
        wait_until(lambda: is_quiet(running))
        assert {entry.pid for entry in control.held(box) if entry.is_alive()} == pids
        assert set(node.processes("box", box.parent)) >= pids


def test_memory_can_take_long_to_come_back(box: Path) -> None:
    with demo(box, "--lab-fail", "slow-release:1.5") as running:
        running.wait_ready()
        died = time.monotonic()
        running.process.kill()
        running.process.wait()
        wait_until(lambda: not members(running.process.pid))
        wait_until(lambda: control.held(box) == [])
        assert time.monotonic() - died >= 1.4


def test_slow_phases_show_progress(box: Path) -> None:
    with demo(box, "--lab-fail", "slow:weights", LAB_SPEED="100") as running:
        running.wait_line("Load weight end")
        assert float(re.findall(r"Load weight end\. elapsed=([\d.]+)", running.log)[0]) >= 0.4
        assert len([piece for piece in running.pieces if "loading shards" in piece]) == 17


def test_a_busy_port_is_noticed_last_and_its_owner_answers_the_warm_up(box: Path) -> None:
    root = node.prepare("other", box.parent)
    with demo(root) as owner:
        owner.wait_ready()
        with demo(box, port=owner.port) as late:
            assert late.wait_end() == 3
            log = late.log
        wait_until(lambda: owner.status("/health") == 200)
    error = f"ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', {owner.port}): address"
    assert 0 < log.find("Application startup complete.") < log.find(error) < log.find("fired up and ready to roll!")


def test_a_busy_port_whose_owner_does_not_speak_http(box: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as owner, demo(box, port=port) as late:
        late.wait_line("[Errno 98] error while attempting to bind on address")
        connection, _ = owner.accept()
        connection.close()
        late.wait_end()
        assert "Initialization failed. warmup error:" in late.log
        assert "fired up" not in late.log


@pytest.mark.parametrize(
    ("words", "line"),
    [(["--no-such-flag", "7"], "sglang serve: error: unrecognized arguments: --no-such-flag 7"),
     (["--speculative_num_steps", "2"], "sglang serve: error: unrecognized arguments: --speculative_num_steps 2"),
     (["--kv-cache-dtype", "fp9"], "error: argument --kv-cache-dtype: invalid choice: 'fp9'")],
)  # fmt: skip
def test_wrong_arguments_end_at_once_with_two(box: Path, words: list[str], line: str) -> None:
    with demo(box, *words) as running:
        assert running.wait_end() == 2
        assert line in running.log
        assert running.log.startswith("usage: sglang serve [-h] --model-path MODEL_PATH\n")


@pytest.mark.parametrize(
    ("words", "variables", "line", "rc"),
    [(["--tp", "3"], {}, "torch.AcceleratorError: CUDA error: invalid device ordinal", -9),
     ([], {"CUDA_VISIBLE_DEVICES": "0"}, "torch.AcceleratorError: CUDA error: invalid device ordinal", -9),
     (["--mem-fraction-static", "0.9995"], {}, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", -9),
     (["--mem-fraction-static", "0.02"], {}, "Not enough memory. Please try to increase --mem-fraction-static", -9),
     ([], {"NCCL_PROTO": "LL,Simpel"}, 'NCCL WARN Unrecognized element token "Simpel" when parsing', -9),
     (["--model-path", "/no/such/model"], {}, "OSError: Repo id must be in the form 'repo_name'", 1)],
)  # fmt: skip
def test_what_goes_wrong_by_itself(box: Path, words: list[str], variables: dict[str, str], line: str, rc: int) -> None:
    with demo(box, *words, tp=2, **variables) as running:
        assert running.wait_end() == rc
        assert line in running.log


@pytest.mark.parametrize("variables", [{"NCCL_PROTO": "^LL128,Simple"}, {"NCCL_ALGO": "allreduce:tree;allgather:ring"}])
def test_values_that_nccl_understands(box: Path, variables: dict[str, str]) -> None:
    with demo(box, tp=2, **variables) as running:
        running.wait_line("Load weight begin")


@pytest.mark.parametrize("fault", ["nonsense", "die", "die:never", "hang:wights"])
def test_a_misspelt_failure_is_refused(box: Path, fault: str) -> None:
    with demo(box, "--lab-fail", fault) as running:
        assert running.wait_end() == 1
        assert f"lab: unknown failure {fault!r}" in running.log


def is_quiet(running: Demo) -> bool:
    """No new line for half a second (twenty seconds at speed 1)."""
    before = len(running.log)
    time.sleep(0.5)
    return len(running.log) == before
