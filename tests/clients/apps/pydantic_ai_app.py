"""An agent on pydantic-ai; prints what its user sees as JSON. Runs in the environment of ``pydantic-ai``.

Arguments: the address, the dialect, and the path of a file for which the model is to wait, if any.
"""

import asyncio
import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c63f8cfc0f01f0005000201"
    "a4b1e8b20000000049454e44ae426082"
)


class Visit(BaseModel):
    city: str


def model_of(url: str, dialect: str) -> object:
    if dialect == "anthropic":
        provider = AnthropicProvider(base_url=url.removesuffix("/v1"), api_key="any")
        return AnthropicModel("tiny", provider=provider)
    kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[dialect]
    return kind("tiny", provider=OpenAIProvider(base_url=url, api_key="any"))


async def main(url: str, dialect: str, wait: str | None = None) -> None:
    model = model_of(url, dialect)
    agent = Agent(model, instructions="Be kind.")
    if wait is not None:
        await agent.run(f"WAIT {wait}")
        return
    plain = await agent.run("Hello")
    async with agent.run_stream("Hello") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    ran = []

    def weather(city: str) -> str:
        """The weather in a city."""
        ran.append(city)
        return f"{city} is sunny"

    guide = Agent(model, tools=[weather])
    tools = await guide.run("How is it in Rome and Oslo?")
    again = await agent.run("And now?", message_history=tools.all_messages())
    image = await agent.run(["What is it?", BinaryContent(data=PNG, media_type="image/png")])
    visit = await Agent(model, output_type=Visit).run("Where to?")
    print(
        json.dumps(
            {
                "plain": plain.output,
                "streamed": "".join(pieces),
                "pieces": len(pieces),
                "tools": tools.output,
                "ran": ran,
                "again": again.output,
                "image": image.output,
                "object": visit.output.model_dump(),
            }
        )
    )


asyncio.run(main(*sys.argv[1:]))
