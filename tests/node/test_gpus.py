"""Verdicts on recorded and mutated output, nvidia-smi stand-ins that fail in every way, the watch until it is freed."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lamplighter.node.gpu import gpus, holders
from lamplighter.node.gpu.gpus import FREED, HELD, NO_HOLDERS, UNKNOWN, Answer, FreedWatch, Sample, Verdict, judge
from tests.node.living import group_members, until

PROGRAMS = Path(__file__).resolve().parents[2] / "roles/node/programs.yml"
WATCHERS = yaml.safe_load(PROGRAMS.read_text())["watchers"]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CASES = Path(__file__).resolve().parents[1] / "cases" / "gpus"
A, B, C = (f"GPU-{letter * 8}-0000-1111-2222-{letter * 12}" for letter in "abc")


# ------------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize("case", sorted(path.name for path in CASES.iterdir()))
def test_recorded_sample(case: str) -> None:
    meta = yaml.safe_load((CASES / case / "meta.yml").read_text())
    expect = yaml.safe_load((CASES / case / "expect.yml").read_text())
    answers = [
        Answer(meta[name]["rc"], (CASES / case / f"{name}.csv").read_text(), meta[name]["stderr"])
        for name in ("gpus", "apps")
    ]
    alive = set(meta["alive"]).__contains__
    verdict = judge(Sample(*answers), meta["expected"], meta["baseline"], alive, meta["ours"], meta.get("allow", ()))
    assert (verdict.word, list(verdict.holders)) == (expect["verdict"], expect["holders"]), verdict.reason
    assert verdict.reason
    assert set(verdict.foreign) == set(expect["holders"]) - set(meta["ours"])


def gpu(uuid: str = A, used: str = "0", total: str = "143771", index: str = "0", **cells: str) -> str:
    row = {"name": "NVIDIA H200", "reserved": "614", "temperature": "28", "pstate": "P0", **cells}
    return ", ".join((index, uuid, row["name"], total, used, row["reserved"], row["temperature"], row["pstate"]))


def said(gpu_lines: list[str], app_lines: list[str] | None = None, newline: str = "\n") -> Sample:
    texts = ["".join(line + newline for line in lines) for lines in (gpu_lines, app_lines or [])]
    return Sample(Answer(0, texts[0], ""), Answer(0, texts[1], ""))


ALIVE = {10, 11, 12}.__contains__
NA = {"used": "[N/A]", "total": "[N/A]", "reserved": "[N/A]"}


@pytest.mark.parametrize(
    ("sample", "word", "holders"),
    [
        # 5: freed
        (said([gpu(used="64")]), FREED, ()),
        (said([f"  {gpu().replace(', ', ' ,   ')}  "], newline="\r\n"), FREED, ()),
        (said([gpu(used="64 MiB", total="143771 MiB")]), FREED, ()),
        (said([gpu(), ""]), FREED, ()),
        (said([gpu(reserved="[N/A]")]), FREED, ()),
        (said([gpu(), gpu(B, "[GPU requires reset]", index="1", temperature="ERR!")]), FREED, ()),
        (said([gpu(), gpu(B, "9", index="1"), gpu(B, "9", index="1")]), FREED, ()),
        (said([gpu()], [f"{B}, 99, dead, 5", f"{B}, [N/A], x, 5", f"{B}, 10, x, 5"]), FREED, ()),
        (said([gpu(used="20")], [f"{A}, 10, Xorg, 20"]), FREED, ()),
        # 4: memory without a process
        (said([gpu(used="65")]), HELD, ()),
        # 2: a live process, on the one GPU of several
        (said([gpu(used="5")], [f"{A}, 10, python, 5"]), HELD, (10,)),
        (said([gpu(used="5")], [f"{A}, 11, python, 5", f"{A}, 10, python, 5", f"{A}, 10, python, 6"]), HELD, (10, 11)),
        (said([gpu(used="5")], [f"{A}, 10, python, with, commas, Xorg, 5 MiB"]), HELD, (10,)),
        (said([gpu(used="5")], [f"{A}, 10, [No data], 102918 MiB"]), HELD, (10,)),
        (said([gpu(used="5")], [f"{A}, 10, [Not Found], [N/A]"]), HELD, (10,)),
        (said([gpu(used="5")], [f"{A}, 10, /usr/lib/xorg/Xorg, 5"]), HELD, (10,)),
        (said([gpu(used="5")], [f"{A.upper()}, 10, x, 5"]), HELD, (10,)),
        # 3: memory that proves nothing
        (said([gpu(**NA)]), NO_HOLDERS, ()),
        (said([gpu(used="[Not Supported]", total="Not Supported")]), NO_HOLDERS, ()),
        (said([gpu(**NA)], [f"{A}, 10, VLLM::EngineCore, 19135"]), HELD, (10,)),
        (said([gpu(used="65", name="NVIDIA GH200 480GB")]), NO_HOLDERS, ()),
        (said([gpu(used="64", name="NVIDIA GH200 480GB")]), FREED, ()),
        (said([gpu(used="99", name="NVIDIA GB200")], [f"{A}, 10, x, 5"]), HELD, (10,)),
        # 1: not understood
        (said([]), UNKNOWN, ()),
        (said([gpu(B)]), UNKNOWN, ()),
        (said([gpu(), gpu()]), UNKNOWN, ()),
        (said([gpu(), gpu(index="1")]), UNKNOWN, ()),
        (said([gpu(), "No devices were found"]), UNKNOWN, ()),
        (said(["index, uuid, name, a, b, c, d, e", gpu()]), UNKNOWN, ()),
        (said([gpu() + ", 7"]), UNKNOWN, ()),
        (said([gpu(), gpu(B, index="[Unknown Error]")]), UNKNOWN, ()),
        (said([gpu(), gpu("[Unknown Error]", index="1")]), UNKNOWN, ()),
        (said([gpu(), gpu(B[:-4], index="1")]), UNKNOWN, ()),
        (said([gpu(temperature="[Unknown Error]", used="6")]), UNKNOWN, ()),
        (said([gpu(temperature="N/A")]), UNKNOWN, ()),
        (said([gpu(temperature="28.5")]), UNKNOWN, ()),
        (said([gpu(temperature="\u0662\u0668")]), UNKNOWN, ()),
        (said([gpu(pstate="[N/A]")]), UNKNOWN, ()),
        (said([gpu(pstate="0")]), UNKNOWN, ()),
        (said([gpu(pstate="P")]), UNKNOWN, ()),
        (said([gpu(used="ERR!")]), UNKNOWN, ()),
        (said([gpu(used="[gpu is lost]")]), UNKNOWN, ()),
        (said([gpu(total="[Insufficient Permissions]")]), UNKNOWN, ()),
        (said([gpu(reserved="[GPU requires reset]")]), UNKNOWN, ()),
        (said([gpu(reserved="[GPU requires reset]")], [f"{A}, 10, x, 5"]), UNKNOWN, (10,)),
        (said([gpu(reserved="[Unknown Error]", used="3")]), UNKNOWN, ()),
        (said([gpu(reserved="[Unknown Error]", used="3")], [f"{A}, 10, x, 5"]), HELD, (10,)),
        (said([gpu(name="[Unknown Error]", used="0 MiB")]), UNKNOWN, ()),
        (said([gpu(used="143772")]), UNKNOWN, ()),
        (said([gpu(used="-1")]), UNKNOWN, ()),
        (said([gpu(used="1e3")]), UNKNOWN, ()),
        (said([gpu(used="4 GiB")]), UNKNOWN, ()),
        (said([gpu(used="")]), UNKNOWN, ()),
        (said([gpu(used="[No data]", total="[No data]")]), UNKNOWN, ()),
        (said([gpu(used="[N/A]")]), UNKNOWN, ()),
        (said([gpu(total="[N/A]")]), UNKNOWN, ()),
        (said([gpu(temperature="[N/A]", used="[N/A]", total="[N/A]")]), UNKNOWN, ()),
        (said([gpu()], [f"{A}, 99, python, 5"]), UNKNOWN, ()),
        (said([gpu()], [f"{A}, 99, Xorg, 5"]), UNKNOWN, ()),
        (said([gpu()], [f"{A}, 0, python, 5"]), UNKNOWN, ()),
        (said([gpu()], [f"{A}, {'9' * 5000}, python, 5"]), UNKNOWN, ()),
        (said([gpu()], [f"{A}, 99, python, 5", f"{A}, 10, python, 5"]), UNKNOWN, (10,)),
        (said([gpu()], [f"{A}, [N/A], python, 5", f"{A}, 11, python, 5", f"{A}, 10, Xorg, 5"]), UNKNOWN, (11,)),
        (said([gpu()], [f"{A}, , python, 5"]), UNKNOWN, ()),
        (said([gpu()], [f"{A}, 10"]), UNKNOWN, (10,)),
        (said([gpu()], [f"{A}, 10, python, serve"]), UNKNOWN, (10,)),
        (said([gpu()], ["[Unknown Error], 10, python, 5"]), UNKNOWN, ()),
        (said([gpu()], ["MIG-" + A[4:] + ", 10, python, 5"]), UNKNOWN, ()),
        (said([gpu()], ["No running processes found"]), UNKNOWN, ()),
        (said([gpu()], ["gpu_uuid, pid, process_name, used_gpu_memory [MiB]"]), UNKNOWN, ()),
    ],
)
def test_the_rule_for_one_gpu(sample: Sample, word: str, holders: tuple[int, ...]) -> None:
    verdict = judge(sample, [A], {A: 0, B: 0}, ALIVE, ours=[10], allow=["Xorg"])
    assert (verdict.word, verdict.holders) == (word, holders), verdict.reason


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([gpu(A, **NA), gpu(B, index="1", **NA)], NO_HOLDERS),
        ([gpu(A, **NA), gpu(B, index="1")], UNKNOWN),
        ([gpu(A), gpu(B, "70000", index="1")], HELD),
        ([gpu(A), gpu(B, "[GPU requires reset]", index="1")], UNKNOWN),
        ([gpu(A)], UNKNOWN),
        ([gpu(B, index="0"), gpu(A, index="1")], FREED),
    ],
)
def test_the_rule_for_two_gpus(rows: list[str], word: str) -> None:
    assert judge(said(rows), [A, B], {}, ALIVE).word == word


@pytest.mark.parametrize(
    ("used", "idle", "word"), [(512, None, FREED), (513, None, HELD), (292, 228, FREED), (293, 228, HELD)]
)
def test_the_limit_is_the_baseline_and_a_little_or_half_a_gib(used: int, idle: int | None, word: str) -> None:
    sample = said([gpu(used=str(used))])
    assert judge(sample, [A], {A: idle}, ALIVE).word == word
    if idle is None:
        assert judge(sample, [A], {}, ALIVE).word == word


@pytest.mark.parametrize(
    "broken",
    [
        Answer(None, "", "gave no answer"),
        Answer(1, "", ""),
        Answer(-9, "", ""),
        Answer(14, "", ""),
        Answer(255, "", ""),
        Answer(0, "", "WARNING: infoROM is corrupted at gpu 0000:02:00.0"),
    ],
)
def test_an_answer_that_failed_is_unknown_whatever_it_lists(broken: Answer) -> None:
    good = said([gpu()], [f"{A}, 10, python, 5"])
    gpus_failed = judge(Sample(dataclasses.replace(broken, stdout=good.gpus.stdout), good.apps), [A], {A: 0}, ALIVE)
    apps_failed = judge(Sample(good.gpus, dataclasses.replace(broken, stdout=good.apps.stdout)), [A], {A: 0}, ALIVE)
    assert (gpus_failed.word, gpus_failed.holders) == (UNKNOWN, (10,))
    assert (apps_failed.word, apps_failed.holders) == (UNKNOWN, (10,))
    assert judge(Sample(broken, Answer(0, "", "")), [A], {A: 0}, ALIVE).word == UNKNOWN


@pytest.mark.parametrize(
    ("sample", "idle", "found"),
    [
        (said([gpu(used="101620")], [f"{A}, 10, sglang::scheduler, 101604"]), None, ""),
        (said([gpu(used="9512")], [f"{A}, 10, x, 9000"]), None, ""),
        (said([gpu(used="9513")], [f"{A}, 10, x, 9000"]), 2, ""),
        (said([gpu(used="9513")], [f"{A}, 10, x, 9000"]), 0, "GPU 0 uses 9513 MiB, of which its processes hold 9000"),
        (said([gpu(used="9513")], [f"{A}, 10, x, 4000", f"{A}, 11, y, 5000", f"{B}, 11, y, 70"]), 1, ""),
        (said([gpu(used="9513")], [f"{B}, 11, y, 9000"]), 0, "GPU 0 uses 9513 MiB, of which its processes hold 0"),
        (said([gpu(used="9000")], [f"{A.upper()}, 10, x, 9000 MiB"]), None, ""),
        (said([gpu(used="9999")], [f"{A}, 10, x, [N/A]"]), None, None),
        (said([gpu(**NA)], [f"{A}, 10, x, 9000"]), None, None),
        (said([gpu(used="99999", name="NVIDIA GH200 480GB")], [f"{A}, 10, x, 9000"]), None, None),
    ],
)  # fmt: skip
def test_memory_that_no_listed_process_holds(sample: Sample, idle: int | None, found: str | None) -> None:
    assert gpus.unaccounted(judge(sample, [A], {A: idle}, ALIVE), {A: idle}) == found


def test_no_gpu_asked_for_is_never_freed() -> None:
    assert judge(said([gpu()]), [], {}, ALIVE).word == UNKNOWN


def test_the_reason_names_what_holds() -> None:
    assert judge(said([gpu()], [f"{A}, 10, sglang::scheduler_TP0, 5"]), [A], {}, ALIVE).reason == (
        "held by pid 10 (sglang::scheduler_TP0)"
    )
    assert (
        judge(said([gpu(used="71233 MiB")]), [A], {}, ALIVE).reason == "GPU 0 uses 71233 MiB, but no process is listed"
    )
    assert judge(said([gpu(used="600")]), [A], {A: 40}, ALIVE).reason == (
        "GPU 0 uses 600 MiB (idle: 40), but no process is listed"
    )


# ------------------------------------------------------------------------------------------------------- mutations

ODD = (
    "[N/A]", "N/A", "[Not Supported]", "[Not Found]", "[No data]", "", "[Unknown Error]", "ERR!", "[GPU is lost]",
    "[GPU requires reset]", "[Insufficient Permissions]", "-1",
    "1e2", "0x0", "+0", "0.0", "0 GiB", "nan", "inf", "\u0660",
    "0,0", "\x00", "P0", A, "P", "[]", "null", "0 MiB MiB",
)  # fmt: skip
JUNK = (
    "Unable to determine the device handle for GPU0000:02:00.0: Unknown Error",
    "No devices were found",
    "WARNING: infoROM is corrupted at gpu 0000:02:00.0",
    "index, uuid, name, memory.total [MiB], memory.used [MiB], memory.reserved [MiB], temperature.gpu, pstate",
    "\x1b[31m", ",,,,,,,", "\u2028", "GPU-", "0",
)  # fmt: skip


@dataclasses.dataclass
class Node:
    """What is true: MiB that each GPU really holds, by whom, and which of them are dead (those read 0 MiB)."""

    used: list[int]
    pids: dict[int, int]  # pid -> GPU
    dead: set[int]
    expected: list[int]

    @property
    def is_freed(self) -> bool:
        return not any(self.used[at] > 64 or at in self.dead for at in self.expected)

    def uuid(self, at: int) -> str:
        return f"GPU-{at:08x}-0000-1111-2222-333333333333"

    def sample(self) -> tuple[list[list[str]], list[list[str]]]:
        rows = []
        for at, mib in enumerate(self.used):
            fault = "[GPU requires reset]"
            state = [fault, fault] if at in self.dead else ["30", "P0"]
            used = "0" if at in self.dead else str(mib)
            rows.append([str(at), self.uuid(at), "NVIDIA H200", "143771", used, "614", *state])
        return rows, [[self.uuid(at), str(pid), "python", "600"] for pid, at in self.pids.items()]


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    count = draw(st.integers(1, 4))
    used = draw(st.lists(st.sampled_from([0, 4, 64, 65, 612, 131204]), min_size=count, max_size=count))
    busy = [at for at in range(count) if used[at] >= 612]
    pids = {1000 + at: at for at in busy if draw(st.booleans())}
    dead = set(draw(st.lists(st.integers(0, count - 1), max_size=1)))
    expected = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True))
    return Node(used, {pid: at for pid, at in pids.items() if at not in dead}, dead, expected)


def render(table: list[list[str]], newline: str = "\n") -> str:
    return "".join(", ".join(cells) + newline for cells in table)


def mutate(rng: random.Random, tables: tuple[list[list[str]], list[list[str]]]) -> Sample:
    """Spoil the output in one to four ways; no mutation invents a plausible number in place of a true one."""
    tables = ([list(row) for row in tables[0]], [list(row) for row in tables[1]])
    text_changes, rcs, errors = [], [0, 0], ["", ""]
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(2)
        table = tables[at]
        kind = rng.choice(
            ("odd", "odd", "odd", "drop", "double", "swap", "cut", "junk", "rc", "stderr", "crlf", "unit")
        )
        row = rng.choice(table) if table else None
        if kind == "odd" and row:
            row[rng.randrange(len(row))] = rng.choice(ODD)
        elif kind == "drop" and row:
            table.remove(row)
        elif kind == "double" and row:
            table.append(list(row))
        elif kind == "swap":
            rng.shuffle(table)
        elif kind == "unit" and row:
            row[-1 if at else 4] += " MiB"
        elif kind == "rc":
            rcs[at] = rng.choice((None, 1, 2, 9, 15, 18, 124, 127, 255, -9))  # type: ignore[call-overload]
        elif kind == "stderr":
            errors[at] = rng.choice(JUNK[:3])
        else:
            text_changes.append((at, kind))
    texts = [render(table) for table in tables]
    for at, kind in text_changes:
        if kind == "cut":
            texts[at] = texts[at][: rng.randrange(len(texts[at]) + 1)]
        elif kind == "junk":
            place = rng.choice([0, len(texts[at]), rng.randrange(len(texts[at]) + 1)])
            texts[at] = texts[at][:place] + rng.choice(JUNK) + rng.choice(("\n", "")) + texts[at][place:]
        else:
            texts[at] = texts[at].replace("\n", "\r\n")
    return Sample(Answer(rcs[0], texts[0], errors[0]), Answer(rcs[1], texts[1], errors[1]))


def spoiled_once(tables: tuple[list[list[str]], list[list[str]]]) -> Iterator[Sample]:
    """Every single mutation of the output: each cell by each token, each row away or twice, each cut."""
    for at, table in enumerate(tables):

        def sample(text: str, rc: int | None = 0, err: str = "", at: int = at) -> Sample:
            answers = [Answer(0, render(other), "") for other in tables]
            answers[at] = Answer(rc, text, err)
            return Sample(*answers)

        whole = render(table)
        for row in range(len(table)):
            before, after = table[:row], table[row + 1 :]
            yield sample(render([*before, *after]))
            yield sample(render([*before, table[row], table[row], *after]))
            for cell in range(len(table[row])):
                for token in ODD:
                    yield sample(render([*before, [*table[row][:cell], token, *table[row][cell + 1 :]], *after]))
        for place in range(len(whole)):
            yield sample(whole[:place])
            for junk in JUNK:
                yield sample(whole[:place] + junk + whole[place:])
        for rc in (None, 1, 2, 9, 15, 18, 124, 127, 255, -9):
            yield sample(whole, rc)
        yield sample(whole, 0, JUNK[0])


@pytest.mark.parametrize(
    "node",
    [
        Node([0, 131204], {}, set(), [0, 1]),
        Node([0, 131204], {7: 1}, set(), [0, 1]),
        Node([612, 4], {}, set(), [0]),
        Node([4, 0], {}, {1}, [0, 1]),
        Node([0], {}, {0}, [0]),
    ],
)
def test_no_single_change_of_the_output_frees_what_is_not_free(node: Node) -> None:
    expected = [node.uuid(at) for at in node.expected]
    for sample in spoiled_once(node.sample()):
        verdict = judge(sample, expected, dict.fromkeys(expected, 0), node.pids.__contains__)
        assert verdict.word != FREED, sample


@settings(max_examples=300)
@given(nodes(), st.integers(0, 1 << 32))
def test_no_spoiled_output_frees_what_is_not_free(node: Node, seed: int) -> None:
    expected = [node.uuid(at) for at in node.expected]
    baseline = dict.fromkeys(expected, 0)
    sample = mutate(random.Random(seed), node.sample())
    verdict = judge(sample, expected, baseline, node.pids.__contains__)
    assert verdict.word in (FREED, HELD, UNKNOWN, NO_HOLDERS)
    assert verdict.reason
    if not node.is_freed:
        assert verdict.word != FREED, sample
    gpus.resolve("all", sample)
    gpus.list_gpus(sample)


@settings(max_examples=100)
@given(nodes())
def test_unspoiled_output_tells_the_truth(node: Node) -> None:
    rows, apps = node.sample()
    expected = [node.uuid(at) for at in node.expected]
    sample = Sample(Answer(0, render(rows), ""), Answer(0, render(apps), ""))
    verdict = judge(sample, expected, dict.fromkeys(expected, 0), node.pids.__contains__)
    assert (verdict.word == FREED) == node.is_freed, verdict.reason
    assert set(verdict.holders) == {pid for pid, at in node.pids.items() if at in node.expected}


@settings(max_examples=300)
@given(st.text(), st.text(), st.text(), st.one_of(st.none(), st.integers()))
def test_no_text_at_all_makes_it_raise(out: str, apps: str, err: str, rc: int | None) -> None:
    sample = Sample(Answer(rc, out, err), Answer(rc, apps, err))
    assert judge(sample, [A], {}, ALIVE).word == UNKNOWN
    assert gpus.resolve("all", sample).error
    assert gpus.resolve([0], sample).error
    gpus.read_recovery_actions(sample.gpus)


# --------------------------------------------------------------------------------------------- asking nvidia-smi


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a script in nvidia-smi's place; it notes each start in ``starts``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def install(body: str) -> Path:
        script = folder / "nvidia-smi"
        script.write_text(f"#!/bin/sh\necho $$ >>{tmp_path}/starts\n{body}\n")
        script.chmod(0o755)
        return tmp_path / "starts"

    return install


def pids_in(starts: Path) -> list[int]:
    return [int(word) for word in starts.read_text().split()] if starts.exists() else []


def test_both_questions_are_asked_and_their_answers_kept_apart(stand_in) -> None:
    starts = stand_in(
        f'case "$1" in --query-gpu=*) echo "{gpu()}";; *) echo "{A}, 10, python, 5"; echo "odd" >&2; exit 3;; esac\n'
    )
    sample = gpus.take_sample()
    assert sample == Sample(Answer(0, gpu() + "\n", ""), Answer(3, f"{A}, 10, python, 5\n", "odd\n"))
    assert len(pids_in(starts)) == 2
    assert judge(sample, [A], {}, ALIVE).word == UNKNOWN


def test_the_exact_words_of_the_questions(stand_in, tmp_path: Path) -> None:
    stand_in(f'printf "%s|" "$@" >>{tmp_path}/words; echo "$LC_ALL" >>{tmp_path}/words')
    gpus.take_sample()
    gpus.recovery_trouble([A])
    assert (tmp_path / "words").read_text().splitlines() == [
        f"--query-gpu={','.join(gpus.QUERY_GPU_FIELDS)}|--format=csv,noheader,nounits|C",
        "--query-compute-apps=gpu_uuid,pid,process_name,used_memory|--format=csv,noheader,nounits|C",
        "--query-gpu=uuid,gpu_recovery_action|--format=csv,noheader,nounits|C",
    ]


def test_a_missing_nvidia_smi_is_127_and_one_that_cannot_be_started_126(
    stand_in, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("").parent.joinpath("bin", "nvidia-smi").write_bytes(b"\x7fELF no program")
    assert gpus.take_sample().gpus.rc == 126
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    sample = gpus.take_sample()
    assert sample.gpus.rc == sample.apps.rc == 127
    assert judge(sample, [A], {}, ALIVE).word == UNKNOWN


def test_it_is_no_terminal_no_input_and_a_session_of_its_own(stand_in, tmp_path: Path) -> None:
    stand_in(f"cat; ps -o sid= -p $$ >{tmp_path}/sid; kill -PIPE $$; echo ignored")
    assert gpus.take_sample().gpus.rc == -13
    assert int((tmp_path / "sid").read_text()) not in (os.getsid(0), 0)


def test_a_call_that_hangs_is_unknown_in_time_and_leaves_nothing(stand_in) -> None:
    starts = stand_in(f'echo "{gpu()}"; trap "" TERM; sleep 600; sleep 600')
    began = time.monotonic()
    sample = gpus.take_sample(4.0)  # time enough for its first words
    assert time.monotonic() - began < 60
    assert sample.gpus.rc is None
    assert sample.apps.rc is None
    assert sample.gpus.stdout == gpu() + "\n"
    assert judge(sample, [A], {}, ALIVE).word == UNKNOWN
    [pid] = pids_in(starts)
    assert until(lambda: group_members(pid) == ())


def test_a_call_that_hangs_at_the_second_question_is_unknown_too(stand_in) -> None:
    stand_in(f'case "$1" in --query-gpu=*) echo "{gpu()}";; *) sleep 600;; esac')
    sample = gpus.take_sample(4.0)
    assert (sample.gpus.rc, sample.apps.rc) == (0, None)
    assert judge(sample, [A], {A: 0}, ALIVE).word == UNKNOWN


def test_no_other_is_started_while_a_hung_one_of_an_earlier_run_is_there(stand_in) -> None:
    starts = stand_in(f'echo "{gpu()}"')
    program = starts.parent / "bin" / "nvidia-smi"

    def call_with_deadline(at: float, of: Path = program) -> subprocess.Popen[bytes]:
        """A call as an earlier run left it (its deadline rides in its environment), one that KILL did not end."""
        words = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)", *gpus.QUERY_GPUS[1:]]
        child = subprocess.Popen(
            words, env={**os.environ, "LAMPLIGHTER_SMI_CALL": f"{at!r} {of}"}, stdout=subprocess.PIPE
        )
        child.stdout.readline()  # type: ignore[union-attr]
        return child

    slow = call_with_deadline(time.monotonic() + 600)
    elsewhere = call_with_deadline(time.monotonic() - 1, program.with_name("of-another-node"))
    try:
        assert gpus.take_sample().gpus.rc == 0, "a slow call of another run is no reason to give up, nor another node's"
        assert len(pids_in(starts)) == 2
        hung = call_with_deadline(time.monotonic() - 1)
        try:
            for _ in range(3):
                sample = gpus.take_sample()
                assert sample.gpus.rc is None
                assert str(hung.pid) in sample.gpus.stderr
                assert "no answer about recovery" in str(gpus.recovery_trouble([A]))
            assert len(pids_in(starts)) == 2
        finally:
            hung.kill()
            hung.wait()
            hung.stdout.close()  # type: ignore[union-attr]
        assert gpus.take_sample().gpus.rc == 0
    finally:
        for child in (slow, elsewhere):
            child.kill()
            child.wait()
            child.stdout.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("answer", "actions"),
    [
        (Answer(0, f"{A}, None\n{B}, Reset\n{C}, Drain and Reset\r\n", ""), {B: "Reset", C: "Drain and Reset"}),
        (Answer(0, f"{A}, [N/A]\n", ""), {}),
        (Answer(0, f"{A}, [GPU requires reset]\n", ""), {A: "[GPU requires reset]"}),
        (Answer(2, 'Field "gpu_recovery_action" is not a valid field to query.\n', ""), {}),
        (Answer(None, f"{A}, Reset\n", ""), {}),
    ],
)
def test_recovery_actions(answer: Answer, actions: dict[str, str]) -> None:
    assert gpus.read_recovery_actions(answer) == actions


# ------------------------------------------------------------------------------------------------------ which GPUs

THREE = said([gpu(C, index="2"), gpu(A, index="0", used="[Unknown Error]", temperature="[N/A]"), gpu(B, index="1")])


def test_gpus_are_listed_by_index_with_what_could_be_read() -> None:
    first, second, third = gpus.list_gpus(THREE)
    assert (first.uuid, first.index, first.used_mib, first.temperature, first.pstate) == (A, 0, None, None, "P0")
    assert (second.total_mib, second.used_mib, second.temperature, third.uuid) == (143771, 0, 28, C)


@pytest.mark.parametrize(
    ("wanted", "uuids", "error"),
    [
        ("all", (A, B, C), None),
        ([2, 0], (C, A), None),
        (["1"], (B,), None),
        ([B.upper().replace("GPU", "GPU"), 0], (B, A), None),
        ([], (), None),
        ([0, 9], (), "no GPU 9: this node has GPU 0, 1, 2"),
        ([A[:-1] + "f"], (), "no GPU " + A[:-1] + "f"),
        ([0, A], (), f"GPU {A} is asked for twice"),
        ("some", (), 'neither "all" nor a list'),
        ([-1], (), "no GPU -1"),
    ],
)
def test_gpus_asked_for_become_uuids(wanted: str | list[int | str], uuids: tuple[str, ...], error: str | None) -> None:
    resolved = gpus.resolve(wanted, THREE)
    assert resolved.uuids == uuids
    assert error in resolved.error if error and resolved.error else resolved.error == error


def test_all_is_refused_when_a_gpu_may_be_missing_from_the_list() -> None:
    lost = said([gpu(), "Unable to determine the device handle for GPU0000:AB:00.0: Unknown Error"])
    assert "Unable to determine" in (gpus.resolve("all", lost).error or "")
    assert gpus.resolve([0], lost).uuids == (A,)
    assert gpus.resolve("all", said([])).error == "this node has no GPU"
    assert "rc 9" in (gpus.resolve([0], Sample(Answer(9, "", "broken"), Answer(9, "", ""))).error or "")
    assert gpus.resolve("all", said([gpu(), gpu()])).error == "nvidia-smi lists a GPU twice"


# -------------------------------------------------------------------------------------------- device files held open

HOLD = "import sys, time; files = [open(path, 'w') for path in sys.argv[1:]]; print(flush=True); time.sleep(600)"


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that stand for the devices, so that no other run on this machine sees a GPU in use."""
    monkeypatch.setattr(gpus, "DEVICES", str(tmp_path / "nvidia"))
    return tmp_path


