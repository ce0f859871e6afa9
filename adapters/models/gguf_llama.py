"""A Llama-family GGUF file to a Hugging Face folder: fp32 safetensors, configuration, tokenizer with chat template.

Invariant: the tokenizer cuts text exactly as the model was trained with, and ``<|im_end|>``-like end tokens stop
generation; a file whose architecture or pre-tokenizer we do not know is refused, never guessed.

Works on numpy alone (no torch): 135 M parameters take seconds.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

from adapters.models.cache import OnProgress
from swarm.errors import ConfigError

_CONTROL = 3  # gguf.TokenType.CONTROL

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def _import(module: str) -> Any:
    """A package that comes with the engine, which the light install lacks."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ConfigError(
            f"converting a model needs {exc.name}, which is not installed; run `make setup` in a clone, "
            "or: pip install gguf safetensors tokenizers"
        ) from exc


def tensor_name(name: str) -> str:
    """The transformers name of a GGUF tensor.

    Raises:
        ConfigError: a tensor that a plain Llama does not have.
    """
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _BLOCK_NAMES:
        raise ConfigError(f"the GGUF file has a tensor {name!r} that a Llama model does not have")
    return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.weight"


def unpermute(weight: Any, heads: int) -> Any:
    """Undo llama.cpp's interleaving of the two rotary halves of each head.

    Args:
        weight: [heads * head_dim, hidden] rows in llama.cpp's order.
        heads: attention heads for q, key-value heads for k.
    """
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def convert(gguf_file: Path, folder: Path, progress: OnProgress) -> None:
    """Write the model in ``gguf_file`` to ``folder`` in Hugging Face layout.

    Raises:
        ConfigError: a package is not installed, or the file holds something else than a known Llama model.
    """
    gguf, safetensors = _import("gguf"), _import("safetensors.numpy")
    progress("reading", 0, None, "B")
    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ConfigError(f"{gguf_file.name} holds a {fields.get('general.architecture')!r} model, only llama is known")
    _write_tokenizer(fields, folder)

    total = len(reader.tensors)
    heads = {
        "attn_q": int(fields["llama.attention.head_count"]),
        "attn_k": int(fields["llama.attention.head_count_kv"]),
    }
    tensors: dict[str, Any] = {}
    for done, tensor in enumerate(reader.tensors, 1):
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=False)
        match = _BLOCK.fullmatch(tensor.name)
        if match and match[2] in heads:
            weight = unpermute(weight, heads[match[2]])
        tensors[tensor_name(tensor.name)] = weight.copy(order="C")
        progress("converting", done, total, "tensors")
    progress("writing", 0, None, "B")
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_config(fields, "lm_head.weight" not in tensors, folder)


def _token_ids(fields: dict[str, Any]) -> dict[str, int]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id``.

    Padding takes the unknown token: with the end token (which GGUF names) the embedding of the end of an answer would
    get no gradient, since torch freezes the padding row.
    """
    return {
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.unknown_token_id"]),
    }


def _write_config(fields: dict[str, Any], tied: bool, folder: Path) -> None:
    ids = _token_ids(fields)
    hidden, heads = int(fields["llama.embedding_length"]), int(fields["llama.attention.head_count"])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        # GGUF keeps it as a float32: 9.999999747378752e-06 was 1e-05
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_theta": float(fields["llama.rope.freq_base"]), "rope_type": "default"},
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": int(fields["llama.vocab_size"]),
        **ids,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=1))


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    tokenizers = _import("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ConfigError(f"the GGUF file's tokenizer {'/'.join(map(str, kind))} is not known (gpt2/smollm is)")
    if "tokenizer.chat_template" not in fields:
        raise ConfigError("the GGUF file has no chat template: it is not a chat model")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # "smollm" in llama.cpp: every digit alone, then GPT-2's cut
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            byte_level(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    control = [
        token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL
    ]
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    ids = _token_ids(fields)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[int(fields["tokenizer.ggml.unknown_token_id"])],
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields["llama.context_length"]),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])
