"""An SGLang engine on the double, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engine.interfaces import Sampling
from engine.rollout.loading import on_disk
from engine.rollout.sglang.engine import SGLangEngine
from tests.support.sglang_double import Double

PROMPT = [5, 6, 7]
SHORT, LONG = Sampling(max_tokens=8), Sampling(max_tokens=300)
DEADLINE_S = 20


@asynccontextmanager
async def engine_of(double: Double, folder: Path, **options: Any) -> AsyncIterator[SGLangEngine]:
    assert double.model is not None
    engine = SGLangEngine(
        double.model, url=double.url, folder=folder / "served", locate=on_disk(folder), **options
    )
    try:
        yield engine
    finally:
        await engine.close()


def run(
    double: Double, folder: Path, scene: Callable[[SGLangEngine], Awaitable[None]], **options: Any
) -> None:
    async def main() -> None:
        async with engine_of(double, folder, **options) as engine:
            await asyncio.wait_for(scene(engine), DEADLINE_S)

    asyncio.run(main())


def generate(
    engine: SGLangEngine, sampling: Sampling = SHORT, *, request_id: str = "r", prompt: list[int] = PROMPT
) -> asyncio.Task[Any]:
    return asyncio.ensure_future(engine.generate(prompt, sampling, request_id=request_id))


async def some_tokens(double: Double, count: int = 5) -> None:
    async def wait() -> None:
        while not any(len(each.ids) >= count for each in list(double.live.values())):
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), DEADLINE_S)


CONTROL = ("/pause_generation", "/update_weights_from_disk", "/weights_checker", "/continue_generation")


def control(double: Double) -> list[str]:
    return [path.strip("/").partition("_")[0] for path, _ in double.requests if path in CONTROL]
