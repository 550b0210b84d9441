"""Packs what a GPU machine that is bare and offline needs: ``python tests/gpu/pack.py site|project|jit ... DIRECTORY``.

``site``: SGLang without the parts that the machine has (torch) or that this model never calls, 56 MB in site.tar.xz.
``project``: one commit, the packages of requirements.lock for CPython 3.12, and an SSH server, 25 MB in three files.
Both need ``uv``, the network, and a Debian 12 with apt for the SSH server; neither changes anything on this machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
FOREIGN = ["--python-platform", "x86_64-manylinux_2_39", "--python-version", "3.12", "--only-binary", ":all:"]

#: Big and not called by a small dense model on one kind of GPU, below the site directory.
UNUSED = [
    "nvidia_cutlass_dsl*",
    "tokenspeed_*",
    "tilelang*",
    "nvidia*",
    "z3*",
    "jedi*",
    "modelscope*",
    "anthropic*",
    "helion*",
    "flash_attn*",
    "humming*",
    "quack*",
    "Cryptodome",
    "smg_grpc*",
    "py_spy*",
    "cuda_tile*",
    "bin",
    "sgl_kernel/flash_ops.abi3.so",
    "sgl_kernel/sm100",
    "sgl_kernel/infllm_ops*",
    "flashinfer/data/cutlass",
    "flashinfer/data/cccl",
    "mistral_common/data",
    "deep_gemm/include",
    "xgrammar/lib",
    "pycountry/locales",
    "sglang/test",
    "**/tests",
    "**/__pycache__",
]
STRIP_FROM_BYTES = 1 << 20

#: Checkers of this project's own code: nothing there runs them.
CHECKERS = {"ruff", "mypy", "ast-serialize", "librt", "types-paramiko", "types-pyyaml", "hypothesis"}
SSH_PACKAGES = ["openssh-server", "libwrap0", "libnsl2", "libtirpc3"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["site", "project"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--commit", default="HEAD", help="what of the project is packed")
    parser.add_argument("--keep", type=Path, help="for site: install here, and leave it there for the next time")
    words = parser.parse_args()
    words.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        if words.what == "site":
            pack_site(words.keep or Path(scratch) / "site", words.directory)
        else:
            pack_project(words.commit, words.directory)
            pack_control(Path(scratch), words.directory)
            pack_ssh(Path(scratch), words.directory)
    for file in sorted(words.directory.iterdir()):
        print(f"{file.stat().st_size / 1e6:8.1f} MB  {file.name}")


def pack_site(site: Path, out: Path) -> None:
    """Install SGLang for the machine's Python, thin it out, and compress it."""
    run("uv", "pip", "install", "--quiet", *FOREIGN, "--no-deps", "--target", site, "-r", HERE / "sglang.txt")
    for pattern in UNUSED:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for library in site.rglob("*.so*"):
        # sgl_kernel's hold GPU code in sections that strip does not know.
        if "sgl_kernel" not in library.parts and library.stat().st_size > STRIP_FROM_BYTES:
            subprocess.run(["strip", "--strip-unneeded", library], check=False, stderr=subprocess.DEVNULL)
    compress(site, out / "site.tar.xz")


def pack_project(commit: str, out: Path) -> None:
    with (out / "project.tar").open("wb") as file:
        subprocess.run(["git", "-C", PROJECT, "archive", commit], stdout=file, check=True)
    (out / "commit").write_text(subprocess.check_output(["git", "-C", PROJECT, "rev-parse", commit], text=True))


def pack_control(scratch: Path, out: Path) -> None:
    """Pack what ``inv`` would install into its environment: the locked packages, hashes checked."""
    wanted = scratch / "control.txt"
    entries = re.split(r"\n(?=\S)", (PROJECT / "requirements.lock").read_text())
    wanted.write_text("\n".join(entry for entry in entries if re.split(r"[=\s]", entry)[0] not in CHECKERS))
    site = scratch / "control"
    run("uv", "pip", "install", "--quiet", *FOREIGN, "--no-deps", "--require-hashes", "--target", site, "-r", wanted)
    compress(site, out / "control.tar.xz")


def pack_ssh(scratch: Path, out: Path) -> None:
    """Unpack an SSH server of Debian 12: it runs on later systems too with three libraries beside it."""
    packages = scratch / "packages"
    packages.mkdir()
    subprocess.run(["apt-get", "download", "-qq", *SSH_PACKAGES], cwd=packages, check=True, stderr=subprocess.DEVNULL)
    root = scratch / "ssh"
    for package in packages.glob("*.deb"):
        run("dpkg-deb", "-x", package, root)
    kept = scratch / "sshd"
    kept.mkdir()
    for file in [root / "usr/sbin/sshd", *root.rglob("lib*.so.*")]:
        shutil.copy2(file.resolve(), kept / file.name)
    compress(kept, out / "sshd.tar.xz")


def compress(directory: Path, archive: Path) -> None:
    environment = {**os.environ, "XZ_OPT": "-6 -T0"}
    run("tar", "-C", directory, "--owner=0", "--group=0", "-cJf", archive, ".", environment=environment)


def run(*words: object, environment: dict[str, str] | None = None) -> None:
    subprocess.run([str(word) for word in words], check=True, env=environment)


if __name__ == "__main__":
    main()
