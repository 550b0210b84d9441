"""What can go wrong on the control side, sorted by what the operator does next.

Every failure says four things: what failed, why (with the evidence), what is serving now, what to do next. What failed
on the node arrives as events instead; these are the errors that arise before or beside it.
"""

from __future__ import annotations

from lamplighter.exits import meaning_of
from lamplighter.node.events import Exit

#: What serves after an error that came before the node was asked to do anything.
UNTOUCHED = "unchanged; nothing was touched"


class LamplighterError(Exception):
    """Root of all errors that a user may see; ``str()`` composes the whole message, ready to print."""

    exit_code: Exit = Exit.INTERNAL
    advice = ""
    """What to do next, of an error of this kind that does not know better."""

    def __init__(
        self, what: str, *, why: str = "", origin: object = None, serving: str = "", next_step: str = ""
    ) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.origin = origin
        self.serving = serving
        self.next_step = next_step

    def __str__(self) -> str:
        head = f"{self.origin}: {self.what}" if self.origin else self.what
        lines = [head]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.serving:
            lines.append(f"  serving: {self.serving}")
        if self.next_step:
            lines.append(f"  next: {self.next_step}")
        return "\n".join(lines)

    @property
    def whole(self) -> str:
        """The message for who reads nothing else: with what to do next, even where the error itself does not say it."""
        text = str(self)
        return text if self.next_step or not self.advice or "\n  next: " in text else f"{text}\n  next: {self.advice}"


class UsageError(LamplighterError):
    """The command line asks for something that is not there; nothing was opened."""

    exit_code = Exit.USAGE
    advice = "correct that, and run the command again"


class InventoryError(LamplighterError):
    """The inventory, a role or a template is wrong; ``origin`` is ``file:line``; nothing was opened."""

    exit_code = Exit.USAGE
    advice = meaning_of(Exit.USAGE).next_step


class Unreachable(LamplighterError):
    """No usable SSH connection: refused, timed out, unknown or changed host key; nothing was touched."""

    exit_code = Exit.UNREACHABLE
    advice = meaning_of(Exit.UNREACHABLE).next_step


class SessionRefused(Unreachable):
    """The node lets us in, and takes no (further) session on this connection."""


class LoginFailed(Unreachable):
    """The host answered and turned us away: no key fits."""


class NodeRefused(LamplighterError):
    """The node cannot run our side: no Python >= 3.9, a root directory that is not ours; nothing was touched."""

    exit_code = Exit.REFUSED
    advice = meaning_of(Exit.REFUSED).next_step.format(on="")


class ContactLost(LamplighterError):
    """The wire went silent during a run; the node goes on by itself."""

    exit_code = Exit.DETACHED
    advice = meaning_of(Exit.DETACHED).next_step.format(on="")


class SilenceTimeout(ContactLost):
    """Nothing arrived within the time that the reader allowed; the channel is still open."""
