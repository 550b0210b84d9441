"""Can a server start here, now? Each question on the ground that it is about, real where a test may ruin it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.finding import Finding
from lamplighter.node.start import ground, startup
from lamplighter.node.start.ground import Start
from lamplighter.node.system import disks, ports
from lamplighter.release.engine import load_engine
from tests.node.living import IS_ROOT, NOBODY

PROJECT = Path(__file__).resolve().parents[2]
ZEBRA = {"name": "zebra", "distribution": "zebra", "needs": {"package": "zebra"}}
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
#: An address of documentation (RFC 5737), which no node has.
ELSEWHERE = "203.0.113.7"


def start(**given: Any) -> Start:
    plain: dict[str, Any] = {
        "name": "kimi", "argv": (sys.executable, "-c", "pass"), "environment": ENVIRONMENT, "python": sys.executable,
        "model": "a-name", "host": "127.0.0.1", "port": 18000, "gpus": 0, "engine": {"name": "zebra"},
    }  # fmt: skip
    return Start(**{**plain, **given})


def errors(asked: Start, *stopping: int) -> dict[str, Finding]:
    return {found.id: found for found in ground.examine(asked, stopping) if found.level == "error"}


def rules(engine: str) -> dict[str, Any]:
    return load_engine(engine, PROJECT / "roles").compiled


def serving(engine: str, *words: str, **given: Any) -> Start:
    """A start whose words only its ports and ranks are asked of."""
    return start(engine=rules(engine), argv=("server", *words), **given)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("0.0.0.0", 0))
        server.listen()
        yield server


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory for PYTHONPATH with the metadata and the code of zebra 1.5."""
    site = tmp_path / "site"
    metadata = site / "zebra-1.5.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: zebra\nVersion: 1.5\n")
    (site / "zebra" / "serve").mkdir(parents=True)
    for name in ("__init__.py", "launch.py", "serve/__init__.py"):
        (site / "zebra" / name).write_text("raise SystemExit('imported')\n")
    return site


