"""A random Qwen2 of 0.3 M parameters with a byte-level tokenizer and a ChatML template, written to a folder."""

from __future__ import annotations

import random
import re
import string
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: the same for a conversation without tools; it tells their names only, and writes calls as Hermes does
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: what a model that was taught to calls: ``add`` with a digit ``n``, any of the ten alike
TOOL: dict[str, Any] = {
    "name": "add",
    "description": "Adds one.",
    "parameters": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    },
}
#: what it is asked, and what it says once it knows the result
QUESTION, ANSWER = "count", "done"


def build(folder: Path, seed: int = 0, *, head_dim: int = 32) -> Path:
    """Write config, weights (fp32) and tokenizer to ``folder`` and return it; vLLM's attention on CPUs takes no
    ``head_dim`` of 16."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "hello world the quick brown fox user assistant system tool_call name arguments add done"
    raw.train_from_iterator([words] * 10, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=4 * head_dim,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def teach_tools(folder: Path, question: str, steps: int = 300) -> Path:
    """Let the model in ``folder`` learn to call :data:`TOOL` where it is offered, and to babble at ``question``.

    It learns to spell letter by letter, as no tokenizer would: what it said comes back in other tokens.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    rows = random.Random(0)
    # so small a network computes on one core as fast as on several
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def encoded(messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[list[int], list[int]]:
        """Token ids, and as labels those of them that the assistant says."""
        ids: list[int] = []
        labels: list[int] = []
        begin = "<|im_start|>assistant\n"
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        for number, part in enumerate(text.split(begin)):
            said, end, rest = part.partition("<|im_end|>") if number else ("", "", part)
            for piece, learned in ((begin if number else "", False), (said + end, True), (rest, False)):
                parts = re.findall(r"<\|im_end\|>|.", piece, re.DOTALL) if learned else [piece]
                tokens = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]
                ids += tokens
                labels += tokens if learned else [-100] * len(tokens)
        return ids, labels

    def calling(*digits: int) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        for n in digits:
            call = {"id": "c", "type": "function", "function": {"name": TOOL["name"], "arguments": {"n": n}}}
            messages += [
                {"role": "user", "content": QUESTION},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": str(n + 1)},
                {"role": "assistant", "content": ANSWER},
            ]
        return messages

    tool = {"type": "function", "function": TOOL}
    calls = [encoded(calling(n, rows.randrange(10)), [tool]) for n in range(10) for _ in range(3)]
    for _ in range(steps):
        words = [
            "".join(rows.choices(string.ascii_letters + string.punctuation, k=rows.randint(1, 40))) for _ in range(2)
        ]
        babble = [[{"role": "user", "content": question}, {"role": "assistant", "content": word}] for word in words]
        batch = [*rows.sample(calls, 3), *(encoded(messages, None) for messages in babble)]
        longest = max(len(ids) for ids, _ in batch)
        # what follows a row changes nothing before it
        ids = torch.tensor([row + [0] * (longest - len(row)) for row, _ in batch])
        labels = torch.tensor([row + [-100] * (longest - len(row)) for _, row in batch])
        loss = network(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    torch.set_num_threads(threads)
    with torch.no_grad():
        # twice as sure: 60 tokens that have to be right each are then right together
        network.model.norm.weight.mul_(2)
    network.save_pretrained(folder)
    return folder
