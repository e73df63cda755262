"""Many engines behind one address with Ray Serve; equal prompts go to one of them.

needs `pip install 'starlette>=0.45' 'uvicorn>=0.34' 'ray[serve]'`. Each replica is a `csd serve` of
its own, with one device. A request goes to the replica that the hash of its prompt picks, so
requests with equal prompts of one key share keys, values and graph there, as a GRPO step's do. With
GPUs: `--gpus 1`.

    python examples/ray_serve.py MODEL --replicas 2
"""

import argparse
import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

import csd
from csd.serve.http import Server, make_app


@serve.deployment(max_ongoing_requests=512)
class Replica:
    """One engine; its answers are those of the application that `csd serve` runs."""

    def __init__(self, model: str, name: str, options: dict[str, Any]):
        self.app = make_app(Server(csd.AsyncEngine(model, **options), name))

    async def answer(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> AsyncIterator[Any]:
        """The status, then parts of the body. Where the reader leaves, the request ends."""
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
            "client": None,
            "server": None,
        }
        messages: asyncio.Queue = asyncio.Queue(maxsize=4)
        unread, left = [body], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        running = asyncio.ensure_future(self.app(scope, receive, messages.put))
        try:
            more = True
            while more:
                message = await messages.get()
                if message["type"] == "http.response.start":
                    kinds = [v for k, v in message["headers"] if k == b"content-type"]
                    yield message["status"], kinds[0].decode() if kinds else "text/plain"
                else:
                    yield message.get("body", b"")
                    more = message.get("more_body", False)
        finally:
            left.set()
            await running


@serve.deployment(max_ongoing_requests=4096)
class Router:
    """Sends a request to the replica of its prompt."""

    def __init__(self, *replicas: Any):
        self.replicas = replicas

    async def __call__(self, request: Request) -> StreamingResponse:
        body = await request.body()
        replica = self.replicas[place_of(body, len(self.replicas))]
        answer = replica.options(stream=True).answer.remote(
            request.method, request.url.path, request.headers.raw, body
        )
        status, kind = await anext(aiter(answer))

        async def parts() -> AsyncIterator[bytes]:
            async for part in answer:
                yield part

        return StreamingResponse(parts(), status, media_type=kind)


def place_of(body: bytes, replicas: int) -> int:
    """Key of a request: its prompt alone, whatever else it asks for."""
    try:
        asked = json.loads(body)
        prompt = asked.get("messages", asked.get("prompt"))
    # an invalid request is answered with an error by any replica
    except (ValueError, AttributeError):
        prompt = None
    digest = hashlib.blake2b(json.dumps(prompt).encode(), digest_size=8).digest()
    return int.from_bytes(digest) % replicas


def main(
    model: str, name: str = "model", replicas: int = 2, gpus: float = 0, **options: Any
) -> Any:
    """The application's handle; options: of `csd.AsyncEngine`."""
    # the decorator makes a deployment of a class
    replica: Any = Replica
    router: Any = Router
    bound = [
        replica.options(name=f"replica-{i}", ray_actor_options={"num_gpus": gpus}).bind(
            model, name, options
        )
        for i in range(replicas)
    ]
    return serve.run(router.bind(*bound))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--name", default="model")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0)
    args = parser.parse_args()
    main(args.model, args.name, args.replicas, args.gpus)
    print("serving at http://localhost:8000/v1")
    asyncio.run(asyncio.Event().wait())