def test_sound_ground_is_no_obstacle(site: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    environment = {**ENVIRONMENT, "PYTHONPATH": str(site)}
    argv = (sys.executable, "-m", "zebra.launch")
    assert errors(start(engine=ZEBRA, environment=environment, argv=argv, model=str(tmp_path))) == {}


# -- the program and the engine


@pytest.mark.parametrize("python", ["/opt/gone/bin/python", "no-such-python"])
def test_an_interpreter_that_is_gone(python: str) -> None:
    assert python in errors(start(python=python))["interpreter_missing"].message


def test_an_interpreter_is_looked_up_on_the_path_of_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zebra-python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "interpreter_missing" in errors(start(python="zebra-python"))
    assert errors(start(python="zebra-python", environment={"PATH": str(tmp_path)}, argv=())) == {}


@pytest.mark.parametrize(
    ("first_line", "mode", "says"),
    [
        (None, 0, "is not there"),
        ("#!/bin/sh", 0o644, "not executable"),
        ("#!/opt/moved/bin/python3", 0o755, "/opt/moved/bin/python3, which is not there"),
        ("#!/usr/bin/env no-such-python", 0o755, "no-such-python, which is not there"),
    ],
)
def test_a_program_that_cannot_be_started(tmp_path: Path, first_line: str | None, mode: int, says: str) -> None:
    program = tmp_path / "serve"
    if first_line is not None:
        program.write_text(f"{first_line}\n")
        program.chmod(mode)
    assert says in errors(start(argv=(str(program),)))["program_missing"].evidence


def test_a_script_that_python_is_given(tmp_path: Path) -> None:
    script = str(tmp_path / "vllm")
    assert errors(start(argv=(sys.executable, script, "serve")))["program_missing"].evidence == f"{script} is not there"
    Path(script).touch()
    assert errors(start(argv=(sys.executable, script, "serve"))) == {}


def test_metadata_without_its_code(site: Path) -> None:
    environment = {**ENVIRONMENT, "PYTHONPATH": str(site)}
    for name in ("launch.py", "__init__.py"):
        (site / "zebra" / name).unlink()
        argv = (sys.executable, "-m", "zebra.launch")
        found = errors(start(engine=ZEBRA, environment=environment, argv=argv))["engine_missing"]
        assert "its metadata says 1.5" in found.evidence
        assert ("launch is not in" if name == "launch.py" else "no __init__.py") in found.evidence
    (site / "zebra" / "serve" / "__init__.py").unlink()
    (site / "zebra" / "serve").rmdir()
    (site / "zebra").rmdir()
    found = errors(start(engine=ZEBRA, environment=environment))["engine_missing"]
    assert "there is no package zebra" in found.evidence


@pytest.mark.parametrize("variable", ["PYTHONPATH", "PYTHONHOME"])
def test_the_engine_is_asked_for_in_the_environment_of_the_launch(
    site: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(site))
    assert "not installed" in errors(start(engine=ZEBRA))["engine_missing"].message
    mine = start(engine=ZEBRA, environment={**ENVIRONMENT, "PYTHONPATH": str(site)})
    assert errors(mine) == {}
    assert ground.installed(mine).version == "1.5"


@pytest.mark.parametrize(
    ("before", "is_found"),
    [
        (("env", "PYTHONPATH={site}"), True),
        (("env", "-u", "PYTHONPATH"), False),
        (("env", "-i"), False),
        (("env", "PYTHONPATH={site}", "PYTHONHOME=/nowhere"), False),
    ],
)
def test_what_env_sets_on_the_command_line_counts(site: Path, before: tuple[str, ...], is_found: bool) -> None:
    """False refusals, and a server found in the place of none."""
    argv = (*(word.format(site=site) for word in before), sys.executable, "-m", "zebra.launch")
    environment = ENVIRONMENT if is_found else {**ENVIRONMENT, "PYTHONPATH": str(site)}
    found = errors(start(argv=argv, engine=ZEBRA, environment=environment))
    assert ("engine_missing" in found or "interpreter_broken" in found) != is_found


def test_an_engine_of_another_version(site: Path) -> None:
    mine = start(engine=ZEBRA, environment={**ENVIRONMENT, "PYTHONPATH": str(site)}, engine_version="1.4")
    assert "the node has zebra 1.5" in errors(mine)["engine_version"].message


def test_a_python_that_does_not_run(tmp_path: Path) -> None:
    broken = tmp_path / "python3"
    broken.write_text("#!/bin/sh\necho 'error while loading shared libraries: libpython3.so' >&2\nexit 127\n")
    broken.chmod(0o755)
    found = errors(start(engine=ZEBRA, python=str(broken), argv=(str(broken), "-m", "zebra")))["interpreter_broken"]
    assert "libpython3.so" in found.evidence
    with pytest.raises(startup.NoPython):
        ground.installed(start(engine=ZEBRA, python=str(broken), argv=()))


# -- what it reads


def test_a_model_that_is_gone(tmp_path: Path) -> None:
    assert "model_path" in errors(start(model=str(tmp_path / "gone")))


@pytest.mark.skipif(not IS_ROOT, reason="root reads everything, and can become somebody who does not")
@pytest.mark.parametrize("closed", [".", "config.json", ".."])
def test_a_model_that_the_servers_user_may_not_read(open_dir: Path, closed: str) -> None:
    model = open_dir / "models" / "kimi"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / closed).chmod(0)
    os.seteuid(NOBODY)
    try:
        found = errors(start(model=str(model)))
    finally:
        os.seteuid(0)
    told = found["model_path" if closed == ".." else "model_unreadable"]
    assert closed == ".." or "Permission denied" in told.evidence


def test_a_model_whose_link_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../../blobs/0123")
    evidence = errors(start(model=str(tmp_path)))["model_unreadable"].evidence
    assert "a link to ../../blobs/0123" in evidence


def test_what_engines_do_not_read_is_no_obstacle(tmp_path: Path) -> None:
    for name in ("download.log", "config.json"):
        (tmp_path / name).symlink_to("/gone")
        told = {
            each.id for each in ground.examine(serving("sglang", "--model-path", str(tmp_path), model=str(tmp_path)))
        }
        assert ("model_unreadable" in told) == (name == "config.json")


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    mine = start(model=str(tmp_path), engine={"needs": {"model_files": ["config.json", "*.gguf"]}})
    assert "none of config.json, *.gguf" in errors(mine)["model_incomplete"].evidence
    (tmp_path / "kimi.gguf").touch()
    assert errors(mine) == {}


