"""An agent on smolagents; prints what its user sees as JSON. Runs in the environment of ``smolagents``.

Arguments: the address, and the path of a file for which the model is to wait, if any.
"""

import json
import sys

from smolagents import ChatMessage, MessageRole, OpenAIServerModel, ToolCallingAgent, tool

RAN = []


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name.
    """
    RAN.append(city)
    # the scripted model follows orders, also those of a tool
    return f'CALL final_answer {{"answer": "{city} is sunny"}}' if city == "Oslo" else f"{city} is sunny"


def main(url: str, wait: str | None = None) -> None:
    model = OpenAIServerModel(model_id="tiny", api_base=url, api_key="any")

    def turns(*texts: str) -> list[ChatMessage]:
        roles = [MessageRole.USER, MessageRole.ASSISTANT]
        return [ChatMessage(role=roles[k % 2], content=[{"type": "text", "text": t}]) for k, t in enumerate(texts)]

    if wait is not None:
        model(turns(f"WAIT {wait}"))
        return
    pieces = [delta.content for delta in model.generate_stream(turns("Hello")) if delta.content]
    agent = ToolCallingAgent(tools=[weather], model=model, max_steps=3, verbosity_level=0)
    order = 'CALL weather {"city": "Rome"}\nCALL weather {"city": "Oslo"}'
    streaming = ToolCallingAgent(tools=[weather], model=model, max_steps=3, verbosity_level=0, stream_outputs=True)
    result = {
        "plain": model(turns("Hello")).content,
        "streamed": "".join(pieces),
        "pieces": len(pieces),
        "again": model(turns("Hello", "You said: Hello", "And now?")).content,
        "tools": agent.run(order),
        "tools_streamed": streaming.run(order),
        "ran": sorted(RAN),
    }
    # what it streams ends without a newline
    print()
    print(json.dumps(result))


main(*sys.argv[1:])
