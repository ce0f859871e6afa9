"""The turns of an Anthropic request in the chat form.

Invariant: whatever stands in a conversation, the session goes on. What the chat form cannot say is told to the model in
words where the user or a tool said it, left out where the model did, and noted either way.
"""

from __future__ import annotations

import json

from adapters.dialects.conversation import Content, Conversation, Part, Turn, carried, content_of, text_part, unread
from adapters.dialects.fields import Fields, refuse

#: How a model is told that a tool failed: the chat form has no field for it.
_FAILED = "Error: "


def conversation_of(top: Fields) -> Conversation:
    """The conversation of a request, its ``system`` first.

    Raises:
        RequestError: see :meth:`adapters.dialects.MessagesDialect.parse`.
    """
    conversation = Conversation()
    system = top.take("system")
    if isinstance(system, str) and system:
        conversation.system(system)
    elif system:
        conversation.system(content_of([_text(block) for block in top.listed(system, "system")]))
    turns = top.objects("messages")
    if not turns:
        refuse("messages", "must be a list of at least one message")
    for turn in turns:
        _add(conversation, turn)
    return conversation


def _add(conversation: Conversation, turn: Fields) -> None:
    role, content = turn.needed("role"), turn.take("content")
    turn.done()
    blocks = [] if isinstance(content, str) else turn.listed(content, "content")
    said = content if isinstance(content, str) else ""
    if role == "assistant":
        answer = conversation.assistant()
        answer.say(said)
        for block in blocks:
            _assistant(answer, block)
    elif role == "user":
        parts = _user(conversation, blocks)
        if parts or not blocks:
            conversation.user(content_of(parts) or said)
    elif role == "system":
        conversation.system(said or content_of([part for block in blocks for part in _parts(block)]))
    else:
        refuse(turn.at("role"), "must be 'user', 'assistant' or 'system'")


def _user(conversation: Conversation, blocks: list[Fields]) -> list[Part]:
    """Add the results of tools, which come first in the chat form, and give back what the user says."""
    parts: list[Part] = []
    for block in blocks:
        if block.data.get("type") == "tool_result":
            call_id, content = _tool_result(block)
            conversation.tool(call_id, content)
        else:
            parts += _parts(block)
    return parts


def _tool_result(block: Fields) -> tuple[str, Content]:
    block.drop("type", "cache_control")
    call_id, failed, content = block.needed("tool_use_id"), block.flag("is_error"), block.take("content")
    block.done()
    if content is None or isinstance(content, str):
        return call_id, (_FAILED if failed else "") + (content or "")
    parts = [part for inner in block.listed(content, "content") for part in _parts(inner)]
    return call_id, content_of([text_part(_FAILED), *parts] if failed else parts)


def _assistant(answer: Turn, block: Fields) -> None:
    kind = block.needed("type")
    block.drop("cache_control")
    if kind == "thinking":
        # a signature is a proof that only its maker can check
        block.drop("signature")
        answer.think(block.needed("thinking"))
    elif kind == "text":
        answer.say(block.needed("text"))
        block.leave("citations", "not carried", [])
    elif kind == "tool_use":
        call_id, name, given = block.needed("id"), block.needed("name"), block.take("input")
        if not isinstance(given, dict | str):
            # a stream gives arguments as the model wrote them, which may be no object
            given = json.dumps(given)
        block.leave("caller", "not carried", {"type": "direct"})
        arguments = carried(given) if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        answer.call(call_id, name, arguments)
    else:
        block.note(f"{kind} is not carried")
        return
    block.done()


def _parts(block: Fields) -> list[Part]:
    """A block of anyone but the assistant."""
    kind = block.needed("type")
    block.drop("cache_control")
    if kind == "text":
        part = text_part(block.needed("text"))
        block.leave("citations", "not carried", [])
    elif kind == "image":
        part = _image(block)
    elif kind == "document":
        return _document(block)
    elif kind == "search_result":
        block.leave("citations", "answers do not cite", {"enabled": False})
        head = f"{block.text('title') or ''} ({block.text('source') or ''})"
        texts = [_text(inner)["text"] for inner in block.objects("content") or []]
        part = text_part("\n".join([head, *texts]))
    elif kind == "tool_reference":
        # all tools are there from the start
        part = text_part(f"[The tool {block.needed('tool_name')!r:.200} can be called now.]")
    else:
        block.note(f"{kind} is told in words only")
        return [unread(f"A block of type {kind!r:.60}")]
    block.done()
    return [part]


def _text(block: Fields) -> Part:
    if block.data.get("type") != "text":
        refuse(block.at("type"), "must be 'text'")
    return _parts(block)[0]


def _image(block: Fields) -> Part:
    source = block.inner("source")
    if source is None:
        refuse(block.at("source"), "is required")
    kind = source.needed("type")
    if kind == "base64":
        url = f"data:{source.needed('media_type')};base64,{source.needed('data')}"
    elif kind == "url":
        url = source.needed("url")
    else:
        source.note(f"images from {kind} are told in words only")
        return unread("An image")
    source.done()
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Fields) -> list[Part]:
    """A document of text is carried, any other is told in words."""
    source, title, context = block.inner("source"), block.text("title"), block.text("context")
    if source is None:
        refuse(block.at("source"), "is required")
    block.leave("citations", "answers do not cite", {"enabled": False})
    block.done()
    head = [text_part(text) for text in (title, context) if text]
    kind, form = source.needed("type"), source.text("media_type")
    if kind == "text":
        parts = [*head, text_part(source.needed("data"))]
    elif kind == "content":
        content = source.take("content")
        inner = [] if isinstance(content, str) else source.listed(content, "content")
        parts = [*head, *([text_part(content)] if isinstance(content, str) else [])]
        parts += [part for one in inner for part in _parts(one)]
    else:
        source.note("documents are told in words only, unless they are text")
        return [unread("A PDF document" if form == "application/pdf" else "A document", title)]
    source.done()
    return parts
