"""Multi-turn traces of a scripted agent with real tools, and the calls that they are to a trainer.

``python -m benchmarks.traces`` writes ``traces.jsonl`` anew: four attempts at one task (repair a small program until
its tests pass). The agent's answers are scripted, with the chance of ``--seed``; its tools truly run, in a throw-away
folder: their results, and so the lengths of the turns, are those of programs. The second attempt sends a sub-agent with
a conversation of its own; the last one compacts its history to a summary half-way.

One line per call of a model: the attempt, its conversation's ``messages`` from the one at ``from`` on, and the
``answer``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from swarm.tokens import ModelCall

TRACES = Path(__file__).with_name("traces.jsonl")
Message = dict[str, Any]

SYSTEM = """You repair programs. Work in small steps: look before you change anything, run the tests after each change,
and stop when they pass. You have these tools, which you call with JSON arguments:
list() names the files of the folder; read(path) shows a file with the numbers of its lines; search(text) shows the
lines of all files that hold the text; replace(path, old, new) changes a text that a file holds once; test() runs the
tests and shows their output; ask(question) sends a sub-agent, which reads for you and answers in a sentence.
Never change a test. Say in one sentence what you have found before you call a tool."""
TASK = "The tests in test_stats.py fail. Find out why and repair stats.py."
FILES = {
    "stats.py": '''"""Statistics of a list of numbers."""


def mean(values):
    """The arithmetic mean; raises ValueError for an empty list."""
    if not values:
        raise ValueError("no values")
    return sum(values) / (len(values) - 1)


def median(values):
    """The middle value, or the mean of both middle ones."""
    ordered = values.sort()
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return mean(ordered[middle - 1 : middle + 1])


def spread(values):
    """Largest less smallest."""
    return max(values) - min(values)
''',
    "test_stats.py": """import unittest

from stats import mean, median, spread


class Stats(unittest.TestCase):
    def test_mean(self):
        self.assertEqual(mean([1, 2, 3]), 2)

    def test_mean_of_nothing(self):
        with self.assertRaises(ValueError):
            mean([])

    def test_median(self):
        self.assertEqual(median([3, 1, 2]), 2)
        self.assertEqual(median([4, 1, 2, 3]), 2.5)

    def test_spread(self):
        self.assertEqual(spread([3, 1, 2]), 2)


if __name__ == "__main__":
    unittest.main()
""",
    "README.md": "# stats\n\nA mean, a median and a spread of plain lists. `python -m unittest` runs the tests.\n",
}
MEAN = {"path": "stats.py", "old": "(len(values) - 1)", "new": "len(values)"}
MEDIAN = {"path": "stats.py", "old": "values.sort()", "new": "sorted(values)"}


class Folder:
    """The tools, in a folder of their own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name, text in FILES.items():
            (place / name).write_text(text)

    def list(self) -> str:
        return "\n".join(f"{path.name}  {path.stat().st_size} bytes" for path in sorted(self.place.glob("*.*")))

    def read(self, path: str) -> str:
        lines = (self.place / path).read_text().splitlines()
        return "\n".join(f"{number:4}  {line}" for number, line in enumerate(lines, 1))

    def search(self, text: str) -> str:
        return "\n".join(
            f"{path.name}:{number}: {line}"
            for path in sorted(self.place.glob("*.*"))
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if text in line
        )

    def replace(self, path: str, old: str, new: str) -> str:
        text = (self.place / path).read_text()
        (self.place / path).write_text(text.replace(old, new))
        return f"replaced {text.count(old)} time in {path}"

    def test(self) -> str:
        command = [sys.executable, "-B", "-m", "unittest"]
        done = subprocess.run(command, cwd=self.place, capture_output=True, text=True, timeout=60)
        # the time that they took, and where the folder is, are no part of a trace
        told = re.sub(r"in [0-9.]+s", "in 0.001s", done.stderr).replace(f"{self.place}/", "")
        return re.sub(r'File "[^"]*/(unittest|lib)/[^"]*"', 'File "unittest"', told).strip()


