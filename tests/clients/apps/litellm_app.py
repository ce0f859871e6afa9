"""An application on litellm; prints what its user sees as JSON. Runs in the environment of ``litellm``.

Arguments: the address, the dialect (litellm's name of the provider), and the path of a file for which the model is to
wait, if any.
"""

import json
import sys

import litellm

litellm.suppress_debug_info = True
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def main(url: str, provider: str, wait: str | None = None) -> None:
    base = url.removesuffix("/v1") if provider == "anthropic" else url
    asked = {"model": f"{provider}/tiny", "api_base": base, "api_key": "any", "num_retries": 0}

    def ask(messages: list, **more):
        return litellm.completion(**asked, messages=messages, **more).choices[0].message

    if wait is not None:
        ask([{"role": "user", "content": f"WAIT {wait}"}])
        return
    hello = [{"role": "user", "content": "Hello"}]
    plain = ask(hello).content
    chunks = litellm.completion(**asked, messages=hello, stream=True)
    pieces = [piece for chunk in chunks if (piece := chunk.choices[0].delta.content)]
    ran = []

    def tools(stream: bool) -> tuple[str, str]:
        talk = [{"role": "user", "content": "How is it in Rome and Oslo?"}]
        if stream:
            parts = list(litellm.completion(**asked, messages=talk, tools=[WEATHER], stream=True))
            message = litellm.stream_chunk_builder(parts).choices[0].message
        else:
            message = ask(talk, tools=[WEATHER])
        talk.append(message.model_dump())
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            ran.append(city)
            talk.append({"role": "tool", "tool_call_id": call.id, "content": f"{city} is sunny"})
        last = ask(talk, tools=[WEATHER])
        talk += [last.model_dump(), {"role": "user", "content": "SAY still here"}]
        return last.content, ask(talk, tools=[WEATHER]).content

    (called, again), (streamed_call, _) = tools(False), tools(True)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    image = ask([{"role": "user", "content": [{"type": "text", "text": "What is it?"}, picture]}]).content
    result = {
        "plain": plain,
        "streamed": "".join(pieces),
        "pieces": len(pieces),
        "tools": called,
        "tools_streamed": streamed_call,
        "ran": ran,
        "again": again,
        "image": image,
    }
    print(json.dumps(result))


main(*sys.argv[1:])
