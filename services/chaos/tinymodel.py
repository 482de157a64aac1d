"""A random model in Hugging Face's folder form, small enough to start in a second."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:"
    "{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>{{ '\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{% set it = call.function %}"
    '<tool_call>\n{"name": "{{ it.name }}", "arguments": {{ it.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is the capital of France? Paris, of course.",
    "def relay(blocks): return [block for block in blocks if block.ready]  # 0123456789",
    "one two three four five six seven eight nine ten; user assistant system message answer",
)


def write_tiny_model(
    folder: Path,
    *,
    family: str = "llama",
    seed: int = 0,
    layers: int = 2,
    tied: bool = True,
    **config: object,
) -> Path:
    """Write config.json, model.safetensors, tokenizer.json and their companions; gives `folder`.

    `config` adds to or replaces fields of config.json. Llama, mistral, qwen2 and qwen3 are known.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields: dict[str, object] = {
        "model_type": family,
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if family == "qwen3" else 16,
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "dtype": "float32",
        **config,
    }
    _write_json(folder / "config.json", fields)
    _write_json(folder / "generation_config.json", {"eos_token_id": [2, 0]})
    save_file(_tensors(fields, seed), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)
    return folder


def _tensors(fields: dict[str, object], seed: int) -> dict[str, torch.Tensor]:
    """Random weights whose logits differ clearly, and norms that are not all one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def matrix(out_features: int, in_features: int) -> torch.Tensor:
        return normal(out_features, in_features, scale=in_features**-0.5)

    def norm(width: int) -> torch.Tensor:
        return 1.0 + normal(width, scale=0.1)

    hidden, wide, vocab, heads, kv_heads, dim, layers = (
        int(str(fields[name]))
        for name in (
            "hidden_size",
            "intermediate_size",
            "vocab_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "num_hidden_layers",
        )
    )
    tensors = {
        "model.embed_tokens.weight": normal(vocab, hidden, scale=0.5),
        "model.norm.weight": norm(hidden),
    }
    for number in range(layers):
        at = f"model.layers.{number}."
        for name, rows in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = matrix(rows, hidden) * 2
            if fields["model_type"] == "qwen2":
                tensors[f"{at}self_attn.{name}_proj.bias"] = normal(rows, scale=0.5)
        if fields["model_type"] == "qwen3":
            tensors[f"{at}self_attn.q_norm.weight"] = norm(dim)
            tensors[f"{at}self_attn.k_norm.weight"] = norm(dim)
        tensors[f"{at}self_attn.o_proj.weight"] = matrix(hidden, heads * dim)
        tensors[f"{at}mlp.gate_proj.weight"] = matrix(wide, hidden) * 2
        tensors[f"{at}mlp.up_proj.weight"] = matrix(wide, hidden) * 2
        tensors[f"{at}mlp.down_proj.weight"] = matrix(hidden, wide)
        tensors[f"{at}input_layernorm.weight"] = norm(hidden)
        tensors[f"{at}post_attention_layernorm.weight"] = norm(hidden)
    if not fields["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocab, hidden)
    return tensors


def _write_tokenizer(folder: Path) -> None:
    """Byte-level BPE with the ChatML marks as ids 0 to 2; any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[1],
            "eos_token": SPECIAL[0],
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(file: Path, value: dict[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2), encoding="utf-8")
