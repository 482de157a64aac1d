"""Stands in for `kvrelay router|prefill|decode` under `kvrelay up`: announces itself and waits.

Run as `python up_fake_service.py FOLDER COMMAND`. A file in FOLDER changes the part of its name:
`NAME.fail` makes it fail with the line in that file, `NAME.mute` never announce itself, `NAME.deaf`
ignore SIGTERM.
"""

import http.server
import os
import signal
import sys
from pathlib import Path

from kvrelay.shared.lifeline import announce_ready


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "ready"}')

    def log_message(self, *_: object) -> None:
        pass


def main(folder: Path, command: str) -> int:
    name = os.environ.get("KVRELAY_WORKER_NAME", command)
    if (fail := folder / f"{name}.fail").exists():
        print(f"error: {fail.read_text()}", file=sys.stderr)
        return 2
    if (folder / f"{name}.deaf").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if (folder / f"{name}.mute").exists():
        signal.pause()
    port = int(os.environ.get("KVRELAY_HTTP_PORT", "0"))
    with http.server.HTTPServer(("127.0.0.1", port), Ready) as server:
        announce_ready({"address": f"127.0.0.1:{server.server_port}", "detail": f"role {command}"})
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
