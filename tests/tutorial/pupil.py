"""The engine of the tutorials' tests: an engine without a trainer, whose model has one weight that learns.

The weight is the share of good answers. What is good depends on the tutorial, which the prompt tells
(:func:`_answers`); a step moves the weight towards the kind of answer that had the higher mean reward.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import threading
from pathlib import Path
from statistics import fmean
from typing import Any

from starlette.responses import Response

from swarm.importer import SourceFolder
from swarm.job import TrainJob, parse_job
from swarm.tokens import Timeline, TrainBatch
from tests.standins.engine import Engine
from tests.standins.models import text_of
from tests.standins.vllm import ScriptedVllm, chat_answer, entries, listening, plain_choice, spoken

#: starts the engine; the server appends the path of the job
COMMAND = (sys.executable, "-P", __file__)
TUTORIALS = Path(__file__).parents[2] / "tutorial"
GLOSSARY = SourceFolder(TUTORIALS / "opencode_build_translation_agent").module("make_sentences").GLOSSARY
#: of the coding tutorial: the repaired module by what the agent is asked
REPAIRS = {
    row["prompt"]: row for row in SourceFolder(TUTORIALS / "opencode_build_coding_agent").module("make_repairs").rows()
}
#: what agents call the tool that runs a command, and its argument
_SHELLS = {"Bash": "command", "bash": "command", "exec_command": "cmd"}
_DONE = "Done."
_PIECE = re.compile(r"<\w+>|\s*\w+|\s*[^\w\s]|\s+")


class Pupil:
    """Its tokens spell its text, so that an answer that comes back in the next prompt continues its timeline."""

    def __init__(self) -> None:
        self.share = 0.4
        self._random = random.Random(0)
        self._ids: dict[str, int] = {}
        self._good: dict[tuple[int, ...], bool] = {}
        self._kinds: dict[str, bool] = {}
        self._lock = threading.Lock()

    def answer(self, body: dict[str, Any]) -> Response:
        prompt = "".join(f"<{one['role']}>{_text(one)}" for one in body["messages"]) + "<assistant>"
        with self._lock:
            choices = [self._choice(index, body) for index in range(body.get("n") or 1)]
            return spoken(chat_answer(choices, prompt=self._tokens(prompt)), bool(body.get("stream")))

    def _choice(self, index: int, body: dict[str, Any]) -> dict[str, Any]:
        # a conversation goes on as it began
        before = [self._kinds.get(_text(one)) for one in body["messages"] if one["role"] == "assistant"]
        known = next((kind for kind in reversed(before) if kind is not None), None)
        good = self._random.random() < self.share if known is None else known
        message = _message(body, good)
        text = message["content"] or json.dumps(message["tool_calls"])
        tokens = self._tokens(text)
        self._kinds[text] = self._good[tuple(tokens)] = good
        finish = "tool_calls" if message["tool_calls"] else "stop" if good or text == _DONE else "length"
        return plain_choice(tokens, finish, index, message=message, logprobs=entries(tokens, _PIECE.findall(text)))

    def _tokens(self, text: str) -> list[int]:
        return [self._ids.setdefault(piece, 100 + len(self._ids)) for piece in _PIECE.findall(text)]

    def learn(self, batch: TrainBatch) -> None:
        for group in batch.groups:
            kinds: dict[bool, list[float]] = {True: [], False: []}
            for one in group.trajectories:
                with self._lock:
                    kinds[self._good[_first_answer(one.timelines[0])]].append(one.reward + one.credit)
            if all(kinds.values()):
                better = fmean(kinds[True]) > fmean(kinds[False])
                with self._lock:
                    self.share = min(0.95, max(0.05, self.share + (0.1 if better else -0.1)))


def _first_answer(timeline: Timeline) -> tuple[int, ...]:
    mask = [bool(one) for one in timeline.response_mask]
    end = mask.index(False) if False in mask else len(mask)
    return tuple(int(token) for token in timeline.response_ids[:end])


def _text(message: dict[str, Any]) -> str:
    return text_of(message) or json.dumps(message.get("tool_calls"))


def _message(body: dict[str, Any], good: bool) -> dict[str, Any]:
    last = _text(body["messages"][-1])
    shell = next((name for tool in body.get("tools") or [] if (name := tool["function"]["name"]) in _SHELLS), "")
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
    if shell:
        return message | _repair(body, shell, good)
    if body["messages"][-1]["role"] == "tool":
        return message | {"content": f"The calculator says {last}."}
    if body.get("tools"):
        a, b = re.findall(r"\d+", last)[:2]
        sign = "+" if "buys" in last else "-"
        arguments = json.dumps({"a": int(a), "sign": sign, "b": int(b)}) if good else "{}"
        call = {"id": "call_0", "type": "function", "function": {"name": "calculate", "arguments": arguments}}
        return message | {"tool_calls": [call]}
    return message | {"content": _answers([_text(one) for one in body["messages"]])[0 if good else 1]}


def _repair(body: dict[str, Any], shell: str, good: bool) -> dict[str, Any]:
    """What a coding agent is told: to write the repaired module, or only to look at it; then that it is done."""
    asked = "".join(_text(one) for one in body["messages"] if one["role"] == "user")
    row = next((row for order, row in REPAIRS.items() if order in asked), None)
    if row is None or any(one["role"] == "assistant" for one in body["messages"]):
        return {"content": _DONE}
    module = f"{row['task_id']}.py"
    command = f"cat > {module} <<'END'\n{row['right']}END" if good else f"cat {module}"
    arguments = json.dumps({_SHELLS[shell]: command, "description": "Repair it"})
    return {"tool_calls": [{"id": "call_0", "type": "function", "function": {"name": shell, "arguments": arguments}}]}


def _answers(texts: list[str]) -> tuple[str, str]:
    """A good and a bad answer."""
    asked = texts[-1]
    if texts[0].startswith("You write a problem as a sum"):
        return _sum(asked), "I cannot say."
    if texts[0].startswith("You walk to the goal"):
        return f"{_move(asked)}!", "Hmm."
    if texts[0].startswith("You work out sums"):
        return str(eval(asked if "+" in asked else _sum(asked))), "77"
    if "buys" in asked or "gives away" in asked:
        a, b = (int(number) for number in re.findall(r"\d+", asked)[:2])
        return f"{a} + {b} = {a + b}" if "buys" in asked else f"{a} - {b} = {a - b}", f"{a} of {b}, or 77"
    if "French" in asked:
        sentence = texts[0].partition(": ")[2]
        french = " ".join(f"{GLOSSARY.get(word, 'mot')}" for word in re.findall(r"[a-z]+", sentence.lower()))
        numbers = re.findall(r"[0-9]+", sentence)
        return " ".join([french, *numbers]), f"Sure! Here is the translation: {sentence}"
    if "Write this as JSON" in asked:
        return _person(asked), f"Here is the person: {asked}"
    if "keep the talk going" in texts[0]:
        return f"I like that: {asked.strip(' .?!')}. What about you?", "word " * 60
    question = asked.removesuffix("Answer in one short sentence.").strip(" ?")
    return f"It is about {question} in the language.", "word " * 60


def _move(seen: str) -> str:
    """Towards the goal where there is no hole, else where there is ice; not in the words of the agent's examples."""
    around, _, goal = seen.lower().partition(". the goal is")
    sides = dict(side.split(" is ") for side in around.split(", "))
    safe = [move for move, there in sides.items() if there in ("ice", "the goal")]
    return next((move for move in safe if move in goal), safe[0])


def _sum(story: str) -> str:
    """The sum of a word problem."""
    a, b, c = re.findall(r"\d+", story)
    return f"{a} + {b} - {c}" if story.index("buys") < story.index("gives") else f"{a} - {b} + {c}"


def _person(asked: str) -> str:
    found = re.match(r"(\w+) is (\d+) years old, lives in (\w+) and works as a (\w+)", asked)
    assert found is not None
    name, age, city, job = found.groups()
    return json.dumps({"name": name, "age": int(age), "city": city, "job": job})


async def _serve(job: TrainJob) -> None:
    model = Pupil()
    vllm = ScriptedVllm(model.answer)

    class Learning(Engine):
        def step(self, batch: TrainBatch) -> bool:
            model.learn(batch)
            return super().step(batch)

    async with listening(vllm.app) as url:
        await asyncio.to_thread(Learning(job, url.removeprefix("http://")).run)


if __name__ == "__main__":
    asyncio.run(_serve(parse_job(Path(sys.argv[1]).read_text())))
