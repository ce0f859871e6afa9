"""An agent on haystack; prints what its user sees as JSON. Runs in the environment of ``haystack``.

Arguments: the address, and the path of a file for which the model is to wait, if any.
"""

import json
import sys
from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, ImageContent
from haystack.tools import tool
from haystack.utils import Secret

RAN = []


@tool
def weather(city: Annotated[str, "its name"]) -> str:
    """The weather in a city."""
    RAN.append(city)
    return f"{city} is sunny"


def main(url: str, wait: str | None = None) -> None:
    def model(**more):
        return OpenAIChatGenerator(Secret.from_token("any"), "tiny", api_base_url=url, max_retries=0, **more)

    def said(*messages: ChatMessage, **more) -> ChatMessage:
        return model(**more).run(list(messages))["replies"][0]

    hello = ChatMessage.from_user("Hello")
    if wait is not None:
        said(ChatMessage.from_user(f"WAIT {wait}"))
        return
    plain = said(hello)
    pieces = []
    streamed = said(hello, streaming_callback=lambda chunk: pieces.append(chunk.content) if chunk.content else None)
    question = [ChatMessage.from_user("How is it in Rome and Oslo?")]
    tools = Agent(chat_generator=model(), tools=[weather]).run(question)["messages"][-1].text
    live = Agent(chat_generator=model(), tools=[weather], streaming_callback=lambda chunk: None)
    image = ImageContent(base64_image="iVBORw0KGgo=", mime_type="image/png", validation=False)
    result = {
        "plain": plain.text,
        "streamed": streamed.text,
        "pieces": len(pieces),
        "again": said(hello, plain, ChatMessage.from_user("And now?")).text,
        "tools": tools,
        "tools_streamed": live.run(question)["messages"][-1].text,
        "ran": RAN,
        "image": said(ChatMessage.from_user(content_parts=["What is it?", image])).text,
    }
    print(json.dumps(result))


main(*sys.argv[1:])
