"""What lint says of variables and arguments: the cases, a pair for each rule, and recipes of others without a word."""

from __future__ import annotations

import functools
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lamplighter.lint import Entry, Finding, View, inspect, load_knowledge
from lamplighter.release.engine import load_engine

PROJECT = Path(__file__).parents[2]
ROLES = PROJECT / "roles"
CASES = PROJECT / "tests" / "cases"


@functools.cache
def engine_of(name: str) -> Mapping[str, Any]:
    return load_engine(name, ROLES).compiled


def entry_of(value: object, is_forced: bool = False) -> Entry:
    return Entry(None if value is None else str(value), is_forced)


def view(engine: str, version: str | None, argv: Sequence[str], env: Mapping[str, Any], **more: Any) -> View:
    compiled = engine_of(engine)
    known = load_knowledge(ROLES, (engine, *compiled["ancestors"]))
    entries = {
        name: entry_of(each["value"], bool(each.get("force"))) if isinstance(each, dict) else entry_of(each)
        for name, each in env.items()
    }
    return View(compiled, known, tuple(argv), entries, version, extra=tuple(argv), **more)


def judged(found: Sequence[Finding]) -> dict[str, list[str]]:
    """As the cases say it: names with errors, and names with warnings alone."""
    errors = {each.name for each in found if each.level == "error"}
    return {"errors": sorted(errors), "warnings": sorted({each.name for each in found} - errors)}


@pytest.mark.parametrize("path", sorted((CASES / "env").glob("*.yml")), ids=lambda path: path.stem)
def test_a_case_has_the_errors_and_warnings_that_it_expects(path: Path) -> None:
    case = yaml.safe_load(path.read_text())
    argv = case.get("server_args") or case.get("extra_args") or []
    found = inspect(view(case["engine"], case["engine_version"], argv, case["env"]))
    assert judged(found) == case["expect"], found


def test_the_names_of_nccl_are_those_of_its_library() -> None:
    rows = [line.split("\t") for line in (CASES / "env" / "nccl-names.tsv").read_text().splitlines()]
    nccl = load_knowledge(ROLES, ()).common.nccl
    assert sorted(nccl.integers) == sorted(name for name, kind in rows if kind == "int")
    assert sorted(nccl.texts) == sorted(name for name, kind in rows if kind == "text")


RECIPES = [
    (engine, recipe)
    for engine in ("sglang", "vllm")
    for recipe in yaml.safe_load((CASES / "recipes" / f"{engine}.yml").read_text())
]


@pytest.mark.parametrize(
    ("engine", "recipe"), RECIPES, ids=lambda each: each["source"] if isinstance(each, dict) else each
)
def test_a_public_recipe_is_found_without_fault(engine: str, recipe: Mapping[str, Any]) -> None:
    assert inspect(view(engine, None, shlex.split(recipe["args"]), recipe.get("env") or {})) == []


def test_there_are_enough_recipes_of_both_engines() -> None:
    assert min(Counter(engine for engine, _ in RECIPES).values()) >= 20


NAMES = st.sampled_from(
    ["NCCL_IB_SL", "NCCL_PROTO", "NCCL_ALGO", "NCCL_DEBUG", "NCCL_BUFFSIZE", "http_proxy", "no_proxy"]
)
ODD = st.text(st.sampled_from("0179x-+^,;:=${}/LS \n\u0660\u00b2"), max_size=12)


@given(st.dictionaries(NAMES | ODD, ODD), st.lists(ODD | st.sampled_from(["--tp", "--host", "-tp", "--nnodes"])))
def test_whatever_is_written_is_judged(env: Mapping[str, str], argv: Sequence[str]) -> None:
    for engine in ("sglang", "vllm"):
        found = inspect(view(engine, "0.5.16", argv, env))
        assert all(each.level in ("error", "warning") and each.message for each in found)


# -- each rule: what it tells of, and what lies close by and is none of its business

TP = "--tp 2"
DETERMINISTIC = "--enable-deterministic-inference --tp 2"
PINNED = {"VLLM_BATCH_INVARIANT": "1"}


def forced(value: str) -> dict[str, Any]:
    return {"value": value, "force": True}


