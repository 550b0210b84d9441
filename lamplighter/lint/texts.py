"""Rules about the values of variables, one by one and together: L7 to L17, L29, L30."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from lamplighter.lint.knowledge import Words
from lamplighter.lint.view import Finding, View, c_number, error, nearest, warning

_NUMBER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|[0-9]+)(.*)", re.DOTALL)
#: Behind the first digits of 4_194_304 and of 4,194,304.
_GROUPS = re.compile(r"(_\d{3})+|(,\d{3})+")
_SWITCHES = {"true": "1", "yes": "1", "on": "1", "enable": "1", "enabled": "1"} | dict.fromkeys(
    ("false", "no", "off", "disable", "disabled", "none"), "0"
)
_LEFT_AS_TEXT = re.compile(r"\$(?:\{\w+\}|[A-Z_][A-Z0-9_]*)|\{\{.*?\}\}", re.DOTALL)
_TALKING = ("INFO", "TRACE")


def empty(view: View) -> Iterator[Finding]:
    """L11: NCCL takes an empty value for none, and engines for a value."""
    for name, value in _texts(view, "NCCL_"):
        if not value:
            yield warning("L11", name, "is empty, which NCCL takes for not set", "leave it out")


def numbers(view: View) -> Iterator[Finding]:
    """L7 to L10, L12: what NCCL does not read as the number that people mean."""
    for name, value in _texts(view, "NCCL_"):
        if value and name in view.known.common.nccl.integers:
            yield from _number(name, value)


def _number(name: str, value: str) -> Iterator[Finding]:
    text = value.strip()
    if text != value:
        yield warning("L12", name, "has blanks around its value", text)
    found = _NUMBER.fullmatch(text)
    if found is None and text:
        why = f"NCCL reads a number, and {text!r} is none: it counts as 0 up to version 2.30, as not set in later ones"
        yield error("L7", name, why, _SWITCHES.get(text.lower(), "a number"))
    elif found is not None and found[2]:
        why = f"NCCL reads the number and ignores what follows: {text!r} is {found[1]}"
        yield error("L8", name, why, _written_out(found[1], found[2]))
    elif found is not None:
        yield from _leading_zero(name, text, found[1])
        number = c_number(text)
        if number is not None and not -(1 << 63) <= number < 1 << 63:
            yield error("L10", name, f"{text} does not fit into 64 bits: NCCL takes its default instead")


def _written_out(number: str, suffix: str) -> str:
    if _GROUPS.fullmatch(suffix):
        return re.sub("[_,]", "", number + suffix)
    factor = {"K": 10, "M": 20, "G": 30}.get(suffix.strip().upper().removesuffix("IB").removesuffix("B"))
    plain = c_number(number)
    return str(plain << factor) if factor is not None and plain is not None and not number.startswith("0") else number


def _leading_zero(name: str, text: str, digits: str) -> Iterator[Finding]:
    if len(digits) < 2 or not digits.startswith("0") or digits[1] in "xX":
        return
    number, meant = c_number(text), text[: -len(digits)] + (digits.lstrip("0") or "0")
    if number == c_number(meant):
        yield warning("L9", name, f"{text} begins with 0, which makes it octal to NCCL: here the same number", meant)
    else:
        read = f"it is {number} there" if number is not None else "no such number exists there"
        yield error("L9", name, f"{text} begins with 0, which makes it octal to NCCL: {read}", meant)


def p2p_switch(view: View) -> Iterator[Finding]:
    """L13: NCCL_P2P_DISABLE acts for 1 alone."""
    if view.number("NCCL_P2P_DISABLE") not in (None, 0, 1):
        yield error("L13", "NCCL_P2P_DISABLE", "acts for the value 1 alone: this one turns nothing off", "1 or 0")


def words(view: View) -> Iterator[Finding]:
    """L12, L14: a word that is not taken, as it is written."""
    texts = view.known.common.nccl.texts
    for name, value in _texts(view):
        rule = view.known.common.words.get(name)
        is_blank = value != value.strip()
        if is_blank and name in texts:
            yield error("L12", name, f"has blanks around its value, which become part of it: {value!r}", value.strip())
        elif rule is not None and value:
            yield from _list(view, name, value, rule) if rule.list else _word(name, value, rule)


def _word(name: str, value: str, rule: Words) -> Iterator[Finding]:
    if value in rule.old:
        yield warning("L14", name, f"{value!r} is the old way to name a {rule.what}, {_known(rule)}")
    elif value.upper() in rule.words and not _is_one_of(value, rule):
        why = f"{value!r} counts in upper case alone, as it stands {rule.why}"
        yield error("L14", name, why, value.upper())
    elif not _is_one_of(value, rule):
        yield _strange(name, value, rule)


def _strange(name: str, value: str, rule: Words) -> Finding:
    return error(
        "L14", name, f"{value!r} is no {rule.what}, {_known(rule)}; with another {rule.why}", _meant(value, rule)
    )


def _known(rule: Words) -> str:
    return f"known {'is' if len(rule.words) == 1 else 'are'} {', '.join(rule.words)}"


def _is_one_of(value: str, rule: Words) -> bool:
    return value in rule.words or (rule.case == "any" and value.upper() in {each.upper() for each in rule.words})


def _meant(value: str, rule: Words) -> str:
    by_case = {each.upper(): each for each in rule.words}
    slip = nearest(value.upper(), by_case, 1)
    close = [slip] if slip else get_close_matches(value.upper(), sorted(by_case), n=1, cutoff=0.5)
    return by_case[close[0]] if close else ""


def _list(view: View, name: str, value: str, rule: Words) -> Iterator[Finding]:
    """Look at ``LIST`` or ``FUNCTION:LIST;FUNCTION:LIST``, where ``^`` before a list excludes."""
    for place, part in enumerate(value.split(";")):
        function, colon, listed = part.rpartition(":")
        if colon and function.lower() not in view.known.common.functions:
            shown = ", ".join(view.known.common.functions)
            yield error("L14", name, f"{function!r} is no function, known are {shown}; with another {rule.why}")
        elif place and not colon:
            yield error("L14", name, f"{part!r} has no FUNCTION: in front, which the first alone may lack; {rule.why}")
        for token in listed.removeprefix("^").split(","):
            if not _is_one_of(token, rule) and (token or listed in ("", "^")):
                yield _strange(name, token, rule)


def low_latency_128(view: View) -> Iterator[Finding]:
    """L15: LL128 asked for in words works on NVLink, and breaks data where a link reorders writes."""
    for part in view.text("NCCL_PROTO").split(";"):
        listed = part.rpartition(":")[2]
        if not listed.startswith("^") and "LL128" in listed.upper().split(","):
            why = "asks for LL128 by name, also where NCCL would not choose it: without NVLink it may damage data"
            yield warning("L15", "NCCL_PROTO", why, "leave LL128 to NCCL")
            return


def without_effect(view: View) -> Iterator[Finding]:
    """L16: variables that others keep from having any effect."""
    if view.number("NCCL_P2P_DISABLE") == 1 and view.text("NCCL_P2P_LEVEL"):
        yield warning("L16", "NCCL_P2P_LEVEL", "is not read while NCCL_P2P_DISABLE is 1", "keep one of them")
    for name, value in _texts(view, "NCCL_IB_"):
        if name != "NCCL_IB_DISABLE" and value and view.number("NCCL_IB_DISABLE"):
            yield warning("L16", name, "has no effect while NCCL_IB_DISABLE turns InfiniBand off", "keep one of them")
    level = view.text("NCCL_DEBUG") or ("INFO" if view.nccl_proof else "")
    if view.text("NCCL_DEBUG_SUBSYS") and level.upper() not in _TALKING:
        yield warning("L16", "NCCL_DEBUG_SUBSYS", "has no effect unless NCCL_DEBUG is INFO or TRACE", "both")
    file = view.text("NCCL_DEBUG_FILE")
    if file and "%p" not in file and not file.startswith("/dev/"):
        yield warning("L16", "NCCL_DEBUG_FILE", "has no %p, so that all ranks write over one file", f"{file}.%p")


def loopback(view: View) -> Iterator[Finding]:
    """L17: several nodes do not meet over the loopback interface."""
    if (view.whole(view.ranks.get("nodes") or ()) or 1) < 2:
        return
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME"):
        value = view.text(name)
        listed = [] if value.startswith("^") else [each.strip() for each in value.removeprefix("=").split(",")]
        if "lo" in listed:
            yield error("L17", name, "chooses lo, over which no other node is reached", "a network card")


def left_as_text(view: View) -> Iterator[Finding]:
    """L29: no shell reads a value; where the whole of it is a variable the inventory itself says so."""
    for name, value in _texts(view):
        found = _LEFT_AS_TEXT.search(value)
        if found and not (found[0] == value.strip() and value.startswith("$")):
            why = f"no shell and no template reads this: the server gets {found[0]} as it stands"
            yield warning("L29", name, why, "the text itself")


def hidden_proof(view: View) -> Iterator[Finding]:
    """L30: nccl_proof goes by lines that these settings keep NCCL from writing."""
    level, subsystems = view.text("NCCL_DEBUG").upper(), view.text("NCCL_DEBUG_SUBSYS").upper()
    if not view.nccl_proof:
        return
    if level and level not in _TALKING:
        yield warning("L30", "NCCL_DEBUG", f"{level} hides the lines that nccl_proof goes by", "INFO")
    listed = subsystems.removeprefix("^").split(",")
    is_heard = bool({"ENV", "ALL"} & set(listed)) != subsystems.startswith("^")
    if subsystems and not is_heard:
        yield warning("L30", "NCCL_DEBUG_SUBSYS", "hides the lines of ENV, which nccl_proof goes by", "INIT,ENV")


def _texts(view: View, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, entry in view.env.items():
        if entry.value is not None and name.startswith(prefix):
            yield name, entry.value
