# Everything here makes its own virtual environment in .venv, from the versions in constraints.txt.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup test test-all sanitize lint format finetune bench docs dist clean
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := $(VENV)/.peers
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -q --no-compile -c constraints.txt
CPP := $(shell find csrc -type f)
CPP_BESIDE := $(shell find tests benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.cu')
ARGS ?=
RESULTS ?= benchmarks/results

# Here the CUDA kernels are for one processor, that of the GPU at hand, or of none in particular.
# `make dist` and `pip install` build them for all.
GPU := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .)

# Waiting threads sleep: spinning ones make two cores slower than one where the machine is shared.
export OMP_WAIT_POLICY := passive
# Compiling only what is imported saves a minute of the set-up, if Python may keep the result.
unexport PYTHONDONTWRITEBYTECODE

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## Make .venv with torch, every extra and the compiled kernels

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(CPP)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "make: $(PYTHON) is older than Python 3.10 or missing: run make PYTHON=/path/to/python3.11" >&2; \
	  exit 1; }
	@if [ ! -x $(BIN)/pip ]; then \
	  echo "[1/3] creating $(VENV)"; \
	  $(PYTHON) -m venv $(VENV) || { \
	    echo "make: $(PYTHON) -m venv failed: install its venv module (Debian: apt-get install python3-venv)" >&2; \
	    rm -rf $(VENV); exit 1; }; \
	fi
	@echo "[2/3] torch: some hundred megabytes the first time"
	@$(PIP_INSTALL) torch
	@if command -v "$${CXX:-c++}" >/dev/null; then \
	  export NF4TENSOR_REQUIRE_COMPILED=1; \
	else \
	  echo "make: no C++ compiler: nf4tensor will run on plain PyTorch, slower." \
	    "For the compiled kernels install one (Debian: apt-get install g++) and run make clean setup"; \
	fi; \
	echo "[3/3] nf4tensor and what its tests and examples use: about a minute the first time"; \
	CUDAARCHS=$${CUDAARCHS:-$(or $(GPU),90)-real} $(PIP_INSTALL) -e '.[dev,hf,plot]'
	@touch $@

test: lint ## Lint, then the fast tests (ARGS: more arguments for pytest)
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: lint ## Lint, then every test
	$(BIN)/python -m pytest $(ARGS)

sanitize: $(STAMP) ## Run the compiled kernels under address and undefined-behaviour sanitizers
	$(BIN)/python -m tests.kernels.native_grid -g -O1 -fsanitize=address,undefined \
	  -fno-sanitize-recover=all

lint: $(STAMP) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP) $(CPP_BESIDE)
	$(BIN)/mypy

format: $(STAMP) ## Rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP) $(CPP_BESIDE)

finetune: $(STAMP) ## Run the example on a small model (ARGS: its arguments)
	$(BIN)/python examples/finetune.py $(ARGS)

bench: $(PEERS) ## Measure the kernels here, beside those of others (ARGS: for each script)
	for script in dequantize quantize linear; do \
	  $(BIN)/python benchmarks/bench_$$script.py --results $(RESULTS) $(ARGS); done
	$(BIN)/python benchmarks/roofline.py --results $(RESULTS)
	$(BIN)/python benchmarks/bench_step.py --results $(RESULTS) $(ARGS)
	$(BIN)/python benchmarks/bench_sharding.py --results $(RESULTS) $(ARGS)
	$(BIN)/python benchmarks/bench_compile.py --results $(RESULTS) $(ARGS)

# The extra `bench` by name: pip would build nf4tensor again. Without a network the benchmarks run
# too, and say who is missing.
$(PEERS): $(STAMP)
	@echo "installing bitsandbytes and torchao to compare with: 50 MB the first time"
	@if $(PIP_INSTALL) bitsandbytes torchao matplotlib; then touch $@; \
	  else echo "make: pip could not install them (see above): measuring without" >&2; fi

docs: $(STAMP) ## Build the documentation into build/docs, with an error for each warning
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

dist: $(STAMP) ## Build the source archive and a wheel into dist/
	NF4TENSOR_REQUIRE_COMPILED=1 $(BIN)/python -m build

clean: ## Remove everything that was built or installed here
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find nf4tensor tests -name __pycache__ -type d -prune -exec rm -rf {} +
