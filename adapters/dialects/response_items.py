"""The input items and tools of a Responses request in chat form, and tool calls on their way back.

Invariant: whatever a conversation contains, the session goes on. What the chat form cannot express is replaced by a
text if the user or a tool said it, or if it stands for a conversation, left out if the model said it, and noted either
way. A call goes out with the name, namespace and kind that the request gave to its tool; sent back, it names the same
function again.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from adapters.dialects.conversation import (
    Content,
    ConversationBuilder,
    Part,
    as_object,
    carried,
    content_of,
    text_part,
    unread,
    written,
)
from adapters.dialects.fields import Fields, present, refuse
from swarm.errors import NotFoundError

#: Schema of the function for a custom tool: the tool's free-text input is its one argument.
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input of the tool."}},
    "required": ["input"],
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the request names it; ``custom``: its input is free text."""

    name: str
    namespace: str | None = None
    custom: bool = False

    @property
    def function(self) -> str:
        """The name of its function."""
        return self.name if self.namespace is None else f"{self.namespace.rstrip('_')}__{self.name}"


def tools_by_function(data: Mapping[str, Any]) -> dict[str, Tool]:
    """The tools of a parsed request by the names of their functions."""
    tools: dict[str, Tool] = {}
    for tool in (tool.data for tool in _all_tools(Fields(data))):
        namespace = tool.get("name") if tool.get("type") == "namespace" else None
        for member in [tool] if namespace is None else tool.get("tools") or []:
            if member.get("type") in ("function", "custom"):
                named = Tool(member["name"], namespace, member["type"] == "custom")
                tools.setdefault(named.function, named)
    return tools


def input_of(arguments: str) -> str:
    """The input of a custom tool, from the arguments of its function."""
    text = as_object(arguments).get("input")
    return text if isinstance(text, str) else arguments


def tools_of(top: Fields) -> dict[str, Any]:
    """``tools`` and ``tool_choice`` of the chat form.

    Raises:
        RequestError: one is malformed, or this model has no such choice.
    """
    functions = [function for tool in _all_tools(top) for function in _functions(tool)]
    choice, allowed = _choice(top, {function["name"] for function in functions})
    if compacts(top.data):
        choice = "none"
    elif allowed is not None:
        functions = [function for function in functions if function["name"] in allowed]
    parallel = top.flag("parallel_tool_calls")
    body = present(parallel_tool_calls=parallel)
    if functions:
        body["tools"] = [{"type": "function", "function": function} for function in functions]
        return {**body, **present(tool_choice=choice)}
    # vLLM refuses a choice among no tools
    if choice not in (None, "auto", "none"):
        refuse("tool_choice", "there is no tool that this model could call")
    return body


def _all_tools(top: Fields) -> list[Fields]:
    """All tools of a request, those of input items last."""
    tools, items = top.objects("tools") or [], top.data.get("input")
    for index, item in enumerate(cast("list[Any]", items) if isinstance(items, list) else []):
        match item:
            case {"type": "additional_tools"}:
                tools += Fields(cast("object", item), f"input.{index}", top.notes).objects("tools") or []
            case _:
                pass
    return tools


def _functions(tool: Fields, namespace: str | None = None) -> Iterator[dict[str, Any]]:
    kind = tool.required("type")
    if kind == "namespace" and namespace is None:
        name = tool.required("name")
        for inner in tool.objects("tools") or []:
            yield from _functions(inner, name)
        tool.leave("description", "only its functions are described")
        tool.done()
        return
    if kind not in ("function", "custom"):
        # it runs on OpenAI's servers, or is part of their models
        tool.note(f"{kind} is OpenAI's own tool")
        return
    function: dict[str, Any] = {"name": Tool(tool.required("name"), namespace).function}
    description = tool.text("description")
    if kind == "function":
        function["parameters"] = tool.whole("parameters") or {}
        function |= present(strict=tool.flag("strict"))
    else:
        function["parameters"] = _INPUT
        if (form := tool.inner("format")) is not None and (grammar := form.text("definition")) is not None:
            form.note("the grammar is described, not enforced")
            description = f"{description or ''}\n\nThe input follows this grammar:\n{grammar}".strip()
    function |= present(description=description)
    # all tools are available from the start
    tool.drop("defer_loading")
    tool.leave("allowed_callers", "only the model calls tools", ["direct"])
    tool.leave("async", "unknown field", False)
    tool.done()
    yield function


