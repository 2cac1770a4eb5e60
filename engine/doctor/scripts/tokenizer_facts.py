"""What a tokenizer makes of texts in this interpreter: one digest a part, so that two sides can be compared.

python tokenizer_facts.py FOLDER [CHAT_TEMPLATE_FILE]
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

TEXTS = (
    "Hello, world!  Two  spaces, a tab\tand a newline\n.",
    "def f(x):\n    return x ** 2  # π ≈ 3.14159",
    "数学：1 + 1 = 2。 Ünïcödé, emoji 🙂, <|im_end|> and [/INST]",
    " leading and trailing ",
)
CHAT = (
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Why?"},
)


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:12]


def facts(folder: str, template: str | None) -> dict[str, Any]:
    sys.modules["torch"] = None  # type: ignore[assignment]  # not needed here, and most of the time of the import
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if template is not None:
        tokenizer.chat_template = Path(template).read_text("utf-8")
    ids = [list(tokenizer.encode(text)) for text in TEXTS]
    found = {
        "transformers": transformers.__version__,
        "class": type(tokenizer).__name__,
        "vocabulary": digest(tokenizer.get_vocab()),
        "size": len(tokenizer),
        "special tokens": digest({k: str(v) for k, v in tokenizer.special_tokens_map.items()}),
        "encoding": digest(ids),
        "decoding": digest([tokenizer.decode(each) for each in ids]),
    }
    if tokenizer.chat_template is None:
        found["chat template"] = "none"
    else:
        found["chat template"] = digest(tokenizer.chat_template)
        try:
            found["rendered chat"] = digest(
                tokenizer.apply_chat_template(list(CHAT), tokenize=False, add_generation_prompt=True)
            )
        except Exception as error:  # a template may refuse a role
            found["rendered chat"] = f"{type(error).__name__}: {error}"[:200]
    return found


if __name__ == "__main__":
    print("\0" + json.dumps(facts(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)))
