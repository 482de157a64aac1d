"""The settings of the router."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ByteSize, Field

from kvrelay.services.router.tools.formats import ReasoningParser, ToolParser
from kvrelay.shared.config import (
    ClusterName,
    Host,
    LogFormat,
    LogLevel,
    Named,
    Names,
    Port,
    RedisUrl,
    Secrets,
    Settings,
)

Seconds = Annotated[float, Field(gt=0, le=86400)]
_QUANTISATION = re.compile(r"\.(I?Q\d\w*|BF16|F16|F32)$", re.IGNORECASE)


class RouterConfig(Settings):
    """One frozen object per router process; units are in the names."""

    table: ClassVar[str] = "router"

    model: str
    """The workers' model: the router reads its tokenizer and chat template, never its weights."""
    served_model_name: Names = ()
    """Names under which clients ask for the model; unset means the file's or folder's own name."""
    host: Annotated[Host, Named(env="HTTP_HOST")] = "127.0.0.1"
    """Address that the HTTP port binds to."""
    port: Annotated[Port, Named(env="HTTP_PORT")] = 8000
    """HTTP port of the OpenAI API; 0 takes a free one."""
    admin_port: Port | None = None
    """HTTP port of /metrics, /dashboard, /health, /ready and /admin/* alone, without API keys; the
    other one then has no /metrics, /dashboard and /admin/*. Unset: all on one port."""
    admin_host: Host = "127.0.0.1"
    """Address that the admin port binds to."""
    api_key: Secrets = ()
    """Keys of which clients need one, on all routes but /health and /ready. Give them by
    environment or file: every user of the machine can read a flag."""
    api_key_file: str = ""
    """A file with more such keys, one a line, # for comments; read again on SIGHUP."""
    allowed_origins: Names = ()
    """Origins whose web pages may call this API from a browser, like https://app.example.org; * for
    all. Unset: none."""
    redis_url: RedisUrl = "redis://127.0.0.1:6379/0"
    """The cluster's Redis. Give one with a password by environment or file, not by flag."""
    cluster: ClusterName = "kvrelay"
    """Name of the cluster: several can share one Redis."""
    max_queue_requests: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    """Most requests waiting for their first token; beyond it the answer is 429."""
    max_concurrent_requests: Annotated[int, Field(ge=1, le=1 << 20)] = 4096
    """Most requests at the same time, waiting or running; beyond it the answer is 429."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens that one answer may have: asking for more is a 400, not asking ends there. Unset:
    what the model's context holds."""
    lenient_fields: bool = False
    """Leave fields of a request that are not known out, with a warning in the log, instead of
    refusing it; never those that constrain the answer."""
    max_body_bytes: Annotated[ByteSize, Field(ge=1024), Named(setting="max_body")] = ByteSize(
        8 << 20
    )
    """Longest request body in bytes; 8MiB is understood."""
    queue_s: Seconds = 60.0
    """Longest wait for a worker and for room, in seconds."""
    prefill_s: Seconds = 120.0
    """Longest computation of a prompt, in seconds."""
    transfer_s: Seconds = 10.0
    """Longest wait for the KV blocks after the prompt was computed, in seconds."""
    route: Literal["auto", "split", "local"] = "auto"
    """Who computes a prompt: split takes a prefill worker and local the decode worker that writes
    the answer, each wherever there is one; auto takes what has the first token sooner and disturbs
    running answers less, by measured rates."""
    idle_s: Seconds = 30.0
    """Longest time between two tokens of one choice, in seconds."""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """After SIGTERM running answers have this many seconds to end."""
    tool_call_parser: ToolParser = "auto"
    """The form in which the model writes tool calls; auto goes by its chat template, none takes no
    tools."""
    reasoning_parser: ReasoningParser = "auto"
    """The tags around the model's reasoning: think is <think>, mistral is [THINK]; auto goes by its
    chat template, and with none reasoning is content."""
    chaos: str = ""
    """A chaos plan (YAML file): faults that this router injects into its own work, to prove that
    nothing comes of them. Empty is none; never set it where people are served."""
    vllm_metric_names: bool = True
    """Tell on /metrics what vLLM also has by vLLM's names too, for dashboards made for those."""
    log_format: LogFormat = "auto"
    """One JSON object a line, or one line of text; auto is text on a terminal and else json."""
    log_level: LogLevel = "info"
    """Least severe message that is logged."""

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names clients may use; the first is the one in answers."""
        if self.served_model_name:
            return self.served_model_name
        if not self.model.endswith(".gguf"):
            path = Path(self.model)
            return (path.resolve().name if path.is_dir() else self.model,)
        return (_QUANTISATION.sub("", Path(self.model).stem),)
