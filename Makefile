# The targets that a person needs. Each makes its own environment first: Python >= 3.10 and make are enough.
#
#   make demo                        learn a small task end to end (DEMO_ARGS="--task reverse --seed 1" …)
#   make test                        the tests, without those marked slow (TEST_ARGS="-k codec", TEST_WORKERS=8 …)
#   make sglang                      an environment with a real SGLang for a CPU, in .venv-sglang (some 3 GB)
#   make soak                        kills of every daemon and of the broker, audited (SOAK_ARGS="--kills 200" …)
#
# Packages come from wherever pip is set up to look (PIP_INDEX_URL and the like are handed on to uv).

PYTHON ?= python3
VENV ?= .venv
DEMO_ARGS ?=
TEST_ARGS ?=
TEST_WORKERS ?= 2
SOAK_ARGS ?=
BENCH ?= $(sort $(wildcard benchmarks/*.py))

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup sglang demo test test-slow check format docs bench soak clean
.DEFAULT_GOAL := help

help:
	@echo "make setup | sglang | demo | test | test-slow | check | format | docs | bench | soak | clean"

setup: $(STAMP)

# uv installs several times faster; where it cannot be had, or cannot reach what pip reaches, pip does the work.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v < (3, 14) else "Python 3.10 to 3.13 is needed, $(PYTHON) is %d.%d; try make PYTHON=python3.12" % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(BIN)/python -m pip install --quiet uv || true
	if test -x $(BIN)/uv && \
	    env $${PIP_INDEX_URL:+UV_DEFAULT_INDEX="$$PIP_INDEX_URL"} $${PIP_EXTRA_INDEX_URL:+UV_INDEX="$$PIP_EXTRA_INDEX_URL"} \
	    $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python -e '.[train,lora,megatron,kafka,kafka-fast,export,ray,sglang,dev]'; \
	then :; else $(BIN)/python -m pip install -e '.[train,lora,megatron,kafka,kafka-fast,export,ray,sglang,dev]'; fi
	touch $@

# Apart from ours, since SGLang pins its own torch and transformers. Tests that need it find it there.
sglang: $(STAMP)
	$(BIN)/python -m engine.rollout.sglang.environment .venv-sglang

demo: $(STAMP)
	$(BIN)/millstream demo $(DEMO_ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -n $(TEST_WORKERS) --dist loadfile $(TEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(TEST_ARGS) || test $$? -eq 5  # 5: there are none

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)
	$(BIN)/python -m engine.configdocs docs/configuration.md
	$(BIN)/python -m streams.catalogue docs/events.md

bench: $(STAMP)
	set -e; for script in $(BENCH); do echo "== $$script"; $(BIN)/python $$script; done

# Every daemon and the broker killed and stopped after every hand-over, on both logs; the summary is left in soak.json.
soak: $(STAMP)
	$(BIN)/python -m tests.faults.soak $(SOAK_ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
