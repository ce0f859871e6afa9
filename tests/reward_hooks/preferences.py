"""The labelled preference set: groups of answers with a known order, because each was made worse on purpose.

The ranks come from how an answer was made, never from a hook; the same seed makes the same groups.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

SEED = 20
GROUPS = 14

_SUBJECTS = "rivers bridges volcanoes libraries glaciers compilers vaccines orchards satellites"
SUBJECTS = _SUBJECTS.split()
CAUSES = ["erosion", "gravity", "pressure", "friction", "demand", "sunlight", "caching", "migration", "heat", "trade"]
_FILLER = """moreover several further observations deserve careful attention whenever somebody considers these matters
with enough patience and although many experts disagree about details most would accept that long experience shows how
different circumstances lead towards rather similar outcomes over time"""
FILLER = _FILLER.split()
SENTENCES = {
    "en": [
        "The weather is mild and there are many people on the street.",
        "You can find it in the house that was built by the river.",
        "It was not clear what they have to do with this.",
    ],
    "de": [
        "Das Wetter ist mild und es sind viele Leute auf der Straße.",
        "Du findest es in dem Haus, das nicht weit von der Brücke ist.",
        "Es war nicht klar, was sie mit dem Problem zu tun haben.",
    ],
    "ru": ["Погода хорошая, и на улице много людей.", "Дом стоит у реки.", "Никто не знает ответа."],  # noqa: RUF001
}

#: An answer's fields (``text`` among them) and its rank, 1 for the best.
Ranked = tuple[dict[str, Any], int]
Group = tuple[dict[str, Any], list[Ranked]]


def said(text: str, rank: int, **fields: Any) -> Ranked:
    return {"text": text, **fields}, rank


def concise(rng: random.Random) -> Group:
    subject = rng.choice(SUBJECTS)
    one, two = rng.sample(CAUSES, 2)
    good = f"Most {subject} change because of {one} and {two}."
    longer = f"{good[:-1]}, and {' '.join(FILLER[: rng.randrange(12, 16)])}."
    loop = f"{subject.capitalize()} change. " * 14
    listed = [said(good, 1), said(longer, 2), said(loop, 3), said("", 3)]
    return {"task": {"main_query": f"Why do {subject} change?"}}, listed


def length(rng: random.Random) -> Group:
    return {}, [said(" ".join(rng.choices(FILLER, k=10 + 2 * step)), step + 1) for step in range(5)]


def json_keys(rng: random.Random) -> Group:
    value = {"answer": rng.randrange(100), "why": rng.choice(CAUSES)}
    text = json.dumps(value)
    listed = [said(text, 1), said(f"```json\n{text}\n```", 1), said(text[:-1], 2), said(f"Sure! {text}", 2)]
    return {}, [*listed, said(json.dumps({"why": "x"}), 2)]


def json_schema(rng: random.Random) -> Group:
    good = [json.dumps({"answer": rng.randrange(100)}) for _ in range(2)]
    bad = [json.dumps({"answer": str(rng.randrange(100))}), json.dumps({"answer": -1 - rng.randrange(9)}), "[]", "no"]
    return {}, [*(said(text, 1) for text in good), *(said(text, 2) for text in bad)]


def matches(rng: random.Random) -> Group:
    number = rng.randrange(1000)
    wrong = [f"It is {number}.", f"answer: {number}", f"Answer: {number} or so", "Answer:"]
    return {}, [said(f"Answer: {number}", 1), said(f"Answer: {number + 1}\n", 1), *(said(text, 2) for text in wrong)]


def language(rng: random.Random) -> Group:
    english, german, russian = (rng.choice(SENTENCES[name]) for name in ("en", "de", "ru"))
    return {}, [
        said(f"{english} {english}", 1),
        said(f"{english} {english} {german}", 2),
        said(f"{english} {german} {german} {russian}", 3),
        said(f"{russian} {russian}", 4),
    ]


def words(rng: random.Random) -> Group:
    wanted = ["river", "bridge", "stone"]
    listed = [said(f"There is {' and '.join(wanted[:count])} here.", 4 - count) for count in (3, 2, 1)]
    return {}, [*listed, said(f"We like {rng.choice(CAUSES)} only.", 4)]


def repetition(rng: random.Random) -> Group:
    base = rng.sample(FILLER, 12)
    return {}, [said(" ".join(base * (1 + times)), 1 + times) for times in range(5)]


def tool_calls(rng: random.Random) -> Group:
    def call(name: str, arguments: str) -> dict[str, Any]:
        return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}

    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    request = {"tools": [{"type": "function", "function": {"name": "look", "parameters": parameters}}]}
    good = call("look", json.dumps({"n": rng.randrange(9)}))
    bad = rng.choice([call("look", "{}"), call("see", '{"n": 1}'), call("look", '{"n": "1"}'), call("look", "{n: 1}")])
    made = [([good, good], 1), ([good], 1), ([good, bad], 2), ([bad, bad, good], 3), ([bad], 4)]
    return {}, [said("", rank, tool_calls=calls, request=request) for calls, rank in made]


def exact(rng: random.Random) -> Group:
    subject, cause = rng.choice(SUBJECTS), rng.choice(CAUSES)
    right = [f"The {subject}.", subject.upper(), f" {subject}! "]
    return answer(subject), [*(said(text, 1) for text in right), said(cause, 2), said(f"{subject} {cause}", 2)]


def fuzzy(rng: random.Random) -> Group:
    reference = rng.sample(FILLER, 8)
    strange = [f"zz{number}" for number in range(8)]
    listed = [said(" ".join(reference[: 8 - 2 * step] + strange[: 2 * step]), step + 1) for step in range(5)]
    return answer(" ".join(reference)), listed


def math(rng: random.Random) -> Group:
    top, bottom = rng.randrange(1, 9), rng.choice([2, 4, 5, 8])
    right = [f"The answer is $\\frac{{{top}}}{{{bottom}}}$.", f"So x = {top / bottom}", f"\\boxed{{{top}/{bottom}}}"]
    wrong = [f"The answer is {top + 1}/{bottom}.", f"It is {top / bottom + 1}", "I do not know."]
    return answer(f"{top}/{bottom}"), [*(said(text, 1) for text in right), *(said(text, 2) for text in wrong)]


def code(rng: random.Random) -> Group:
    number = rng.randrange(2, 9)
    tests = [
        {"call": "f(0)", "returns": number},
        {"call": "f(3)", "returns": 3 + number},
        {"call": "f(-1)", "returns": number - 1},
    ]
    bodies = [f"return x + {number}", f"return max(x, 0) + {number}", f"return {number}", "return None"]
    listed = [said(f"Here:\n```python\ndef f(x):\n    {body}\n```", rank) for rank, body in enumerate(bodies, 1)]
    return {"task": {"metadata": {"tests": tests}}}, listed


def consensus(rng: random.Random) -> Group:
    most, some, one = rng.sample(range(1000), 3)
    listed = [said(f"I get {most}.", 1), said(f"{most}.0", 1), said(f"= {most}", 1), said(f"Is it {most}?", 1)]
    return {}, [*listed, said(f"{some}", 2), said(f"maybe {some}", 2), said(f"{one}!", 3), said("no idea", 4)]


def feedback(rng: random.Random) -> Group:
    return rated(rng, {"rating": 1.0}, {"rating": -1.0})


def implicit_feedback(rng: random.Random) -> Group:
    return rated(rng, {"signals": {"copied": 1.0}}, {"signals": {"regenerated": 1.0}})


def rated(rng: random.Random, good: dict[str, Any], bad: dict[str, Any]) -> Group:
    """Praise and blame each for one answer; the others are like one of these or like neither."""
    praised, blamed, other = (" ".join(rng.sample(FILLER[start : start + 13], 10)) for start in (0, 13, 26))
    return {}, [
        said(praised, 1, feedback=good),
        said(f"{praised} indeed", 2),
        said(other, 3),
        said(f"{blamed} indeed", 4),
        said(blamed, 5, feedback=bad),
    ]


def diversity(rng: random.Random) -> Group:
    common = " ".join(rng.sample(FILLER, 12))
    alone = " ".join(f"{rng.choice(CAUSES)} {rng.choice(SUBJECTS)}" for _ in range(6))
    return {}, [said(alone, 1), said(f"{common} perhaps {rng.choice(SUBJECTS)}", 2), said(common, 3), said(common, 3)]


def novelty(rng: random.Random) -> Group:
    """Each group's answers start like ``OLD``, which the first group has shown, and go on by themselves."""
    new = [f"w{rng.randrange(10**9)}" for _ in range(12)]
    return {}, [said(" ".join(OLD[: 3 * step] + new[3 * step :]), step + 1) for step in range(5)]


