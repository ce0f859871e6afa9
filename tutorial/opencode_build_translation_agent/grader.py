"""The grader: named error patterns of a translation. Each that is found takes its weight from a reward of 1."""

from __future__ import annotations

import re
from collections.abc import Callable

from swarm.types import Task

_WORD = re.compile(r"[^\W\d_]+")
_NUMBER = re.compile(r"\d+")
_TALK = re.compile(r"translat|traduction|sure|certainly|here is|here's|voici|french|english|[\n:\"`*]", re.IGNORECASE)

#: of the final translation, stripped, and its task
Pattern = Callable[[Task, str], bool]


def words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def talks(task: Task, final: str) -> bool:
    """There is something beside the translation: an introduction, a comment, a list."""
    return bool(_TALK.search(final))


def untranslated(task: Task, final: str) -> bool:
    """More than a third of its words stand in the English sentence."""
    said, source = words(final), set(words(task.main_query))
    return 3 * sum(word in source for word in said) > len(said)


def misses_a_term(task: Task, final: str) -> bool:
    """A term of the glossary is not there in French."""
    return any(term.casefold() not in final.casefold() for term in task.metadata["terms"].values())


def changes_a_number(task: Task, final: str) -> bool:
    return sorted(_NUMBER.findall(final)) != sorted(_NUMBER.findall(task.main_query))


def repeats_itself(task: Task, final: str) -> bool:
    """A sequence of three words comes twice."""
    said = words(final)
    threes = list(zip(said, said[1:], said[2:], strict=False))
    return len(set(threes)) < len(threes)


def has_another_length(task: Task, final: str) -> bool:
    """Fewer than half, or more than twice the words of the sentence."""
    said, source = len(words(final)), len(words(task.main_query))
    return not source <= 2 * said <= 4 * source


#: name -> weight and pattern; the weights add up to 1
PATTERNS: dict[str, tuple[float, Pattern]] = {
    "misses_a_term": (0.3, misses_a_term),
    "untranslated": (0.2, untranslated),
    "talks": (0.2, talks),
    "has_another_length": (0.1, has_another_length),
    "repeats_itself": (0.1, repeats_itself),
    "changes_a_number": (0.1, changes_a_number),
}


def errors_of(task: Task, final: str) -> list[str]:
    """The names of the errors in a translation; one without any word has all of them."""
    final = final.strip()
    return [name for name, (_, found) in PATTERNS.items() if not words(final) or found(task, final)]


def reward_of(errors: list[str]) -> float:
    return round(1.0 - sum(PATTERNS[name][0] for name in errors), 6)
