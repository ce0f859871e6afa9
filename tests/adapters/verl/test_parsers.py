"""Which parsers vLLM gets, by folders that look like models of the known families."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import ConfigError
from swarm.job import TrainJob

config = pytest.importorskip("adapters.verl.config", reason="needs the cpu or gpu extra")
parsers = pytest.importorskip("adapters.verl.parsers")

HERMES = (
    "{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>\n<tool_call>\n"
    '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\n</tool_call>{% endif %}<|im_end|>'
)
LLAMA = '{{ tools }}{"name": function name, "parameters": dictionary of argument name and its value}'
CLOSED = "<think>\n\n</think>\n\n"
#: what follows the generation prompt, of models that think unless they are told not to, and of those that must be told
THINKS = "{% if enable_thinking is defined and not enable_thinking %}" + CLOSED + "{% endif %}"
THINKS_IF_TOLD = "{% if enable_thinking %}<think>\n{% else %}" + CLOSED + "{% endif %}"
DEEPSEEK = "{% if tools %}{% endif %}<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>{{ name }}"
DEEPSEEK_TOKENS = ("<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>")
THINK_TOKENS = ("<think>", "</think>")


def write_model(
    folder: Path, model_type: str, template: Any, tokens: tuple[str, ...] = (), eos: Any = "<|im_end|>"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": eos}))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": token} for token in tokens]}))
    return folder


def vllm_of(model: Path | str, tmp_path: Path, **changes: Any) -> Any:
    job = TrainJob.model_validate({"model": "tiny"} | changes)
    return config.verl_config(job, str(model), tmp_path / "run", "cpu").actor_rollout_ref.rollout.engine_kwargs.vllm


def chosen(model: Path | str, tmp_path: Path, **changes: Any) -> tuple[Any, Any, Any]:
    vllm = vllm_of(model, tmp_path, **changes)
    return vllm.enable_auto_tool_choice, vllm.tool_call_parser, vllm.reasoning_parser


@pytest.mark.parametrize(
    ("model_type", "template", "tokens", "tools", "reasoning"),
    [
        ("qwen2", HERMES, (), "hermes", None),
        ("qwen3", HERMES + THINKS, THINK_TOKENS, "hermes", "qwen3"),
        ("qwen3_moe", HERMES, THINK_TOKENS, "hermes", None),
        ("qwen3_5", HERMES + THINKS_IF_TOLD, THINK_TOKENS, "hermes", None),
        ("qwen3_moe", HERMES.replace("<function-name>", "<function=example>"), (), "qwen3_coder", None),
        ("unheard_of", HERMES, (), "hermes", None),
        ("llama", LLAMA, ("<|python_tag|>",), "llama3_json", None),
        ("llama", LLAMA, (), None, None),
        ("mistral", "{{ tools }}[TOOL_CALLS]", ("[TOOL_CALLS]",), "mistral", None),
        ("deepseek_v3", DEEPSEEK + "```json", DEEPSEEK_TOKENS, "deepseek_v3", None),
        ("deepseek_v3", DEEPSEEK + THINKS + "thinking<|im_end|>", DEEPSEEK_TOKENS, "deepseek_v31", None),
        # vLLM's parser takes it that these do not think unless they are told to
        ("deepseek_v3", "<|im_end|>{{ '<think>' if thinking else '</think>' }}", THINK_TOKENS, None, "deepseek_v3"),
        ("qwen2", "<\uff5cAssistant\uff5c></think>{{ eos_token }}", THINK_TOKENS, None, "deepseek_r1"),
        ("glm4_moe", HERMES + "<arg_key>" + THINKS, THINK_TOKENS, "glm45", "glm45"),
        ("gpt_oss", "{{ tools }}", (), "openai", "openai_gptoss"),
        ("kimi_k2", "{{ tools }}<|tool_calls_section_begin|>", (), "kimi_k2", None),
        ("granite", "{{ tools }}<|tool_call|>", (), "granite", None),
        ("granitemoehybrid", HERMES, (), "granite4", None),
        ("phi3", "{{ tools }}functools", (), "phi4_mini_json", None),
        ("minimax_m2", "{{ tools }}<minimax:tool_call>", (), "minimax_m2", None),
        # what the template shows the model are not tools, or in a form that nothing is known to read
        ("llama", "{{ messages }}<tool_call>", (), None, None),
        ("llama", "{{ tools }}", (), None, None),
        ("llama", None, (), None, None),
    ],
)  # fmt: skip
def test_the_chat_template_chooses(
    tmp_path: Path, model_type: str, template: Any, tokens: tuple[str, ...], tools: Any, reasoning: Any
) -> None:
    model = write_model(tmp_path / "model", model_type, template, tokens)
    assert chosen(model, tmp_path) == (tools and True, tools, reasoning)


def test_a_base_model_does_not_reason(tmp_path: Path) -> None:
    """It has its family's template, whose turns it does not end: a reasoning parser would take all that it says."""
    model = write_model(tmp_path / "model", "qwen3", HERMES + THINKS, THINK_TOKENS, eos={"content": "<|endoftext|>"})
    assert chosen(model, tmp_path) == (True, "hermes", None)


