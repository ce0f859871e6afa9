"""An agent on llama-index; prints what its user sees as JSON. Runs in the environment of ``llama-index``.

Arguments: the address, and the path of a file for which the model is to wait, if any.
"""

import asyncio
import base64
import json
import sys

from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike


async def main(url: str, wait: str | None = None) -> None:
    settings = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4000, "max_retries": 0}
    llm = OpenAILike(model="tiny", api_base=url, api_key="any", **settings)
    hello = ChatMessage("Hello")
    if wait is not None:
        await llm.achat([ChatMessage(f"WAIT {wait}")])
        return
    plain = llm.chat([hello]).message.content
    pieces = [piece.delta for piece in llm.stream_chat([hello]) if piece.delta]
    again = llm.chat([hello, ChatMessage(plain, role="assistant"), ChatMessage("And now?")]).message.content
    ran = []

    def weather(city: str) -> str:
        """The weather in a city."""
        ran.append(city)
        return f"{city} is sunny"

    agent = FunctionAgent(tools=[weather], llm=llm)
    handler = agent.run("How is it in Rome and Oslo?")
    deltas = [event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)]
    tools = str(await handler)
    png = base64.b64encode(b"\x89PNG\r\n\x1a\n")
    picture = ChatMessage(
        role="user", blocks=[TextBlock(text="What is it?"), ImageBlock(image=png, image_mimetype="image/png")]
    )
    result = {
        "plain": plain,
        "streamed": "".join(pieces),
        "pieces": len(pieces),
        "again": again,
        "tools": tools,
        "tool_deltas": len(deltas),
        "ran": sorted(ran),
        "image": llm.chat([picture]).message.content,
    }
    print(json.dumps(result))


asyncio.run(main(*sys.argv[1:]))
