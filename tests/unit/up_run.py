"""`kvrelay up` over `up_fake_service.py`: `python up_run.py FOLDER [PORT [GRACE_S]]`."""

import sys
from pathlib import Path

from rich.console import Console

from kvrelay.services.deployment import Deployment, UpConfig
from kvrelay.services.router.config import RouterConfig
from kvrelay.services.up import run
from kvrelay.shared.errors import KvrelayError
from kvrelay.shared.worker.config import WorkerConfig


def main(folder: str, port: str = "0", grace_s: str = "1") -> int:
    fake = (sys.executable, str(Path(__file__).with_name("up_fake_service.py")), folder)
    deployment = Deployment(
        UpConfig(ready_s=20, grace_s=float(grace_s)),
        RouterConfig(model="tiny.Q4_1.gguf", port=int(port)),
        WorkerConfig(model="tiny.Q4_1.gguf"),
        external_redis=False,
    )
    try:
        return run(deployment, Console(width=120), fake)
    except KvrelayError as error:
        print(f"error: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
