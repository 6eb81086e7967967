"""The process that serves an application: its address, its signals, its end."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import signal
import socket
import sys

import uvicorn
from fastapi import FastAPI

GRACE = 20.0  # seconds that running requests have to finish in when the server is told to stop


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, app: FastAPI):
        super().__init__(config)
        self.app = app

    async def shutdown(self, sockets=None) -> None:
        """Wait for what runs, but for GRACE seconds."""
        late = asyncio.get_running_loop().call_later(GRACE, self.app.state.worker.stop)
        await super().shutdown(sockets)
        late.cancel()


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, whose port may be 0 for any. OSError if that can't be had, ValueError for no port."""
    if not 0 <= port < 2**16:  # getaddrinfo takes the rest
        raise ValueError(f"--port: expected 0 to 65535, got {port}")
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if bound:
            bound.close()
        expected = "expected a free address of this machine"
        raise OSError(f"--host, --port: {expected}, got {host}:{port}: {error}") from None
    return bound


def serve(app: FastAPI, bound: socket.socket, *, model_name: str, api_key: bool) -> None:
    """Serve an application of :func:`create_app` at a bound socket until SIGTERM or SIGINT, and say where."""
    host, port = bound.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    where = f"http://{f'[{host}]' if address.version == 6 else host}:{port}/v1"
    if not address.is_loopback and not api_key:
        print(f"warning: {where} can be reached from other machines, and asks for no key (--api-key, MOR_API_KEY)",
              file=sys.stderr)  # fmt: skip
    config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=math.ceil(GRACE) + 5)
    process = _Server(config, app)
    # uvicorn catches the signal while it runs, and sends it once more when it is through
    signal.signal(signal.SIGTERM, lambda *_: setattr(process, "should_exit", True))
    bound.listen(config.backlog)
    print(f"serving {model_name} at {where}", flush=True)
    try:
        process.run(sockets=[bound])
    finally:
        if (worker := app.state.worker) is not None:  # a second Ctrl-C leaves it as it is
            worker.stop()
            worker.thread.join(timeout=GRACE)
