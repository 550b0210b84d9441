"""What can go wrong on the way to a node, in words that are the same whoever drives SSH."""

from __future__ import annotations

from lamplighter.errors import UNTOUCHED, ContactLost, LoginFailed, NodeRefused, SessionRefused, Unreachable
from lamplighter.ssh.config import Settings, ssh_line

#: Seconds for one login attempt; a node with a slow directory service or DNS takes its time here.
AUTH_SECONDS = 30.0
#: Seconds for opening a channel and for the node's answer to exec.
CHANNEL_SECONDS = 20.0
#: Seconds between two attempts when nobody listens: long enough for an sshd that is being restarted.
REFUSED_PAUSE = 0.5
UNKNOWN_STATE = "not known from here; the node finishes what it started"

_KINDS = {
    "unresolved": (
        "the name {host} does not resolve",
        "check ansible_host, HostName in ssh_config, and DNS",
    ),
    "refused": ("nothing listens on {host}:{port}", "is sshd running there, and is ansible_port right?"),
    "silent": ("{host}:{port} does not answer", "is the node up, and does a firewall let this machine in?"),
    "slow": (
        "{host}:{port} accepts connections but does not speak SSH in time",
        "the node may be overloaded or stopped, or something else listens on that port",
    ),
    "no ssh": ("{host}:{port} is not an SSH server", "is ansible_port right?"),
    "hung up": (
        "{host}:{port} hung up during the handshake",
        "look at the sshd log of the node: MaxStartups, fail2ban, a host that is still booting",
    ),
    "no method": ("no encryption method in common with {host}:{port}", "update the SSH server on the node"),
    "proxy": (
        "the ProxyCommand for {host}:{port} does not get through",
        "run the command of ssh_config by hand to see what it does",
    ),
    "behind": (
        "the jump host cannot connect to {host}:{port}",
        "check the name and port as seen from the jump host, and AllowTcpForwarding there",
    ),
    "slow login": ("the login as {label} did not come to an end", "try `{ssh_line} -v`"),
    "other": ("no SSH connection to {host}:{port}", "try `{ssh_line} -v`"),
}


def unreachable(name: str, stop: Settings, kind: str, why: str) -> Unreachable:
    """The error of one of `_KINDS`."""
    words = {"host": stop.host, "port": stop.port, "label": stop.label, "ssh_line": ssh_line(stop.spec)}
    what, next_step = (text.format(**words) for text in _KINDS[kind])
    return Unreachable(f"{name}: {what}", why=why, serving=UNTOUCHED, next_step=next_step)


def login_failed(name: str, stop: Settings, why: str, next_step: str) -> LoginFailed:
    return LoginFailed(f"{name}: the login as {stop.label} failed", why=why, serving=UNTOUCHED, next_step=next_step)


def given_up(name: str) -> Unreachable:
    return Unreachable(f"{name}: the connection was given up", serving=UNTOUCHED, next_step="try again")


def connection_gone(name: str, stop: Settings, why: str) -> Unreachable:
    return Unreachable(
        f"{name}: the connection to {stop.label} is gone",
        why=why or "it ended without a word",
        serving=UNTOUCHED,
        next_step="try again",
    )


def session_refused(name: str, stop: Settings, why: str) -> SessionRefused:
    return SessionRefused(
        f"{name}: {stop.label} refuses another session on this connection",
        why=why,
        serving=UNTOUCHED,
        next_step="set MaxSessions in the node's sshd_config to 1 or more, and look for a command there that "
        "still holds the session of an earlier task",
    )


def runs_no_commands(name: str, stop: Settings) -> NodeRefused:
    return NodeRefused(
        f"{name}: {stop.label} lets us in but runs no commands",
        why="the sshd refused the exec request",
        serving=UNTOUCHED,
        next_step="look for ForceCommand, a restricted key or a no-login shell on the node",
    )


def unanswered(name: str, stop: Settings, why: str) -> ContactLost:
    return ContactLost(
        f"{name}: {stop.label} did not say whether it started the command",
        why=why,
        serving=UNKNOWN_STATE,
        next_step="try again; the same task picks up what the node did",
    )
