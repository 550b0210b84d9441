"""What a server's command line says: a flag, its value however it is written, the model, what is secret. Pure."""

from __future__ import annotations

import re
from typing import Any, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

from lamplighter.node.confidential import NAMED, looks_secret

#: In a word that is a command of its own, as in ``sh -c '...'``.
_INSIDE = re.compile(rf"\s--?(?:[\w.-]*[-_.])?(?:{NAMED})[\s=]", re.IGNORECASE)


def value_of(flags: Collection[str], argv: Sequence[str]) -> Optional[str]:
    """Return the value of the last of ``flags`` (its names, with their dashes); None where none has one.

    facts: argparse lets the last one win, and vLLM takes underscores for dashes.
    """
    found = None
    for place, (name, value) in enumerate(_split(argv)):
        if name in flags:
            following = argv[place + 1] if place + 1 < len(argv) else None
            found = value if value is not None else following if following is not None else found
    return found


def has_any(flags: Collection[str], argv: Sequence[str]) -> bool:
    """Tell whether one of ``flags`` is given, with a value or without."""
    return any(name in flags for name, _ in _split(argv))


def _split(argv: Sequence[str]) -> List[Tuple[str, Optional[str]]]:
    """Return each word as the name of a flag with the value behind its ``=``; a word that is no flag stays whole."""
    words = []
    for word in argv:
        name, equals, value = word.partition("=") if word.startswith("-") else (word, "", "")
        name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        words.append((name, value if equals else None))
    return words


def by_flag(words: Sequence[str], bare: str) -> Dict[str, str]:
    """Turn a command line into names and values: flags by their name, other words by their place.

    A flag without a value has the value ``bare``; one that comes twice has both.
    """
    found: Dict[str, str] = {}
    place = 0
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not re.match(r"--?[A-Za-z]", word):
            found[f"word {place}"] = word
            place += 1
            continue
        name, equals, value = word.partition("=")
        if not equals:
            following = []
            while index < len(words) and not re.match(r"--?[A-Za-z]", words[index]):
                following.append(words[index])
                index += 1
            value = " ".join(following) if following else bare
        found[name] = f"{found[name]} {value}".strip() if name in found else value
    return found


def model_of(engine: Mapping[str, Any], argv: Sequence[str]) -> Optional[str]:
    """Find the model among the arguments: the value of its flag, or the word in its place of the launch command."""
    launch = engine.get("launch") or {}
    flag = (launch.get("flags") or {}).get("model")
    if flag:
        return value_of((flag,), argv)
    command = list(launch.get("command") or ())
    if "{model}" not in command:
        return None
    before = command[command.index("{model}") - 1]
    after = argv[argv.index(before) + 1 :] if before in argv else ()
    return after[0] if after and not after[0].startswith("-") else None


def gpus_wanted(ranks: Mapping[str, Any], argv: Sequence[str]) -> Optional[int]:
    """Return up to which GPU the ranks of this node count, or None where the command line does not tell.

    ``ranks`` is what the engine says of them, under ``needs``.
    """
    here = ranks_here(ranks, argv)
    first = value_of(ranks.get("first_gpu") or (), argv)
    return None if here is None else here + (int(first) if first is not None and first.isdigit() else 0)


def ranks_here(ranks: Mapping[str, Any], argv: Sequence[str]) -> Optional[int]:
    """Return how many ranks, each with a GPU of its own, the command line starts here; None where that is not told."""
    for flags in ranks.get("elsewhere") or ():
        if value_of(flags["flags"], argv) in flags["values"]:
            return None
    total = 1
    for factor in ranks.get("factors") or ():
        value = value_of(factor["flags"], argv)
        if value is None or has_any(factor.get("unless") or (), argv):
            continue
        if not value.isascii() or not value.isdigit() or not int(value):
            return None  # the engine's own parser has a word to say about it
        total *= int(value)
    nodes = value_of(ranks.get("nodes") or (), argv) or "1"
    return -(-total // max(1, int(nodes))) if nodes.isascii() and nodes.isdigit() else None


def ranks_said(ranks: Mapping[str, Any], argv: Sequence[str]) -> Dict[str, str]:
    """Return the flags that decide how many GPUs are needed, as they are given."""
    flags = [*(flag for factor in ranks.get("factors") or () for flag in factor["flags"])]
    found = {flag: value_of((flag,), argv) for flag in (*flags, *(ranks.get("first_gpu") or ()))}
    return {flag: value for flag, value in found.items() if value is not None}


def secret_places(words: Sequence[str]) -> Tuple[int, ...]:
    """Return where the words are that hold secrets: the value of a flag that is named like one, or ``NAME=value``.

    facts: vLLM takes several keys after one flag, so all words up to the next flag are its values.
    """
    found: List[int] = []
    flag = ""
    for place, word in enumerate(words):
        if word.startswith("-"):
            flag = "" if "=" in word else word
        is_value = bool(flag) and word is not flag and looks_secret(flag, word)
        if is_value or _is_secret_pair(word) or _INSIDE.search(word):
            found.append(place)
    return tuple(found)


def without_secrets(words: Sequence[str], instead: str) -> List[str]:
    """Return the words with ``instead`` in the place of each secret; one that carries its name keeps that."""
    places = secret_places(words)
    return [_shown(word, instead) if place in places else word for place, word in enumerate(words)]


def _is_secret_pair(word: str) -> bool:
    name, equals, value = word.partition("=")
    return bool(equals) and looks_secret(name, value)


def _shown(word: str, instead: str) -> str:
    return f"{word.partition('=')[0]}={instead}" if _is_secret_pair(word) else instead
