"""What we sent is known again in what comes back, so that no message repeats a secret."""

from __future__ import annotations

import pytest

from lamplighter.run.conversation import _Sent

SECRETS = ["pin7", "hf_0123456789abcdef", 'quo"ted\n0123456789']
SENT = _Sent(b"import sys\nprint('the program that we sent to the node')\n", SECRETS)
REPEATED = "before\n(here it repeats what we sent)"


@pytest.mark.parametrize(
    "line",
    [
        "bash: pin7: command not found",  # shorter than any part that is looked for
        "Token hf_012345 is refused",
        "tail: 9abcdef",
        r"{\"quo\"ted\n01",
        "print('the program that we sent to the node')",
    ],
)
def test_from_the_first_line_that_repeats_something_nothing_is_quoted(line: str) -> None:
    assert SENT.quotable(f"before\n{line}\nafter") == REPEATED


@pytest.mark.parametrize("line", ["bash: pin: command not found", "import sys", "hf_0", "the node is full"])
def test_what_anybody_may_say_is_quoted(line: str) -> None:
    assert SENT.quotable(f"before\n{line}\nafter") == f"before\n{line}\nafter"
