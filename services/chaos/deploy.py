"""The deployment that a plan is run against: like `kvrelay up`'s, with the plan in every part."""

from __future__ import annotations

from pathlib import Path

from kvrelay.services.deployment import Deployment, UpConfig
from kvrelay.services.router.config import RouterConfig
from kvrelay.shared import config as settings
from kvrelay.shared.checkpoint import fetch
from kvrelay.shared.errors import ModelError
from kvrelay.shared.worker.config import WorkerConfig

TINY_POOL_BYTES = 2 << 20
DRAIN_S = 10.0


def chaotic(plan: Path, sources: settings.Sources, tiny: Path | None) -> Deployment:
    """`tiny`: where to write a model of its own. Raises `ConfigError`."""
    pattern: dict[str, object] = {"chaos": str(plan.resolve())}
    if tiny is not None:
        from kvrelay.services.chaos.tinymodel import write_tiny_model

        model = write_tiny_model(tiny)
        pattern |= {"kv_cache_memory_bytes": TINY_POOL_BYTES, "threads": 1}
        pattern |= {"max_num_batched_tokens": 64}  # several chunks for most prompts
    else:
        model = fetch.default_model_path()
    pattern["model"] = str(model)
    router = settings.resolve(RouterConfig, sources, {**_router(pattern), "route": "split"})
    if not Path(router.config.model).exists():
        raise ModelError(
            f"model: {router.config.model} does not exist; `kvrelay model fetch` gets the default "
            "one, and --tiny makes one"
        )
    worker = settings.resolve(WorkerConfig, sources, {**pattern, "model": router.config.model})
    up = settings.resolve(UpConfig, sources)
    return Deployment(up.config, router.config, worker.config, external_redis=False)


def _router(pattern: dict[str, object]) -> dict[str, object]:
    return {"model": pattern["model"], "chaos": pattern["chaos"], "drain_s": DRAIN_S}
