"""What a server's command line says: a flag, its value however it is written, the model, what is secret. Pure."""

from __future__ import annotations

import re
from typing import Any, Callable, Collection, List, Mapping, Optional, Sequence, Tuple

# A secret's flag is known by the last part of its name: --api-key and --ssl-keyfile-password count, and --tokenizer,
# --ssl-keyfile (a path) and --speculative-num-draft-tokens do not.
_NAME = r"--?(?:[\w.-]*[-_.])?(?:key|token|secret|passwd|password|passphrase)"
_FLAG = re.compile(_NAME, re.IGNORECASE)
_GIVEN = re.compile(rf"({_NAME}=)(.+)", re.IGNORECASE | re.DOTALL)
#: In a word that is a command of its own, as in ``sh -c '...'``.
_INSIDE = re.compile(rf"\s{_NAME}[\s=]", re.IGNORECASE)


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


def without_secrets(words: Sequence[str], instead: Callable[[str], str]) -> Tuple[str, ...]:
    """Return the words with each secret replaced by what ``instead`` makes of it.

    facts: vLLM takes several keys after one flag, so all words up to the next flag are its values.
    """
    found: List[str] = []
    is_value = False
    for word in words:
        given = _GIVEN.fullmatch(word)
        if given is not None:
            found.append(given[1] + instead(given[2]))
        elif (is_value and not word.startswith("-")) or _INSIDE.search(word) is not None:
            found.append(instead(word))
            continue
        else:
            found.append(word)
        is_value = _FLAG.fullmatch(word) is not None
    return tuple(found)
