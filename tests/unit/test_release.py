"""A release as text: its digest, its plan, and the golden example of eight PCIe GPUs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lamplighter
from lamplighter.errors import InventoryError
from lamplighter.inventory import SecretRef, Server, load_inventory
from lamplighter.inventory.values import Origin
from lamplighter.release.engine import load_engine
from lamplighter.release.release import Release, build_release, server_plan
from lamplighter.release.render import quote

PROJECT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"


@dataclasses.dataclass(frozen=True)
class SglangShaped:
    """Stands for the engine: its argument rule, and the tables that a release carries for the node."""

    name: str = "sglang"
    compiled: dict[str, Any] = dataclasses.field(default_factory=lambda: {"name": "sglang", "failures": []})

    is_python = True

    def served_name(self, server: Server) -> str:
        return server.served_name or server.model

    def argv(self, server: Server) -> list[str]:
        words = [server.python, "-m", "sglang.launch_server", "--model-path", server.model]
        words += ["--host", server.host, "--port", str(server.port)]
        for name, value in server.args.items():
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return [*words, *server.extra_args]


def server(**changes: Any) -> Server:
    """The incident's server: a 1T-parameter model on 8 PCIe GPUs, EAGLE-3."""
    kimi = {
        "name": "kimi",
        "engine": "sglang",
        "model": "/models/kimi-k2.5-int4",
        "served_name": "kimi-k2.5-int4",
        "port": 8000,
        "python": "/opt/sglang/bin/python",
        "args": {"tp": 8, "speculative-algorithm": "EAGLE3", "speculative-num-steps": 2, "trust-remote-code": True},
        "env": {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": {"value": "SYS", "mode": "force"}},
    }
    return Server.model_validate({**kimi, **changes})


def release(project: Path = PROJECT, engine: SglangShaped | None = None, **changes: Any) -> Release:
    return build_release(None, server(**changes), engine or SglangShaped(), project)  # type: ignore[arg-type]


def copy_of_templates(directory: Path) -> Path:
    shutil.copytree(PROJECT / "templates", directory / "templates")
    return directory


@pytest.mark.parametrize("name", ["launch.sh", "pysite/sitecustomize.py", "server.service"])
def test_the_incidents_server_renders_as_written_down(name: str) -> None:
    """A template or the example changed? Look at the difference, then run this with LAMPLIGHTER_GOLDEN=write."""
    gpu1 = load_inventory(PROJECT / "inventory", PROJECT / "roles").host("gpu1")
    kimi = gpu1.servers["kimi"]
    built = build_release(gpu1, kimi, load_engine(kimi.engine, PROJECT / "roles"), PROJECT)
    text = built.files[name].text.replace(built.digest, "DIGEST")
    golden = GOLDEN / ("kimi-" + name.replace("/", "-"))
    if os.environ.get("LAMPLIGHTER_GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text()


def test_files_and_modes() -> None:
    files = release().files
    assert {name: file.mode for name, file in files.items()} == {
        "launch.sh": 0o755,
        "pysite/sitecustomize.py": 0o644,
        "release.json": 0o644,
        "server.service": 0o644,
    }


def test_release_json_names_every_other_file_and_what_runs() -> None:
    built = release()
    written = json.loads(built.files["release.json"].text)
    assert set(written["files"]) == set(built.files) - {"release.json"}
    text = built.files["launch.sh"].text.encode()
    assert written["files"]["launch.sh"] == {"sha256": hashlib.sha256(text).hexdigest(), "mode": "0755"}
    assert written["digest"] == built.digest
    assert written["server"]["argv"][0] == "/opt/sglang/bin/python"
    assert "timeouts" not in written["server"]


def test_manifest_holds_the_whole_plan_the_engine_and_our_version() -> None:
    built, kimi = release(), server()
    assert built.manifest["server"] == server_plan(None, kimi, SglangShaped())  # type: ignore[arg-type]
    assert built.manifest["engine"] == SglangShaped().compiled
    assert built.manifest["lamplighter"] == lamplighter.__version__
    assert built.manifest == json.loads(json.dumps(built.manifest))


def test_digest_is_the_same_in_another_checkout_and_another_process(tmp_path: Path) -> None:
    here = release()
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_release; print(test_release.release().digest)"
    there = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(PROJECT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == here.digest == release(copy_of_templates(tmp_path)).digest
    assert len(here.digest) == 12
    assert str(PROJECT) not in "".join(file.text for file in here.files.values())


@pytest.mark.parametrize(
    "change",
    [
        {"env": {}},
        {"env": {"NCCL_PROTO": {"value": "LL", "mode": "force"}}},
        {"args": {"tp": 4}},
        {"python": "/opt/other/bin/python"},
        {"gpus": [0, 1]},
        {"engine_version": "0.5.16"},
        {"launcher": "detached"},
    ],
)
def test_what_runs_decides_the_digest(change: dict[str, Any]) -> None:
    assert release(**change).digest != release().digest


@pytest.mark.parametrize(
    "change", [{"timeouts": {"ready": 9}}, {"keep_releases": 2}, {"allow": ["Xorg"]}, {"stale": {"kill": ["x"]}}]
)
def test_how_we_treat_a_server_restarts_nothing(change: dict[str, Any]) -> None:
    changed = release(**change)
    assert changed.digest == release().digest
    assert changed.files == release().files
    assert changed.manifest["server"] != release().manifest["server"]


def test_a_better_failure_table_restarts_nothing() -> None:
    better = release(engine=SglangShaped(compiled={"failures": [{"id": "new"}]}))
    assert (better.digest, better.files) == (release().digest, release().files)


def test_a_changed_template_is_another_release(tmp_path: Path) -> None:
    copy = copy_of_templates(tmp_path)
    with (copy / "templates" / "launch.sh.j2").open("a") as file:
        file.write("# one more line\n")
    assert release(copy).digest != release().digest


def test_order_of_variables_in_the_inventory_does_not_matter() -> None:
    assert release(env={"A": "1", "B": "2"}).digest == release(env={"B": "2", "A": "1"}).digest


def test_of_a_secret_the_plan_has_the_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_show")
    with_secret = server(secrets={"HF_TOKEN": SecretRef("env", "HF_TOKEN")})
    plan = server_plan(None, with_secret, SglangShaped())  # type: ignore[arg-type]
    assert plan["env"]["NCCL_P2P_LEVEL"] == {"value": "SYS", "mode": "force"}
    assert plan["secrets"] == ["HF_TOKEN"]
    assert plan == json.loads(json.dumps(plan))
    built = build_release(None, with_secret, SglangShaped(), PROJECT)  # type: ignore[arg-type]
    assert "hf_do_not_show" not in "".join(file.text for file in built.files.values())


def test_served_name_falls_back_to_the_model() -> None:
    plan = server_plan(None, server(served_name=None), SglangShaped())  # type: ignore[arg-type]
    assert plan["served_name"] == "/models/kimi-k2.5-int4"


def test_a_role_overrides_a_template(tmp_path: Path) -> None:
    copy = copy_of_templates(tmp_path)
    own = copy / "roles" / "sglang" / "templates"
    own.mkdir(parents=True)
    (own / "launch.sh.j2").write_text("#!/bin/sh\n# ours\nexec {{ argv[0] | sh }}\n")
    assert release(copy).files["launch.sh"].text == "#!/bin/sh\n# ours\nexec /opt/sglang/bin/python\n"
    other_role = build_release(None, server(engine="vllm"), SglangShaped("vllm"), copy)  # type: ignore[arg-type]
    assert other_role.files["launch.sh"].text.endswith("    --trust-remote-code\n")
    child = SglangShaped("demo", {"ancestors": ["sglang", "torch"]})
    assert release(copy, engine=child).files["launch.sh"].text.startswith("#!/bin/sh\n# ours\n")


@pytest.mark.parametrize(
    ("template", "line", "says"),
    [
        ("#!/bin/sh\nexec {{ argv }} {{ misspelt }}\n", 2, "misspelt"),
        ("#!/bin/sh\n\n{% if %}\n", 3, "Jinja2"),
        ("#!/bin/sh\n{{ argv | nosuchfilter }}\n", 2, "nosuchfilter"),
        ("#!/bin/sh\n\n\n{{ 1 | sh }}\n", 4, "int"),
    ],
)
def test_a_faulty_template_is_named_with_its_line(tmp_path: Path, template: str, line: int, says: str) -> None:
    copy = copy_of_templates(tmp_path)
    (copy / "templates" / "launch.sh.j2").write_text(template)
    with pytest.raises(InventoryError) as caught:
        release(copy)
    assert str(caught.value.origin) == f"templates/launch.sh.j2:{line}"
    assert says in str(caught.value)


def test_a_missing_template_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(InventoryError) as caught:
        release(tmp_path)
    assert f"{tmp_path}/roles/sglang/templates and {tmp_path}/templates" in str(caught.value)


def test_a_directory_with_a_colon_cannot_be_on_path() -> None:
    with pytest.raises(InventoryError, match="colon"):
        release(python="/opt/a:b/bin/python")


@pytest.mark.parametrize("value", ["a\0b", "\ud800"])
def test_the_quoter_refuses_what_no_process_can_be_given(value: str) -> None:
    with pytest.raises(ValueError, match=r"NUL|surrogates"):
        quote(value)


def test_an_argument_that_no_process_can_be_given_is_the_inventorys_fault() -> None:
    with pytest.raises(InventoryError, match="surrogates"):
        release(extra_args=["\ud800"])


def refused(**changes: Any) -> None:
    class Host:
        def origin(self, path: str) -> Origin:
            return Origin(path, 7)

    build_release(Host(), server(**changes), SglangShaped(), PROJECT)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["x" * (131072 - len("BIG=")), "é" * 65536], ids=["ascii", "utf-8"])
def test_a_variable_that_the_kernel_passes_to_no_process_is_refused_with_its_place(value: str) -> None:
    with pytest.raises(InventoryError, match=r"servers\.kimi\.env\.BIG: no process can be given") as caught:
        refused(env={"BIG": value})
    assert str(caught.value.origin) == "servers.kimi.env.BIG:7"
    assert value not in str(caught.value)
    assert release(env={"BIG": "x" * (131072 - len("BIG=") - 1)})


def test_cuda_visible_devices_beside_gpus_is_a_contradiction() -> None:
    for gpus in ([0, 1], []):
        with pytest.raises(InventoryError, match=r"servers\.kimi\.env\.CUDA_VISIBLE_DEVICES: "):
            refused(env={"CUDA_VISIBLE_DEVICES": "0"}, gpus=gpus)
    assert release(env={"CUDA_VISIBLE_DEVICES": "0"}, gpus="all")
    assert release(env={"CUDA_VISIBLE_DEVICES": ""}, gpus=[])


# -- how the variables reach the workers


def test_the_server_scope_goes_by_pythonpath() -> None:
    built = release(sitecustomize={"scope": "server"})
    assert 'export PYTHONPATH="$1/pysite' in built.files["launch.sh"].text
    assert "LAMPLIGHTER_PYSITE" not in built.files["launch.sh"].text


@pytest.mark.parametrize("scope", ["pth", "interpreter"])
def test_the_other_scopes_name_the_file_and_leave_pythonpath_alone(scope: str) -> None:
    built = release(sitecustomize={"scope": scope})
    assert 'export LAMPLIGHTER_PYSITE="$1/pysite"' in built.files["launch.sh"].text
    assert "PYTHONPATH" not in built.files["launch.sh"].text
    assert "NCCL_PROTO" in built.files["pysite/sitecustomize.py"].text


def test_no_scope_means_exports_alone() -> None:
    built = release(sitecustomize={"scope": "none"})
    assert "pysite/sitecustomize.py" not in built.files
    assert "pysite" not in built.files["launch.sh"].text
    assert "export NCCL_PROTO=LL" in built.files["launch.sh"].text


def test_nccl_is_made_to_talk_where_a_proof_is_asked_for() -> None:
    silent = release().manifest["server"]["env"]
    talks = release(nccl_proof=True).manifest["server"]["env"]
    assert talks == {
        "NCCL_DEBUG": {"value": "INFO", "mode": "default"},
        "NCCL_DEBUG_SUBSYS": {"value": "INIT,ENV", "mode": "default"},
        **silent,
    }
    ours = release(nccl_proof=True, env={"NCCL_DEBUG": "TRACE"}).manifest["server"]["env"]
    assert ours["NCCL_DEBUG"]["value"] == "TRACE"


# -- the unit


def test_a_detached_server_has_no_unit_and_a_role_may_write_its_own(tmp_path: Path) -> None:
    assert "server.service" not in release(launcher="detached").files
    copy = copy_of_templates(tmp_path)
    own = copy / "roles" / "sglang" / "templates"
    own.mkdir(parents=True)
    (own / "server.service.j2").write_text("[Service]\nExecStart=/bin/sh @LAUNCH@\n# {{ name }}\n")
    assert release(copy).files["server.service"].text == "[Service]\nExecStart=/bin/sh @LAUNCH@\n# kimi\n"