def _choice(top: Fields, functions: set[str]) -> tuple[Any, set[str] | None]:
    """``tool_choice`` of the chat form, and the names of ``functions`` where it is among some of them."""
    value = top.take("tool_choice")
    if value is None or isinstance(value, str):
        if value not in (None, "auto", "none", "required"):
            refuse("tool_choice", "must be 'auto', 'none', 'required' or a function")
        return value, None
    choice = Fields(value, "tool_choice", top.notes)
    kind = choice.required("type")
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": _chosen(choice)}}, None
    if kind == "allowed_tools":
        mode = choice.required("mode")
        if mode not in ("auto", "required"):
            refuse(choice.at("mode"), "must be 'auto' or 'required'")
        allowed: set[str] = set()
        for tool in choice.objects("tools") or []:
            if tool.data.get("type") in ("function", "custom") and (name := _chosen(tool)) in functions:
                allowed.add(name)
            else:
                tool.note("no tool of this model")
        return mode, allowed
    refuse(choice.at("type"), f"{kind!r:.60} is OpenAI's own tool and cannot be called by this model")


def _chosen(choice: Fields) -> str:
    return Tool(choice.required("name"), choice.text("namespace")).function


#: Marks our reasoning and summaries in ``encrypted_content``, the only place where some clients keep it.
SEAL = "swarm-gateway:"
_COMPACT = (
    "Summarize this conversation for a model that goes on with it and sees nothing else of it: what was asked for, "
    "what was decided and done, what is known, and what is left to do. Answer with the summary alone."
)
_COMPACTED = "A summary of the conversation so far:\n\n"


def sealed(text: str) -> str:
    """``encrypted_content`` of our reasoning or summary: it is no secret, it only travels there."""
    return SEAL + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def _unsealed(item: Fields) -> str | None:
    """What :func:`sealed` made the ``encrypted_content`` of; ``None`` if it is another's."""
    secret = item.data.get("encrypted_content")
    if not isinstance(secret, str) or not secret.startswith(SEAL):
        return None
    item.drop("encrypted_content")
    try:
        return base64.b64decode(secret.removeprefix(SEAL), validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, UnicodeDecodeError):
        refuse(item.at("encrypted_content"), "is not what this gateway gave out")


def uttered(item: dict[str, Any]) -> dict[str, Any]:
    """An item of an answer; what it says, if it is a summary of ours."""
    summary = _unsealed(Fields(item)) if item.get("type") == "compaction" else None
    return item if summary is None else {"role": "assistant", "content": summary}


def without_seals(items: Iterable[Any]) -> list[Any]:
    """``items`` for another model, whose maker refuses what others sealed: our summaries in plain, without our sealed
    reasoning."""
    plain: list[Any] = []
    for item in items:
        match item:
            case {"type": "compaction" | "reasoning", "encrypted_content": str() as secret} if secret.startswith(SEAL):
                if item["type"] == "compaction" and (summary := _unsealed(Fields(item))):
                    plain.append({"type": "message", "role": "user", "content": _COMPACTED + summary})
            case _:
                plain.append(item)
    return plain


def compacts(data: Mapping[str, Any]) -> bool:
    """Whether a request asks for a summary of its conversation, which comes back in the place of what it says."""
    match data.get("input"):
        case [*_, {"type": "compaction_trigger"}]:
            return True
        case _:
            return False


def conversation_of(top: Fields) -> ConversationBuilder:
    """The conversation of a request, its ``instructions`` first.

    Raises:
        RequestError: see :meth:`adapters.dialects.Dialect.parse`.
        NotFoundError: it contains an ``item_reference``.
    """
    instructions, items = top.text("instructions"), top.take("input")
    conversation = ConversationBuilder()
    if instructions:
        conversation.system(instructions)
    if isinstance(items, str):
        conversation.user(items)
        return conversation
    if not items:
        refuse("input", "must be a string or a list of at least one item")
    before = ""
    for item in top.listed(items, "input"):
        kind = item.text("type") or ("message" if "role" in item.data else "item_reference")
        item.drop("id", "status")
        _add(conversation, item, kind, before)
        before = kind
    if compacts(top.data):
        conversation.user(_COMPACT)
    return conversation


