"""Where a command line holds secrets: the values of flags that are named like one. Pure.

A name is judged by its last part, so that ``--api-key`` and ``--ssl-keyfile-password`` count, and ``--tokenizer``,
``--ssl-keyfile`` (a path) and ``--speculative-num-draft-tokens`` do not.
"""

from __future__ import annotations

import re
from typing import Callable, List, Sequence, Tuple

_NAME = r"--?(?:[\w.-]*[-_.])?(?:key|token|secret|passwd|password|passphrase)"
_FLAG = re.compile(_NAME, re.IGNORECASE)
_GIVEN = re.compile(rf"({_NAME}=)(.+)", re.IGNORECASE | re.DOTALL)
#: In a word that is a command of its own, as in ``sh -c '...'``.
_INSIDE = re.compile(rf"\s{_NAME}[\s=]", re.IGNORECASE)


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
