"""An agent on langgraph with a memory; prints what its user sees as JSON. Runs in the environment of ``langgraph``.

Arguments: the address, and the path of a file for which the model is to wait, if any.
"""

import base64
import json
import sys

from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

RAN = []


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    RAN.append(city)
    return f"{city} is sunny"


def agent_of(url: str, tools: list, streaming: bool = True):
    model = ChatOpenAI(base_url=url, api_key="any", model="tiny", streaming=streaming)
    bound = model.bind_tools(tools) if tools else model
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_edge(START, "model")
    if tools:
        graph.add_node("tools", ToolNode(tools))
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
    return graph.compile(checkpointer=InMemorySaver())


def main(url: str, wait: str | None = None) -> None:
    talker, guide = agent_of(url, []), agent_of(url, [weather])

    def said(agent, text, thread: str) -> str:
        config = {"configurable": {"thread_id": thread}}
        return agent.invoke({"messages": [HumanMessage(text)]}, config)["messages"][-1].text

    if wait is not None:
        said(talker, f"WAIT {wait}", "0")
        return
    plain = said(agent_of(url, [], streaming=False), "Hello", "1")
    config = {"configurable": {"thread_id": "2"}}
    stream = talker.stream({"messages": [HumanMessage("Hello")]}, config, stream_mode="messages")
    pieces = [message.text for message, _ in stream if isinstance(message, AIMessageChunk) and message.text]
    tools = said(guide, "How is it in Rome and Oslo?", "3")
    again = said(guide, "SAY still here", "3")
    png = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
    picture = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}},
    ]
    result = {
        "plain": plain,
        "streamed": "".join(pieces),
        "pieces": len(pieces),
        "tools": tools,
        "ran": RAN,
        "again": again,
        "image": said(talker, picture, "4"),
    }
    print(json.dumps(result))


main(*sys.argv[1:])
