"""Reads a whole log: guesses the engine that wrote it, learns its envelope, and diagnoses it. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any, BinaryIO, Iterator, List, Mapping, Optional, Union

from lamplighter.node.log.rules import outside_quotes
from lamplighter.node.log.sieve import plain
from lamplighter.node.log.verdict import Diagnosis
from lamplighter.node.log.watch import SLICE_BYTES, WINDOW_BYTES, LogWatch

DETECT_BYTES = 256 * 1024
#: So many places of a mark are looked at: some may be in what clients sent.
MOST_MARKS = 20


def diagnose_log(
    stream: Union[bytes, BinaryIO],
    engines: Mapping[str, Mapping[str, Any]],
    engine: Optional[str] = None,
    version: Optional[str] = None,
) -> Diagnosis:
    """Diagnose a whole log. Engine and version are told, or guessed from the log; ``engines`` is name -> compiled.

    Raises KeyError for an engine that is not among ``engines``.
    """
    blocks = _blocks(stream)
    head = b""
    first: List[bytes] = []
    for block in blocks:
        first.append(block)
        head += block[: DETECT_BYTES - len(head)]
        if len(head) >= DETECT_BYTES:
            break
    text = plain(head).decode("utf-8", "replace")
    name = engine if engine is not None else guess_engine(text, engines)
    # An unknown engine is read with the wording that knows most: the others share the general signatures.
    rules = engines[name] if name is not None else max(engines.values(), key=lambda each: len(each.get("failures", ())))
    watch = LogWatch(rules, version)
    watch.learn(text)
    for block in first:
        watch.feed(block)
    for block in blocks:
        watch.feed(block)
    watch.finish()
    return dataclasses.replace(watch.diagnosis(), engine=name)


def guess_engine(text: str, engines: Mapping[str, Mapping[str, Any]]) -> Optional[str]:
    """The engine whose marks are found most often in the beginning of a log; None without any.

    What stands in quotes, as paths in tracebacks do, counts only between equals: a client may have sent it. Of an
    engine and one that extends it, with the same marks, the former is meant; of several starts, the last, unless it
    died before it left any.
    """
    latest = _last_start(text, engines)
    found = _most_marked(text[latest:], engines) if latest is not None else None
    return found if found is not None else _most_marked(text, engines)


def _most_marked(text: str, engines: Mapping[str, Mapping[str, Any]]) -> Optional[str]:
    best: Optional[str] = None
    best_score = (0, 0, 0)
    for name, rules in engines.items():
        own = hits = 0
        for mark in rules.get("detect", ()):
            places = [match.start() for match in itertools.islice(re.finditer(mark, text), MOST_MARKS)]
            own += min(3, sum(_is_own_word(text, place) for place in places))
            hits += min(3, len(places))
        score = (own, hits, -len(rules.get("ancestors", ())))
        if hits and (best is None or score > best_score):
            best, best_score = name, score
    return best


def _last_start(text: str, engines: Mapping[str, Mapping[str, Any]]) -> Optional[int]:
    """Where the last start of a log with several begins."""
    found = {
        match.start()
        for rules in engines.values()
        for pattern in rules.get("starts", ())
        for match in re.finditer(pattern, text)
        if _is_own_word(text, match.start())
    }
    return max(found) if len(found) > 1 else None


def _is_own_word(text: str, place: int) -> bool:
    start = text.rfind("\n", 0, place) + 1
    line = text[start : start + WINDOW_BYTES].partition("\n")[0]
    return next(outside_quotes(line, [place - start]), None) is not None


def _blocks(stream: Union[bytes, BinaryIO]) -> Iterator[bytes]:
    if isinstance(stream, (bytes, bytearray, memoryview)):
        for start in range(0, len(stream), SLICE_BYTES):
            yield bytes(stream[start : start + SLICE_BYTES])
        return
    while True:
        block = stream.read(SLICE_BYTES)
        if not block:
            return
        yield block
