"""The SGLang engine on a real server: every token's log-prob is that of the weights that its span names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.interfaces import Completion, EngineError, Sampling, WeightsId
from engine.rollout.loading import on_disk
from engine.rollout.sglang.engine import SGLangEngine
from tests.support.sglang import VOCAB, RealServer
from tests.support.sglang_logprobs import TEMPERATURE, TOLERANCE, worst_difference
from tests.support.sglang_versions import Versions

pytest.importorskip("torch")
pytest.importorskip("transformers")

DEADLINE_S = 300
COUNT = 900  # tokens: more than a fast machine makes until it is told of the update


def test_tokens_made_before_and_after_an_update_are_those_of_the_weights_they_name(
    sglang: RealServer, tmp_path: Path
) -> None:
    """Mode retract, with requests that run through the update."""
    model = sglang.models[0]
    versions = Versions(model, tmp_path)
    first, second = versions.publish(1), versions.publish(2)
    weights = {(1, 1): first.tensors, (1, 2): second.tensors}
    prompts = [[5 + n, 17, 3 * n + 9, 40] for n in range(6)]

    async def main() -> list[Completion]:
        engine = SGLangEngine(model, url=sglang.url, folder=tmp_path / "served", locate=on_disk(tmp_path))
        try:
            assert list(engine.tokenizer.encode("t5 t6 t7")) == [5, 6, 7]
            await engine.update(first.event, first.path)
            first_checksum = engine.checksum()
            sampling = Sampling(max_tokens=COUNT, temperature=TEMPERATURE)
            running = [
                asyncio.ensure_future(engine.generate(prompt, sampling, request_id=f"r{n}"))
                for n, prompt in enumerate(prompts)
            ]
            # What is sent after them is answered once they have some tokens; a fixed time would be the machine's.
            await engine.generate(prompts[0], Sampling(max_tokens=4), request_id="after")
            assert not any(task.done() for task in running)
            stall_s = await engine.update(second.event, second.path)
            assert 0 < stall_s < 60
            assert engine.held == WeightsId(1, 2, second.event.digest)
            assert engine.checksum() != first_checksum
            done = list(await asyncio.gather(*running))
            await engine.update(first.event, first.path)  # back again: equal weights, equal checksum
            assert engine.checksum() == first_checksum
            return done
        finally:
            await engine.close()

    completions = asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    both = [done for done in completions if [version for _, version, _ in done.versions] == [1, 2]]
    assert both, "no request ran through the update"
    for prompt, done in zip(prompts, completions, strict=True):
        assert len(done.ids) == COUNT and done.finish_reason == "length"
        assert worst_difference(model, weights, prompt, done) < TOLERANCE
    swapped = {(1, 1): second.tensors, (1, 2): first.tensors}
    assert worst_difference(model, swapped, prompts[0], completions[0]) > 0.1, "the check can tell them apart"


def test_a_folder_that_the_server_cannot_load_leaves_the_old_version_serving(
    sglang: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sglang.models[0]
    versions = Versions(model, tmp_path)
    first, second = versions.publish(1), versions.publish(2)

    async def main() -> None:
        engine = SGLangEngine(model, url=sglang.url, folder=tmp_path / "served", locate=on_disk(tmp_path))
        try:
            await engine.update(first.event, first.path)
            prepare = engine._updates._prepare

            def without_weights(*given: Any) -> Any:
                target = prepare(*given)
                (target.folder / "model.safetensors").unlink()
                return target

            monkeypatch.setattr(engine._updates, "_prepare", without_weights)
            with pytest.raises(EngineError, match="update_weights_from_disk"):
                await engine.update(second.event, second.path)
            assert engine.held == WeightsId(1, 1, first.event.digest)
            done = await engine.generate([5, 6, 7], Sampling(max_tokens=4), request_id="r")
            assert done.versions == [(1, 1, 4)] and done.ids.max() < VOCAB
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
