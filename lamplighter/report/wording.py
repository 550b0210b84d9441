"""Words for people: text from a node made safe to print, seconds, moments, and what is serving.

Pure. Nothing here raises on odd values: they come from nodes that may be newer than we are.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from typing import Any

from lamplighter.project import called

# Escape sequences: OSC, DCS, APC, PM and SOS strings up to BEL or ST, then CSI, then any other two-byte escape.
_ESCAPES = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|\x1b[ -/]*[0-~]?"
)
_BLANKS = re.compile(r"[\t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]+")
# Other control bytes, the marks that reorder text on a terminal or have no width, and half characters that no terminal
# can show.
_UNSEEN = re.compile(
    r"[\x00-\x08\x0e-\x1b\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]"
)
# All of them but line breaks and tabs, in text of several lines.
_BREAKS = re.compile(r"\r\n|[\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
# A sequence that the next piece of a stream may go on with; none is that long, or goes over a line break.
_UNENDED = re.compile(
    r"(?:(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c\n]*\x1b?|(?:\x1b\[|\x9b)[0-?]*[ -/]*|\x1b[ -/]*)\Z"
)
_LONGEST_SEQUENCE = 4096
#: Ours alone, and not what a server's log says of a program of that name.
_COMMAND = re.compile(r"\./inv(?= [a-z]+\b)")
_HALVES = re.compile(r"[\ud800-\udfff]")

#: A log line may be megabytes long; what proves a failure is at its beginning.
LONGEST = 1000
MOST_INDENT = 40


def clean(value: object, longest: int = LONGEST) -> str:
    """One printable line: no escape sequence, no control byte, no line break, at most ``longest`` characters."""
    if value is None:
        return ""
    text = str(value)[: longest * 8]  # sequences vanish below, so look at more than will be shown
    text = _ESCAPES.sub("", text)
    text = _BLANKS.sub(" ", text)
    text = spoken(_HALVES.sub("?", _UNSEEN.sub("", text)).strip())
    return text if len(text) <= longest else text[: longest - 3] + "..."


def printable(value: object) -> str:
    """Text of any length that is safe on a terminal: line breaks and tabs stay, all else of `clean` is taken out."""
    return spoken(_shown(str(value), keeps_colours=False))


def spoken(text: str) -> str:
    """``text`` with our own commands as they are typed here: our words, the node's too, are those of a checkout."""
    return text if (name := called()) == "./inv" else _COMMAND.sub(name, text)


class LogText:
    """A server's log made safe for a terminal, piece by piece: its colours stay, what else it orders does not.

    A lone carriage return begins a line: what a log wrote before is not hidden by what it writes after.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_coloured = False

    def feed(self, piece: str) -> str:
        """Return what can be shown by now."""
        text = self._held + piece
        unended = _UNENDED.search(text, max(0, len(text) - _LONGEST_SEQUENCE))
        end = unended.start() if unended else len(text) - text.endswith("\r")
        self._held = text[end:]
        return self._colour(_shown(text[:end], keeps_colours=True))

    def finish(self) -> str:
        """Return the rest, and give the terminal its own colours back."""
        rest, self._held = self._held, ""
        return self._colour(_shown(rest, keeps_colours=True)) + ("\x1b[0m" if self._is_coloured else "")

    def _colour(self, text: str) -> str:
        self._is_coloured = self._is_coloured or "\x1b" in text
        return text


def _shown(text: str, *, keeps_colours: bool) -> str:
    def kept(sequence: re.Match[str]) -> str:
        return sequence[0] if keeps_colours and _COLOUR.fullmatch(sequence[0]) else ""

    shown, at = [], 0
    for sequence in _ESCAPES.finditer(text):
        shown += [_plain(text[at : sequence.start()]), kept(sequence)]
        at = sequence.end()
    return "".join([*shown, _plain(text[at:])])


def _plain(text: str) -> str:
    return _HALVES.sub("?", _UNSEEN.sub("", _BREAKS.sub("\n", text)))


def clean_log_line(value: object) -> str:
    """``clean`` that keeps the indentation: a traceback is read by it. Tabs become blanks."""
    text = clean(value)
    whole_line = _UNSEEN.sub("", _ESCAPES.sub("", str(value or "")[: LONGEST * 8])).expandtabs(4)
    indent = len(whole_line) - len(whole_line.lstrip(" "))
    return " " * min(indent, MOST_INDENT) + text if text else ""


def clean_lines(value: object) -> list[str]:
    """The lines of ``value``, each made printable; empty ones are dropped."""
    return [line for line in map(clean, str(value or "").splitlines()) if line]


def number(value: object) -> float | None:
    """``value`` as a finite float; None for anything else, a bool too."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if abs(result) < 1e15 else None  # also false for NaN and infinity


def whole(value: object) -> int | None:
    """``value`` as an int; None for anything that is not a whole number of sane size."""
    result = number(value)
    return int(result) if result is not None and result.is_integer() else None


def text(value: object) -> str | None:
    """``value`` as a non-empty string; numbers are written out, anything else is None."""
    if isinstance(value, str):
        return value or None
    as_number = number(value)
    return None if as_number is None else str(value)


def seconds(value: float) -> str:
    """A length of time: ``0.4 s``, ``5m 42s``, ``1h 02m``."""
    if value < 99.95:
        return f"{value:.1f} s"
    whole_seconds = round(value)
    if whole_seconds < 3600:
        return f"{whole_seconds // 60}m {whole_seconds % 60:02d}s"
    return f"{whole_seconds // 3600}h {whole_seconds % 3600 // 60:02d}m"


def clock(value: float) -> str:
    """Elapsed time for the margin of a line: ``00:07``, ``12:31``, ``1:02:03``."""
    whole_seconds = max(0, int(value))
    hours, rest = divmod(whole_seconds, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes:02d}:{left:02d}"


def moment(value: object) -> str:
    """A wall clock time in UTC, so that hosts and cron mails compare; empty when there is none."""
    stamp = number(value)
    if stamp is None:
        return ""
    try:
        return dt.datetime.fromtimestamp(stamp, dt.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return ""


def time_of_day(stamp: float) -> str:
    """``03:09:11``, in UTC as `moment` tells it; dashes for what is no time."""
    return moment(stamp)[11:19] or "--:--:--"


def serving(data: Mapping[str, Any]) -> str:
    """What answers now: ``kimi on port 8000, pid 4242, release 3f2a9c81d0aa, since ...``, as far as it is known."""
    parts = [clean(data.get("model")) or "a server"]
    if port := clean(data.get("port")):
        parts[0] += f" on port {port}"
    pid, release = clean(data.get("pid")), clean(data.get("release"))
    if pid and not release.startswith(f"pid {pid} "):  # who is not ours is called by that
        parts.append(f"pid {pid}")
    if release:
        parts.append(release if " " in release else f"release {release}")
    if since := moment(data.get("since")):
        parts.append(f"since {since}")
    return ", ".join(parts)


def plural(count: int, noun: str) -> str:
    """``1 host``, ``2 hosts``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
