"""Reference solver: reads a question's prompt as text and works the answer out, knowing the wording and nothing else."""

from __future__ import annotations

import re
from collections import Counter

NOTE = re.compile(r"^# Note: the (\w+) of (\S+) is (\S+)$", re.MULTILINE)
ASSIGNED = re.compile(r"^(\w+) = (\w+)$", re.MULTILINE)


def solve(prompt: str) -> str:
    """The answer of a prompt, without its line break."""
    body, _, question = prompt.rpartition("\n")
    question = question.strip()
    for pattern, answer in (
        (r"# Recall: the (\w+) of (\S+) is", _needle), (r"# Recall all (\d+): the (\w+) of (\S+) is", _values),
        (r"# Recall each of (.+): the (\w+) of", _queries), (r"# Trace: (\w+) =", _trace), (r"# Count of (\w+):", _count),
        (r"# The (\d+) most common words:", _common), (r"# The (\d+) most frequent codes:", _frequent),
    ):
        found = re.fullmatch(pattern, question)
        if found:
            return answer(body, *found.groups())
    raise AssertionError(f"no question that is known: {question!r}")


def _needle(body: str, noun: str, key: str) -> str:
    (value,) = [value for kind, name, value in NOTE.findall(body) if (kind, name) == (noun, key)]
    return value


def _values(body: str, count: str, noun: str, key: str) -> str:
    values = [value for kind, name, value in NOTE.findall(body) if (kind, name) == (noun, key)]
    assert len(values) == int(count)
    return ", ".join(values)


def _queries(body: str, keys: str, noun: str) -> str:
    return ", ".join(f"{key} is {_needle(body, noun, key)}" for key in keys.split(", "))


def _trace(body: str, name: str) -> str:
    said, links = dict(ASSIGNED.findall(body)), []
    while name in said:
        name = said[name]
        links.append(name)
    return " = ".join(links)


def _count(body: str, name: str) -> str:
    return str(len(re.findall(rf"^# Seen: {name}$", body, re.MULTILINE)))


def _listed(body: str, marker: str) -> list[str]:
    rows = re.findall(rf"^# {marker}: (.+)$", body, re.MULTILINE)
    return [word for row in rows for word in row.split(", ")]


def _common(body: str, count: str) -> str:
    words = _listed(body, "Words")
    most = Counter(words).most_common()
    assert most[int(count) - 1][1] > most[int(count)][1], "the few are more frequent than all others"
    few = {word for word, _ in most[: int(count)]}
    return ", ".join(dict.fromkeys(word for word in words if word in few))


def _frequent(body: str, count: str) -> str:
    most = Counter(_listed(body, "Coded")).most_common()
    times = [number for _, number in most[: int(count) + 1]]
    assert len(set(times)) == len(times), "every rank that is asked for is clear"
    return ", ".join(word for word, _ in most[: int(count)])
