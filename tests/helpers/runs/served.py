"""A server of a small model in this process, and clients that need no package."""

import http.client
import json
import threading
import time
from contextlib import contextmanager

from csd.serve import AsyncEngine

NAME = "toy"
CHAT = [{"role": "user", "content": "Say 1."}]


@contextmanager
def served(
    model,
    *,
    limits=None,
    keys=(),
    shares=False,
    group_window=0.0,
    weights_folder=None,
    drain=5.0,
    hosts=(),
    origins=(),
    **engine,
):
    """(port, Server) while the block runs."""
    from csd.serve.http import Server, process

    if not isinstance(model, AsyncEngine):
        model = AsyncEngine(model, **engine)
    server = Server(
        model,
        NAME,
        keys=keys,
        shares=shares,
        group_window=group_window,
        weights_folder=weights_folder,
        limits=limits,
        hosts=hosts,
        origins=origins,
    )
    listening = process(server, port=0, drain=drain)
    thread = threading.Thread(target=listening.run)
    thread.start()
    try:
        while not listening.started:
            assert thread.is_alive()
            time.sleep(0.005)
        yield listening.servers[0].sockets[0].getsockname()[1], server
    finally:
        listening.should_exit = True
        thread.join(30)
        model.close(drain=False)
    assert not thread.is_alive()


def chat(**fields):
    return {"model": NAME, "messages": CHAT, "max_tokens": 20, "temperature": 0.8} | fields


def call(port, path, body=None, key=None, method=None):
    """Status and JSON of a response, or its text where it is none."""
    response = opened(port, path, body, key, method)
    text = response.read().decode()
    kind = response.headers.get("content-type", "")
    return response.status, json.loads(text) if "json" in kind else text


def opened(port, path, body=None, key=None, method=None, headers=()):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=180)
    headers = {"Content-Type": "application/json"} | dict(headers)
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
    return connection.getresponse()


def events(port, path, body, key=None):
    """The objects of a stream; its end is checked."""
    response = opened(port, path, body | {"stream": True}, key)
    assert response.status == 200, response.read()
    found = []
    for line in response.read().decode().split("\n\n"):
        if line:
            assert line.startswith("data: ")
            found.append(line.removeprefix("data: "))
    assert found[-1] == "[DONE]" or "error" in found[-1]
    return [json.loads(x) for x in found if x != "[DONE]"]
