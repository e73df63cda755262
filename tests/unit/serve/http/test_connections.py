"""Connections whose clients send slowly, do not read, close one half, or are many."""

import asyncio
import http.client
import json
import socket
import time

import pytest
from helpers.runs.served import call, served

import csd

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

TEXTS = "/v1/completions"


@pytest.fixture
def seconds(monkeypatch):
    """Sets the time limits of connections."""
    from csd.serve.http import connection

    def change(**limits):
        for name, value in limits.items():
            monkeypatch.setattr(connection, name, value)

    return change


@pytest.fixture(scope="module")
def service(engine):
    with served(csd.AsyncEngine(engine, max_tokens=400, budget=8)) as found:
        yield found


def head(length, more=""):
    return (
        f"POST {TEXTS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n{more}\r\n"
    ).encode()


def connected(port):
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def wait_until(condition):
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def ends(connection):
    """All that the server sends until it closes the connection."""
    found = b""
    try:
        while part := connection.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


FIRST = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
# requests whose response does not wait for the body, which never ends
UNREAD = FIRST.replace(b"\r\n\r\n", b"\r\nContent-Length: 100\r\n\r\n{")


@pytest.mark.parametrize("before", [b"", FIRST, UNREAD], ids=["first", "second", "unread body"])
@pytest.mark.parametrize("part", [b"", b"GET /hea"], ids=["nothing", "a part"])
def test_a_head_must_be_complete_in_time(service, seconds, before, part):
    seconds(HEAD_SECONDS=0.3, NEXT_SECONDS=0.3)
    with connected(service[0]) as slow:
        slow.sendall(before)
        if before:
            assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200")
        slow.sendall(part)
        # without an answer, and whatever it goes on to send
        assert not ends(slow).startswith(b"HTTP")
    assert call(service[0], "/health")[0] == 200


def test_a_slow_body_ends_its_request_alone(service):
    port, server = service
    limit = server.limits.body_seconds
    object.__setattr__(server.limits, "body_seconds", 0.5)
    try:
        slow = [connected(port) for _ in range(40)]
        for one in slow:
            one.sendall(head(1000) + b'{"prompt": ')
        wait_until(lambda: server.open == 40)
        status, answer = call(port, TEXTS, {"prompt": "ab", "max_tokens": 3, "seed": 1})
        assert status == 200, answer
        for one in slow:
            assert ends(one).startswith(b"HTTP/1.1 408")
            one.close()
        wait_until(lambda: server.open == 0)
    finally:
        object.__setattr__(server.limits, "body_seconds", limit)


