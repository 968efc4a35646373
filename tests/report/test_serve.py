"""The page of a run in progress: it follows the record, and nothing else can be read."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpcore.report.__main__ import main
from ddpcore.report.serve import HOST, make_server

pytest.importorskip("jinja2")
pytest.importorskip("plotly")
pytest.importorskip("matplotlib")

Get = Callable[..., tuple[int, str]]


@pytest.fixture
def folder(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("ddpcore.report.page.svg_of", lambda chart: "<svg/>")  # pictures take most of the time
    path: Path = make_run()
    lines = (path / "record.jsonl").read_text().splitlines(keepends=True)
    (path / "record.jsonl").write_text("".join(lines[:3]))  # in progress
    return path


@pytest.fixture
def get(folder: Path) -> Iterator[Get]:
    """Asks a server of the folder: a path, and other headers than usual."""
    server = make_server([folder], 0, every=1e-9)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def ask(path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(HOST, server.server_port, timeout=60)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    yield ask
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_page_follows_the_record(get: Get, folder: Path) -> None:
    status, page = get("/")
    assert status == 200 and "not ended: step 2 of 6" in page and "connect-src" in page
    assert get("/digest") == get("/digest"), "nothing has changed"
    before = get("/digest")[1]
    end = {"kind": "end", "step": 6, "diverged": False}
    with (folder / "record.jsonl").open("a") as file:
        file.write(json.dumps(end) + "\n")
    assert get("/digest")[1] != before
    assert "finished" in get("/")[1]


def test_it_serves_nothing_else_and_changes_nothing(get: Get, folder: Path) -> None:
    (folder / "secret.txt").write_text("a secret")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    paths = ["/secret.txt", "/record.jsonl", "/../secret.txt", "/%2e%2e/etc/passwd", "//etc/passwd", "/?x"]
    for path in (*paths, f"/{folder}/secret.txt"):
        status, text = get(path)
        assert status in (400, 404) and "secret" not in text.replace("secret.txt", "")
    for method in ("POST", "PUT", "DELETE"):
        assert get("/", method)[0] == 501
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_other_host_names_are_refused(get: Get) -> None:
    """A page of another site may let its own name point to 127.0.0.1."""
    assert get("/", Host="example.org")[0] == 403


def test_a_port_in_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(folder), "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ddpcore report: port {port} of 127.0.0.1 cannot be used (")
    assert error.count("\n") == 1 and "take another with --port" in error


def test_a_browser_that_goes_away(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = make_server([folder], 0, every=1e-9)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with socket.create_connection((HOST, server.server_port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes with a reset
            client.sendall(f"GET / HTTP/1.1\r\nHost: {HOST}:{server.server_port}\r\n\r\n".encode())
        time.sleep(1)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert capfd.readouterr().err == ""


def test_a_run_that_is_deleted(get: Get, folder: Path) -> None:
    assert get("/")[0] == 200
    shutil.rmtree(folder)
    assert "there is no such file or folder" in get("/")[1]


def test_a_file_that_is_deleted_while_its_time_is_read(get: Get, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: path.name == "gone.json" or is_file(path))
    (folder / "gone.json").symlink_to(folder / "nothing")
    assert get("/digest")[0] == 200


def test_the_usual_port_of_http(folder: Path) -> None:
    """A browser leaves the port 80 out of the host that it names."""
    with make_server([folder], 0, every=1) as server:
        port = server.server_port
        server.server_port = 80
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        connection = http.client.HTTPConnection(HOST, port, timeout=60)
        connection.request("GET", "/", headers={"Host": HOST})
        assert connection.getresponse().status == 200
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("seconds", ["0", "nan", "inf", "1e7"])
def test_times_that_a_browser_cannot_wait(folder: Path, seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(folder), "--port", "0", "--every", seconds]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ddpcore report: --every is {float(seconds)}: it must be") and error.count("\n") == 1
