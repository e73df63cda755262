"""Two hundred clients of a server: some read slowly, some leave, some send nothing."""

import asyncio
import json
import random

import csd

CLIENTS = 200
PROMPTS = ["Say 1.", "Once upon a time", "Say 2.", "x" * 90]


def body_of(i):
    own = random.Random(i)
    return {
        "prompt": own.choice(PROMPTS),
        "n": own.randint(1, 3),
        "seed": own.randint(0, 2),
        "max_tokens": own.choice([4, 12, 30]),
        "stream": own.random() < 0.5,
    }


def expected(engine, i):
    """The texts that `csd.generate` draws for the client's request."""
    body = body_of(i)
    out = csd.generate(
        engine,
        body["prompt"],
        num_samples=body["n"],
        seed=body["seed"],
        max_new_tokens=body["max_tokens"],
    )
    return out.texts


def head_of(data):
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    ).encode()


def texts_of(body, raw):
    """The texts of a response, or its error's code."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    if b"chunked" in head:
        parts = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            parts.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        rest = b"".join(parts)
    if not head.startswith(b"HTTP/1.1 200"):
        return json.loads(rest)["error"]["code"]
    if not body["stream"]:
        return [c["text"] for c in json.loads(rest)["choices"]]
    texts = [""] * body["n"]
    lines = rest.decode().split("\n\n")
    if lines[-2] != "data: [DONE]":
        return json.loads(lines[-2].removeprefix("data: "))["error"]["code"]
    for line in lines[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


async def client(port, i, found):
    own, body = random.Random(-i), body_of(i)
    await asyncio.sleep(own.random())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    kind = own.choice(["whole", "whole", "whole", "slow", "leaves", "silent", "half"])
    try:
        if kind == "silent":
            await asyncio.sleep(1)
            return
        if kind == "half":
            writer.write(head_of(data)[: own.randint(1, 60)])
            await asyncio.sleep(1)
            return
        writer.write(head_of(data) + data)
        if kind == "leaves":
            await asyncio.sleep(own.random() / 5)
            return
        raw = b""
        while part := await reader.read(7 if kind == "slow" else 1 << 16):
            raw += part
            if kind == "slow" and len(raw) < 500:
                await asyncio.sleep(0.01)
        found[i] = texts_of(body, raw)
    finally:
        writer.close()


async def clients(port, found):
    await asyncio.gather(*(client(port, i, found) for i in range(CLIENTS)))
