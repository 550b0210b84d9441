"""Rules about the arguments of a server: L31 to L36."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from difflib import get_close_matches

from lamplighter.lint.knowledge import Speculation
from lamplighter.lint.view import Finding, View, distance, error, warning
from lamplighter.node import arguments
from lamplighter.node.versions import compare

_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")
#: Letters of the shortest flag in which two mistakes are still one and the same flag.
_LONG = 12
#: Says that there is no key, or is none.
_HARMLESS = re.compile(r"(?i)\$.*|[0-9.]+|[~/].*|empty|none|null|dummy|x+")


def unknown(view: View) -> Iterator[Finding]:
    """L31, L32: flags that the engine's parser refuses, and so its start."""
    words = [word for word in view.argv if view.known.flags and not word.startswith(view.known.engine.open_flags)]
    for name in dict.fromkeys(found[0].partition(".")[0] for found in map(_FLAG.match, words) if found):
        flag = name.replace("_", "-") if view.known.engine.underscores else name
        why = view.known.absence(flag, view.version) if view.stated_version else ""
        if why and not _is_short(view, flag):
            there = [each for each in view.known.flags if not view.known.absence(each, view.version)]
            close = get_close_matches(flag, sorted(there), n=1, cutoff=0.8)
            yield error("L32", name, f"{view.called} does not take it: {why}", close[0] if close else "")
        elif not why and not _is_taken(view, flag):
            yield _strange(view, name)


def _is_taken(view: View, flag: str) -> bool:
    """Whether some version takes the flag, shortened as parsers allow it."""
    base = "--" + flag.removeprefix("--no-") if view.known.engine.negations and flag.startswith("--no-") else flag
    is_long = flag.startswith("--")
    return any(each in (flag, base) or (is_long and each.startswith(flag)) for each in view.known.flags)


def _is_short(view: View, flag: str) -> bool:
    """Whether a parser of this version takes the flag for the beginning of another one, and of one alone."""
    longer = [each for each in view.known.flags if each.startswith(flag) and each != flag]
    return len([each for each in longer if not view.known.absence(each, view.version)]) == 1


def _strange(view: View, name: str) -> Finding:
    dashed = name.replace("_", "-")
    if dashed != name and _is_taken(view, dashed):
        why = f"{view.called} takes no flag with underscores, and refuses to start"
        return error("L31", name, why, dashed)
    close = get_close_matches(dashed, sorted(view.known.flags), n=1, cutoff=0.8)
    meant = close[0] if close else ""
    is_slip = bool(meant) and distance(dashed, meant, 2) <= 2 and len(name) >= _LONG
    is_exact = view.stated_version in view.known.engine.versions
    is_newer = view.stated_version is not None and compare(view.version, view.known.newest) > 0
    make = error if is_exact or (is_slip and not is_newer) else warning
    return make("L31", name, f"is no flag of {view.called} that is known here: its parser would refuse to start", meant)


def speculation(view: View) -> Iterator[Finding]:
    """L33: numbers of draft tokens that do not fit together."""
    rule = view.known.engine.speculation
    if rule.config:
        yield from _as_json(view, rule)
    algorithm = view.value_of([rule.algorithm]) if rule.algorithm else None
    if algorithm is None:
        yield from _idle(view, rule)
    elif algorithm.upper() in rule.drafting and not view.has(rule.unless):
        yield from _tree(view, rule)
        if algorithm.upper() in rule.needs_draft and not view.has(rule.draft):
            yield warning("L33", rule.algorithm, f"{algorithm} needs a model that drafts: {rule.draft[0]} names it")


def _idle(view: View, rule: Speculation) -> Iterator[Finding]:
    for flag in (rule.steps, rule.topk, rule.tokens):
        if flag and view.has([flag]) and not view.has(rule.unless):
            yield warning("L33", flag, f"has no effect without {rule.algorithm}")


