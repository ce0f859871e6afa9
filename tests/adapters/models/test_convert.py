"""A tiny GGUF written by the gguf package itself, converted and read back."""

from pathlib import Path
from typing import Any

import pytest

from adapters.models.pull import convert_smollm2

np = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.slow

HIDDEN, HEADS, KV_HEADS, LAYERS, FFN = 16, 4, 2, 1, 32
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "a", "b", "ab", "Ġ", "12"]
TEMPLATE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
#: transformers' name of each tensor
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk.0.attn_norm": "model.layers.0.input_layernorm",
    "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
    "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
    "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
    "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
    "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
    "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
}


def permute(weight: Any, heads: int) -> Any:
    """What llama.cpp's converter does to q and k."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def weights() -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }
    return {f"{name}.weight": random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, tensors: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    # as SmolLM2's file has it
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def original() -> dict[str, Any]:
    return weights()


@pytest.fixture(scope="module")
def folder(original: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    stored = dict(original)
    stored["blk.0.attn_q.weight"] = permute(original["blk.0.attn_q.weight"], HEADS)
    stored["blk.0.attn_k.weight"] = permute(original["blk.0.attn_k.weight"], KV_HEADS)
    place = tmp_path_factory.mktemp("converted")
    convert_smollm2(write_gguf(place / "model.gguf", stored), place / "model", lambda *_: None)
    return place / "model"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_every_weight_comes_back_under_its_transformers_name(original: dict[str, Any], folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found = dict(model.named_parameters())
    assert {f"{name}.weight" for name in NAMES.values()} == set(found)
    for name, there in NAMES.items():
        parameter = found[f"{there}.weight"]
        assert parameter.dtype == torch.float32
        assert np.array_equal(parameter.detach().numpy(), original[f"{name}.weight"]), name


def test_the_configuration_says_what_the_file_said(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert config.tie_word_embeddings is True
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (HEADS, KV_HEADS, 4)


def test_the_end_of_a_turn_stops_generation_and_is_not_the_padding(folder: Path, tokenizer: Any) -> None:
    generation = transformers.GenerationConfig.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>", "<|im_end|>", "<|endoftext|>",
    )  # fmt: skip
    assert generation.eos_token_id == config.eos_token_id == tokenizer.eos_token_id == 2
    assert generation.pad_token_id == config.pad_token_id == tokenizer.pad_token_id == 0


def test_digits_are_cut_apart_whatever_the_merges_say(tokenizer: Any) -> None:
    assert tokenizer.tokenize("ab12<|im_end|>") == ["ab", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("ab 12")) == "ab 12"


def test_a_digit_is_cut_from_the_space_before_it(tokenizer: Any) -> None:
    assert tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 1²")[1:] == [
        ("Ġ", (1, 2)), ("1", (2, 3)), ("Â²", (3, 4)),
    ]  # fmt: skip


def test_a_byte_without_a_token_is_left_out(tokenizer: Any) -> None:
    assert tokenizer.encode("a\x04b") == tokenizer.encode("a") + tokenizer.encode("b")


def test_the_chat_template_is_the_files(tokenizer: Any) -> None:
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab<|im_end|>"
