"""What the demo server was asked to do: SGLang's own command line, and the switches of the lab beside it.

The parser is made from the usage text that SGLang 0.5.16 printed (sglang-0.5.16-usage.txt), so it knows every flag of
that version, and a wrong one gets the words and the exit status (2) of the original.

Lab switches, none of them known to SGLang: ``--lab-speed N`` (or LAB_SPEED) divides all durations, ``--lab-fail LIST``
(or LAB_FAIL) injects failures, ``--lab-gpus DIRECTORY`` is the node's gpu directory (set by the node's wrapper).

LIST is ``KIND[:PHASE][@RANK]``, separated by commas; PHASE is one of PHASES, RANK defaults to the last one:

    die:PHASE       an exception with its traceback (in the launcher for boot and http)
    kill:PHASE      SIGKILL of the rank (of the launcher for boot and http)
    hang:PHASE      no further step, no further line; hang:ready stops right after the ready line
    slow:PHASE      the phase takes ten times as long and shows progress
    vanish:PHASE    SIGKILL of the launcher, by its own rank 0
    orphans         the launcher dies just after starting its workers, which stay and take memory later
    oom[:PHASE]     torch.OutOfMemoryError, by default while the KV cache is allocated
    nccl            an NCCL variable that NCCL cannot parse (a really bad NCCL_PROTO or NCCL_ALGO does the same)
    port-in-use     the port counts as taken (a really taken one does the same)
    bind-early      has the port bound from its first moment on, and listens when all is loaded, as vLLM does
    mute            listens, answers /v1/models, never generates, never gets ready
    silent          answers the first question of a client, and no other; its health says 503 after a while
    wedge           the same, but its health goes on saying 200
    forbid          answers every question with 403
    reject          answers every question with 400
    bind-v6         listens on ::1 alone, whatever address it was given
    fork            starts the server in the background, and ends with 0
    wrong-model     serves under another name than asked
    ignore-term     launcher and workers ignore SIGTERM
    slow-release:S  the GPU memory takes S seconds to come back after death
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

USAGE = Path(__file__).with_name("sglang-0.5.16-usage.txt")
PHASES = ("boot", "distributed", "weights", "kv_cache", "graphs", "http", "warmup", "ready")
KINDS = {
    "die": None,
    "kill": None,
    "hang": None,
    "slow": None,
    "vanish": None,
    "orphans": "boot",
    "oom": "kv_cache",
    "nccl": "distributed",
    "port-in-use": "http",
    "bind-early": "boot",
    "mute": "warmup",
    "silent": "ready",
    "wedge": "ready",
    "forbid": "http",
    "reject": "http",
    "bind-v6": "http",
    "fork": "boot",
    "wrong-model": "http",
    "ignore-term": "boot",
    "slow-release": "",
}

#: Names that the usage text, which shows one name an option, does not show.
ALIASES = {
    "--tp-size": ["--tp", "--tensor-parallel-size"],
    "--pp-size": ["--pp", "--pipeline-parallel-size"],
    "--dp-size": ["--dp", "--data-parallel-size"],
    "--ep-size": ["--ep", "--expert-parallel-size"],
}
NUMBERS: dict[str, type] = {
    "tp_size": int,
    "dp_size": int,
    "pp_size": int,
    "port": int,
    "base_gpu_id": int,
    "context_length": int,
    "speculative_num_steps": int,
    "speculative_eagle_topk": int,
    "speculative_num_draft_tokens": int,
    "mem_fraction_static": float,
}


@dataclass(frozen=True)
class Fault:
    """One injected failure; ``rank`` None is the last one."""

    kind: str
    phase: str
    rank: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Arguments:
    """The command line, understood; handed to every worker."""

    model_path: str
    served_model_name: str
    host: str
    port: int
    tp_size: int
    base_gpu_id: int
    mem_fraction_static: float
    context_length: int
    api_key: str | None
    speculative_algorithm: str | None
    speculative_num_steps: int
    skip_server_warmup: bool
    given: dict[str, Any]  # every SGLang argument by its attribute name
    speed: float = 1.0
    faults: tuple[Fault, ...] = ()
    gpu_directory: str | None = None

    def fault(self, kind: str, phase: str | None = None, rank: int | None = None) -> Fault | None:
        """The injected failure ``kind``, of ``phase`` and ``rank`` where these are given."""
        for fault in self.faults:
            if fault.kind != kind or (phase is not None and fault.phase != phase):
                continue
            if rank is None or rank == (self.tp_size - 1 if fault.rank is None else fault.rank):
                return fault
        return None


def parse(words: Sequence[str], environ: Mapping[str, str]) -> Arguments:
    """Understand the command line. Prints SGLang's usage and error and exits 2 on a wrong one."""
    lab = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    lab.add_argument("--lab-gpus")
    lab.add_argument("--lab-speed", type=float, default=float(environ.get("LAB_SPEED") or 1))
    lab.add_argument("--lab-fail", default=environ.get("LAB_FAIL", ""))
    switches, rest = lab.parse_known_args(words)
    given = vars(_sglang_parser().parse_args(rest))
    return Arguments(
        model_path=given["model_path"],
        served_model_name=given["served_model_name"] or given["model_path"],
        host=given["host"] or "127.0.0.1",
        port=given["port"] or 30000,
        tp_size=given["tp_size"] or 1,
        base_gpu_id=given["base_gpu_id"] or 0,
        mem_fraction_static=given["mem_fraction_static"] or 0.909,
        context_length=given["context_length"] or 8192,
        api_key=given["api_key"],
        speculative_algorithm=given["speculative_algorithm"],
        speculative_num_steps=given["speculative_num_steps"] or 3,
        skip_server_warmup=given["skip_server_warmup"],
        given=given,
        speed=switches.lab_speed,
        faults=faults(switches.lab_fail),
        gpu_directory=switches.lab_gpus,
    )


