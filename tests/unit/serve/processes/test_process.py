"""`csd serve` as a process: its start, its end by a signal, and connections that say nothing."""

import asyncio
import errno
import http.client
import json
import os
import pty
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from crowd import CLIENTS, client, expected
from helpers.runs.served import call, opened

import csd

pytest.importorskip("starlette")


@pytest.fixture
def started(toy_folder):
    """started(*flags): (process, port) of a server over the toy model, in float64.

    lines: gets what it logs after its start.
    """
    running = []

    def start(*flags, lines=None):
        command = [
            sys.executable,
            "-m",
            "csd.cli.main",
            "serve",
            toy_folder,
            "--port",
            "0",
            "--dtype",
            "float64",
            "--max-tokens",
            "300",
            "--budget",
            "8",
            *flags,
        ]
        env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        running.append(process)
        for line in process.stderr:
            if found := re.search(r"http://[\d.]+:(\d+)", line):
                # what else it logs must not fill the pipe
                lines = [] if lines is None else lines
                rest = threading.Thread(target=lines.extend, args=[process.stderr], daemon=True)
                rest.start()
                return process, int(found[1])
        raise AssertionError("the server has not started")

    yield start
    for process in running:
        process.kill()
        process.wait()


def test_sigterm_in_the_middle(started, toy_folder):
    """Accepted requests are answered with the samples of their seeds, others are refused."""
    process, port = started("--drain", "20")
    found, refused = {}, []

    async def one(i, signalled):
        if i % 4 == 0:
            # too late
            await signalled.wait()
        try:
            await client(port, i, found)
        except OSError:
            refused.append(i)
        # a connection that was closed before its response began
        except (ValueError, IndexError):
            refused.append(i)

    async def all_of_them():
        signalled = asyncio.Event()
        tasks = [asyncio.ensure_future(one(i, signalled)) for i in range(CLIENTS)]
        while len(found) < 20:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        signalled.set()
        await asyncio.gather(*tasks)

    asyncio.run(all_of_them())
    assert process.wait(30) == 0
    answered = {i: texts for i, texts in found.items() if isinstance(texts, list)}
    assert len(answered) >= 20 and refused
    assert {t for t in found.values() if not isinstance(t, list)} <= {"shutting_down"}
    with csd.Engine(toy_folder, dtype=torch.float64) as engine:
        for i, texts in answered.items():
            assert texts == expected(engine, i)


def test_what_does_not_end_in_time_is_refused(started):
    process, port = started("--drain", "0.2", "--max-slots", "1")
    body = {"prompt": "ab", "max_tokens": 290, "n": 100, "ignore_eos": True}
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(call(port, "/v1/completions", body)))
    stream = opened(port, "/v1/completions", body | {"stream": True})
    stream.read(5)
    waiting.start()
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert "shutting_down" in stream.read().decode()
    waiting.join()
    assert (answers[0][0], answers[0][1]["error"]["code"]) == (503, "shutting_down")
    assert process.wait(30) == 0


@pytest.mark.parametrize(
    "signals",
    [
        [signal.SIGINT, signal.SIGINT],
        [signal.SIGTERM, signal.SIGTERM],
        [signal.SIGTERM, signal.SIGINT, signal.SIGINT],
    ],
    ids=lambda signals: " ".join(one.name for one in signals),
)
def test_a_second_signal_answers_what_is_in_flight(started, signals):
    """Long before the drain ends."""
    process, port = started("--drain", "600", "--max-slots", "1")
    body = {"prompt": "ab", "max_tokens": 290, "n": 100, "ignore_eos": True}
    answers = []

    def ask(path, body):
        answers.append(call(port, path, body))

    stream = opened(port, "/v1/completions", body | {"stream": True})
    stream.read(5)
    asked = [
        ("/v1/completions", body),
        ("/v1/responses", {"input": "ab", "max_output_tokens": 200}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 200, "n": 90},
        ),
    ]
    waiting = [threading.Thread(target=ask, args=one) for one in asked]
    for one in waiting:
        one.start()
    time.sleep(0.5)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.2)
    assert "shutting_down" in stream.read().decode()
    for one in waiting:
        one.join(30)
    assert [(status, answer["error"]["code"]) for status, answer in answers] == (
        [(503, "shutting_down")] * len(asked)
    )
    assert process.wait(30) == 0


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="sets a limit of another process")
def test_connections_without_descriptors_write_one_line(started):
    """Waiting connections are answered once others have closed."""
    lines = []
    process, port = started(lines=lines)
    held = len(os.listdir(f"/proc/{process.pid}/fd"))
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (held + 5, held + 5))
    crowd = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(40)]
    time.sleep(4)
    assert process.poll() is None
    for one in crowd[:-1]:
        one.close()
    crowd[-1].sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert crowd[-1].recv(12) == b"HTTP/1.1 200"
    crowd[-1].close()
    assert call(port, "/health")[0] == 200
    assert len(lines) == 1 and "ulimit -n" in lines[0], lines[:5]


def test_warnings_about_requests_are_few(started):
    lines = []
    _, port = started(lines=lines)
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as bad:
            bad.sendall(b"no request\r\n\r\n")
            bad.recv(1 << 12)
    assert call(port, "/health")[0] == 200
    assert len(lines) <= 1, lines[:5]


