"""Prompts that begin with the very tokens that were sampled: put in where vLLM renders the messages of a chat.

Invariant: a prompt's text is what vLLM rendered, character for character as the tokenizer reads it, in whatever tokens,
but for line ends that a template adds to those which were sampled (:data:`_ADDED`); where earlier tokens do not spell
its beginning, the prompt stays as vLLM tokenised it. Parsers, streaming and stops see an ordinary chat.

A conversation comes back as text. Its tokenisation is rarely the model's own: a model may sample ``do`` + ``ne`` where
the tokenizer writes ``done``. Then the next turn continues other tokens than were sampled, and a timeline breaks.

Written against vLLM 0.24 and 0.28, whose renderer of chats has no public hook between text and tokens; their chat
requests take ready token ids in ``kv_transfer_params``, but then nothing renders the text that they have to agree with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from swarm.tokens import EARLIER_IDS

#: What becomes of a prompt with an earlier answer: the tokenizer gives back the answer's own tokens (``same``), they
#: are put in (``spliced``), or they are not: the template renders another text (``other_text``), the prompt would be
#: too long with them (``too_long``), or vLLM has no text of it (``no_text``: images, cut prompts, some tokenizers).
OUTCOMES = ("same", "spliced", "other_text", "too_long", "no_text")

#: Between a text and a call, templates of Qwen's form put a line end, where the text that vLLM's parsers give of an
#: answer ends with the one that was sampled; and what that is then.
_ADDED, _SAMPLED = "\n\n<tool_call>", "\n<tool_call>"


def spliced(text: str, own: Sequence[int], earlier: Sequence[int], tokenizer: Any) -> list[int] | None:
    """Token ids that begin with ``earlier`` and spell ``text``, with line ends as they were sampled; ``None`` where
    there are none.

    Args:
        text: of the whole prompt.
        own: its tokens as the tokenizer writes them.
        earlier: prompt and answer of an earlier call.
        tokenizer: of transformers.
    """

    def spell(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def begun(read: str) -> list[int] | None:
        if not spelled or not read.startswith(spelled):
            return None
        ids = [*earlier, *encode(read[len(spelled) :])]
        # some write a space before a text, and some cannot spell all that they read
        return ids if spell(ids) == read else None

    spelled = spell(earlier)
    ids = begun(text) or begun(_as_sampled(text, spelled))
    # to some tokenizers several texts are one: Qwen's compose characters, Phi's drop white space beside special tokens
    if ids is None and (ids := begun(read := spell(own))) and encode(read) != own:
        return None
    return ids


def _as_sampled(text: str, spelled: str) -> str:
    """``text`` without the line ends that a template added to ``spelled``, its beginning."""
    read, *parts = text.split(_ADDED)
    for part in parts:
        is_added = len(read) < len(spelled) and not spelled.startswith(_ADDED, len(read))
        read += (_SAMPLED if is_added else _ADDED) + part
    return read


class TokenIn:
    """Puts earlier tokens into prompts in a process that serves vLLM, for as long as that lives.

    Args:
        renderer: vLLM's class that renders chats; its ``preprocess_chat`` is wrapped.
    """

    def __init__(self, renderer: Any) -> None:
        # both only grow: requests are counted in one thread and asked for in another
        self._counts = dict.fromkeys(OUTCOMES, 0)
        self._reported = dict(self._counts)
        render = renderer.preprocess_chat

        async def preprocess_chat(renderer: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            conversation, inputs = await render(renderer, request, *args, **kwargs)
            earlier = (request.model_extra or {}).get(EARLIER_IDS)
            # /tokenize renders chats too, and has no such field
            if isinstance(earlier, list) and earlier and hasattr(request, "truncate_prompt_tokens"):
                [prompt] = inputs
                await self._begin_with(earlier, prompt, request, renderer)
            return conversation, inputs

        renderer.preprocess_chat = preprocess_chat

    @classmethod
    def install(cls) -> TokenIn:
        """Wrap the renderer of the vLLM in this process."""
        try:
            from vllm.renderers.online_renderer import OnlineRenderer as Renderer
        except ImportError:
            # its name before
            from vllm.entrypoints.serve.render.serving import OpenAIServingRender as Renderer
        return cls(Renderer)

    def take(self) -> dict[str, int]:
        """How many prompts had each of :data:`OUTCOMES` since the last time."""
        before, self._reported = self._reported, dict(self._counts)
        return {name: count - before[name] for name, count in self._reported.items()}

    async def _begin_with(self, earlier: list[int], prompt: Any, request: Any, renderer: Any) -> None:
        outcome, ids = "no_text", None
        text = prompt.get("prompt")
        if prompt["prompt_token_ids"][: len(earlier)] == earlier:
            outcome = "same"
        elif text and prompt["type"] == "token" and request.truncate_prompt_tokens is None:
            # vLLM's own thread for the tokenizer, which no other may use at the same time
            own = prompt["prompt_token_ids"]
            work = partial(spliced, text, own, earlier, renderer.renderer.get_tokenizer())
            ids = await asyncio.get_running_loop().run_in_executor(renderer.renderer._executor, work)
            outcome = "other_text"
        if ids is not None:
            # vLLM has checked the length of what it tokenised itself
            room = request.build_tok_params(renderer.model_config).max_input_tokens
            outcome = "spliced" if room is None or len(ids) <= room else "too_long"
        if outcome == "spliced":
            prompt["prompt_token_ids"] = ids
        self._counts[outcome] += 1
