"""HTTP as this project uses it with SGLang: one bounded call, and errors that say whether it was sent.

Every call has a connection of its own. A kept one may be closed by the server at the moment a request goes out, and
then nobody knows whether it ran; a new one costs a fraction of a millisecond beside a generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engine.rollout.sglang.api import words_of
from engine.rollout.sglang.errors import Refused, TimedOut, Unreachable
from streams.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

_JSON = {"Content-Type": "application/json"}


def library() -> Any:
    """aiohttp. Raises ConfigError where it is missing."""
    try:
        import aiohttp
    except ImportError:
        raise ConfigError(
            "rollout.backend = 'sglang' needs aiohttp, which is not installed: pip install 'millstream[sglang]'"
        ) from None
    return aiohttp


class Wire:
    """Calls to one server. Made anywhere, used on one event loop; `close()` when it is no longer needed."""

    def __init__(self, url: str, *, key: str | None, admin_key: str | None, connect_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ConfigError(
                f"rollout.sglang.url: needed http://HOST:PORT or https://…, without a user, got {_shown(url)!r}"
            )
        self.url = url.rstrip("/")
        self._keys = {False: key or admin_key, True: admin_key or key}  # by whether it is a control call
        self._connect_s = connect_s
        self._aiohttp = library()
        self._session: aiohttp.ClientSession | None = None

    def to(self, url: str) -> Wire:
        """Another server that takes the same keys."""
        return Wire(url, key=self._keys[False], admin_key=self._keys[True], connect_s=self._connect_s)

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        seconds: float | None,
        is_control: bool = False,
    ) -> bytes:
        """The body of a 200. `seconds`: for all of it; None when the caller has a deadline of its own.

        Raises Unreachable, Refused, TimedOut.
        """
        chunks = [
            chunk async for chunk in self.stream(method, path, body, seconds=seconds, is_control=is_control)
        ]
        return b"".join(chunks)

    async def stream(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        seconds: float | None,
        is_control: bool = False,
    ) -> AsyncGenerator[bytes, None]:
        """The body of a 200 as it comes, in pieces of any size. Raises as `ask`."""
        library = self._aiohttp
        what = f"{method} {self.url}{path}"
        key = self._keys[is_control]
        headers = (_JSON if body is not None else {}) | ({"Authorization": f"Bearer {key}"} if key else {})
        timeout = library.ClientTimeout(total=seconds, sock_connect=self._connect_s)
        try:
            async with self._opened().request(
                method, self.url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise Refused(
                        f"{method} {path} of {self.url}", response.status, words_of(await response.read())
                    )
                async for chunk in response.content.iter_any():
                    yield chunk
        except (library.ClientConnectorError, library.ConnectionTimeoutError) as error:
            why = getattr(error, "os_error", None) or error
            raise Unreachable(f"{what}: nothing answers there ({why})", was_sent=False) from error
        except asyncio.TimeoutError:
            raise TimedOut(f"{what}: no whole answer within {seconds:g} s") from None
        except (library.ClientError, OSError) as error:
            detail = f"{what}: the connection broke ({type(error).__name__}: {error})"
            raise Unreachable(detail, was_sent=True) from error

    def _opened(self) -> aiohttp.ClientSession:
        session = self._session
        if session is None:
            library = self._aiohttp
            connector = library.TCPConnector(force_close=True, limit=0)  # the caller bounds how many
            session = self._session = library.ClientSession(connector=connector, trust_env=False)
        return session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _shown(url: str) -> str:
    """Without what may be a password."""
    return url if "@" not in url else "…@" + url.rpartition("@")[2]