@pytest.mark.parametrize(
    ("unread", "said"),
    [
        (0, "only this user's processes could be looked into"),
        (1, "1 process could not be looked into"),
        (2, "2 processes could not be looked into"),
    ],
)
def test_a_scan_says_how_much_it_did_not_see(unread: int, said: str) -> None:
    assert gpus.DeviceHolders({}, complete=True).gap == ""
    assert gpus.DeviceHolders({}, complete=False, unread=unread).gap.startswith(said)


def test_of_many_devices_the_first_gpus_are_named() -> None:
    caps = [f"/dev/nvidia-caps/nvidia-cap{number}" for number in range(9)]
    found = [*caps, "/dev/nvidiactl", "/dev/nvidia10", "/dev/nvidia2"]
    assert holders.shown_devices(found) == "/dev/nvidia2, /dev/nvidia10, /dev/nvidiactl and 9 more"
    assert holders.shown_devices(found[:1]) == caps[0]


def test_holders_of_the_devices_are_found_and_sorted_out(devices: Path, tmp_path: Path) -> None:
    uvm, control = str(devices / "nvidia-uvm"), str(devices / "nvidiactl")
    watcher = tmp_path / "nv-hostengine"
    watcher.symlink_to(sys.executable)
    words = [
        [sys.executable, "-c", HOLD, uvm, control],
        [sys.executable, "-c", HOLD, control],
        [str(watcher), "-c", HOLD, uvm],
        [sys.executable, "-c", HOLD, str(devices / "other")],
    ]
    children = [subprocess.Popen(line, stdout=subprocess.PIPE) for line in words]
    try:
        for child in children:
            child.stdout.readline()  # type: ignore[union-attr]
        holder, asker, watching, _ = (child.pid for child in children)
        found = gpus.device_holders()
        assert set(found.by_pid) == {holder, asker, watching}
        assert found.by_pid[holder].devices == (uvm, control)
        assert found.by_pid[holder].process.pid == holder
        if os.geteuid() != 0:
            assert not found.complete
        assert bool(found.gap) == (not found.complete)

        idle, elsewhere, here = (
            said([gpu()]),
            said([gpu()], [f"{B}, {holder}, x, 5"]),
            said([gpu()], [f"{A}, {holder}, x, 5"]),
        )
        assert gpus.foreign_holders(found, idle, [A], allow=WATCHERS) == (holder,)
        assert gpus.foreign_holders(found, here, [A], allow=WATCHERS) == (holder,)
        assert gpus.foreign_holders(found, elsewhere, [A], allow=WATCHERS) == ()
        assert gpus.foreign_holders(found, idle, [A], ours=[holder], allow=WATCHERS) == ()
        assert gpus.foreign_holders(found, idle, [A], allow=[*WATCHERS, os.path.basename(sys.executable)]) == ()
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()  # type: ignore[union-attr]


