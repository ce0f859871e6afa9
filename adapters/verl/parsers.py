"""Which of vLLM's parsers read tool calls and reasoning out of a model's text: those that the job names, or by family.

Invariant: ``auto`` names a parser only where the model's own chat template teaches the format that this parser reads,
and where the vocabulary has the tokens without which it does not start.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from swarm.errors import ConfigError
from swarm.job import TrainJob

VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
#: field of the job (and of vLLM) -> the package of vLLM that registers its parsers
_PACKAGES = {"tool_call_parser": "tool_parsers", "reasoning_parser": "reasoning"}


class _Format(NamedTuple):
    """How a chat template gives away that ``parser`` is meant: all ``marks`` are in it; ``tokens`` must exist."""

    parser: str
    marks: tuple[str, ...]
    tokens: tuple[str, ...] = ()


#: Families whose format has no mark of its own, by the ``model_type`` of their configuration.
_TOOLS_BY_TYPE = {
    "gpt_oss": "openai",
    "jamba": "jamba",
    "hunyuan_v1_moe": "hunyuan_a13b",
    "granitemoehybrid": "granite4",
    "ernie4_5_moe": "ernie45",
    "laguna": "poolside_v1",
    "step3p5": "step3p5",
    "olmo3": "olmo3",
}
#: with the vertical line that DeepSeek's tokens have
_DEEPSEEK = ("<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>")
#: Of the rest, the first that fits. Several families write ``<tool_call>``: hermes, JSON between these tags, is last.
_TOOLS = (
    _Format("kimi_k2", ("<|tool_calls_section_begin|>",)),
    _Format("deepseek_v3", (_DEEPSEEK[0], "```json"), _DEEPSEEK),
    _Format("deepseek_v31", (_DEEPSEEK[0],), _DEEPSEEK),
    _Format("step3", ("<\uff5ctool_calls_begin\uff5c>",)),
    _Format("minimax_m2", ("<minimax:tool_call>",)),
    _Format("seed_oss", ("<seed:tool_call>",)),
    _Format("longcat", ("<longcat_tool_call>",)),
    _Format("gemma4", ("<|tool_call>",)),
    _Format("functiongemma", ("<start_function_call>",)),
    _Format("lfm2", ("<|tool_call_start|>",), ("<|tool_call_start|>", "<|tool_call_end|>")),
    _Format("apertus", ("<|tools_prefix|>",)),
    _Format("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",)),
    _Format("internlm", ("<|action_start|>",)),
    _Format("phi4_mini_json", ("functools",)),
    _Format("granite", ("<|tool_call|>",)),
    _Format("granite-20b-fc", ("<function_call>",)),
    _Format("cohere_command3", ("<|START_ACTION|>",)),
    _Format("llama3_json", ('{"name": function name, "parameters":',), ("<|python_tag|>",)),
    _Format("glm45", ("<tool_call>", "<arg_key>")),
    _Format("qwen3_coder", ("<tool_call>", "<function=")),
    _Format("hermes", ("<tool_call>",)),
)
#: Of the first whose beginning of a ``model_type`` fits too.
_REASONING = (
    ("", _Format("seed_oss", ("<seed:think>",), ("<seed:think>", "</seed:think>"))),
    ("", _Format("mistral", ("[THINK]",), ("[THINK]", "[/THINK]"))),
    *(
        (model_type, _Format(parser, ("</think>", *marks), ("<think>", "</think>")))
        for model_type, parser, marks in (
            # the distillations of DeepSeek-R1 have the types of what they were made from
            ("qwen", "deepseek_r1", ("<\uff5cAssistant\uff5c>",)),
            ("llama", "deepseek_r1", ("<\uff5cAssistant\uff5c>",)),
            ("deepseek_v3", "deepseek_v3", ("thinking",)),
            ("deepseek_v3", "deepseek_r1", ()),
            ("qwen3", "qwen3", ()),
            ("qwen2", "deepseek_r1", ()),
            ("glm", "glm45", ()),
            ("kimi", "kimi_k2", ()),
            ("minimax", "minimax_m2", ()),
        )
    ),
)


def parser_values(job: TrainJob, model: str) -> dict[str, Any]:
    """vLLM's arguments for the parsers of ``job``, as dotted verl keys, by the files of the resolved ``model``.

    They are ``None`` where there is no parser.
    """
    chosen: dict[str, str] = {field: getattr(job, field) for field in _PACKAGES}
    if "auto" in chosen.values():
        auto = dict.fromkeys(_PACKAGES, "none")
        if config := read_object(model, "config.json"):
            files = _Model(model, config)
            auto = {"tool_call_parser": files.tool_call_parser(), "reasoning_parser": files.reasoning_parser()}
        chosen = {field: auto[field] if name == "auto" else name for field, name in chosen.items()}
    parsers = {field: None if name == "none" else name for field, name in chosen.items()}
    # without it vLLM loads no tool parser, and refuses all that needs one
    automatic = parsers["tool_call_parser"] is not None or None
    return {f"{VLLM}.{name}": value for name, value in {"enable_auto_tool_choice": automatic, **parsers}.items()}


def check_parsers(vllm: Mapping[str, Any]) -> None:
    """Refuse a parser in vLLM's arguments that it does not know, unless a plugin brings it.

    Raises:
        ConfigError: names those that there are.
    """
    for field in _PACKAGES:
        name, registered = vllm.get(field), _registered(field)
        if not name or not registered or name in registered or vllm.get(f"{field.replace('_call', '')}_plugin"):
            continue
        meant = difflib.get_close_matches(str(name), registered, n=1)
        hint = f"did you mean {meant[0]!r}? " if meant else ""
        raise ConfigError(
            f"{field}: vLLM has no parser {name!r}; {hint}there are: auto, none, {', '.join(sorted(registered))}",
            param=field,
        )


def _registered(field: str) -> Collection[str]:
    """The names that the installed vLLM registers, read from its sources: importing them takes many seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return ()
    source = Path(spec.origin).parent / _PACKAGES[field] / "__init__.py"
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text()) if source.is_file() else ast.Module([], [])):
        if isinstance(node, ast.Dict):
            names |= {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return names


class _Model:
    """What a model's files say of its formats."""

    def __init__(self, model: str, config: Mapping[str, Any]) -> None:
        self._type = str(config.get("model_type") or "")
        tokenizer = read_object(model, "tokenizer_config.json")
        added: list[dict[str, Any]] = read_object(model, "tokenizer.json").get("added_tokens") or []
        added += ({"id": number, **token} for number, token in (tokenizer.get("added_tokens_decoder") or {}).items())
        self._tokens = {str(token.get("content")) for token in added}
        self._begin, self._end = (_token(tokenizer.get(name)) for name in ("bos_token", "eos_token"))
        stops: Any = read_object(model, "generation_config.json").get("eos_token_id")
        ids = {str(stop) for stop in (stops if isinstance(stops, list) else [stops]) if isinstance(stop, int)}
        # all tokens that end a turn, as vLLM reads them
        self._ends = {str(token.get("content")) for token in added if str(token.get("id")) in ids}
        self._ends |= {self._end} if self._end else set()
        named = _templates(tokenizer.get("chat_template"))
        processor = _templates(read_object(model, "chat_template.json").get("chat_template"))
        jinja, tool_use = (
            _text(model, name) for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
        )
        # all chat templates in one; quotes are escaped where it writes them into a string of its own
        self._template = "\n".join((*named.values(), *processor.values(), jinja, tool_use)).replace('\\"', '"')
        # for a request without tools
        self._plain_template = jinja or processor.get("default") or named.get("default", "")

    def tool_call_parser(self) -> str:
        """``none`` where the template shows the model no tools, or in a form that no parser is known for."""
        if not re.search(r"\btools\b", self._template):
            return "none"
        by_type = _TOOLS_BY_TYPE.get(self._type)
        return by_type or next((tool_format.parser for tool_format in _TOOLS if self._fits(tool_format)), "none")

    def reasoning_parser(self) -> str:
        """``none`` also where a parser would take a whole answer for reasoning: a base model has its family's template
        but never ends the reasoning, and some templates end it themselves unless a request asks for it."""
        if self._type == "gpt_oss":
            return "openai_gptoss"
        if not self._ends or not any(end in self._template for end in ("eos_token", *self._ends)):
            return "none"
        fitting = (
            reasoning_format.parser
            for kind, reasoning_format in _REASONING
            if self._type.startswith(kind) and self._fits(reasoning_format)
        )
        parser = next(fitting, "none")
        # this one looks for reasoning only in requests that ask for it
        return parser if parser == "deepseek_v3" or self._may_reason() else "none"

    def _may_reason(self) -> bool:
        """Whether a plain request's prompt leaves room for reasoning; not where the template cannot be rendered."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            [prompt], _ = render_jinja_template(
                [[{"role": "user", "content": "hi"}]],
                chat_template=self._plain_template,
                add_generation_prompt=True,
                bos_token=self._begin,
                eos_token=self._end,
            )
        except Exception:  # a template may raise whatever it likes
            return False
        return not prompt.rstrip().endswith("</think>")

    def _fits(self, parser_format: _Format) -> bool:
        return self._tokens.issuperset(parser_format.tokens) and all(
            mark in self._template for mark in parser_format.marks
        )


def _text(model: str, name: str) -> str:
    """A file of a model in a folder or, by the hub's own client and cache, on a hub; empty where there is none."""
    try:
        if Path(model).is_dir():
            return (Path(model) / name).read_text(encoding="utf-8")
        if Path(model).is_absolute() or "/" not in model:
            return ""
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(model, name)).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def read_object(model: str, name: str) -> dict[str, Any]:
    """What is in a JSON file of a model, in a folder or on a hub; empty where there is none or it is no object."""
    try:
        value: Any = json.loads(_text(model, name) or "{}")
    except ValueError:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _templates(value: Any) -> dict[str, str]:
    """Chat templates by name; one alone is ``default``."""
    if isinstance(value, list):
        named = cast("list[dict[str, Any]]", value)
        return {str(template.get("name")): str(template.get("template") or "") for template in named}
    return {"default": value} if isinstance(value, str) else {}


def _token(value: Any) -> str:
    """The text of a special token, which is written as such or as an object."""
    return str((cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value) or "")
