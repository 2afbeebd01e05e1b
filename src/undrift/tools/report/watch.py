"""The live page: served to browsers on this machine, and rewritten as new rounds arrive."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from undrift.errors import UndriftError, first_line, listed
from undrift.tools.report.gather import gather
from undrift.tools.report.page import numbers, page, write
from undrift.tools.run_folders import find_runs, runs_in

HOST = "127.0.0.1"
PAUSE = 1.0
"""Seconds between two checks of the folders."""
REWRITE = 10.0
"""Seconds between two writes of the file, which is large; the final state is written at the end."""
WATCHED = ("config.toml", "metrics.jsonl", "model.safetensors", "partition.json")


class Server(ThreadingHTTPServer):
    """Serves the payload, which is replaced as a whole when there are new rounds."""

    daemon_threads = True

    def __init__(self, port: int, payload: dict[str, Any]) -> None:
        super().__init__((HOST, port), Handler)
        self.show(payload)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a browser that closed the connection
            super().handle_error(request, client_address)

    def show(self, payload: dict[str, Any]) -> None:
        text = numbers({**payload, "live": True}).encode()
        self.payload, self.text, self.tag = payload, text, f'"{hashlib.sha256(text).hexdigest()[:16]}"'


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        shown = self.server
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in (HOST, "localhost"):
            self.send_error(403)  # DNS rebinding: another site's name that resolves to this machine
        elif self.path == "/":
            self._reply(page(shown.payload, live=True).encode(), "text/html; charset=utf-8")
        elif self.path != "/data.json":
            self.send_error(404)
        elif self.headers.get("If-None-Match") == shown.tag:
            self.send_response(304)
            self.end_headers()
        else:
            self._reply(shown.text, "application/json", shown.tag)

    def _reply(self, body: bytes, kind: str, tag: str | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def wait_for(paths: Sequence[Path], say: Callable[[str], None]) -> None:
    """Wait until there is a run in each of these folders, which may not exist yet."""
    announced = False
    while waiting := [path for path in paths if not started(path)]:
        if not announced:
            say(f"waiting for {listed([str(path) for path in waiting], 3)} …")
        announced = True
        time.sleep(PAUSE)


def started(path: Path) -> bool:
    """Whether there is a run in this folder. Raises `UndriftError` if it is a file, in which there will be none."""
    return bool(find_runs([path]) if path.exists() and not path.is_dir() else runs_in(path))


def watch(paths: Sequence[Path], file: Path, port: int, say: Callable[[str], None]) -> None:
    """Serve the page and update it until Ctrl-C, with the runs that a sweep or a study has started since."""
    runs = find_runs(paths)
    seen, payload = stamps(runs), gather(runs)
    try:
        server = Server(port, payload)
    except OSError as error:
        raise UndriftError(
            f"Port {port} cannot be used ({error.strerror}); choose another, or leave --port out."
        ) from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say(f"watching at http://{HOST}:{server.server_port}/ until Ctrl-C")
    written, stale, pause = time.monotonic(), False, PAUSE
    said = set(payload["left_out"])

    def warn(problems: Iterable[str]) -> None:
        for problem in problems:
            if problem not in said:
                said.add(problem)
                say(f"warning: {problem}")

    try:
        while True:
            time.sleep(pause)
            runs = [folder for path in paths for folder in runs_in(path)]
            if (now := stamps(runs)) != seen:
                seen, began = now, time.monotonic()
                try:
                    payload = gather(runs)
                    server.show(payload)
                except Exception as error:  # all folders are damaged or being rewritten: keep the page as it is
                    warn([first_line(error)])
                    continue
                warn(payload["left_out"])
                stale, pause = True, max(PAUSE, 4 * (time.monotonic() - began))
            if stale and time.monotonic() - written > REWRITE:
                try:
                    write(file, payload)
                except UndriftError as error:  # a full disk, for example; browsers still get the new data
                    warn([str(error)])
                written, stale = time.monotonic(), False
    except KeyboardInterrupt:
        write(file, payload)
        say(f"stopped; the page is in {file}")
    finally:
        server.shutdown()
        server.server_close()


def stamps(folders: Sequence[Path]) -> list[Any]:
    """Modification times and sizes of the files that change during a run."""
    stats: list[Any] = []
    for folder in folders:
        for name in WATCHED:
            try:
                stat = (folder / name).stat()
                stats.append((stat.st_mtime_ns, stat.st_size))
            except OSError:
                stats.append(None)
    return stats