def answer(value: str) -> dict[str, Any]:
    return {"task": {"metadata": {"answer": value}}}


OLD = [f"old{number}" for number in range(12)]
MAKERS: dict[str, Callable[[random.Random], Group]] = {
    "concise": concise,
    "length": length,
    "json": json_keys,
    "json_schema": json_schema,
    "matches": matches,
    "language": language,
    "words": words,
    "repetition": repetition,
    "tool_calls": tool_calls,
    "exact": exact,
    "fuzzy": fuzzy,
    "math": math,
    "code": code,
    "consensus": consensus,
    "feedback": feedback,
    "implicit_feedback": implicit_feedback,
    "diversity": diversity,
    "novelty": novelty,
}


def lines(name: str) -> str:
    """The groups of one hook, as JSON Lines."""
    rng = random.Random(f"{SEED} {name}")
    rows: list[str] = []
    if name == "novelty":
        text = " ".join(OLD)
        rows.append(json.dumps({"task": {"task_id": "novelty-0"}, "candidates": [{"text": text}, {"text": text}]}))
    for number in range(1, GROUPS + 1):
        fields, listed = MAKERS[name](rng)
        rng.shuffle(listed)
        row = {
            "task": {"task_id": f"{name}-{number}", **fields.get("task", {})},
            "candidates": [one for one, _ in listed],
            "rank": [rank for _, rank in listed],
        }
        rows.append(json.dumps(row, ensure_ascii=False))
    return "\n".join(rows) + "\n"