@pytest.mark.parametrize(
    ("engine", "flag"),
    [("sglang", "--speculative-draft-model-path"), ("vllm", "--tokenizer"), ("vllm", "--ssl-keyfile")],
)
def test_another_file_that_the_command_line_names(tmp_path: Path, engine: str, flag: str) -> None:
    asked = serving(engine, f"{flag}={tmp_path / 'gone'}")
    found = [each for each in ground.examine(asked) if each.id == "file_unreadable"]
    assert [flag in each.message for each in found] == [True]


# -- what it takes


def full(monkeypatch: pytest.MonkeyPatch, place: str, **odd: int) -> None:
    """Make the file system of ``place`` seem to have that little free, in MiB or inodes."""
    real = disks.space

    def space(path: str) -> dict[str, Any]:
        numbers = {"total": 64 << 20, "free": odd.get("mib", 1000) << 20, "inodes": 10_000}
        return {**real(path), **numbers, "free_inodes": odd.get("inodes", 9000)} if path == place else real(path)

    monkeypatch.setattr(disks, "space", space)


@pytest.mark.parametrize("odd", [{"mib": 3}, {"inodes": 2}])
@pytest.mark.parametrize(("place", "cause"), [("/dev/shm", "shm_full"), ("/tmp", "tmp_full")])
def test_a_place_that_is_full(monkeypatch: pytest.MonkeyPatch, place: str, cause: str, odd: dict[str, int]) -> None:
    full(monkeypatch, place, **odd)
    asked = serving("sglang")
    assert place in {each.id: each for each in ground.examine(asked)}[cause].message


def test_several_ranks_need_more_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch, "/dev/shm", mib=40)
    for words, wanted in ((("--tp", "1"), False), (("--tp", "2"), True)):
        assert ("shm_full" in {each.id for each in ground.examine(serving("sglang", *words))}) == wanted


def test_shared_memory_that_the_stopped_server_gives_back_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch, "/dev/shm", mib=3)
    monkeypatch.setattr("lamplighter.node.system.processes.mapped_below", lambda directory, pids: sum(pids) << 20)
    assert "shm_full" in {each.id for each in ground.examine(serving("sglang"), [5])}
    assert "shm_full" not in {each.id for each in ground.examine(serving("sglang"), [50])}


def test_a_node_without_a_place_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ground, "TEMPORARY_PLACES", ("/gone",))
    assert "mode 1777" in errors(start())["tmp_unusable"].hint


