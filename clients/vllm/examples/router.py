"""A router in front of several vLLM servers that sends a prompt to where most of it is cached.

    python router.py PORT SERVER=DAEMON SERVER=DAEMON ...

SERVER is the address of an OpenAI server (http://host:8001), DAEMON that of the prefixcache daemon on its host
(unix:///path or HOST:PORT). It knows no model: it asks the servers for token ids and the daemons for what they hold.
"""

import sys
from collections import Counter
from typing import Any

from aiohttp import request as ask
from aiohttp import web

from prefixcache_client import Nodes

TOKENS_A_REQUEST = 1024  # so much more must be cached on a server for each request that it has more than another


class Router:
    def __init__(self, places: list[str]) -> None:
        self.nodes, self.running, self.sent = Nodes(dict(place.split("=") for place in places)), Counter(), Counter()

    async def choose(self, body: dict[str, Any]) -> str:
        tokens = body.get("prompt")
        if not isinstance(tokens, list):
            text = {name: body[name] for name in ("model", "prompt", "messages") if name in body}
            async with ask("POST", f"{self.nodes.names[0]}/tokenize", json=text) as answer:
                tokens = (await answer.json()).get("tokens", [])
        found = await self.nodes.lookup(tokens)
        return max(found, key=lambda at: (found[at].tokens - TOKENS_A_REQUEST * self.running[at], -self.sent[at]))

    async def route(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        server = await self.choose(body)
        self.running[server], self.sent[server] = self.running[server] + 1, self.sent[server] + 1
        try:
            async with ask("POST", server + request.path, json=body) as answer:
                told = {"Content-Type": answer.content_type, "X-Routed-To": server}
                reply = web.StreamResponse(status=answer.status, headers=told)
                await reply.prepare(request)
                async for piece in answer.content.iter_any():
                    await reply.write(piece)
                return reply
        finally:
            self.running[server] -= 1


if __name__ == "__main__":
    app = web.Application()
    app.router.add_post("/v1/{path:.*}", Router(sys.argv[2:]).route)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]))