@pytest.mark.parametrize(
    ("told", "engine", "version", "args", "env"),
    [
        ("L1 error nccl_debug", "sglang", None, "", {"nccl_debug": "INFO"}),
        ("L1 error PythonHashSeed", "vllm", None, "", {"PythonHashSeed": "0"}),
        ("", "sglang", None, "", {"http_proxies": "x", "NCCL_DEBUG": "INFO", "my_own_name": "y"}),
        ("L2 error NCCL_DEBGU", "sglang", None, "", {"NCCL_DEBGU": "INFO"}),
        ("L2 error NCCL_P2P_DISABL", "sglang", None, "", {"NCCL_P2P_DISABL": "1"}),
        ("L3 warning NCCL_SPEED", "sglang", None, "", {"NCCL_SPEED": "fast"}),
        ("L3 warning NCCL_PAT_NDIMS", "sglang", None, "", {"NCCL_PAT_NDIMS": "2"}),
        ("", "sglang", None, "", {"NCCL_PAT_ENABLE": "1", "NCCLX_SPEED": "1"}),
        ("L4 warning NCCL_BLOCKING_WAIT", "vllm", None, "", {"NCCL_BLOCKING_WAIT": "true"}),
        ("", "vllm", None, "", {"TORCH_NCCL_BLOCKING_WAIT": "1"}),
        ("L5 warning NCCL_MNNVL", "vllm", None, "", {"NCCL_MNNVL": "1"}),
        ("", "vllm", None, "", {"NCCL_MNNVL_ENABLE": "1"}),
        ("L6 error MY-NAME", "vllm", None, "", {"MY-NAME": "1"}),
        ("L6 error 2ND", "vllm", None, "", {"2ND": "1"}),
        ("", "vllm", None, "", {"_MY_NAME2": "1"}),
        ("L7 error NCCL_IB_DISABLE", "sglang", None, "", {"NCCL_IB_DISABLE": "yes"}),
        ("", "sglang", None, "", {"NCCL_IB_DISABLE": "-1", "NCCL_NET_PLUGIN": "none"}),
        ("L8 error NCCL_BUFFSIZE", "sglang", None, "", {"NCCL_BUFFSIZE": "8MiB"}),
        ("L8 error NCCL_IB_TIMEOUT", "sglang", None, "", {"NCCL_IB_TIMEOUT": "1 # fast"}),
        ("L8 error NCCL_IB_TIMEOUT", "sglang", None, "", {"NCCL_IB_TIMEOUT": "1.5"}),
        ("", "sglang", None, "", {"NCCL_BUFFSIZE": "0x400000", "NCCL_IB_TIMEOUT": "+22"}),
        ("L9 error NCCL_NTHREADS", "sglang", None, "", {"NCCL_NTHREADS": "0256"}),
        ("L9 error NCCL_NTHREADS", "sglang", None, "", {"NCCL_NTHREADS": "08"}),
        ("L9 warning NCCL_IB_SL", "sglang", None, "", {"NCCL_IB_SL": "01"}),
        ("", "sglang", None, "", {"NCCL_IB_SL": "0", "NCCL_IB_TC": "0x0"}),
        ("L10 error NCCL_BUFFSIZE", "sglang", None, "", {"NCCL_BUFFSIZE": "9223372036854775808"}),
        ("L10 error NCCL_BUFFSIZE", "sglang", None, "", {"NCCL_BUFFSIZE": "9" * 5000}),
        ("", "sglang", None, "", {"NCCL_BUFFSIZE": "9223372036854775807", "NCCL_IB_SL": "-9223372036854775808"}),
        ("L11 warning NCCL_IB_SL", "sglang", None, "", {"NCCL_IB_SL": ""}),
        ("L11 warning NCCL_PROTO", "sglang", None, "", {"NCCL_PROTO": ""}),
        ("", "sglang", None, "", {"HF_HUB_OFFLINE": ""}),
        ("L12 warning NCCL_IB_SL", "sglang", None, "", {"NCCL_IB_SL": " 1 "}),
        ("L12 error NCCL_DEBUG", "sglang", None, "", {"NCCL_DEBUG": "INFO "}),
        ("", "sglang", None, "", {"MY_TEXT": " x "}),
        ("L13 error NCCL_P2P_DISABLE", "sglang", None, "", {"NCCL_P2P_DISABLE": "2"}),
        ("", "sglang", None, "", {"NCCL_P2P_DISABLE": "0x1"}),
        ("L14 error NCCL_ALGO", "sglang", None, "", {"NCCL_ALGO": "ring,trees"}),
        ("L14 error NCCL_ALGO", "sglang", None, "", {"NCCL_ALGO": "allreduce:tree;ring"}),
        ("L14 error NCCL_ALGO", "sglang", None, "", {"NCCL_ALGO": "alreduce:tree"}),
        ("L14 error NCCL_PROTO", "sglang", None, "", {"NCCL_PROTO": "LL,^Simple"}),
        ("L14 error NCCL_NET_GDR_LEVEL", "sglang", None, "", {"NCCL_NET_GDR_LEVEL": "6"}),
        ("L14 warning NCCL_P2P_LEVEL", "sglang", None, "", {"NCCL_P2P_LEVEL": "5"}),
        ("L14 error NCCL_SOCKET_FAMILY", "sglang", None, "", {"NCCL_SOCKET_FAMILY": "af_inet"}),
        ("L14 error VLLM_WORKER_MULTIPROC_METHOD", "vllm", None, "", {"VLLM_WORKER_MULTIPROC_METHOD": "thread"}),
        ("", "sglang", None, "", {"NCCL_ALGO": "ring;allreduce:tree,nvlstree;broadcast:^PAT", "NCCL_DEBUG": "version"}),
        ("L15 warning NCCL_PROTO", "sglang", None, "", {"NCCL_PROTO": "simple;allreduce:ll128"}),
        ("", "sglang", None, "", {"NCCL_PROTO": "^LL128"}),
        ("L16 warning NCCL_P2P_LEVEL", "sglang", None, "", {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"}),
        ("L16 warning NCCL_IB_HCA", "sglang", None, "", {"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5"}),
        ("L16 warning NCCL_DEBUG_SUBSYS", "sglang", None, "", {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_SUBSYS": "ENV"}),
        ("L16 warning NCCL_DEBUG_FILE", "sglang", None, "", {"NCCL_DEBUG_FILE": "/tmp/nccl.%h"}),
        (
            "",
            "sglang",
            None,
            "",
            {
                "NCCL_P2P_DISABLE": "0",
                "NCCL_P2P_LEVEL": "SYS",
                "NCCL_IB_DISABLE": "0",
                "NCCL_IB_HCA": "mlx5",
                "NCCL_DEBUG": "trace",
                "NCCL_DEBUG_SUBSYS": "ENV",
                "NCCL_DEBUG_FILE": "/tmp/nccl.%h.%p",
            },
        ),
        ("L17 error NCCL_SOCKET_IFNAME", "sglang", None, "--nnodes 2", {"NCCL_SOCKET_IFNAME": "=lo"}),
        ("L17 error NCCL_OOB_NET_IFNAME", "vllm", None, "m --nnodes=2", {"NCCL_OOB_NET_IFNAME": "eth0,lo"}),
        ("", "sglang", None, "--nnodes 2", {"NCCL_SOCKET_IFNAME": "^lo,docker0"}),
        ("", "sglang", None, "", {"NCCL_SOCKET_IFNAME": "lo"}),
        ("L18 error WORLD_SIZE", "vllm", None, "", {"WORLD_SIZE": "1"}),
        ("L18 error MASTER_PORT", "vllm", None, "", {"MASTER_PORT": forced("1")}),
        ("", "vllm", None, "", {"WORLD": "1"}),
        ("L19 error LD_PRELOAD", "sglang", None, "", {"LD_PRELOAD": forced("/x.so")}),
        ("", "sglang", None, "", {"LD_PRELOAD": "/x.so", "PATH": "/bin"}),
        ("L20 error NCCL_NVLS_ENABLE", "sglang", "0.4.6.post5", "", {"NCCL_NVLS_ENABLE": "1"}),
        ("L20 error NCCL_CUMEM_ENABLE", "sglang", "0.5.3", "--enable-symm-mem", {"NCCL_CUMEM_ENABLE": "0"}),
        ("L20 warning NCCL_NVLS_ENABLE", "sglang", "0.5.3", "", {"NCCL_NVLS_ENABLE": forced("1")}),
        ("", "sglang", "0.5.3", "--enable-symm-mem", {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}),
        ("", "sglang", "0.5.3", "--enable-nccl-nvls", {"NCCL_NVLS_ENABLE": "1"}),
        ("L20 error NCCL_CUMEM_ENABLE", "sglang", "0.5.3.post3", "", {"NCCL_CUMEM_ENABLE": "1"}),
        ("", "sglang", "0.5.4", "", {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}),  # nobody looked into it
        ("", "sglang", "0.5.5", "", {"NCCL_CUMEM_ENABLE": "1"}),
        ("L21 error NCCL_NVLS_ENABLE", "sglang", "0.5.12", "--enable-nccl-nvls", {"NCCL_NVLS_ENABLE": forced("0")}),
        ("L21 error NCCL_NVLS_ENABLE", "sglang", None, "--enable-symm-mem", {"NCCL_NVLS_ENABLE": "0"}),
        ("", "sglang", "0.5.12", "--enable-nccl-nvls", {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}),
        ("L22 warning CUDA_DEVICE_MAX_CONNECTIONS", "sglang", "0.5.3", "", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}),
        ("", "sglang", "0.5.23", "", {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_MODULE_LOADING": "LAZY"}),
        ("", "sglang", "0.5.3", "", {"CUDA_DEVICE_MAX_CONNECTIONS": "4", "CUDA_MODULE_LOADING": forced("LAZY")}),
        ("L23 warning NCCL_ALGO", "sglang", "0.5.5", DETERMINISTIC, {"NCCL_ALGO": "Ring"}),
        ("L23 error NCCL_ALGO", "sglang", "0.5.12", DETERMINISTIC, {"NCCL_ALGO": forced("Ring")}),
        ("L23 warning NCCL_MIN_NCHANNELS", "sglang", "0.5.23", DETERMINISTIC, {"NCCL_MIN_NCHANNELS": "4"}),
        ("", "sglang", "0.5.18", DETERMINISTIC, {"NCCL_MIN_NCHANNELS": "4"}),
        ("", "sglang", "0.5.23", "--enable-deterministic-inference", {"NCCL_ALGO": "Ring"}),
        ("L24 warning PYTORCH_NVML_BASED_CUDA_CHECK", "vllm", "0.25.0", "", {"PYTORCH_NVML_BASED_CUDA_CHECK": "0"}),
        ("", "vllm", "0.33.0", "", {"TORCHINDUCTOR_COMPILE_THREADS": "1"}),
        ("", "sglang", "0.5.23", "", {"TORCHINDUCTOR_COMPILE_THREADS": "4"}),
        ("L25 warning NCCL_PROTO", "vllm", "0.33.0", "", {**PINNED, "NCCL_PROTO": forced("LL")}),
        ("", "vllm", "0.33.0", "", {"VLLM_BATCH_INVARIANT": "0", "NCCL_PROTO": "LL"}),
        ("", "vllm", "0.33.0", "", {**PINNED, "NCCL_IB_HCA": "mlx5"}),
        ("L26 error HTTP_PROXY", "sglang", "0.5.12", "", {"HTTP_PROXY": "http://p:1", "no_proxy": "localhost"}),
        ("L26 error all_proxy", "sglang", "0.5.5", "--host 0.0.0.0", {"all_proxy": "x", "no_proxy": "127.0.0.1"}),
        ("L26 warning http_proxy", "vllm", "0.33.0", "", {"http_proxy": "x", "no_proxy": "127.0.0.0/8,.lab"}),
        ("L26 warning http_proxy", "transformers", "5.19.0", "--host 10.0.0.7", {"http_proxy": None}),
        ("", "sglang", "0.5.5", "--host 0.0.0.0", {"all_proxy": "x", "NO_PROXY": "0.0.0.0"}),
        ("", "sglang", "0.5.12", "--host 0.0.0.0", {"http_proxy": "x", "no_proxy": "a", "NO_PROXY": "127.0.0.1"}),
        ("", "vllm", "0.33.0", "", {"https_proxy": "x"}),
        ("", "sglang", "0.5.12", "", {"http_proxy": "x", "no_proxy": "*"}),
        ("L27 warning VLLM_LOGING_LEVEL", "vllm", None, "", {"VLLM_LOGING_LEVEL": "DEBUG"}),
        ("L27 warning CUDA_VISIBLE_DEVICE", "vllm", None, "", {"CUDA_VISIBLE_DEVICE": "0"}),
        ("", "vllm", None, "", {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_MY_PLUGIN": "1", "HF_XY_HOME": "x"}),
        ("L28 warning VLLM_USE_V1", "vllm", "0.33.0", "", {"VLLM_USE_V1": "1"}),
        ("", "vllm", "0.9.2", "", {"VLLM_USE_V1": "1"}),
        ("L29 warning LD_LIBRARY_PATH", "vllm", None, "", {"LD_LIBRARY_PATH": "/opt/x:$LD_LIBRARY_PATH"}),
        ("L29 warning MY_URL", "vllm", None, "", {"MY_URL": "http://{{ host }}/"}),
        ("", "vllm", None, "", {"MY_PRICE": "5 $", "MY_REGEX": "^a$"}),
        ("L31 error --tp_size", "sglang", "0.5.23", "--tp_size 2", {}),
        ("L31 error --speculative-num-step", "vllm", "0.33.0", "m --speculative-num-step 2", {}),
        ("L31 error --mem-fraction-statik", "sglang", None, "--mem-fraction-statik 0.8", {}),
        ("L31 warning --brand-new", "sglang", None, "--brand-new 1", {}),
        ("L31 error --brand-new", "sglang", "0.5.16", "--brand-new=1", {}),
        ("", "vllm", "0.33.0", "m --tensor_parallel_size 2 -O3 -cc.mode=3 --no-enable-prefix-caching", {}),
        ("", "sglang", "0.5.16", "--mem-fraction 0.8 --random-seed -1", {}),
        ("", "demo", "0.5.16", "--lab-speed 20 --tp 2", {}),
        ("", "transformers", "5.19.0", "m --anything", {}),
        ("L32 error --enable-deterministic-inference", "sglang", "0.4.6.post5", DETERMINISTIC, {}),
        ("", "sglang", "0.5.5", DETERMINISTIC, {}),
        ("", "sglang", "0.4.6.post5", "--model m --tp 2", {}),
        (
            "L33 error --speculative-eagle-topk",
            "sglang",
            None,
            "--speculative-algorithm EAGLE --speculative-eagle-topk 1",
            {},
        ),
    ],
)
def test_a_rule_tells_of_what_it_is_about_and_of_nothing_else(
    told: str, engine: str, version: str | None, args: str, env: Mapping[str, Any]
) -> None:
    entries = {name: {"value": None} if value is None else value for name, value in env.items()}
    found = inspect(view(engine, version, shlex.split(args), entries))
    assert [f"{each.id} {each.level} {each.name}" for each in found] == ([told] if told else [])


EAGLE = (
    "--speculative-algorithm {} --speculative-draft-model-path d "
    "--speculative-num-steps {} --speculative-eagle-topk {} "
)


@pytest.mark.parametrize(
    ("told", "engine", "args"),
    [
        ("", "sglang", EAGLE.format("EAGLE3", 3, 4) + "--speculative-num-draft-tokens 37"),
        ("error", "sglang", EAGLE.format("EAGLE3", 3, 4) + "--speculative-num-draft-tokens 38"),
        ("warning", "sglang", EAGLE.format("EAGLE3", 3, 1) + "--speculative-num-draft-tokens 3"),
        ("", "sglang", EAGLE.format("EAGLE3", 3, 1) + "--speculative-num-draft-tokens 4"),
        ("error", "sglang", "--speculative-algorithm EAGLE --speculative-num-steps 3"),
        ("warning", "sglang", "--speculative-algorithm EAGLE3"),
        ("warning", "sglang", "--speculative-num-steps 3"),
        ("", "sglang", "--speculative-algorithm NGRAM --speculative-num-draft-tokens 8"),
        ("error", "vllm", "m --speculative-config {method:eagle3}"),
        ("error", "vllm", "m --speculative-config '[3]'"),
        ("error", "vllm", """m --speculative-config '{"method": "eagle3"}'"""),
        ("", "vllm", """m --speculative-config '{"method": "mtp"}'"""),
    ],
)
def test_draft_tokens_that_do_not_fit_together(told: str, engine: str, args: str) -> None:
    found = inspect(view(engine, None, shlex.split(args), {}))
    assert [(each.id, each.level) for each in found] == ([("L33", told)] if told else [])


@pytest.mark.parametrize(
    ("told", "engine", "args", "gpus"),
    [
        ("--tp", "sglang", "--tp 4", 2),
        ("--tensor-parallel-size", "vllm", "m --tensor-parallel-size 2 -pp 2", 2),
        ("", "sglang", "--tp 4 --nnodes 2", 2),
        ("", "sglang", "--tp 4", None),
        ("", "vllm", "m -tp 8 --distributed-executor-backend ray", 2),
    ],
)
def test_more_ranks_than_gpus(told: str, engine: str, args: str, gpus: int | None) -> None:
    found = inspect(view(engine, None, shlex.split(args), {}, gpus=gpus))
    assert [(each.id, each.level, each.name) for each in found] == ([("L34", "error", told)] if told else [])


@pytest.mark.parametrize(
    ("told", "args"),
    [
        ("--port", "m --port 9000"),
        ("--served-model-name", "m --served-model-name=other"),
        ("", "m --served-model-name other mine --port 8000"),
        ("--served-model-name", "m --served-model-name mine --served-model-name other"),
    ],
)
def test_an_argument_that_readiness_would_wait_for_in_vain(told: str, args: str) -> None:
    settings = {"--port": ("port", "8000"), "--served-model-name": ("served_name", "mine")}
    found = inspect(view("vllm", None, shlex.split(args), {}, settings=settings))
    assert [(each.id, each.level, each.name) for each in found] == ([("L35", "error", told)] if told else [])


@pytest.mark.parametrize(
    ("told", "args"),
    [
        ("--api-key", "m --api-key sk-abc"),
        ("--hf-token", "m --hf-token=hf_abc"),
        ("", "m --api-key $LAMPLIGHTER_EXTRA_ARGS_3"),
        ("", "m --max-num-batched-tokens 8192"),
    ],
)
def test_a_secret_among_the_arguments(told: str, args: str) -> None:
    found = inspect(view("vllm", None, shlex.split(args), {}))
    assert [(each.id, each.level, each.name) for each in found] == ([("L36", "warning", told)] if told else [])


@pytest.mark.parametrize(
    ("told", "env"),
    [
        ("NCCL_DEBUG", {"NCCL_DEBUG": "WARN"}),
        ("NCCL_DEBUG_SUBSYS", {"NCCL_DEBUG_SUBSYS": "INIT,NET"}),
        ("NCCL_DEBUG_SUBSYS", {"NCCL_DEBUG_SUBSYS": "^ENV"}),
        ("", {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV"}),
        ("", {"NCCL_DEBUG_SUBSYS": "^NET"}),
    ],
)
def test_the_lines_that_nccl_proof_needs(told: str, env: Mapping[str, str]) -> None:
    found = inspect(view("sglang", None, (), env, nccl_proof=True))
    assert [(each.id, each.level, each.name) for each in found] == ([("L30", "warning", told)] if told else [])
    assert inspect(view("sglang", None, (), {**env, "NCCL_DEBUG": "INFO"})) == []


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("4M", "4194304"),
        ("4_194_304", "4194304"),
        ("4,194,304", "4194304"),
        ("4,5", "4"),
        ("22.0", "22"),
        ("yes", "1"),
        ("010", "10"),
    ],
)
def test_instead_of_a_number_the_one_that_was_meant_is_offered(written: str, meant: str) -> None:
    (found,) = inspect(view("sglang", None, [], {"NCCL_BUFFSIZE": written}))
    assert found.instead == meant