def test_a_directory_for_temporary_files_that_is_none(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    found = {each.id: each for each in ground.examine(start(environment={**ENVIRONMENT, "TMPDIR": gone}))}
    assert found["tmp_unusable"].level == "warning"  # Python goes on to the next place
    assert f"{gone} is no directory" in found["tmp_unusable"].message


def test_an_address_of_another_node_is_told_behind_our_own_listener(listener: socket.socket) -> None:
    asked = start(host=ELSEWHERE, port=listener.getsockname()[1])
    assert "is not an address of this node" in errors(asked, os.getpid())["listen_address"].evidence
    assert "listen_address" not in errors(start(port=listener.getsockname()[1]))


@pytest.mark.parametrize(
    ("engine", "words", "wanted"),
    [
        ("sglang", "--tp 8", {}),
        ("sglang", "--nccl-port 28765", {28765: "NCCL"}),
        ("sglang", "--dist-init-addr 10.0.0.1:5000", {5000: "dist-init"}),
        ("sglang", "--dist-init-addr=[::1]:5000 --nnodes 2 --node-rank 1", {}),
        ("sglang", "--enable-dp-attention", {18233: "dist-init", 18235: "the detokenizer", 18236: "RPC"}),
        (
            "sglang",
            "--enable-dp-attention --dist-init-addr 127.0.0.1:5000",
            {5000: "dist-init", 5002: "the detokenizer"},
        ),
        ("vllm", "-tp 8", {}),
        ("vllm", "--master_port 29777 --nnodes 2", {29777: "torch.distributed"}),
        ("vllm", "-dpp 13345", {13345: "data parallel RPC"}),
        # What nobody names is taken all the same.
        ("sglang", "--disaggregation-mode prefill", {8998: "disaggregation bootstrap"}),
        (
            "sglang",
            "--disaggregation-mode=prefill --disaggregation-bootstrap-port 8999",
            {8999: "disaggregation bootstrap"},
        ),
        ("sglang", "--disaggregation-mode decode", {}),
        ("vllm", "--nnodes 2", {29501: "torch.distributed"}),
        ("vllm", "--nnodes 2 --node-rank 1", {}),
        ("vllm", "--nnodes 1 --master-port 29777", {}),
        ("vllm", "--kv-transfer-config {'kv_connector':'NixlConnector'}", {5600: "the NIXL side channel"}),
        ("vllm", "--kv-transfer-config {'kv_connector':'LMCacheConnectorV1'}", {}),
        ("transformers", "serve", {}),
    ],
)
def test_the_ports_that_an_engine_derives(engine: str, words: str, wanted: dict[int, str]) -> None:
    found = {each.port: each.use for each in ground.derived_ports(serving(engine, *words.split()))}
    assert wanted.items() <= found.items()
    assert bool(wanted) == bool(found)


def test_a_derived_port_that_a_variable_moves() -> None:
    words = ("--kv-transfer-config", '{"kv_connector": "NixlConnector"}')
    moved = {**ENVIRONMENT, "VLLM_NIXL_SIDE_CHANNEL_PORT": "5777"}
    (found,) = ground.derived_ports(serving("vllm", *words, environment=moved))
    assert (found.port, found.setting) == (5777, "servers.kimi.env.VLLM_NIXL_SIDE_CHANNEL_PORT")


def test_a_derived_port_near_the_end_of_all_ports_lies_below() -> None:
    found = ground.derived_ports(serving("sglang", "--enable-dp-attention", port=65400))
    assert found[0].port == 65400 - 233


def test_a_derived_port_that_is_held_is_told_with_its_holder(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    asked = serving("sglang", "--nccl-port", str(port))
    found = {each.id: each for each in ground.examine(asked)}["derived_port_in_use"]
    assert f"port {port}, which sglang takes for NCCL, is held by pid {os.getpid()} (" in found.message
    assert "servers.kimi.args.nccl-port" in found.hint
    assert "derived_port_in_use" not in {each.id for each in ground.examine(asked, [os.getpid()])}


def test_a_derived_port_that_is_bound_without_listening() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        asked = serving("sglang", "--nccl-port", str(silent.getsockname()[1]))
        assert "derived_port_in_use" in {each.id for each in ground.examine(asked)}
        assert "derived_port_in_use" not in {each.id for each in ground.examine(asked, [1])}


def test_who_has_a_socket_file_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "zmq")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        assert f"pid {os.getpid()} (" in ports.who_has_file(path)
        assert ports.who_has_file(path, [os.getpid()]) == ""
    assert ports.who_has_file(path) == ""


# -- what it is started with


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"argv": ("/bin/true", "--chat-template", "x" * 131072)}, "the argument --chat-template"),
        ({"argv": ("/bin/true", "--json=" + "x" * 131072)}, "the argument --json"),
        ({"environment": {**ENVIRONMENT, "TOKEN": "x" * 131072}}, "the variable TOKEN"),
        ({"argv": ("/bin/true", *["x" * 100_000] * 100)}, "so many arguments"),
    ],
)
def test_what_the_kernel_does_not_pass(given: dict[str, Any], says: str) -> None:
    found = errors(start(python="/bin/true", **given))["argument_size"]
    assert says in found.message
    assert "xxxx" not in found.message + found.evidence


def test_an_argument_that_just_fits() -> None:
    assert errors(start(python="/bin/true", argv=("/bin/true", "--" + "x" * 131069))) == {}


