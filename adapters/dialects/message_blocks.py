"""The turns of an Anthropic request in chat form.

Invariant: whatever a conversation contains, the session goes on. What the chat form cannot express is replaced by a
text if the user or a tool said it, left out if the model did, and noted either way.
"""

from __future__ import annotations

from adapters.dialects.conversation import (
    AssistantTurn,
    Content,
    ConversationBuilder,
    Part,
    carried,
    content_of,
    text_part,
    unread,
    written,
)
from adapters.dialects.fields import Fields, refuse

#: Marks a failed tool call: the chat form has no field for it.
_FAILED = "Error: "
#: What a block says of a tool.
_CHANGES = {"tool_addition": "can be called now", "tool_removal": "cannot be called any more"}


def conversation_of(top: Fields) -> ConversationBuilder:
    """The conversation of a request, its ``system`` first.

    Raises:
        RequestError: see :meth:`adapters.dialects.Dialect.parse`.
    """
    conversation = ConversationBuilder()
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


def _add(conversation: ConversationBuilder, turn: Fields) -> None:
    role, content = turn.required("role"), turn.take("content")
    turn.done()
    blocks = [] if isinstance(content, str) else turn.listed(content, "content")
    text = content if isinstance(content, str) else ""
    if role == "assistant":
        answer = conversation.assistant()
        answer.say(text)
        for block in blocks:
            _assistant(answer, block)
    elif role == "user":
        parts = _user(conversation, blocks)
        if parts or not blocks:
            conversation.user(content_of(parts) or text)
    elif role == "system":
        conversation.system(text or content_of([part for block in blocks for part in _parts(block)]))
    else:
        refuse(turn.at("role"), "must be 'user', 'assistant' or 'system'")


def _user(conversation: ConversationBuilder, blocks: list[Fields]) -> list[Part]:
    """Add the results of tools, which come first in chat form, and return the parts of the user's message."""
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
    call_id, failed, content = block.required("tool_use_id"), block.flag("is_error"), block.take("content")
    block.done()
    if content is None or isinstance(content, str):
        return call_id, (_FAILED if failed else "") + (content or "")
    parts = [part for inner in block.listed(content, "content") for part in _parts(inner)]
    return call_id, content_of([text_part(_FAILED), *parts] if failed else parts)


def _assistant(answer: AssistantTurn, block: Fields) -> None:
    kind = block.required("type")
    block.drop("cache_control")
    if kind == "thinking":
        # only its maker can check a signature
        block.drop("signature")
        answer.think(block.required("thinking"))
    elif kind == "text":
        answer.say(block.required("text"))
        block.leave("citations", "not carried", [])
    elif kind == "tool_use":
        call_id, name, arguments = block.required("id"), block.required("name"), block.take("input")
        block.leave("caller", "not carried", {"type": "direct"})
        # a stream has arguments as the model wrote them; a client keeps them as a text if it cannot read them
        answer.call(call_id, name, carried(arguments) if isinstance(arguments, str) else written(arguments))
    else:
        block.note(f"{kind} is not carried")
        return
    block.done()


def _parts(block: Fields) -> list[Part]:
    """The parts for a block that is not the assistant's."""
    kind = block.required("type")
    block.drop("cache_control")
    if kind == "text":
        part = text_part(block.required("text"))
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
        # all tools are available from the start
        part = text_part(f"[The tool {block.required('tool_name')!r:.200} can be called now.]")
    elif kind in _CHANGES and (name := _changed(block)) is not None:
        part = text_part(f"[The tool {name!r:.200} {_CHANGES[kind]}.]")
    else:
        block.note(f"{kind} is replaced by a text")
        return [unread(f"A block of type {kind!r:.60}")]
    block.done()
    return [part]


def _changed(block: Fields) -> str | None:
    """The tool that comes or goes, unless it is a server's."""
    match block.take("tool"):
        case {"definition": {"name": str(name), "input_schema": _}} | {"type": "tool_reference", "name": str(name)}:
            return name
        case _:
            return None


def _text(block: Fields) -> Part:
    if block.data.get("type") != "text":
        refuse(block.at("type"), "must be 'text'")
    return _parts(block)[0]


def _image(block: Fields) -> Part:
    source = block.needed("source", block.inner("source"))
    kind = source.required("type")
    if kind == "base64":
        url = f"data:{source.required('media_type')};base64,{source.required('data')}"
    elif kind == "url":
        url = source.required("url")
    else:
        source.note(f"images from {kind} are replaced by a text")
        return unread("An image")
    source.done()
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Fields) -> list[Part]:
    """A document of text is carried, any other is replaced by a text."""
    source = block.needed("source", block.inner("source"))
    title, context = block.text("title"), block.text("context")
    block.leave("citations", "answers do not cite", {"enabled": False})
    block.done()
    head = [text_part(text) for text in (title, context) if text]
    kind, form = source.required("type"), source.text("media_type")
    if kind == "text":
        parts = [*head, text_part(source.required("data"))]
    elif kind == "content":
        content = source.take("content")
        inner = [] if isinstance(content, str) else source.listed(content, "content")
        parts = [*head, *([text_part(content)] if isinstance(content, str) else [])]
        parts += [part for block in inner for part in _parts(block)]
    else:
        source.note("documents that are no text are replaced by a text")
        return [unread("A PDF document" if form == "application/pdf" else "A document", title)]
    source.done()
    return parts
