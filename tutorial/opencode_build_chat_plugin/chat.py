"""A chat companion on the command line: each call says one thing and prints the reply. It knows nothing of training.

    python chat.py "I have been to the sea."
    python chat.py "It was cold."             # goes on with the same conversation
    python chat.py --new "What a day!"

The conversation is in ``--file``. The OpenAI SDK reads OPENAI_BASE_URL and OPENAI_API_KEY; OPENAI_MODEL names the
model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError

SYSTEM = "You are a friendly companion. Answer in one or two short sentences and keep the talk going with a question."


def main() -> None:
    parser = argparse.ArgumentParser(description="Say one thing to the companion.")
    parser.add_argument("words")
    parser.add_argument("--file", type=Path, default=Path("chat.json"), help="the conversation")
    parser.add_argument("--new", action="store_true", help="begin a new one")
    parser.add_argument("--model", default=os.environ.get("OPENAI_MODEL", "smollm2-135m"))
    arguments = parser.parse_args()
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    if arguments.file.exists() and not arguments.new:
        messages = json.loads(arguments.file.read_text(encoding="utf-8"))
    messages.append({"role": "user", "content": arguments.words})
    try:
        reply = OpenAI().chat.completions.create(model=arguments.model, messages=messages).choices[0].message.content
    except OpenAIError as exc:
        sys.exit(f"chat: {exc}")
    messages.append({"role": "assistant", "content": reply or ""})
    arguments.file.write_text(json.dumps(messages, indent=1), encoding="utf-8")
    print(reply)


if __name__ == "__main__":
    main()
