"""A router in front of several vLLM servers that sends a prompt to where most of it is cached.

    python router.py PORT SERVER=DAEMON SERVER=DAEMON ...

SERVER is the address of an OpenAI server (http://host:8001), DAEMON that of the prefixcache daemon on its host
(unix:///path or HOST:PORT). It knows no model: it asks the servers for token ids and the daemons for what they hold.
"""

import asyncio
import sys
from typing import Any

from aiohttp import ClientSession, web

from prefixcache_client import AsyncClient

TOKENS_A_REQUEST = 1024  # so much more must be cached on a server for each request that it has more than another


class Node:
    def __init__(self, server: str, daemon: str) -> None:
        self.server, self.daemon = server, AsyncClient(daemon)
        self.namespaces, self.running, self.sent = [], 0, 0

    async def cached(self, tokens: list[int]) -> int:
        """How many leading tokens this server would load instead of computing; 0 where its daemon does not answer."""
        self.namespaces = self.namespaces or await self.daemon.served_namespaces()
        found = [(await self.daemon.lookup(each, tokens)).tokens for each in self.namespaces]
        return max(found, default=0)


async def tokens_of(app: web.Application, body: dict[str, Any]) -> list[int]:
    if isinstance(body.get("prompt"), list):
        return body["prompt"]
    prompt = {name: body[name] for name in ("model", "prompt", "messages") if name in body}
    async with app["http"].post(f"{app['nodes'][0].server}/tokenize", json=prompt) as answer:
        return (await answer.json())["tokens"]


async def route(request: web.Request) -> web.StreamResponse:
    nodes, http, body = request.app["nodes"], request.app["http"], await request.json()
    tokens = await tokens_of(request.app, body)
    cached = dict(zip(nodes, await asyncio.gather(*(node.cached(tokens) for node in nodes)), strict=True))
    node = max(nodes, key=lambda node: (cached[node] - TOKENS_A_REQUEST * node.running, -node.sent))
    node.running, node.sent = node.running + 1, node.sent + 1
    try:
        async with http.post(node.server + request.path, json=body) as answer:
            told = {"Content-Type": answer.headers["Content-Type"], "X-Routed-To": node.server}
            reply = web.StreamResponse(status=answer.status, headers=told)
            await reply.prepare(request)
            async for piece in answer.content.iter_any():
                await reply.write(piece)
            return reply
    finally:
        node.running -= 1


async def application(places: list[str]) -> web.Application:
    app = web.Application()
    app["nodes"], app["http"] = [Node(*place.split("=")) for place in places], ClientSession()
    app.router.add_post("/v1/{path:.*}", route)
    return app


if __name__ == "__main__":
    web.run_app(application(sys.argv[2:]), host="127.0.0.1", port=int(sys.argv[1]))