class Agent:
    """One attempt; ``write`` gets each call of the model."""

    def __init__(self, attempt: int, folder: Folder, chance: random.Random, write: Callable[[Message], None]) -> None:
        self._attempt, self._folder, self._chance, self._write = attempt, folder, chance, write

    def run(self) -> None:
        plan: list[tuple[str, Message]] = [("list", {}), ("test", {}), ("read", {"path": "stats.py"})]
        if self._attempt == 1:
            plan.insert(2, ("ask", {"question": "Which functions do the tests call, and with which lists?"}))
        else:
            plan.insert(2, ("read", {"path": "test_stats.py"}))
        repairs = self._chance.sample([MEAN, MEDIAN], 2)
        for repair in repairs:
            plan += [("search", {"text": repair["old"]}), ("replace", repair), ("test", {})]
        messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
        for turn, (name, arguments) in enumerate(plan):
            if self._attempt == 3 and turn == 6:
                told = "What happened so far: mean() divides by one too few, median() sorts in place. Go on."
                messages = [*messages[:2], {"role": "user", "content": told}]
            call = {"name": name, "arguments": arguments}
            self._say(messages, self._words(name), [call])
            result = self._asked(arguments) if name == "ask" else getattr(self._folder, name)(**arguments)
            messages.append({"role": "tool", "content": result})
        self._say(messages, "The tests pass: mean() divided by one too few, and median() sorted in place.", [])

    def _asked(self, arguments: Message) -> str:
        """A sub-agent with a conversation of its own."""
        messages: list[Message] = [
            {"role": "system", "content": "You read files for another agent, and answer in one sentence."},
            {"role": "user", "content": arguments["question"]},
        ]
        self._say(messages, "I read the tests.", [{"name": "read", "arguments": {"path": "test_stats.py"}}])
        messages.append({"role": "tool", "content": self._folder.read("test_stats.py")})
        answer = (
            "They call mean() with [1, 2, 3] and [], median() with lists of three and four, and spread() with three."
        )
        self._say(messages, answer, [])
        return answer

    def _say(self, messages: list[Message], text: str, calls: list[Message]) -> None:
        answer: Message = {"role": "assistant", "content": text, **({"calls": calls} if calls else {})}
        self._write({"attempt": self._attempt, "messages": list(messages), "answer": answer})
        messages.append(answer)

    def _words(self, name: str) -> str:
        ways = {
            "list": ["First I look at what there is.", "Which files are there? I list them."],
            "test": ["I run the tests to see what fails.", "Now the tests, to see where we are."],
            "read": ["I read this file as a whole before I judge it.", "The file itself will tell; I read it."],
            "search": ["Where else is this written? I search for it.", "I make sure that it is written only once."],
            "replace": ["This line is wrong: I replace it.", "Here is the fault, and this is what should stand there."],
            "ask": ["A sub-agent can read the tests meanwhile."],
        }
        return self._chance.choice(ways[name])


def record(path: Path, seed: int) -> None:
    """Let the agent work, and write its calls."""
    known: list[Message] = []
    with path.open("w") as file:

        def write(call: Message) -> None:
            nonlocal known
            pairs = zip(known, call["messages"], strict=False)
            start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            line = {"attempt": call["attempt"], "from": start, "messages": call["messages"][start:]}
            file.write(json.dumps(line | {"answer": call["answer"]}) + "\n")
            known = call["messages"]

        for attempt in range(4):
            with tempfile.TemporaryDirectory() as place:
                Agent(attempt, Folder(Path(place)), random.Random(seed + attempt), write).run()


def attempts(encode: Callable[[str], list[int]], *, thinks: bool = False, path: Path = TRACES) -> list[list[ModelCall]]:
    """The calls of each attempt.

    Args:
        encode: a text's token ids.
        thinks: before each answer the model thinks aloud, and the chat template drops that from the history, as Qwen3's
            does: no call continues an earlier one.
    """
    found: list[list[ModelCall]] = [[] for _ in range(4)]
    for attempt, messages, answer in _read(path):
        prompt = "".join(map(_told, messages)) + "<|im_start|>assistant\n"
        thought = f"<think>\nWhat do I know? {answer['content']}\n</think>\n\n" if thinks else ""
        said = _told(answer).removeprefix("<|im_start|>assistant\n")
        ids = encode(thought + said)
        found[attempt].append(
            ModelCall(
                call_id=f"{attempt}-{len(found[attempt])}",
                prompt_ids=encode(prompt),
                response_ids=ids,
                logprobs=[-1.0] * len(ids),
                min_policy_version=0,
                max_policy_version=0,
                finish_reason="stop",
            )
        )
    return found


def _read(path: Path) -> Iterator[tuple[int, list[Message], Message]]:
    messages: list[Message] = []
    for line in path.read_text().splitlines():
        call = json.loads(line)
        messages = [*messages[: call["from"]], *call["messages"]]
        yield call["attempt"], messages, call["answer"]


def _told(message: Message) -> str:
    calls = "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in message.get("calls", ()))
    # templates end a message with a line that the model does not say: the next prompt begins with it
    return f"<|im_start|>{message['role']}\n{message['content']}{calls}<|im_end|>"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Record the traces anew.")
    parser.add_argument("--seed", type=int, default=0)
    record(TRACES, parser.parse_args().seed)
