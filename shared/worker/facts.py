"""What is known of a worker before it opens a port, and what others are told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

from kvrelay.shared.checkpoint.config import ModelConfig, read_config
from kvrelay.shared.checkpoint.source import ModelSource, resolve_model, weights_id
from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo, load_tokenizer
from kvrelay.shared.engine.policy import POLICIES
from kvrelay.shared.engine.state import EngineLimits
from kvrelay.shared.kv.prefix import group_of
from kvrelay.shared.rpc.convert import PROTOCOL
from kvrelay.shared.store.records import WorkerRecord
from kvrelay.shared.transfer.protocol import Address
from kvrelay.shared.types import Incarnation
from kvrelay.shared.worker.capacity import Capacity, worker_capacity
from kvrelay.shared.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of this worker before it opens a port."""

    source: ModelSource
    model: ModelConfig
    tokenizer: TokenizerInfo
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the process can be reached; each incarnation has a transfer address of its own."""

    grpc: str
    metrics: str


Describe = Callable[[Incarnation, Address], WorkerRecord]


def read_facts(config: WorkerConfig) -> Facts:
    """Everything that can be wrong with the settings is found here, before any weight is read."""
    source = resolve_model(config.model)
    model = read_config(source)
    capacity = worker_capacity(config, model)
    return Facts(source, model, load_tokenizer(source.path), capacity)


def fingerprint_of(facts: Facts, config: WorkerConfig, numerics: str) -> dict[str, str]:
    """What two workers must have in common to continue each other's work (L12)."""
    model = facts.model
    return {
        "protocol": f"{PROTOCOL}, grammars by llguidance {version('llguidance')}",
        "layout": f"{model.layers}x{model.kv_heads}x{model.head_dim}",
        "dtype": config.dtype,
        "block_size": str(config.block_size),
        "weights": weights_id(facts.source),
        "tokenizer": facts.tokenizer.identity,
        "numerics": numerics,
    }


def limits_of(facts: Facts, config: WorkerConfig, fingerprint: Mapping[str, str]) -> EngineLimits:
    return EngineLimits(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_tokens,
        max_model_len=facts.capacity.max_model_len,
        vocab_size=facts.model.vocab,
        salt=group_of(fingerprint),
        policy=POLICIES[config.scheduling_policy],
        even_context=facts.model.even_context,
    )


def recorder(
    facts: Facts,
    config: WorkerConfig,
    name: str,
    fingerprint: Mapping[str, str],
    ports: Ports,
) -> Describe:
    """The registration record of any incarnation of this process."""

    def describe(incarnation: Incarnation, transfer: Address) -> WorkerRecord:
        return WorkerRecord(
            incarnation=incarnation,
            role=config.role,
            name=name,
            model=config.model,
            grpc_address=ports.grpc,
            metrics_address=ports.metrics,
            transfer_scheme=transfer.scheme,
            transfer_address=transfer.value,
            fingerprint=fingerprint,
            block_size=config.block_size,
            pool_blocks=facts.capacity.blocks,
            max_model_len=facts.capacity.max_model_len,
            max_num_seqs=config.max_num_seqs,
        )

    return describe
