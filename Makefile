# Everything that a checkout needs goes into its own virtual environment; Python >= 3.11 and make are enough.
#
#   make demo        make a tiny checkpoint and generate text from it
#   make test        the tests that need nothing more (minutes)
#   make test-full   all tests: transformers and the formats' tools as oracles, AMD code generation, the slow ones
#   make lint types  ruff, mypy
#   make clean       remove what these made
#
# PYTHON=python3.12 chooses the interpreter, VENV=DIR where the environment goes, WORKERS=N how many tests run at once,
# ARGS="..." what else pytest is told (ARGS="tests/checkpoint -x").

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13 python; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
VENV ?= .venv
WORKERS ?= 2
ARGS ?=
TOOLS ?= ../shared/tools/rocm_codegen
BIN := $(VENV)/bin
ROCM := $(VENV)/rocm
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The tested versions for this Python, where there are any.
CONSTRAINTS = $(shell f=.ci/constraints-$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt; \
	if [ -f $$f ]; then echo "--constraint $$f"; fi)
REQUIREMENTS := pyproject.toml $(wildcard .ci/constraints-*.txt)
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
DEMO := tiny
DEMO_PROMPT := Natalia sold clips to 48 of her friends

.PHONY: help demo test test-full smoke lint types rocm-env clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.installed $(DEMO)/config.json
	$(BIN)/minimax-jax generate --model $(DEMO) --max-tokens 32 "$(DEMO_PROMPT)"

$(DEMO)/config.json: | $(VENV)/.installed
	$(BIN)/minimax-jax make-tiny $(DEMO)

test: $(VENV)/.installed-test
	$(PYTEST) -m "not gpu and not slow and not oracle and not rocm" $(ARGS)

test-full: $(VENV)/.installed-oracle rocm-env
	MINIMAX_ROCM=$(abspath $(ROCM)) $(PYTEST) -m "not gpu" $(ARGS)

# The files that together walk the whole path: for a second Python, or after a change of versions.
SMOKE := $(addprefix tests/,checkpoint/test_load.py generation kernels/test_implementations.py kernels/test_quant.py \
	kernels/test_pallas_moe.py modules/test_m3_modules.py text test_cli.py test_checkpoints.py test_generate.py test_llm.py \
	test_m3.py)
smoke: $(VENV)/.installed-test
	$(PYTEST) -m "not gpu and not slow and not oracle and not rocm" $(SMOKE) $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

# The AMD compiler inside JAX's ROCm plugin, unpacked beside the environment (not installed: JAX would look for a GPU
# with it at each start), and stand-ins for the ROCm libraries, so that it loads without ROCm. See docs/rocm.md.
rocm-env: $(ROCM)/.made

$(ROCM)/.made: $(VENV)/.installed
	@if [ ! -f $(TOOLS)/make_rocm_stubs.py ]; then echo "no $(TOOLS)/make_rocm_stubs.py; set TOOLS=DIR"; \
	  if [ "$${MINIMAX_REQUIRE_SHARED:-}" = 1 ]; then exit 1; fi; exit 0; fi; \
	  echo "unpacking the AMD compiler into $(ROCM)"; \
	  rm -rf $(ROCM); \
	  version=$$($(BIN)/python -c 'import jax; print(jax.__version__)'); \
	  $(PIP_INSTALL) --no-deps --target $(ROCM)/plugin jax-rocm7-pjrt==$$version; \
	  $(BIN)/python $(TOOLS)/make_rocm_stubs.py $(ROCM)/plugin/jax_plugins/xla_rocm7/xla_rocm_plugin.so --out $(ROCM)/stubs >/dev/null; \
	  touch $@

# One stamp for each set of packages; a change of pyproject.toml or of the tested versions installs again.
$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then echo "no Python >= 3.11 found; set PYTHON=/path/to/python3.11"; exit 1; fi
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(REQUIREMENTS) | $(BIN)/python
	$(PIP_INSTALL) $(CONSTRAINTS) --editable .
	@touch $@

$(VENV)/.installed-test: $(REQUIREMENTS) | $(BIN)/python
	$(PIP_INSTALL) $(CONSTRAINTS) --editable '.[test]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-oracle: $(REQUIREMENTS) | $(BIN)/python
	$(PIP_INSTALL) $(CONSTRAINTS) --editable '.[test,oracle]'
	@touch $(VENV)/.installed $(VENV)/.installed-test $@

clean:
	rm -rf $(VENV) $(DEMO) build *.egg-info .pytest_cache .ruff_cache .mypy_cache
