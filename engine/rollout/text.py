"""Text to token ids and back, with what comes again and again remembered.

All members of a group share a prompt and an environment repeats a handful of replies, while a Hugging Face
tokenizer takes some 50 µs a call: more than the rest of a short turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

CACHED_TEXTS = 4096
CACHED_CHARS = 4096  # longer texts are not kept


class TokenText:
    """A tokenizer's three uses: prompts (template or special tokens), replies (bare), and text of ids.

    >>> text = TokenText(ByteTokenizer())
    >>> text.prompt_ids("ab"), text.reply_ids("c"), text.text([97, 98])
    ([97, 98], [99], 'ab')
    """

    def __init__(self, tokenizer: Any, *, apply_chat_template: bool = False) -> None:
        self.tokenizer, self.apply_chat_template = tokenizer, apply_chat_template
        self._prompt = lru_cache(CACHED_TEXTS)(self._encode_prompt)
        self._reply = lru_cache(CACHED_TEXTS)(self._encode_reply)
        self._word = lru_cache(65_536)(self._decode_one)

    def prompt_ids(self, prompt: Any) -> list[int]:
        """Ids of a text, or of chat messages rendered with the tokenizer's template. A fresh list."""
        if not isinstance(prompt, str):
            return self._render(prompt)
        if self.apply_chat_template:
            return self._render([{"role": "user", "content": prompt}])
        return list(self._prompt(prompt) if len(prompt) <= CACHED_CHARS else self._encode_prompt(prompt))

    def reply_ids(self, text: str) -> list[int]:
        """Ids of a text inside a sequence: no special tokens are added. A fresh list."""
        return list(self._reply(text) if len(text) <= CACHED_CHARS else self._encode_reply(text))

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens kept: a reward function sees whatever the policy said."""
        return self._word(int(ids[0])) if len(ids) == 1 else self._decode(ids)

    def _encode_prompt(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text))

    def _encode_reply(self, text: str) -> tuple[int, ...]:
        if hasattr(self.tokenizer, "all_special_ids"):  # a Hugging Face one
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return tuple(self.tokenizer.encode(text))

    def _decode_one(self, token_id: int) -> str:
        return self._decode([token_id])

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids))

    def _render(self, messages: Any) -> list[int]:
        rendered = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        # the template has written the special tokens already
        return list(self.tokenizer.encode(rendered, add_special_tokens=False))


class ByteTokenizer:
    """One UTF-8 byte, one token; 256 ends a sequence. For engines that have no model."""

    eos_token_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(each for each in ids if each < 256).decode(errors="replace")


class WordTokenizer:
    """One word, one token, as the demo tasks' vocabularies are; unknown words get the id of `<unk>`, else 0."""

    def __init__(self, words: Sequence[str], eos: str = "<eos>") -> None:
        self.words = list(words)
        self._ids = {word: token_id for token_id, word in enumerate(self.words)}
        self._unknown = self._ids.get("<unk>", 0)
        self.eos_token_id = self._ids.get(eos)

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(word, self._unknown) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[each] for each in ids)


def stop_ids(tokenizer: Any, model_path: str | Path = "") -> tuple[int, ...]:
    """What ends a response: the tokenizer's end of sequence and those of the model's generation_config.json."""
    found: list[int] = []
    eos = getattr(tokenizer, "eos_token_id", None)
    if eos is not None:
        found.append(int(eos))
    file = Path(model_path) / "generation_config.json"
    if model_path and file.is_file():
        listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        found += [listed] if isinstance(listed, int) else list(listed or [])
    return tuple(dict.fromkeys(found))