# -------------------------------------------------------------------------------------------------- until it is freed


def seen(word: str, used: int | None = 0, holders: tuple[int, ...] = (), foreign: tuple[int, ...] = ()) -> Verdict:
    rows, _ = gpus._read_gpus(gpu(used="[N/A]", total="[N/A]") if used is None else gpu(used=str(used)))
    return Verdict(word, holders, f"it is {word}", tuple(rows), foreign)


def feed(
    watch: FreedWatch, *verdicts: Verdict, step: float = 0.3, start: float = 0.0, ours: tuple[int, ...] = ()
) -> list[str]:
    return [watch.feed(verdict, ours, (), start + at * step) for at, verdict in enumerate(verdicts)]


def test_three_freed_in_a_row_are_freed() -> None:
    assert feed(FreedWatch(), *[seen(FREED)] * 3) == ["waiting", "waiting", FREED]


@pytest.mark.parametrize("between", [seen(UNKNOWN, None), seen(HELD, 900), seen(NO_HOLDERS, None)])
def test_anything_between_begins_the_streak_anew(between: Verdict) -> None:
    watch = FreedWatch()
    assert feed(watch, seen(FREED), seen(FREED), between, seen(FREED), seen(FREED), seen(FREED)) == ["waiting"] * 5 + [
        FREED
    ]


