"""Stream records from an HTTP server straight to the device, in an event loop that is never held.

The server runs on localhost, in a thread of this script: lines of JSON, one reading of eight sensors each.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import httpx
import torch

from prefetchpipe import GPUPrefetcher

RECORDS = 4096
BATCH = 64


class Readings(BaseHTTPRequestHandler):
    """Sends all records and closes the connection."""

    def do_GET(self) -> None:
        """See :mod:`http.server`."""
        self.send_response(200)
        self.end_headers()
        for number in range(RECORDS):
            values = [float(number % 7 + sensor) for sensor in range(8)]
            self.wfile.write(json.dumps({"id": number, "values": values}).encode() + b"\n")

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""


async def batches(url: str) -> AsyncIterator[dict[str, Any]]:
    """Runs in the event loop, so the connection stays there; packing and copying do not."""
    records = []
    async with httpx.AsyncClient() as client, client.stream("GET", url) as response:
        async for line in response.aiter_lines():
            records.append(json.loads(line))
            if len(records) == BATCH:
                values = torch.tensor([record["values"] for record in records])
                yield {"values": values, "ids": [record["id"] for record in records]}
                records = []


async def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Readings)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/readings"

    seen, total = 0, torch.zeros(8, device=device)
    with anyio.fail_after(60):
        async with GPUPrefetcher(batches(url), device) as prefetcher:
            async for batch in prefetcher:
                total += batch["values"].sum(0)
                seen += len(batch["ids"])
    server.shutdown()
    server.server_close()

    print(f"device   {device}")
    print(f"records  {seen}")
    print(f"means    {[round(value, 2) for value in (total / seen).tolist()]}")
    print(f"stats    {prefetcher.stats()}")


if __name__ == "__main__":
    anyio.run(main)
