"""What the workers of the server run with: its variables, our sitecustomize, the engine's files.

The node's own program alone tells what is in the memory of a worker, which record a worker has left, and whether the
thousands of files of an engine are as its package lists them.
"""

from __future__ import annotations

import pytest

from lamplighter.run.checks import asked, text_of, together


def test_workers_carry_the_variables(server, facts, evidence):
    """Does every live worker carry the variables of the inventory?"""
    found = facts["environment"]
    if found["state"] == "stopped":
        pytest.skip("the server does not run")
    wrong = [
        f"{each['title']} (pid {each['pid']}): {each['name']} is {each['found']}, not {each['expected']}: {each['by']}"
        for each in found["differences"]
    ]
    assert not wrong, "; ".join(wrong)
    if found["state"] == "inconclusive":
        pytest.skip(found["message"])
    evidence(found["message"])


def test_sitecustomize_is_in_force(server, facts, evidence):
    """Has our sitecustomize run in every worker?"""
    if facts["environment"]["state"] == "stopped":
        pytest.skip("the server does not run")
    found = facts["sitecustomize"]
    if found["scope"] == "none":
        pytest.skip("sitecustomize.scope is none")
    workers = found["workers"]
    assert workers, "no worker was found"
    wrong = [f"pid {pid}: {verdict}" for pid, verdict in workers.items() if verdict != "in force"]
    assert not wrong, "; ".join(wrong)
    evidence(f"{len(workers)} of {len(workers)} workers")


@pytest.mark.warning
def test_engine_files_are_as_installed(facts, evidence):
    """Are the engine's files as their package was built?"""
    engine = facts["engine"]
    if not engine:
        pytest.skip("this engine is no installed package")
    if engine.get("error"):
        pytest.skip(engine["error"])
    changed = [*engine["changed"], *(f"{name} (missing)" for name in engine["missing"])]
    what = f"{engine['distribution']} {engine['version']}"
    assert not changed, f"{len(changed)} files of {what} are not as in RECORD: {', '.join(changed[:5])}"
    evidence(f"{engine['files']} files of {what}")


@asked
def nccl_files(host, facts):
    """The files that NCCL reads variables from, with their lines; "" for one that is not there."""
    home = host.environment().get("HOME", "")
    files = {path: host.file(path.replace("~", home, 1)) for path in facts["nccl_files"]}
    found = together(*(lambda file=file: text_of(file) or "" for file in files.values()))
    return dict(zip(files, found, strict=True))


@pytest.mark.warning
def test_nccl_takes_nothing_from_files(nccl_files, evidence):
    """Does NCCL take its variables from the inventory alone?"""
    for path, text in nccl_files.items():
        lines = [line.strip() for line in text.splitlines() if "=" in line and not line.lstrip().startswith("#")]
        assert not lines, f"{path} says {'; '.join(lines[:5])}"
    evidence(f"no {' nor '.join(nccl_files)}")
