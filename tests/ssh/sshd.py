"""A real sshd on a loopback port, run by whoever runs the tests: own configuration, keys, and HOME of its sessions."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.driver import free_port

BINARY = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin:/sbin")

CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
{host_keys}
PidFile none
AuthorizedKeysFile {directory}/authorized_keys
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
PrintMotd no
UseDNS no
SetEnv HOME={directory}
LogLevel VERBOSE
{extra}
"""


def missing() -> str | None:
    """Why there can be no sshd here, or None."""
    if BINARY is None:
        return "there is no sshd (Debian: apt install openssh-server)"
    return None if shutil.which("ssh-keygen") else "there is no ssh-keygen"


def make_key(file: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """A new private key in ``file``, its public half beside it."""
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", str(file)], check=True)
    return file


def public(file: Path) -> str:
    """``type base64`` of the key pair ``file``."""
    return " ".join(Path(f"{file}.pub").read_text().split()[:2])


def sign(authority: Path, key: Path, user: str, *options: str) -> Path:
    """A user certificate for ``key``, beside it."""
    words = ["ssh-keygen", "-q", "-s", str(authority), "-I", "test", "-n", user, *options, f"{key}.pub"]
    subprocess.run(words, check=True)
    return Path(f"{key}-cert.pub")


class Sshd:
    """One running server; ``stop`` ends it by its own pid. Sessions end with their connections."""

    def __init__(
        self, directory: Path, client_key: Path, kinds: tuple[str, ...] = ("ed25519",), extra: str = ""
    ) -> None:
        directory.mkdir()
        self.host = "127.0.0.1"
        self.user = getpass.getuser()
        self.log = directory / "sshd.log"
        self.host_keys = {kind: make_key(directory / f"host_{kind}", kind) for kind in kinds}
        self._directory = directory
        self.authorize(client_key)
        self._extra = extra
        if os.geteuid() == 0:  # its compiled-in place for privilege separation
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        for _ in range(5):  # another process may take the free port first
            self.port = free_port()
            if self._start():
                return
        raise RuntimeError(f"sshd does not start: {self.log.read_text()}")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def authorize(self, *keys: Path) -> None:
        """Let these keys in, and no others."""
        (self._directory / "authorized_keys").write_text("".join(f"{public(key)}\n" for key in keys))

    def known_line(self, kind: str = "ed25519") -> str:
        return f"[{self.host}]:{self.port} {public(self.host_keys[kind])}\n"

    def _start(self) -> bool:
        config = self._directory / "sshd_config"
        host_keys = "\n".join(f"HostKey {file}" for file in self.host_keys.values())
        values: Mapping[str, object] = {"port": self.port, "host_keys": host_keys, "directory": self._directory}
        config.write_text(CONFIG.format(**values, extra=self._extra))
        assert BINARY
        words = [BINARY, "-f", str(config)]
        # OpenSSH >= 9.8 makes an address that failed to log in wait; older ones do not know the word.
        penalties = ["-o", "PerSourcePenalties=no"]
        if subprocess.run([*words, "-t", *penalties], capture_output=True, check=False).returncode == 0:
            words += penalties
        self._process = subprocess.Popen([*words, "-D", "-E", str(self.log)], stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while self._process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex((self.host, self.port)) == 0:
                    return True
            time.sleep(0.02)
        return False