def test_freed_needs_our_processes_gone() -> None:
    watch = FreedWatch()
    assert feed(watch, *[seen(FREED)] * 9, ours=(7,)) == ["waiting"] * 9
    assert "pid 7" in watch.reason
    assert feed(watch, *[seen(FREED)] * 3, start=9) == ["waiting", "waiting", FREED]


def test_a_foreign_process_on_our_gpus_ends_the_wait() -> None:
    watch = FreedWatch()
    assert feed(watch, seen(HELD, 900, (7, 8), (8,))) == ["held_foreign"]


def test_a_device_held_open_counts_only_when_it_stays() -> None:
    watch = FreedWatch()
    said_ = [
        watch.feed(seen(FREED), (), foreign, at) for at, foreign in enumerate([(5,), (6,), (5, 6), (), (5,), (5,)])
    ]
    assert said_ == ["waiting"] * 6
    assert "pid 5" in watch.reason
    assert watch.feed(seen(FREED), (), (5,), 7) == "held_foreign"


def test_memory_without_a_holder_is_flat_after_a_minute_without_news() -> None:
    watch = FreedWatch()
    assert watch.feed(seen(HELD, 71233), (), (), 0) == "waiting"
    assert watch.feed(seen(HELD, 71233), (), (), 59.9) == "waiting"
    assert watch.feed(seen(HELD, 71233), (), (), 60) == "flat"
    assert "71233" in seen(HELD, 71233).rows[0].used
    assert "60 s" in watch.reason


