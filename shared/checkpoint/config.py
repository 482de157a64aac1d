"""What a model is, from config.json or GGUF metadata. What would run wrong is refused.

No torch here: the router reads the longest length and the EOS ids from this too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvrelay.shared.checkpoint.fields import Fields
from kvrelay.shared.checkpoint.gguf_metadata import read_gguf_metadata
from kvrelay.shared.checkpoint.source import ModelSource
from kvrelay.shared.errors import ModelError

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
FAMILIES: dict[str, Family] = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rope frequencies are stretched to longer contexts than the model was first trained on.

    `linear` divides all of them by `factor`. `llama3` divides the slow ones, keeps the fast ones,
    and blends in between, by wave lengths relative to `original_positions`.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers of one decoder-only model. Sizes are in elements."""

    family: Family
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    """Rows of the embedding table, which may be padded past the tokenizer's vocabulary."""
    max_positions: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    sliding_window: int | None
    """How many positions a query sees, its own included; None is all of them."""
    qkv_bias: bool
    qk_norm: bool
    """A norm over each head's queries and keys before the rotation (Qwen3)."""
    tied_head: bool | None
    """Whether a checkpoint without an output head has the embedding table for it. None (GGUF):
    it has."""
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} attention heads are no multiple of {self.kv_heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd: rope needs pairs")

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of one layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * q + 2 * kv + 3 * self.intermediate)

    @property
    def even_context(self) -> int:
        """Tokens of context at which attention to them is as many operations as the matrices of a
        layer: two for each of their elements, four for each query element and token. 0 where
        a window keeps attention from growing with the context."""
        if self.sliding_window:
            return 0
        return self.layer_weights // (2 * self.heads * self.head_dim)


def read_config(source: ModelSource) -> ModelConfig:
    """The configuration of a resolved model.

    Raises `ModelError` naming the file and the field: a family or feature that is not supported, or
    a value that is missing or of the wrong type.
    """
    if source.kind == "gguf":
        return _from_gguf(source.path)
    return _from_folder(source.path)


def _from_folder(folder: Path) -> ModelConfig:
    file = folder / "config.json"
    fields = Fields(str(file), _read_json(file))
    family = FAMILIES.get(fields.text("model_type"))
    if family is None:
        raise ModelError(_unsupported(str(file), fields.text("model_type")))
    _refuse_unsupported(fields, family)
    heads = fields.size("num_attention_heads")
    hidden = fields.size("hidden_size")
    rope = fields.inner("rope_parameters") or fields.inner("rope_scaling")
    theta = rope.number("rope_theta", 0.0) if rope else 0.0
    return ModelConfig(
        family=family,
        layers=fields.size("num_hidden_layers"),
        hidden=hidden,
        intermediate=fields.size("intermediate_size"),
        heads=heads,
        kv_heads=fields.size("num_key_value_heads", heads),
        head_dim=fields.size("head_dim", hidden // heads),
        vocab=fields.size("vocab_size"),
        max_positions=fields.size("max_position_embeddings"),
        rms_eps=fields.number("rms_norm_eps"),
        rope_theta=theta or fields.number("rope_theta", 10_000.0),
        rope_scaling=_scaling(rope) if rope else None,
        sliding_window=fields.integer("sliding_window", 0) or None if family == "mistral" else None,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied_head=fields.flag("tie_word_embeddings", False),
        eos_token_ids=_folder_eos(folder, fields),
    )


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    """Everything that changes the arithmetic and that this model code does not do."""
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise fields.refuse("hidden_act", activation)
    for flag in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if fields.flag(flag, False):
            raise fields.refuse(flag, True)
    uniform = {"full_attention"} if family != "mistral" else {"sliding_attention", "full_attention"}
    kinds = set(fields.texts("layer_types"))
    if len(kinds) > 1 or not kinds <= uniform:
        raise fields.refuse("layer_types", sorted(kinds))
    if fields.inner("quantization_config"):
        raise fields.refuse("quantization_config", "set")


def _scaling(rope: Fields) -> RopeScaling | None:
    kind = rope.text("rope_type", "") or rope.text("type", "default")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor"))
    if kind != "llama3":
        raise rope.refuse("rope_type", kind)
    return RopeScaling(
        "llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_positions=rope.size("original_max_position_embeddings"),
    )


def _folder_eos(folder: Path, fields: Fields) -> tuple[int, ...]:
    """generation_config.json has the last word: chat models name there what ends a turn."""
    file, own = folder / "generation_config.json", fields.integers("eos_token_id")
    if file.exists() and (ids := Fields(str(file), _read_json(file)).integers("eos_token_id")):
        return ids
    return own


def _from_gguf(file: Path) -> ModelConfig:
    fields = Fields(str(file), read_gguf_metadata(file))
    arch = fields.text("general.architecture")
    family = FAMILIES.get(arch)
    if family is None or family == "mistral":  # GGUF files call Mistral llama
        raise ModelError(_unsupported(str(file), arch))
    if fields.integer(f"{arch}.expert_count", 0):
        raise fields.refuse(f"{arch}.expert_count", fields.integer(f"{arch}.expert_count"))
    heads = fields.size(f"{arch}.attention.head_count")
    hidden = fields.size(f"{arch}.embedding_length")
    head_dim = fields.size(f"{arch}.attention.key_length", hidden // heads)
    if fields.integer(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise fields.refuse(f"{arch}.rope.dimension_count", "a part of the head")
    return ModelConfig(
        family=family,
        layers=fields.size(f"{arch}.block_count"),
        hidden=hidden,
        intermediate=fields.size(f"{arch}.feed_forward_length"),
        heads=heads,
        kv_heads=fields.size(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=fields.length("tokenizer.ggml.tokens"),
        max_positions=fields.size(f"{arch}.context_length"),
        rms_eps=fields.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number(f"{arch}.rope.freq_base", 10_000.0),
        rope_scaling=_gguf_scaling(fields, arch),
        sliding_window=fields.integer(f"{arch}.attention.sliding_window", 0) or None,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied_head=None,
        eos_token_ids=fields.gguf_ends(),
    )


def _gguf_scaling(fields: Fields, arch: str) -> RopeScaling | None:
    """Llama 3's scaling is no metadata in a GGUF but the tensor rope_freqs, which loading reads."""
    kind = fields.text(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise fields.refuse(f"{arch}.rope.scaling.type", kind)
    return RopeScaling("linear", fields.number(f"{arch}.rope.scaling.factor"))


def _unsupported(where: str, family: str) -> str:
    return f"{where}: model family {family!r} is not supported (supported: {', '.join(FAMILIES)})"


def _read_json(file: Path) -> dict[str, object]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object")
    return value
