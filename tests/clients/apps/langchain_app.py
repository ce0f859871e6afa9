"""An application on LangChain; prints what its user sees as JSON. Runs in the environment of ``langchain-openai``."""

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Visit(BaseModel):
    """A journey."""

    city: str
    days: int


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city} is sunny"


def tools(model: ChatOpenAI) -> str:
    bound = model.bind_tools([weather])
    talk = [HumanMessage("How is it in Rome and Oslo?")]
    asked = bound.invoke(talk)
    talk += [asked, *(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in asked.tool_calls)]
    return bound.invoke(talk).text


def streamed(model: ChatOpenAI) -> tuple[str, int]:
    pieces = list(model.stream("Hello"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    return whole.text, whole.usage_metadata["output_tokens"]


def main(base_url: str) -> None:
    chat = ChatOpenAI(base_url=base_url, api_key="any", model="tiny", stream_usage=True)
    responses = ChatOpenAI(base_url=base_url, api_key="any", model="tiny", use_responses_api=True)
    for name, model in (("chat", chat), ("responses", responses)):
        plain = model.invoke([("system", "Be kind."), ("user", "Hello")])
        result = {
            "plain": plain.text,
            "output_tokens": plain.usage_metadata["output_tokens"],
            "streamed": streamed(model),
            "tools": tools(model),
            "structured": model.with_structured_output(Visit).invoke("Where to?").model_dump(),
            "batch": [answer.text for answer in model.batch(["one", "two"])],
        }
        print(json.dumps({name: result}))


main(sys.argv[1])