def faults(text: str) -> tuple[Fault, ...]:
    """Read a list of injected failures. Exits 2 with a sentence on an unknown one: a test must not pass by a typo."""
    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        spoken, _, rank = word.partition("@")
        kind, _, phase = spoken.partition(":")
        default = KINDS.get(kind, "unknown")
        seconds = 0.0
        if kind == "slow-release":
            seconds, phase = float(phase or 5), "ready"
        phase = phase or default or ""
        if kind not in KINDS or phase not in PHASES:
            sys.exit(f"lab: unknown failure {word!r}: a kind is one of {', '.join(KINDS)}, a phase {', '.join(PHASES)}")
        found.append(Fault(kind, phase, int(rank) if rank else None, seconds))
    return tuple(found)


class _Parser(argparse.ArgumentParser):
    """Prints the recorded usage, which no formatter of this Python would give back."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{USAGE.read_text()}{self.prog}: error: {message}\n")


def _sglang_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="sglang serve")
    parser.add_argument("--model-path", "--model", required=True)
    # One group of brackets an option, perhaps with others in it: [--port PORT], [--x [X ...]], [--a | --no-a].
    usage = " ".join(USAGE.read_text().split())
    for flag, value in re.findall(r"\[(--[\w-]+)((?:[^\[\]]|\[[^\]]*\])*)\]", usage):
        attribute = flag[2:].replace("-", "_")
        names = [flag, *ALIASES.get(flag, [])]
        if not value:
            parser.add_argument(*names, action="store_true")
        elif value.startswith(" |"):
            parser.add_argument(*names, action=argparse.BooleanOptionalAction)
        else:
            choices = re.fullmatch(r" \{([^}]*)\}", value)
            parser.add_argument(
                *names,
                nargs=("*" if value.startswith(" [") else "+") if "..." in value else None,
                type=NUMBERS.get(attribute, str),
                choices=choices[1].split(",") if choices else None,
            )
    return parser
