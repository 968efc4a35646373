"""The page of runs in progress, over HTTP on this machine alone. It only reads, and serves nothing but the page."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from typing_extensions import override

from ddpcore.report.page import digest_of, page_of
from ddpcore.report.sources import read_sources

HOST = "127.0.0.1"


class Page:
    """The page of some paths. It is made again when a file has changed, at most once in ``every`` seconds."""

    def __init__(self, paths: Sequence[Path], every: float) -> None:
        self._paths, self._every = paths, every
        self._lock = threading.Lock()
        self._made = 0.0
        self._state: list[tuple[str, int, int]] | None = None
        self._text, self._digest = b"", ""

    def latest(self) -> tuple[bytes, str]:
        """The page, and its digest."""
        with self._lock:
            if not self._text or time.monotonic() - self._made >= self._every:
                state = _state(self._paths)
                if state != self._state:
                    page = page_of(read_sources(self._paths), refresh=self._every)
                    self._text, self._digest, self._state = page.encode(), digest_of(page), state
                self._made = time.monotonic()
            return self._text, self._digest


def serve(paths: Sequence[Path], port: int, every: float) -> None:
    """Serve the page until the process is interrupted.

    Raises:
        ValueError: another program uses the port.
    """
    with make_server(paths, port, every) as server:
        print(f"http://{HOST}:{server.server_port}/ shows the runs; Ctrl-C ends it", flush=True)
        server.serve_forever()


def make_server(paths: Sequence[Path], port: int, every: float) -> ThreadingHTTPServer:
    """The server, which listens already. Port 0 takes a free port.

    Raises:
        ValueError: another program uses the port.
    """
    try:
        return _Server((HOST, port), partial(_Handler, Page(paths, every)))
    except OSError as error:
        raise ValueError(
            f"port {port} of {HOST} cannot be used ({error.strerror}): take another with --port, or 0 for a free one"
        ) from None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # a port in use is still refused there

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if the browser has closed the connection: it does so when it loads the page again."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET of two names, and looks at no path of the file system."""

    def __init__(self, page: Page, *args: object) -> None:
        self._page = page
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Send the page, or its digest."""
        assert isinstance(self.server, ThreadingHTTPServer)
        port = self.server.server_port
        end = "" if port == 80 else f":{port}"  # browsers leave out the port of http
        if self.headers.get("Host") not in (f"{HOST}{end}", f"localhost{end}"):
            self.send_error(403, "ask for 127.0.0.1 or localhost")  # a name that another site made point here
            return
        if self.path not in ("/", "/digest"):
            self.send_error(404, "there is only one page")
            return
        text, digest = self._page.latest()
        is_page = self.path == "/"
        body = text if is_page else digest.encode()
        self.send_response(200)
        self.send_header("Content-Type", f"text/{'html' if is_page else 'plain'}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a request line may hold escape codes."""


def _state(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Name, size and time of every file that the page may read."""
    found = []
    for path in paths:
        files = [path] if path.is_file() else [*path.glob("*"), *path.glob("*/*"), *path.glob("*/*/*")]
        for file in sorted(files):
            if file.suffix in (".json", ".jsonl"):
                with suppress(OSError):  # it may be removed at any time
                    about = file.stat()
                    found.append((str(file), about.st_size, about.st_mtime_ns))
    return found