def test_falling_memory_and_disappearing_pids_extend_the_wait() -> None:
    watch = FreedWatch()
    assert watch.feed(seen(HELD, 71000, (7,)), (7, 8), (), 0) == "waiting"
    assert watch.feed(seen(HELD, 71000, (7,)), (7,), (), 50) == "waiting"
    assert watch.progress_at == 50
    assert watch.feed(seen(HELD, 70000), (), (), 100) == "waiting"
    assert watch.feed(seen(HELD, 69000), (), (), 150) == "waiting"
    assert watch.feed(seen(HELD, 70000), (), (), 209) == "waiting"
    assert watch.progress_at == 150
    assert watch.feed(seen(HELD, 70000), (), (), 210) == "flat"


def test_our_own_pids_and_unknown_are_waited_for_without_end() -> None:
    watch = FreedWatch()
    assert watch.feed(seen(HELD, 71000, (7,)), (7,), (), 0) == "waiting"
    assert watch.feed(seen(HELD, 71000, (7,)), (7,), (), 1000) == "waiting"
    assert FreedWatch().feed(seen(UNKNOWN, None), (), (), 0) == "waiting"


def test_no_holders_is_said_as_such_and_with_numa_memory_only_when_it_has_settled() -> None:
    assert feed(FreedWatch(), *[seen(NO_HOLDERS, None)] * 3) == ["waiting", "waiting", NO_HOLDERS]
    assert feed(FreedWatch(), *[seen(NO_HOLDERS, 900)] * 4, step=20) == ["waiting", "waiting", "waiting", NO_HOLDERS]
    falling = [seen(NO_HOLDERS, mib) for mib in (900, 800, 700)]
    assert feed(FreedWatch(), *falling, *[seen(FREED)] * 3, step=20) == ["waiting"] * 5 + [FREED]


