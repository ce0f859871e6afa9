"""A small assistant for Python questions: one question by argument, or a chat. It knows nothing of training.

    python app.py "Why are default values shared between objects?"
    python app.py

The OpenAI SDK reads OPENAI_BASE_URL and OPENAI_API_KEY; OPENAI_MODEL names the model.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from openai import OpenAI, OpenAIError

SYSTEM = "You are a helpful assistant."
STYLE = "Answer in one short sentence."


class Assistant:
    """One conversation; without ``remember`` every question starts a new one."""

    def __init__(self, client: OpenAI, model: str, remember: bool = False) -> None:
        self._client = client
        self._model = model
        self._remember = remember
        self._messages: list[Any] = [{"role": "system", "content": SYSTEM}]

    def ask(self, question: str) -> str:
        """The model's answer."""
        messages = [*self._messages, {"role": "user", "content": f"{question} {STYLE}"}]
        completion = self._client.chat.completions.create(model=self._model, messages=messages)
        answer = completion.choices[0].message.content or ""
        if self._remember:
            self._messages = [*messages, {"role": "assistant", "content": answer}]
        return answer


def chat(assistant: Assistant) -> None:
    """Answer each typed line until an empty one, Ctrl-C or the end of input."""
    while True:
        try:
            question = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not question:
            return
        print(f"bot> {assistant.ask(question)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A small assistant for Python questions.")
    parser.add_argument("question", nargs="?", help="ask this and leave; without it: a chat")
    parser.add_argument("--model", default=os.environ.get("OPENAI_MODEL", "smollm2-135m"))
    arguments = parser.parse_args()
    try:
        client = OpenAI()
        if arguments.question:
            print(Assistant(client, arguments.model).ask(arguments.question))
        else:
            chat(Assistant(client, arguments.model, remember=True))
    except OpenAIError as exc:
        sys.exit(f"app: {exc}")


if __name__ == "__main__":
    main()