def _tree(view: View, rule: Speculation) -> Iterator[Finding]:
    steps, topk, tokens = (view.whole([flag]) for flag in (rule.steps, rule.topk, rule.tokens))
    given = [flag for flag in (rule.steps, rule.topk, rule.tokens) if view.has([flag])]
    missing = [flag for flag in (rule.steps, rule.topk, rule.tokens) if flag not in given]
    if given and rule.steps in missing:
        yield error("L33", given[0], f"{view.called} refuses it without {rule.steps}: give all three, or none")
    elif given and rule.topk in missing:
        yield error("L33", given[0], f"{view.called} fails without {rule.topk}: give all three, or none")
    elif steps and topk and tokens:
        yield from _sizes(rule, steps, topk, tokens)


def _sizes(rule: Speculation, steps: int, topk: int, tokens: int) -> Iterator[Finding]:
    """The tree has ``topk`` tokens of the first step and ``topk``² of each later one; the root is one token more."""
    most = 1 + topk + (steps - 1) * topk * topk
    if topk == 1 and tokens != steps + 1:
        why = f"with {rule.topk} 1 it is {rule.steps} + 1 = {steps + 1}, whatever is written"
        yield warning("L33", rule.tokens, why, str(steps + 1))
    elif tokens > most:
        why = f"{steps} steps with {rule.topk} {topk} draft at most {most} tokens, the root included, not {tokens}"
        yield error("L33", rule.tokens, why, str(most))


def _as_json(view: View, rule: Speculation) -> Iterator[Finding]:
    text = view.value_of(rule.config)
    if text is None:
        return
    try:
        found = json.loads(text)
    except ValueError as reason:
        yield error("L33", rule.config[0], f"is no JSON: {reason}")
        return
    method = found.get("method") if isinstance(found, dict) else None
    if not isinstance(found, dict):
        yield error("L33", rule.config[0], "must be a JSON object, in braces")
    elif method in rule.needs_draft and not found.get("model"):
        yield error("L33", rule.config[0], f"{method} needs a model that drafts: `model` names it")


def too_many_ranks(view: View) -> Iterator[Finding]:
    """L34: more ranks on this node than GPUs."""
    wanted = arguments.gpus_wanted(view.ranks, view.argv)
    if view.gpus and wanted is not None and wanted > view.gpus:
        said = arguments.ranks_said(view.ranks, view.argv)
        shown = ", ".join(f"{flag} {value}" for flag, value in said.items())
        yield error("L34", next(iter(said)), f"{shown}: {wanted} GPUs are needed, `gpus` gives {view.gpus}")


def said_twice(view: View) -> Iterator[Finding]:
    """L35: another value than the setting says, which is what readiness goes by: it would never come."""
    for flag, (setting, value) in view.settings.items():
        listed = list(_values(view, flag))
        if listed and value not in listed and not (setting == "host" and listed[0] in _asked_alike(value)):
            why = f"says {listed[0]}, and `{setting}` says {value}: the server would be waited for in vain"
            yield error("L35", flag, why, f"{setting}: {listed[0]}, and no {flag}")


def _asked_alike(host: str) -> tuple[str, ...]:
    """Where a server may listen that is asked as one at ``host`` is."""
    return ("0.0.0.0", "localhost", "127.0.0.1") if host in ("0.0.0.0", "127.0.0.1", "localhost") else ()  # noqa: S104


def _values(view: View, flag: str) -> Iterator[str]:
    """The values behind the last of a flag among what no setting gave a name."""
    if not arguments.has_any([flag], view.extra):
        return
    places = [place for place, word in enumerate(view.extra) if word.partition("=")[0].replace("_", "-") == flag]
    word, *behind = view.extra[places[-1] :]
    if "=" in word:
        yield word.partition("=")[2]
        return
    for each in behind:
        if each.startswith("-"):
            return
        yield each


def secrets(view: View) -> Iterator[Finding]:
    """L36: everybody on the node may read the command line of a process."""
    for place in arguments.secret_places(view.extra):
        word = view.extra[place]
        value = word.partition("=")[2] if "=" in word else word
        flag = next((each for each in reversed(view.extra[: place + 1]) if each.startswith("-")), word)
        if not _HARMLESS.fullmatch(value):
            why = "carries a secret that stands here in clear, and in the process list of the node"
            yield warning("L36", flag.partition("=")[0], why, "!secret env:NAME, a vault or a lookup")