# ------------------------------------------------------------------------------------------------ warnings that stay

CORRUPT = "WARNING: infoROM is corrupted at gpu 0000:3B:00.0"


def warned(rc: int = 14, stream: str = "stdout", line: str = CORRUPT, used: str = "0") -> Sample:
    """What nvidia-smi says of a whole GPU, with a warning behind each of its answers."""
    texts = (gpu(used=used) + "\n", "")
    return Sample(*(Answer(rc, *((text + line + "\n", "") if stream == "stdout" else (text, line))) for text in texts))


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("rc", [0, 14])
def test_a_warning_at_every_call_is_quoted_and_can_be_accepted_by_name(rc: int, stream: str) -> None:
    verdict = judge(warned(rc, stream), [A], {}, ALIVE)
    assert verdict.word == UNKNOWN
    assert CORRUPT in verdict.reason
    hint = gpus.how_to_see(verdict.reason, "kimi")
    assert "servers.kimi.gpu_warnings: {accept: [infoROM is corrupted]}" in hint
    told = gpus.resolve("all", warned(rc, stream))
    assert CORRUPT in (told.error or "")

    accepted = gpus.accepting(warned(rc, stream), ["inforom is corrupted"])
    assert judge(accepted, [A], {}, ALIVE).word == FREED
    assert gpus.resolve("all", accepted).uuids == (A,)
    held = gpus.accepting(warned(rc, stream, used="9000"), ["inforom"])
    assert judge(held, [A], {}, ALIVE).word == HELD, "the numbers count as printed"