BUSY = """
import sys, time
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from csd.cli.main import main
from csd.serve.http import app

async def busy(server, request):
    # a thread that sleeps, and one that does not release Python's lock
    work = (lambda: time.sleep(60)) if request.url.query == "asleep" else (lambda: 9**50000000 % 7)
    await run_in_threadpool(work)
    return Response()

app.PATHS["/busy"] = ("GET", busy)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("work", "signals", "code"),
    [
        (None, [signal.SIGTERM], 0),
        ("asleep", [signal.SIGTERM], 0),
        ("asleep", [signal.SIGINT, signal.SIGINT], 0),
        ("asleep", [signal.SIGTERM, signal.SIGINT, signal.SIGTERM], 0),
        ("locked", [signal.SIGTERM], -signal.SIGKILL),
    ],
)
def test_a_drain_ends(toy_folder, work, signals, code):
    """Within a few seconds more, and without tracebacks, whatever its threads compute."""
    command = [
        sys.executable,
        "-c",
        BUSY,
        "serve",
        toy_folder,
        "--port",
        "0",
        "--dtype",
        "float64",
        "--max-tokens",
        "300",
        "--budget",
        "0",
        "--drain",
        "0.5",
    ]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    try:
        port = next(
            int(found[1])
            for line in process.stderr
            if (found := re.search(r"http://[\d.]+:(\d+)", line))
        )
        waiting = None
        if work is not None:
            waiting = socket.create_connection(("127.0.0.1", port), timeout=60)
            waiting.sendall(f"GET /busy?{work} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            time.sleep(1)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.3)
        if work == "asleep":
            response = http.client.HTTPResponse(waiting)
            response.begin()
            assert response.status == 503
            assert json.loads(response.read())["error"]["code"] == "shutting_down"
        # far less than what the threads take, on a busy machine too
        assert process.wait(30) == code
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("terminal", [False, True])
def test_the_start_shows_its_steps(terminal, toy_folder, tmp_path):
    """Whole lines in a log; on a terminal one line for each step, which begins before it."""
    command = [sys.executable, "-m", "csd.cli.main", "serve", toy_folder, "--port", "0"]
    command += ["--max-tokens", "300", "--dtype", "float64"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    read, written = pty.openpty() if terminal else os.pipe()
    process = subprocess.Popen(command, stderr=written, env=env)
    os.close(written)
    try:
        text = b""
        while b"http://" not in text:
            text += os.read(read, 1 << 16)
    finally:
        process.kill()
        process.wait()
        os.close(read)
    lines = text.decode().replace("\r\n", "\n").split("\n")
    lines = [line for line in lines if line.startswith("csd: ")]
    steps = [
        f"csd: loading {toy_folder}",
        "csd: compiling or loading kernels in float64, for any number of threads",
        "csd: measuring step times",
        "csd: drawing a text and a JSON value, which compile what is left",
    ]
    if not terminal:
        assert b"\r" not in text
        steps = [line for step in steps for line in (f"{step} ...", f"{step}: ")]
    assert [line for line in lines if line.startswith("csd: serving ")] == lines[-1:]
    shown = [line for line in lines[:-1] if " compiled ..." not in line]
    assert len(shown) == len(steps)
    assert all(map(str.startswith, shown, steps)), lines


def test_a_port_in_use_precedes_loading(toy_folder, capsys, monkeypatch):
    from csd.cli.main import main

    monkeypatch.setattr("csd.serve.AsyncEngine", lambda *args, **options: 1 / 0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for flags, parts in (
            (["--port", port], (f"port {port} of 127.0.0.1", "in use", "another --port")),
            (["--host", "192.0.2.1", "--port", "0"], ("192.0.2.1", "another --host")),
            (["--host", "no.invalid"], ("no.invalid", "no address", "another --host")),
        ):
            assert main(["serve", toy_folder, *flags]) == 2
            error = capsys.readouterr().err
            assert all(part in error for part in parts), error
    # free again: the model is next
    assert main(["serve", toy_folder, "--port", port]) == 2
    assert "division by zero" in capsys.readouterr().err


def test_a_port_is_held_while_the_model_loads():
    """A client is refused meanwhile, and another process that would listen there too is told."""
    from csd.serve.http.run import bound

    (held,) = bound("127.0.0.1", 0)
    address = held.getsockname()
    with held, socket.socket() as client:
        assert client.connect_ex(address) == errno.ECONNREFUSED
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        held.listen()
        with socket.create_connection(address, timeout=5):
            pass
        with pytest.raises(OSError, match=r"port \d+ of 127.0.0.1 cannot be bound.*--port"):
            bound(*address)


def test_errors_precede_loading(toy_folder, capsys):
    from csd.cli.main import main

    for flags, text in (
        (["--port", "70000"], "port"),
        (["--max-slots", "0"], "max_slots"),
        (["--weights-folder", "/none"], "weights-folder"),
        (["--drain", "-1"], "drain"),
    ):
        assert main(["serve", toy_folder, *flags]) == 2
        assert text in capsys.readouterr().err
