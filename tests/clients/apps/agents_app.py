"""An agent on openai-agents; prints what its user sees as JSON. Runs in the environment of ``openai-agents``.

The address comes from the environment, as it does for whoever changes nothing but the base URL.
"""

import asyncio
import json
import sys

from agents import Agent, Runner, SQLiteSession, function_tool, set_default_openai_api
from pydantic import BaseModel


class Visit(BaseModel):
    city: str
    days: int


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city} is sunny"


async def main(api: str) -> None:
    set_default_openai_api(api)
    agent = Agent(name="Guide", instructions="Be kind.", model="tiny", tools=[weather])
    plain = await Runner.run(agent, "How is it in Rome and Oslo?")
    stream = Runner.run_streamed(agent, "How is it in Rome and Oslo?")
    kinds = [event.type async for event in stream.stream_events()]
    visitor = Agent(name="Visitor", model="tiny", output_type=Visit)
    visit = await Runner.run(visitor, "Where to?")
    session = SQLiteSession("talk")
    talker = Agent(name="Talker", model="tiny")
    said = [(await Runner.run(talker, text, session=session)).final_output for text in ("one", "two")]
    desk = Agent(name="Desk", instructions="Hand over.", model="tiny", handoffs=[talker])
    handed = await Runner.run(desk, "Whom may I ask?")
    result = {
        "plain": plain.final_output,
        "streamed": stream.final_output,
        "events": len(kinds),
        "visit": visit.final_output.model_dump(),
        "session": said,
        "last_agent": handed.last_agent.name,
    }
    print(json.dumps(result))


asyncio.run(main(sys.argv[1]))