@pytest.mark.parametrize(
    ("sample", "accepted"),
    [
        (warned(), ["persistence mode"]),
        (warned(15), ["inforom"]),  # off the bus, beside the warning
        (warned(14, line="WARNING: something else"), ["something else"]),  # the exit code stands for another one
        (warned(0, line="Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error"), ["Unable"]),
        (Sample(Answer(14, "", CORRUPT), Answer(14, "", CORRUPT)), ["inforom"]),  # and no GPU is listed
        (Sample(Answer(None, "", CORRUPT), Answer(None, "", CORRUPT)), ["inforom"]),
    ],
)
def test_nothing_but_the_named_warning_is_accepted(sample: Sample, accepted: list[str]) -> None:
    assert judge(gpus.accepting(sample, accepted), [A], {}, ALIVE).word == UNKNOWN


def test_behind_a_warning_a_gpu_that_needs_a_reset_is_still_told() -> None:
    rows = f"{A}, None\n{B}, Reset\n{CORRUPT}\n"
    assert gpus.read_recovery_actions(Answer(14, rows, "")) == {B: "Reset"}
    assert gpus.read_details(["pstate"], Answer(14, f"{A}, P0\n{CORRUPT}\n", "")) == {A: {"pstate": "P0"}}


def test_who_is_told_of_a_hung_nvidia_smi_is_not_sent_to_run_it() -> None:
    hung = Answer(None, "", "an earlier nvidia-smi (pid 7) has not answered yet; no other is started")
    verdict = judge(Sample(hung, hung), [A], {}, ALIVE)
    hint = gpus.how_to_see(verdict.reason, "kimi")
    assert "do not run nvidia-smi" in hint
    assert "dmesg" in hint
    assert "run nvidia-smi on the node" in gpus.how_to_see("GPU 0 reports [GPU requires reset]", "kimi")
