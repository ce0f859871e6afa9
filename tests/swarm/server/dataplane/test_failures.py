"""vLLM's words for a request that is too long, and ours."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from adapters.dialects import ChatDialect, CompletionsDialect, MessagesDialect, ResponsesDialect
from swarm.errors import ContextLengthError
from swarm.job import TrainJob
from swarm.server.dataplane.replica_client import UpstreamRefusalError, not_guided, too_long

JOB = TrainJob(model="tiny", max_prompt_length=60, max_response_length=40)

#: by what was asked for: prompt and answer tokens, or characters
COUNTED = (
    "This model's maximum context length is 100 tokens. However, you requested {answer} output tokens and your "
    "prompt contains {least}{prompt} input tokens, for a total of {least}{total} tokens. Please reduce the length of "
    "the input prompt or the number of requested output tokens."
)
CHARACTERS = (
    "This model's maximum context length is 100 tokens. However, you requested 0 output tokens and your prompt "
    "contains 2000 characters (more than 1000 characters, which is the upper bound for 100 input tokens). Please "
    "reduce the length of the input prompt or the number of requested output tokens."
)
LONGER = "The decoder prompt (length 120) is longer than the maximum model length of 100. Make sure that ..."
NO_ROOM = (
    "The decoder prompt (length 100) plus the number of requested output tokens (at least 1) is longer than the "
    "maximum model length of 100. Make sure that `max_model_len` is no smaller than the number of text tokens (prompt "
    "+ requested output tokens)."
)


def counted(prompt: int, answer: int, *, least: bool = False) -> str:
    more = "at least " if least else ""
    return COUNTED.format(prompt=prompt, answer=answer, total=prompt + answer, least=more)


def told(message: str, param: str = "messages") -> ContextLengthError:
    payload = {"error": {"message": message, "type": "BadRequestError", "param": "input_tokens", "code": 400}}
    error = too_long(UpstreamRefusalError(400, payload, param), JOB)
    assert isinstance(error, ContextLengthError)
    return error


@pytest.mark.parametrize(
    ("message", "openai", "anthropic"),
    [
        (
            counted(120, 0),
            "However, your messages resulted in 120 tokens. Please reduce the length of the messages.",
            "prompt is too long: 120 tokens > 100 maximum",
        ),
        (
            counted(101, 0, least=True),
            "However, your messages resulted in at least 101 tokens.",
            "prompt is too long: 101 tokens > 100 maximum",
        ),
        (
            counted(80, 30),
            "However, you requested 110 tokens (80 in the messages, 30 in the completion).",
            "input length and `max_tokens` exceed context limit: 80 + 30 > 100, decrease",
        ),
        (
            # how long the prompt is beyond the room for it, vLLM did not look
            counted(71, 30, least=True),
            "maximum context length is 70 tokens. However, your messages resulted in at least 71 tokens.",
            "prompt is too long: 71 tokens > 70 maximum",
        ),
        (CHARACTERS, "resulted in at least 101 tokens.", "prompt is too long: 101 tokens > 100 maximum"),
        (LONGER, "resulted in 120 tokens.", "prompt is too long: 120 tokens > 100 maximum"),
        (NO_ROOM, "resulted in 100 tokens.", "prompt is too long: 101 tokens > 100 maximum"),
    ],
)
def test_every_dialect_says_it_in_its_own_words(message: str, openai: str, anthropic: str) -> None:
    error = told(message)
    chat = ChatDialect().error(error)["error"]
    assert chat["message"].startswith("This model's maximum context length is ") and openai in chat["message"]
    assert "job.max_prompt_length (now 60; with job.max_response_length, 40, it makes the context)" in chat["message"]
    assert (error.status, chat["code"], chat["type"], chat["param"]) == (
        400,
        "context_length_exceeded",
        "invalid_request_error",
        "messages",
    )
    assert ResponsesDialect().error(error)["error"]["param"] == "input"
    assert CompletionsDialect().error(told(message, "prompt"))["error"]["param"] == "prompt"
    said: dict[str, Any] = MessagesDialect().error(error)
    assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")
    assert said["error"]["message"].startswith(anthropic) and "job.max_prompt_length" in said["error"]["message"]


def test_other_refusals_are_none() -> None:
    for error in ({"message": "temperature must be at least 0"}, "too long", None):
        assert too_long(UpstreamRefusalError(400, {"error": error}), JOB) is None
        assert not_guided(UpstreamRefusalError(400, {"error": error})) is None


@pytest.mark.parametrize(
    "words",
    # of vLLM 0.28
    [
        'Grammar error: Unimplemented keys: ["uniqueItems"]',
        "Grammar error: Pointer '/$defs/nope' does not exist",
        "Grammar error: Unsatisfiable schema: minLength (5) is greater than maxLength (3)",
    ],
)
def test_a_schema_that_the_engine_cannot_hold_an_answer_to_is_said(words: str) -> None:
    error = not_guided(UpstreamRefusalError(400, {"error": {"message": words, "type": "BadRequestError"}}))
    assert error is not None and (error.status, error.code) == (400, "schema_not_supported")
    assert words in error.message and "response_format" in error.message and "tool_choice" in error.message


#: What the installed vLLM says, in a process of its own: its imports clash with those of other tests.
SAYS = """
import json
from vllm.exceptions import VLLMValidationError
from vllm.renderers.params import TokenizeParams

class Tokenizer:
    max_chars_per_token = 10

def says(answer, prompt):
    params = TokenizeParams(max_total_tokens=100, max_output_tokens=answer)
    check = params._text_len_check if isinstance(prompt, str) else params._token_len_check
    try:
        check(Tokenizer(), prompt)
    except VLLMValidationError as exc:
        return str(exc).partition(" (parameter=")[0]

print(json.dumps([says(0, [1] * 120), says(30, [1] * 80), says(30, [1] * 71), says(0, "x" * 2000)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the cpu extra")
def test_these_are_the_words_of_the_vllm_that_is_installed() -> None:
    done = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == [counted(120, 0), counted(80, 30), counted(71, 30, least=True), CHARACTERS]