def _add(conversation: ConversationBuilder, item: Fields, kind: str, before: str) -> None:
    """Add an item; consecutive items of the assistant are one message. ``before``: the kind of the previous item."""
    match kind:
        case "message":
            _add_message(conversation, item, before)
        case "reasoning":
            conversation.assistant(goes_on=True).think(_thought(item))
        case "function_call" | "custom_tool_call":
            name = Tool(item.required("name"), item.text("namespace")).function
            value = item.required("arguments" if kind == "function_call" else "input")
            arguments = carried(value) if kind == "function_call" else written({"input": value})
            conversation.assistant(goes_on=True).call(item.required("call_id"), name, arguments)
            item.drop("caller", "async")
        case "function_call_output" | "custom_tool_call_output":
            conversation.tool(item.required("call_id"), _content(item, "output"))
            item.drop("caller", "name", "namespace")
        case "item_reference":
            _unknown(item)
        case "compaction" if (summary := _unsealed(item)) is not None:
            conversation.user(_COMPACTED + summary)
        case "compaction_trigger":
            pass
        case "additional_tools":
            # see tools_of
            item.drop("role", "tools")
        case _:
            if kind.endswith("_output") or kind == "compaction" or item.data.get("output") is not None:
                item.note(f"{kind} is replaced by a text")
                text = "\n".join(_texts(item.take("output")))
                unknown = unread(f"An item of type {kind!r:.60}")
                conversation.aside([text_part(f"[{kind}:]\n{text}") if text else unknown])
            else:
                item.note(f"{kind} is not carried")
            return
    item.done()


def _add_message(conversation: ConversationBuilder, item: Fields, before: str) -> None:
    item.drop("phase")
    role = item.required("role")
    if role == "assistant":
        # two consecutive messages are two; with a call or a thought between them they are one answer
        answer = conversation.assistant(goes_on=before != "message")
        value: Any = item.needed("content", item.take("content"))
        if isinstance(value, str):
            answer.say(value)
            return
        for part in item.listed(value, "content"):
            if (of := part.required("type")) in _TEXTS:
                answer.say(_part(part, of)["text"])
            else:
                part.note(f"{of} of the assistant is not carried")
        if not value:
            answer.say("")
    elif role == "user":
        conversation.user(_content(item, "content"))
    elif role in ("system", "developer"):
        conversation.system(_content(item, "content"))
    else:
        refuse(item.at("role"), "must be 'user', 'assistant', 'system' or 'developer'")


def _thought(item: Fields) -> str:
    """The text of a reasoning item: our own, or the summary of another model."""
    content, summary = _thoughts(item, "content"), _thoughts(item, "summary")
    if content:
        item.drop("encrypted_content")
        return "".join(content)
    if (ours := _unsealed(item)) is not None:
        return ours
    item.leave("encrypted_content", "only its maker can read it", "")
    return "\n\n".join(summary)


def _thoughts(item: Fields, name: str) -> list[str]:
    return [part.required("text") for part in item.objects(name) or []]


def _content(item: Fields, name: str) -> Content:
    value: Any = item.needed(name, item.take(name))
    if isinstance(value, str):
        return value
    return content_of([_part(part, part.required("type")) for part in item.listed(value, name)])


_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def _part(part: Fields, kind: str) -> Part:
    if kind in _TEXTS:
        carried_part = text_part(part.required(_TEXTS[kind]))
        part.leave("annotations", "not carried", [])
        part.drop("logprobs", "prompt_cache_breakpoint")
    elif kind == "input_image" and part.data.get("image_url") is not None:
        image = {"url": part.required("image_url"), **present(detail=part.text("detail"))}
        carried_part: Part = {"type": "image_url", "image_url": image}
    else:
        part.note(f"{kind} is replaced by a text")
        if kind == "input_image":
            return unread("An image")
        return (
            unread("A file", part.text("filename")) if kind == "input_file" else unread(f"A part of type {kind!r:.60}")
        )
    part.done()
    return carried_part


def _texts(output: Any) -> list[str]:
    """The texts in the output of a tool of any kind."""
    if isinstance(output, list):
        return [text for item in cast("list[Any]", output) for text in _texts(item)]
    if isinstance(output, dict):
        fields = cast("dict[str, Any]", output)
        return [text for name in ("text", "stdout", "stderr") for text in _texts(fields.get(name))]
    return [output] if isinstance(output, str) and output else []


def _unknown(item: Fields) -> NoReturn:
    """In OpenAI's words, which clients know."""
    item_id = item.data.get("id")
    if not isinstance(item_id, str):
        refuse(item.at("id"), "must be a string")
    raise NotFoundError(
        f"Item with id '{item_id:.100}' not found. Items are not persisted when `store` is set to false. "
        "Try again with `store` set to true, or remove this item from your input.",
        code="item_not_found",
        param="input",
    )