@pytest.mark.parametrize(
    ("engine", "words", "wanted"),
    [
        ("sglang", "--tp 8", 8),
        ("sglang", "--tp-size 4 --pp-size 2", 8),
        ("sglang", "--tp 2 --dp 4", 8),
        ("sglang", "--tp 8 --dp 8 --enable-dp-attention", 8),
        ("sglang", "--tp 16 --nnodes 2", 8),
        ("sglang", "--tp 4 --base-gpu-id 4", 8),
        ("vllm", "--tensor_parallel_size=4 -pp 2", 8),
        ("vllm", "-tp 2 -dp 4", 8),
        ("vllm", "-tp 2 -dp 16 -dpl 4", 8),
    ],
)
def test_more_ranks_than_gpus(engine: str, words: str, wanted: int) -> None:
    for gpus, is_enough in ((wanted, True), (wanted - 1, False)):
        found = {each.id: each for each in ground.examine(serving(engine, *words.split(), gpus=gpus))}
        assert ("gpu_count" not in found) == is_enough
        assert is_enough or f"needs {wanted} GPUs" in found["gpu_count"].message


@pytest.mark.parametrize(
    ("words", "gpus"), [("-tp 16 --distributed-executor-backend ray", 8), ("-tp many", 8), ("-tp 8", 0)]
)
def test_ranks_that_nothing_can_be_said_of(words: str, gpus: int) -> None:
    assert "gpu_count" not in {each.id for each in ground.examine(serving("vllm", *words.split(), gpus=gpus))}


# -- what a launch script gives, and what `verify` would say later


def test_a_launch_script_tells_what_it_gives(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text('#!/bin/sh\nexport NAME="a b"\ncd /usr || exit 2\nexec "$@"\n')
    script.chmod(0o755)
    environment, directory = ground.surroundings(str(script), {"PATH": "/usr/bin:/bin"})
    assert (environment["NAME"], directory) == ("a b", "/usr")
    script.write_text("#!/bin/sh\necho no pysite >&2\nexit 2\n")
    with pytest.raises(ground.NoAnswer, match="no pysite"):
        ground.surroundings(str(script), {"PATH": "/usr/bin:/bin"})


def test_a_disk_on_which_verify_would_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full(monkeypatch, str(tmp_path), mib=900)
    limits = {"disk_free_gib": 5, "inodes_free_percent": 5, "shm_free_gib": 0}
    found = list(ground.room_for_verify([str(tmp_path)], limits, "servers.kimi.checks"))
    assert [(each.id, each.level) for each in found] == [("disk_low", "warning")]
    assert "0.9 GiB free" in found[0].message
    assert not list(ground.room_for_verify([str(tmp_path)], {**limits, "disks_have_room": "off"}, ""))
    assert not list(ground.room_for_verify([str(tmp_path)], {**limits, "disk_free_gib": 0.5}, ""))
    full(monkeypatch, str(tmp_path), inodes=100)
    assert "inodes" in next(ground.room_for_verify([str(tmp_path)], {**limits, "disk_free_gib": 0}, "")).message


#: A Python on a file system without programs, in a mount namespace of its own.
NOEXEC = """
import sys
sys.path.insert(0, sys.argv[1])
from lamplighter.node.start import ground
start = ground.Start("kimi", (), {}, sys.argv[2], "kimi-k2", "127.0.0.1", 8000, 0, {})
(found,) = (each for each in ground.examine(start) if each.id.startswith("interpreter"))
print(found.id, found.message, found.hint)
"""


@pytest.mark.skipif(not IS_ROOT, reason="a mount of one's own needs root")
def test_a_python_on_a_mount_without_programs_is_told_as_that(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o noexec,size=1m,mode=755 none "$1" && cp /bin/true "$1/python3" && shift && exec "$@"'
    words = [sys.executable, "-I", "-c", NOEXEC, str(PROJECT), f"{tmp_path}/python3"]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), *words], capture_output=True, text=True, check=False
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("no mount namespace here")
    assert done.stdout.startswith("interpreter_noexec"), done
    assert "mounted noexec" in done.stdout
    assert "remount" in done.stdout