@pytest.mark.parametrize(
    ("model_type", "template", "ends", "reasoning"),
    [
        # GLM ends a turn with the beginning of the next one
        ("glm4_moe", "<|user|><think></think>{{ messages }}<|assistant|>", [0, 1, 2], "glm45"),
        ("kimi_k2", "<think></think><|im_end|><|im_assistant|>", 3, "kimi_k2"),
        ("kimi_k2", "<think></think><|im_end|><|im_assistant|>", 0, None),
        ("kimi_k2", "<think></think><|im_end|><|im_assistant|>", None, None),
    ],
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_turn_may_end_with_another_token_than_the_tokenizers_own(
    tmp_path: Path, name: str, model_type: str, template: str, ends: Any, reasoning: str | None
) -> None:
    model = write_model(tmp_path / "model", model_type, template, eos="<|endoftext|>")
    texts = ["<|endoftext|>", "<|user|>", "<|observation|>", "<|im_end|>", *THINK_TOKENS]
    settings = json.loads((model / name).read_text())
    if name == "tokenizer.json":
        settings["added_tokens"] = [{"id": number, "content": text} for number, text in enumerate(texts)]
    else:
        settings["added_tokens_decoder"] = {str(number): {"content": text} for number, text in enumerate(texts)}
    (model / name).write_text(json.dumps(settings))
    (model / "generation_config.json").write_text(json.dumps({} if ends is None else {"eos_token_id": ends}))
    assert chosen(model, tmp_path)[2] == reasoning


@pytest.mark.parametrize(
    ("prompt", "reasoning"),
    [
        ("{{ bos_token + eos_token }}{% generation %}</think>{% endgeneration %}<think>\n", "qwen3"),
        ("{% if add_generation_prompt and messages[0].content is string and not tools %}</think>{% endif %}", None),
        (
            "</think>{{ strftime_now('%Y') }}{% for _ in messages %}{% break %}{% endfor %}{{ messages | tojson }}",
            "qwen3",
        ),
        ("{{ raise_exception('a system prompt is missing') }}</think>", None),
        ("{{ messages[7].content.text }}</think>", None),
        ("{% if %}</think>", None),
    ],
)
def test_the_template_is_rendered_to_see_whether_a_model_thinks_by_default(
    tmp_path: Path, prompt: str, reasoning: str | None
) -> None:
    """Else vLLM's parser would take a whole plain answer for reasoning."""
    model = write_model(tmp_path / "model", "qwen3", "<|im_end|>" + prompt, THINK_TOKENS)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["bos_token"] = {"content": "<s>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert chosen(model, tmp_path)[2] == reasoning


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_the_template_that_is_rendered_is_the_one_that_vllm_uses(tmp_path: Path, name: str) -> None:
    named = [{"name": "tool_use", "template": HERMES}, {"name": "default", "template": THINKS}]
    model = write_model(tmp_path / "model", "qwen3", named, THINK_TOKENS)
    assert chosen(model, tmp_path)[2] == "qwen3"
    text = THINKS_IF_TOLD if name.endswith(".jinja") else json.dumps({"chat_template": THINKS_IF_TOLD})
    (model / name).write_text(text)
    assert chosen(model, tmp_path)[2] is None


def test_templates_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": HERMES}]
    assert chosen(write_model(tmp_path / "named", "llama", named), tmp_path)[1] == "hermes"
    for name, text in {
        "chat_template.jinja": HERMES,
        "chat_template.json": json.dumps({"chat_template": HERMES}),
        "additional_chat_templates/tool_use.jinja": HERMES,
    }.items():
        model = write_model(tmp_path / name.replace("/", "-"), "llama", None)
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(text)
        assert chosen(model, tmp_path)[1] == "hermes", name


@pytest.mark.parametrize("broken", ["", "[]", "{", '{"added_tokens": null}'])
def test_files_that_are_broken_choose_nothing(tmp_path: Path, broken: str) -> None:
    model = write_model(tmp_path / "model", "qwen2", None)
    for path in model.iterdir():
        path.write_text(broken)
    assert chosen(model, tmp_path) == (None, None, None)
    assert chosen(tmp_path / "nowhere", tmp_path) == (None, None, None)


def test_a_model_of_a_hub_is_read_through_the_hubs_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub" / "models--org--tiny"
    write_model(cache / "snapshots" / "1234", "qwen2", HERMES)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("1234")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert chosen("org/tiny", tmp_path) == (True, "hermes", None)
    assert chosen("org/other", tmp_path) == (None, None, None)


def test_the_job_and_then_its_overrides_win(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3", HERMES + THINKS, THINK_TOKENS)
    assert chosen(model, tmp_path, tool_call_parser="none") == (None, None, "qwen3")
    named = {"tool_call_parser": "qwen3_xml", "reasoning_parser": "deepseek_r1"}
    assert chosen(model, tmp_path, **named) == (True, "qwen3_xml", "deepseek_r1")
    overrides = {f"{parsers.VLLM}.tool_call_parser": "pythonic", f"{parsers.VLLM}.reasoning_parser": None}
    assert chosen(model, tmp_path, **named, overrides=overrides) == (True, "pythonic", None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tool_call_parser": "hermess"},
            r"tool_call_parser: .*'hermess'; did you mean 'hermes'\?.*, hermes, .*qwen3_coder",
        ),
        ({"reasoning_parser": "xyzzy"}, r"reasoning_parser: .*'xyzzy'; there are: auto, none, .*deepseek_r1"),
        ({"overrides": {f"{parsers.VLLM}.tool_call_parser": "hermess"}}, "did you mean 'hermes'"),
    ],
)
def test_a_parser_that_vllm_has_not_is_refused(tmp_path: Path, changes: Any, message: str) -> None:
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError, match=message):
        vllm_of("/nowhere", tmp_path, **changes)


