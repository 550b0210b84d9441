"""The hint of what a node refuses ends on the file and line that say it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lamplighter.inventory import load_inventory
from lamplighter.run.places import with_places

ROLES = Path(__file__).parents[2] / "roles"
HOSTS = """\
gpu1:
  ansible_host: 127.0.0.1
  servers:
    kimi:
      engine: sglang
      engine_version: 0.5.16
      model: /models/kimi
      port: 8000
      args:
        tp: 3
        chunked_prefil-size: 4096
      extra_args: [--own-flag=1]
"""


@pytest.mark.parametrize(
    ("told", "hint"),
    [
        ({"evidence": "argument --tensor-parallel-size/--tp: invalid int value: 'x'", "hint": "correct it"},
         "correct it; servers.kimi.args.tp is set in {file}:12"),
        ({"evidence": "unrecognized arguments: --chunked-prefil-size 4", "hint": "look", "cause": "unknown_flag"},
         "look; did you mean --chunked-prefill-size?; servers.kimi.args.chunked_prefil-size is set in {file}:13"),
        ({"evidence": "error: unrecognized arguments: --chunked-prefil-siz", "id": "unknown_flag"},
         "did you mean --chunked-prefill-size?"),
        ({"evidence": "error: unrecognized arguments: --chunked-prefil-siz", "cause": "crashed"}, ""),
        ({"evidence": "error: unrecognized arguments: --own-flag=1", "cause": "unknown_flag"},
         "servers.kimi.extra_args is set in {file}:14"),
        ({"message": "port 8000 is taken", "hint": "choose another servers.kimi.port, or end it"},
         "choose another servers.kimi.port, or end it; servers.kimi.port is set in {file}:10"),
        ({"message": "run `./inv deploy --host gpu1`", "hint": None}, ""),
        ({"evidence": "no such option: --tpx", "hint": "servers.other.port"}, "servers.other.port"),
    ],
)  # fmt: skip
def test_a_hint_names_the_line_of_what_it_speaks_of(tmp_path: Path, told: dict[str, Any], hint: str) -> None:
    file = tmp_path / "hosts.yml"
    file.write_text("all:\n  hosts:\n" + "".join(f"    {line}\n" for line in HOSTS.splitlines()))
    host = load_inventory(tmp_path, ROLES).host("gpu1")
    found = with_places(told, host, host.servers["kimi"], ROLES)
    assert found["hint"] == hint.replace("{file}", str(file))
    assert {name: value for name, value in found.items() if name != "hint"} == {
        name: value for name, value in told.items() if name != "hint"
    }
