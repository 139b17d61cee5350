# headrace: build, serve, test. Needs Python 3.11 or newer, a C++17 compiler, make; the rest comes by pip.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m
ARGS ?=
# Installed before anything that wants torch, so that a release already at hand is not passed over for a newer one.
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := $(shell find src native -type f ! -name '*.pyc') CMakeLists.txt pyproject.toml README.md LICENSE
NATIVE := $(wildcard native/*.cpp native/*.h)

.PHONY: help install serve demo-gateway journey test check format sanitize bench-peers wheel clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@echo 'make install   build headrace and install it into $(VENV), with what its load tests need'
	@echo 'make serve     install, pull MODEL (default: $(MODEL)), serve it on 127.0.0.1:8000'
	@echo '               (more options of headrace serve: ARGS="--port 8001")'
	@echo 'make demo-gateway'
	@echo '               the gateway before four local engines: routing, caching, quotas, a canary, failover, the bill'
	@echo 'make journey   MODEL from a transformers server to all of headrace, each step measured (10 minutes)'
	@echo 'make test      install what the tests need, check the code, run every test'
	@echo 'make check     formatting, lint and types only'
	@echo 'make format    rewrite the sources in the agreed formatting'
	@echo 'make sanitize  the native tests under AddressSanitizer with UBSan, then ThreadSanitizer (gcc)'
	@echo 'make bench-peers'
	@echo '               other engines beside ours on this machine, into bench-peers/ (installs them; quiet machine, please;'
	@echo '               ARGS="--quick" sees whether it runs, ARGS="--help" lists the options)'
	@echo 'make wheel     build one wheel into dist/'
	@echo 'make clean     remove everything that was built, $(VENV) included'

$(STAMPS)/venv:
	@command -v $(PYTHON) >/dev/null || \
	  { echo 'headrace: $(PYTHON) was not found; install Python 3.11 or newer, or name it: make PYTHON=/path/to/python3'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "headrace: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V); name another: make PYTHON=python3.12"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || \
	  { echo 'headrace: a C++ compiler is needed (Debian, Ubuntu: apt install g++; macOS: xcode-select --install)'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

# In the environment itself, not in pip's throw-away one: a second build then compiles only what changed.
$(STAMPS)/build-tools: pyproject.toml | $(STAMPS)/venv
	$(PIP) install -q 'scikit-build-core>=0.10' 'nanobind>=2.4' 'cmake>=3.18' ninja
	@touch $@

$(STAMPS)/install: $(SOURCES) $(STAMPS)/build-tools
	$(PIP) install -q --no-build-isolation .
	@touch $@

$(STAMPS)/dev: pyproject.toml $(STAMPS)/build-tools
	$(PIP) install -q '$(TORCH)'
	$(PIP) install -q --no-build-isolation '.[dev]'
	@touch $(STAMPS)/install $@

install: $(STAMPS)/lab
	@echo 'headrace is installed: $(BIN)/headrace --help'

serve: $(STAMPS)/install
	$(BIN)/headrace models pull $(MODEL)
	exec $(BIN)/headrace serve $(MODEL) $(ARGS)

# What the gateway needs besides: aiohttp and usearch.
$(STAMPS)/gateway: $(STAMPS)/install
	$(PIP) install -q --no-build-isolation '.[gateway]'
	@touch $@

demo-gateway: $(STAMPS)/gateway
	$(BIN)/python examples/demo_gateway.py

journey: $(STAMPS)/dev $(STAMPS)/install
	$(BIN)/python -m benchmarks.journey $(MODEL) $(ARGS)

check: $(STAMPS)/dev $(STAMPS)/install
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

format: $(STAMPS)/dev
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/clang-format -i $(NATIVE)

# supported_isas() names the best path first: the whole suite, at the end, runs with that one, and has the tests that
# go through every path by themselves. A file's tests stay in one process, and files in the order of tests/conftest.py.
# Those that load a server to see why it is slow need the machine for themselves.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder
ALONE := tests/lab/test_diagnose_servers.py
test: check
	$(BIN)/python -m pytest -q tests/test_imports.py
	isas=$$($(BIN)/python -c 'from headrace.backend.cpu._native import supported_isas; print(*supported_isas()[1:])') && \
	for isa in $$isas; do \
	  echo "native tests with HEADRACE_ISA=$$isa"; \
	  HEADRACE_ISA=$$isa $(BIN)/python -m pytest -q $(PARALLEL) -m 'native and not every_isa' tests || exit 1; \
	done
	$(BIN)/python -m pytest $(PARALLEL) --durations=25 --ignore $(ALONE) tests
	$(BIN)/python -m pytest $(ALONE)

# A copy of the package with a sanitized native module, in front of the installed one. Python itself is not
# instrumented: leaks are its own affair, and ThreadSanitizer sees only what the native threads do.
BACKEND_TESTS := $(addprefix tests/backend/test_cpu_,attention.py matmul.py packing.py program.py quantise.py \
  rowwise.py runner.py threads.py weights_file.py) $(wildcard tests/backend/test_sampling*.py)
sanitize: $(STAMPS)/dev
	set -e; for kind in address thread; do \
	  build=build/sanitize-$$kind; all=$$kind; tests='$(BACKEND_TESTS)'; \
	  if [ $$kind = address ]; then all=address,undefined; else tests=tests/backend/test_cpu_threads.py; fi; \
	  $(BIN)/cmake -S . -B $$build -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	    -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DHEADRACE_SANITIZE=$$all >/dev/null; \
	  $(BIN)/cmake --build $$build; \
	  rm -rf $$build/src && mkdir $$build/src && cp -r src/headrace $$build/src && \
	    cp $$build/_native*.so $$build/src/headrace/backend/cpu/; \
	  runtime=$$($${CXX:-c++} -print-file-name=lib$$(echo $$kind | cut -c1)san.so); \
	  LD_PRELOAD="$$runtime $$($${CXX:-c++} -print-file-name=libstdc++.so.6)" PYTHONPATH=$$build/src \
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=exitcode=66 \
	    $(BIN)/python -m pytest -q $$tests; \
	done

# The load generator and its pictures; the other engines of bench-peers get environments of their own.
$(STAMPS)/lab: $(STAMPS)/install
	$(PIP) install -q --no-build-isolation '.[lab]'
	@touch $@

bench-peers: $(STAMPS)/lab
	$(BIN)/python benchmarks/peers $(ARGS)

wheel: $(STAMPS)/build-tools
	$(PIP) wheel -q --no-deps --no-build-isolation -w dist .
	@ls -l dist/*.whl

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
