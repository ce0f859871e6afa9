"""An application on instructor; prints what its user sees as JSON. Runs in the environment of ``instructor``.

Arguments: the address, and the path of a file for which the model is to wait, if any.
"""

import json
import sys
from collections.abc import Iterable

import instructor
import openai
from pydantic import BaseModel


class Visit(BaseModel):
    """A journey."""

    city: str


def main(url: str, wait: str | None = None) -> None:
    sdk = openai.OpenAI(base_url=url, api_key="any", max_retries=0)

    def ask(text: str, mode: instructor.Mode, form: type = Visit, **more):
        client = instructor.from_openai(sdk, mode=mode)
        messages = [{"role": "user", "content": text}]
        return client.chat.completions.create(
            model="tiny", messages=messages, response_model=form, max_retries=1, **more
        )

    if wait is not None:
        ask(f"WAIT {wait}", instructor.Mode.TOOLS)
        return
    partial = instructor.from_openai(sdk, mode=instructor.Mode.TOOLS).chat.completions.create_partial(
        model="tiny", messages=[{"role": "user", "content": "To Rome"}], response_model=Visit
    )
    seen = list(partial)
    result = {
        "plain": ask("To Rome", instructor.Mode.JSON_SCHEMA).model_dump(),
        "tools": ask("To Rome", instructor.Mode.TOOLS).model_dump(),
        "parallel": [one.city for one in ask("Rome and Oslo", instructor.Mode.PARALLEL_TOOLS, Iterable[Visit])],
        "streamed": seen[-1].model_dump(),
        "pieces": len(seen),
    }
    print(json.dumps(result))


main(*sys.argv[1:])
