"""How SGLang 0.5.16 talks: the prefix of its lines, its progress bars, its tracebacks.

Promise: one write a line (or a piece of a bar), on stderr, never buffered, so that the lines of several processes do
not cut each other. Wording and layout are those of the recorded logs (H200, SGLang 0.5.16).
"""

from __future__ import annotations

import contextlib
import os
import time


def say(text: str, tag: str = "") -> None:
    """A line of SGLang's logger; ``tag`` is the rank (TP0) of a scheduler among several."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    raw(f"[{stamp}{' ' + tag if tag else ''}] {text}\n")


def raw(text: str) -> None:
    """Text as it is, with no prefix: bars, tracebacks, NCCL."""
    with contextlib.suppress(OSError):  # the log's reader has gone: a server goes on
        os.write(2, text.encode("utf-8", "surrogateescape"))


def bar(name: str, done: int, total: int, seconds: float, *, completed: str = "") -> None:
    """One state of a tqdm bar: starts with a carriage return, ends in a newline only when it is full.

    ``completed`` is the word that the weight loader puts between the percentage and the counts, instead of blocks.
    """
    percent = 100 * done // total
    filled = 10 * done / total
    blocks = ("█" * int(filled) + " ▏▎▍▌▋▊▉"[int(filled % 1 * 8)].strip()).ljust(10)
    rate = f"{done / seconds:5.2f}it/s" if done and seconds else "?it/s"
    left = _clock(seconds / done * (total - done)) if done else "?"
    middle = f" {completed} | " if completed else f"|{blocks}| "
    head = f"{name}: " if name else ""
    raw(
        f"\r{head}{percent:3d}%{middle}{done}/{total} [{_clock(seconds)}<{left}, {rate}]"
        + ("\n" if done == total else "")
    )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


#: Frames as SGLang's own; the last line, the error, is what matters.
FRAMES = {
    "distributed": ("init_torch_distributed", "distributed/bootstrap.py", 65, "torch.get_device_module(device)"),
    "weights": ("load_model", "model_executor/model_runner.py", 1127, "self.model = self.loader.load_model("),
    "kv_cache": (
        "_create_buffers_normal",
        "mem_cache/memory_pool.py",
        2031,
        "torch.zeros(v_shape, dtype=self.store_dtype)",
    ),
    "graphs": ("capture", "model_executor/cuda_graph_runner.py", 812, "self.capture_one_batch_size(bs, forward)"),
    "warmup": ("forward", "model_executor/model_runner.py", 2211, "return self.model.forward(*args, **kwargs)"),
    "ready": ("forward", "model_executor/model_runner.py", 2211, "return self.model.forward(*args, **kwargs)"),
}


def scheduler_traceback(phase: str, error: str) -> str:
    """What a scheduler logs when it dies in ``phase``; ``error`` is the last line or lines."""
    function, file, line, code = FRAMES[phase]
    site = "/opt/llm/site/sglang/srt"
    return (
        "Scheduler hit an exception: Traceback (most recent call last):\n"
        f'  File "{site}/managers/scheduler.py", line 4623, in run_scheduler_process\n'
        "    scheduler = Scheduler(\n"
        "                ^^^^^^^^^^\n"
        f'  File "{site}/managers/scheduler.py", line 431, in __init__\n'
        "    self.init_model_worker()\n"
        f'  File "{site}/{file}", line {line}, in {function}\n'
        f"    {code}\n"
        f"{error}\n"
    )


def launcher_traceback(file: str, line: int, function: str, error: str) -> str:
    """What the launcher prints when it raises."""
    return (
        "Traceback (most recent call last):\n"
        '  File "/opt/llm/site/sglang/launch_server.py", line 68, in <module>\n'
        "    run_server(server_args)\n"
        f'  File "/opt/llm/site/sglang/srt/{file}", line {line}, in {function}\n'
        f"{error}\n"
    )
