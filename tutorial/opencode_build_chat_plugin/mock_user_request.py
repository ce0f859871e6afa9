"""Users who talk to ``chat.py`` through its command line, one message at a time, with a progress bar and a report.

python mock_user_request.py --quick
python mock_user_request.py --steps 24 --report runs/report
"""

from __future__ import annotations

import shlex
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from gateway.replay.senders import CommandSender, Outcome
from swarm.types import Task

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from study.users import Address, main  # noqa: E402

SECONDS = 300.0  # for one message


class Talk:
    """Has one conversation after another, each in a file of its own; every message is a run of ``chat.py``."""

    def __init__(self, to: Address) -> None:
        self._env = {"OPENAI_BASE_URL": to.base_url, "OPENAI_API_KEY": "none", "OPENAI_MODEL": to.model}

    async def send(self, task: Task) -> Outcome:
        with TemporaryDirectory() as folder:
            command = [sys.executable, str(HERE / "chat.py"), "--file", f"{folder}/chat.json", "{question}"]
            sender = CommandSender(shlex.join(command), self._env, SECONDS)
            outcome = Outcome(0.0)
            seconds = 0.0
            for message in task.messages:
                outcome = await sender.send(task.model_copy(update={"main_query": message["content"]}))
                seconds += outcome.seconds
                if outcome.failure:
                    return outcome
        return replace(outcome, seconds=seconds)


if __name__ == "__main__":
    sys.exit(main(lambda to: nullcontext(Talk(to)), HERE / "conversations.jsonl", "chat.py"))
