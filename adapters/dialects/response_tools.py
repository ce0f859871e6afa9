"""Tools of a Responses request as functions of the chat form, and what a call of such a function is in a response.

Invariant: a call comes out under the name, the namespace and the kind that the request gave to its tool; sent back, it
names the same function again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from adapters.dialects.conversation import as_object
from adapters.dialects.fields import Fields, refuse

#: What the function for a custom tool is told of it: its input is free text, which a function takes as an argument.
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
    """The tools of a request that was parsed, by the names of their functions."""
    found: dict[str, Tool] = {}
    for tool in (tool.data for tool in _given(Fields(data))):
        namespace = tool.get("name") if tool.get("type") == "namespace" else None
        for one in [tool] if namespace is None else tool.get("tools") or []:
            if one.get("type") in ("function", "custom"):
                named = Tool(one["name"], namespace, one["type"] == "custom")
                found.setdefault(named.function, named)
    return found


def input_of(arguments: str) -> str:
    """The input of a custom tool, from the arguments with which its function was called."""
    text = as_object(arguments).get("input")
    return text if isinstance(text, str) else arguments


def arguments_of(text: str) -> str:
    """The arguments of the function for the input of a custom tool."""
    return json.dumps({"input": text}, ensure_ascii=False)


def tools_of(top: Fields) -> dict[str, Any]:
    """``tools`` and ``tool_choice`` of the chat form.

    Raises:
        RequestError: one is malformed, or the choice is none that this model has.
    """
    functions = [function for tool in _given(top) for function in _functions(tool)]
    choice = _choice(top, {function["name"] for function in functions})
    if isinstance(choice, tuple):
        choice, allowed = cast("tuple[str, set[str]]", choice)
        functions = [function for function in functions if function["name"] in allowed]
    parallel = top.flag("parallel_tool_calls")
    body: dict[str, Any] = {} if parallel is None else {"parallel_tool_calls": parallel}
    if functions:
        body["tools"] = [{"type": "function", "function": function} for function in functions]
        return body if choice is None else {**body, "tool_choice": choice}
    # vLLM refuses a choice among no tools
    if choice not in (None, "auto", "none"):
        refuse("tool_choice", "there is no tool that this model could call")
    return body


def _given(top: Fields) -> list[Fields]:
    """All tools of a request, those that an input item adds last."""
    tools, items = top.objects("tools") or [], top.data.get("input")
    for index, item in enumerate(cast("list[Any]", items) if isinstance(items, list) else []):
        match item:
            case {"type": "additional_tools"}:
                tools += Fields(cast("object", item), f"input.{index}", top.notes).objects("tools") or []
            case _:
                pass
    return tools


def _functions(tool: Fields, namespace: str | None = None) -> Iterator[dict[str, Any]]:
    kind = tool.needed("type")
    if kind == "namespace" and namespace is None:
        name = tool.needed("name")
        for inner in tool.objects("tools") or []:
            yield from _functions(inner, name)
        tool.leave("description", "only its functions are described")
        tool.done()
        return
    if kind not in ("function", "custom"):
        # it runs on OpenAI's servers, or is part of their models
        tool.note(f"{kind} is OpenAI's own tool")
        return
    function: dict[str, Any] = {"name": Tool(tool.needed("name"), namespace).function}
    description = tool.text("description")
    if kind == "function":
        function["parameters"] = tool.whole("parameters") or {}
        if (strict := tool.flag("strict")) is not None:
            function["strict"] = strict
    else:
        function["parameters"] = _INPUT
        if (form := tool.inner("format")) is not None and (grammar := form.text("definition")) is not None:
            form.note("the grammar is told, not enforced")
            description = f"{description or ''}\n\nThe input follows this grammar:\n{grammar}".strip()
    if description is not None:
        function["description"] = description
    # every tool is there from the start
    tool.drop("defer_loading")
    tool.leave("allowed_callers", "only the model calls tools", ["direct"])
    tool.leave("async", "not known here", False)
    tool.done()
    yield function


def _choice(top: Fields, functions: set[str]) -> Any:
    """``tool_choice`` of the chat form; for a choice among some ``functions`` the mode and those."""
    given = top.take("tool_choice")
    if given is None or isinstance(given, str):
        if given not in (None, "auto", "none", "required"):
            refuse("tool_choice", "must be 'auto', 'none', 'required' or a function")
        return given
    choice = Fields(given, "tool_choice", top.notes)
    kind = choice.needed("type")
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": _chosen(choice)}}
    if kind == "allowed_tools":
        mode = choice.needed("mode")
        if mode not in ("auto", "required"):
            refuse(choice.at("mode"), "must be 'auto' or 'required'")
        allowed: set[str] = set()
        for one in choice.objects("tools") or []:
            if one.data.get("type") in ("function", "custom") and (name := _chosen(one)) in functions:
                allowed.add(name)
            else:
                one.note("no tool of this model")
        return mode, allowed
    refuse(choice.at("type"), f"{kind!r:.60} is OpenAI's own tool and cannot be called by this model")


def _chosen(choice: Fields) -> str:
    return Tool(choice.needed("name"), choice.text("namespace")).function
