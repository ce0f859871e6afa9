"""A program on dspy; prints what its user sees as JSON. Runs in the environment of ``dspy``.

Arguments: the address, and the path of a file for which the model is to wait, if any.
"""

import json
import sys

import dspy


def main(url: str, wait: str | None = None) -> None:
    lm = dspy.LM("openai/tiny", api_base=url, api_key="any", cache=False, num_retries=0)
    if wait is not None:
        lm(f"WAIT {wait}")
        return
    plain = lm("Hello")[0]
    talk = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": plain},
        {"role": "user", "content": "And now?"},
    ]
    again = lm(messages=talk)[0]
    dspy.configure(lm=lm, adapter=dspy.ChatAdapter())
    answer = "SAY [[ ## answer ## ]] Rome"
    signature = dspy.Predict("question -> answer")(question=answer).answer

    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": city}}
    calls = lm("Rome and Oslo", tools=[weather])[0]["tool_calls"]
    ran = [json.loads(call.function.arguments)["city"] for call in calls]
    print(json.dumps({"plain": plain, "again": again, "predicted": signature, "ran": ran}))


main(*sys.argv[1:])
