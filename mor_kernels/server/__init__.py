"""A server of completions that clients of OpenAI's API can talk to: ``/v1/completions``, over one :class:`.Engine`."""

try:
    import fastapi  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ImportError(f"server: expected FastAPI and uvicorn (pip install mor-kernels[server]): {error}") from error

from .app import create_app
from .process import bind, serve

__all__ = ["bind", "create_app", "serve"]