def answer_of(connection):
    """Status and JSON of a response whose body has a length."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, json.loads(response.read())


def chunked(size, part=1 << 14):
    """A body of zeros in chunks."""
    whole, rest = divmod(size, part)
    sizes = [part] * whole + [rest] * bool(rest)
    return b"".join(b"%x\r\n" % n + b"0" * n + b"\r\n" for n in sizes) + b"0\r\n\r\n"


# requests that are refused before their body is read, or while it is
REFUSED = {
    "length": (head(8 << 20), b"0" * (8 << 20), 413, "body_too_large"),
    "chunks": (
        head(0, "Transfer-Encoding: chunked\r\n").replace(b"Content-Length: 0\r\n", b""),
        chunked(8 << 20),
        413,
        "body_too_large",
    ),
    "type": (head(8 << 20).replace(b"/json", b"/text"), b"0" * (8 << 20), 415, "content_type"),
    "path": (head(8 << 20).replace(b"v1/", b"v2/"), b"0" * (8 << 20), 404, None),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_client_that_sends_a_whole_body_first_gets_its_answer(service, kind):
    """The connection then serves its next request."""
    first, body, status, code = REFUSED[kind]
    with connected(service[0]) as large:
        large.sendall(first + body)
        got, answer = answer_of(large)
        assert (got, answer["error"]["code"]) == (status, code), answer
        large.sendall(FIRST)
        assert answer_of(large)[0] == 200


def test_a_client_that_asks_first_sends_no_large_body(service):
    with connected(service[0]) as asking:
        asking.sendall(head(8 << 20, "Expect: 100-continue\r\n"))
        assert answer_of(asking)[0] == 413


def test_a_body_without_end_ends(service, seconds):
    seconds(DROPPED_BYTES=1 << 20)
    with connected(service[0]) as endless:
        endless.sendall(head(1 << 40))
        status = answer_of(endless)[0]
        sent = 0
        with pytest.raises(OSError):
            # until the server closes the connection; sockets hold some megabytes
            while sent < 1 << 28:
                sent += endless.send(b"0" * (1 << 16))
    assert status == 413 and sent < 1 << 27
    assert call(service[0], "/health")[0] == 200


def test_a_body_in_tiny_parts_is_refused(service):
    data = json.dumps({"prompt": "a" * 9970, "max_tokens": 2}).encode()
    more = "Transfer-Encoding: chunked\r\nConnection: close\r\n"
    start = head(0, more).replace(b"Content-Length: 0\r\n", b"")
    with connected(service[0]) as tiny:
        tiny.sendall(start + b"".join(b"1\r\n%c\r\n" % byte for byte in data) + b"0\r\n\r\n")
        assert ends(tiny).startswith(b"HTTP/1.1 400")
    # in larger ones it is read
    parts = b"".join(b"80\r\n" + data[i : i + 128] + b"\r\n" for i in range(0, 9984, 128))
    with connected(service[0]) as whole:
        rest = data[9984:]
        whole.sendall(start + parts + b"%x\r\n" % len(rest) + rest + b"\r\n0\r\n\r\n")
        assert b"exceed the model's context of 400" in ends(whole)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_stops_reading_is_disconnected(service, seconds, monkeypatch, stream):
    """Its slots and memory are free, and others are not delayed."""
    from csd.serve.http import connection

    port, server = service
    seconds(READ_SECONDS=0.5)
    plain = connection.Connection.connection_made

    def with_small_buffer(self, transport):
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        plain(self, transport)

    monkeypatch.setattr(connection.Connection, "connection_made", with_small_buffer)
    body = {"prompt": "ab", "n": 8, "max_tokens": 60, "ignore_eos": True, "logprobs": 20}
    data = json.dumps(body | {"stream": stream, "seed": 1}).encode()
    stopped = []
    for _ in range(3):
        one = socket.socket()
        # less than one answer
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        one.connect(("127.0.0.1", port))
        one.sendall(head(len(data)) + data)
        stopped.append(one)
    wait_until(lambda: server.open == 3)
    assert call(port, TEXTS, {"prompt": "ab", "max_tokens": 3, "seed": 1})[0] == 200
    wait_until(lambda: server.open == 0 and server.engine.counters.slots == 0)
    for one in stopped:
        one.settimeout(30)
        # cut before its end
        assert 0 < len(ends(one)) < 80_000
        one.close()


def test_a_half_closed_connection_has_left(service):
    port, server = service
    body = json.dumps({"prompt": "ab", "n": 20, "max_tokens": 390, "ignore_eos": True}).encode()
    before = server.engine.counters.cancelled
    with connected(port) as half:
        half.sendall(head(len(body)) + body)
        wait_until(lambda: server.engine.counters.slots > 0)
        half.shutdown(socket.SHUT_WR)
        wait_until(lambda: server.open == 0 and server.engine.counters.slots == 0)
    assert server.engine.counters.cancelled > before


def test_an_address_leaves_connections_for_others(engine):
    """Connections that it closes are free again."""
    from csd.serve.http import Server, process

    server = Server(csd.AsyncEngine(engine, max_tokens=100, budget=4), "toy")
    listening = process(server, port=0, connections=20)

    async def crowd():
        serving = asyncio.create_task(listening.serve())
        while not listening.started:
            await asyncio.sleep(0.01)
        port = listening.servers[0].sockets[0].getsockname()[1]
        own = [await asyncio.open_connection("127.0.0.1", port) for _ in range(18)]
        texts = []
        for reader, writer in own:
            writer.write(FIRST)
            texts.append(await reader.read(12))
        # another address of this machine
        other = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        other[1].write(FIRST)
        found = await other[0].read(12)
        for _, writer in [*own, other]:
            writer.close()
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(FIRST)
        again = await reader.read(12)
        writer.close()
        listening.should_exit = True
        await serving
        return texts, found, again

    texts, other, again = asyncio.run(crowd())
    assert texts[:10] == [b"HTTP/1.1 200"] * 10 and texts[-1] == b"HTTP/1.1 503"
    assert other == again == b"HTTP/1.1 200"


GARBAGE = b"Transfer-Encoding: chunked\r\n\r\nno size\r\n"


@pytest.mark.parametrize("path", ["/version", TEXTS])
@pytest.mark.parametrize("late", [False, True])
def test_a_refused_request_logs_no_traceback(service, path, late, caplog):
    """A client would fill the log with them, and others would wait for it."""
    start = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for _ in range(5):
        with connected(service[0]) as bad:
            head, _, body = (start.encode() + GARBAGE).partition(b"no size")
            bad.sendall(head)
            if late:
                time.sleep(0.2)
            bad.sendall(b"no size" + body)
            ends(bad)
    wait_until(lambda: service[1].open == 0)
    assert call(service[0], "/health")[0] == 200
    assert not [record for record in caplog.records if record.exc_info], caplog.text
    assert "Traceback" not in caplog.text and "Fatal" not in caplog.text
