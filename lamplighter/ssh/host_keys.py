"""What the operator is told about a host key that is not accepted."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from lamplighter.errors import UNTOUCHED, Unreachable
from lamplighter.ssh.config import Settings, decoded, fingerprint, known_lines, ssh_line


class HostKeyUnknown(Unreachable):
    """No known_hosts file vouches for the key that the host showed; ``fingerprint`` is that key's."""

    fingerprint = ""


class HostKeyChanged(Unreachable):
    """The host showed another key than the known one, or a revoked one; ``fingerprint`` is what it showed."""

    fingerprint = ""


def host_key_unknown(name: str, stop: Settings, shown: str, *, is_behind: bool) -> HostKeyUnknown:
    """``shown`` is the kind of the key and its fingerprint; a host may be behind another one."""
    error = HostKeyUnknown(
        f"{name}: the host key of {stop.host}:{stop.port} is unknown",
        why=f"it showed {shown}, and no known_hosts file vouches for that",
        serving=UNTOUCHED,
        next_step=f"compare the fingerprint with the node's own (on its console: {_own_fingerprint(shown)}), "
        + _then_add(stop, is_behind),
    )
    error.fingerprint = shown.rpartition(" ")[2]
    return error


def host_key_changed(name: str, stop: Settings, shown: str, origin: str) -> HostKeyChanged:
    """``origin`` is the line of known_hosts that has another key."""
    file = origin.rpartition(":")[0]
    lines = known_lines([Path(file)])
    known = [f"{words[1]} {fingerprint(decoded(words[2]))}" for line, words in lines if line == origin]
    error = HostKeyChanged(
        f"{name}: the host key of {stop.host}:{stop.port} has changed",
        why=f"it showed {shown}; known is {''.join(known)} ({origin})",
        serving=UNTOUCHED,
        next_step="either the node was installed again or somebody is listening in: compare with its console "
        f"({_own_fingerprint(shown)}); if it is right: "
        + shlex.join(["ssh-keygen", "-R", stop.host_names[0], "-f", file])
        + f", {_then_add(stop, is_behind=True)}",
    )
    error.fingerprint = shown.rpartition(" ")[2]
    return error


def host_key_revoked(name: str, stop: Settings, shown: str, said: str) -> HostKeyChanged:
    """``said`` is what ssh had to say."""
    digest = shown.rpartition(" ")[2]
    lines = [
        line
        for line, words in known_lines(stop.known_hosts)
        if words[0] == "@revoked" and fingerprint(decoded(words[-1 if len(words) < 4 else 3])) == digest
    ]
    error = HostKeyChanged(
        f"{name}: the host key of {stop.host}:{stop.port} is revoked",
        why=f"it showed {shown}, revoked by {', '.join(lines) or stop.get('revokedhostkeys')}; ssh says: {said}",
        serving=UNTOUCHED,
        next_step="do not connect; find out why this key was revoked",
    )
    error.fingerprint = digest
    return error


def host_key_unwritten(name: str, file: str) -> Unreachable:
    """A new key that ``file`` did not take: it would be accepted unseen each time."""
    return Unreachable(
        f"{name}: cannot write down the new host key",
        why=f"ssh could not add it to {file}",
        serving=UNTOUCHED,
        next_step=f"make {file} a file that this user may write, or set the host variable known_hosts to one",
    )


def _then_add(stop: Settings, is_behind: bool) -> str:
    words = "then run: "
    file = next((file for file in stop.known_hosts if file != Path(os.devnull)), None)
    if file is None:  # ssh itself has no place for the key either
        file = Path("THAT_FILE")
        words = "then set the host variable known_hosts to a file (none that keeps anything is named) and run: "
    place = shlex.quote(str(file))
    if file.is_dir():
        words += f"mv {place} {place}.aside && "
    elif not file.parent.is_dir():
        words += f"mkdir -p -m 700 {shlex.quote(str(file.parent))} && "
    if is_behind or stop.get("hostkeyalias", ""):  # ssh-keyscan knows neither aliases nor jump hosts
        accept = ("-o", "StrictHostKeyChecking=accept-new", "-o", f"UserKnownHostsFile={file}")
        return f"{words}{ssh_line(stop.spec, *accept)} true"
    port = "" if stop.port == 22 else f"-p {stop.port} "
    return f"{words}ssh-keyscan {port}{shlex.quote(stop.host)} >> {place}"


def _own_fingerprint(shown: str) -> str:
    kind = shown.lower()
    short = "rsa" if "rsa" in kind else "ecdsa" if kind.startswith("ecdsa") else "ed25519"
    return f"ssh-keygen -lf /etc/ssh/ssh_host_{short}_key.pub"