def test_a_plugin_may_bring_a_parser(tmp_path: Path) -> None:
    plugin = {f"+{parsers.VLLM}.tool_parser_plugin": "mine.py"}
    assert chosen("/nowhere", tmp_path, tool_call_parser="mine", overrides=plugin) == (True, "mine", None)


def test_the_table_names_parsers_that_vllm_has_and_marks_that_they_read() -> None:
    vllm = pytest.importorskip("vllm")
    root = Path(vllm.__file__).parent
    tools, reasoning = parsers._registered("tool_call_parser"), parsers._registered("reasoning_parser")
    assert {"hermes", "openai"} <= tools and "qwen3" in reasoning and "hermes" not in reasoning
    assert {*parsers._TOOLS_BY_TYPE.values(), *(one.parser for one in parsers._TOOLS)} <= tools
    assert {"openai_gptoss", *(one.parser for _, one in parsers._REASONING)} <= reasoning
    registered = (root / "tool_parsers" / "__init__.py").read_text()
    for one in parsers._TOOLS:
        [module] = re.findall(rf'"{re.escape(one.parser)}": \([^"]*"(\w+)"', registered)
        tokens = [(root / "tool_parsers" / f"{module}.py").read_text()]
        engines = {"kimi_k2": "kimi_k2", "glm45": "glm47_moe", "qwen3_coder": "qwen3", "gemma4": "gemma4"}
        engine = engines.get(one.parser, one.parser)
        if (root / "parser" / f"{engine}.py").is_file():
            tokens.append((root / "parser" / f"{engine}.py").read_text())
        # which of two formats it is, and how Llama and Cohere are told of theirs, is in no parser
        marks = [
            mark for mark in one.marks if mark != "```json" and one.parser not in ("llama3_json", "cohere_command3")
        ]
        assert all(any(mark in text for text in tokens) for mark in marks), one
