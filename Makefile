# Two commands on a fresh machine with Python 3.11+ and make:  make demo   and   make test.
# Each sets up what it needs first, and is quick when nothing has changed.
#
#   make setup    every environment            make demo     train through three frameworks, three processes
#   make check    format, lint, types, layers, fast tests    (under 90 s)
#   make test     every test                                 (some 13 min on 2 cores)
#   make fuzz     ten minutes of wrong bytes at every door
#   make soak     half an hour of calls while workers are killed
#   make soak-page   ten million calls through one page: none lost, torn or late (some minutes)
#   make bench    what the boundary costs on this machine (minutes; let it idle)
#   make bench-peers    the same work through other systems, each in an environment of its own (GB, the first time)
#   make format   rewrite the sources as `make check` wants them
#   make clean    remove everything that these targets made
#
# `make setup PYTHON=python3.12` uses another interpreter; `make setup PIP_FLAGS=` shows all that uv and pip say.

PYTHON    ?= python3
PIP_FLAGS ?= -q -q
# Python compiles what is imported when it is imported; compiling whole frameworks beforehand is half of pip's time.
INSTALL := .envs/uv/bin/python environments/install.py
unexport PYTHONDONTWRITEBYTECODE # once, then: where it is set, each process would compile three frameworks anew
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += --jobs=3 # three environments at a time: some download while others unpack
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# pytest runs this many processes; each test file runs whole in one of them, the longest first (tests/conftest.py).
# Three on two cores: tests wait a seventh of their time, for deaths, deadlines and programs.
PROCESSES ?= 3
PYTEST := .venv/bin/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo test check lint fuzz soak soak-page bench bench-peers format clean .venv .envs/torch .envs/tensorflow .envs/jax .envs/demo \
        .envs/sentences .envs/jax-oldest .envs/jax-newest

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# ---- Environments --------------------------------------------------------------------------------------------------
# An environment is done when its stamp is there, and the stamp is written last: a half-built one is started afresh.
# `requirements` follows environments/NAME.txt (a change rebuilds from nothing, so that nothing is left over);
# `project` follows pyproject.toml (gradwire is installed editable: its sources need no reinstall).

setup: .venv .envs/torch .envs/tensorflow .envs/jax .envs/demo .envs/sentences .envs/jax-oldest .envs/jax-newest .envs/.stamp-compiled

.venv:            .venv/.stamp-project
.envs/demo:       .envs/demo/.stamp-project
.envs/torch:      .envs/torch/.stamp-requirements
.envs/tensorflow: .envs/tensorflow/.stamp-requirements
.envs/jax:        .envs/jax/.stamp-requirements
.envs/sentences:  .envs/sentences/.stamp-requirements

.venv/.stamp-requirements: environments/dev.txt | .envs/uv/.stamp
	$(call build_environment,.venv,$<)

.envs/%/.stamp-requirements: environments/%.txt | .envs/uv/.stamp
	$(call build_environment,.envs/$*,$<)

# What fills the others: uv, and a pip for where uv cannot (environments/install.py).
.envs/uv/.stamp: environments/uv.txt
	$(check_python)
	@rm -rf .envs/uv
	@$(PYTHON) -m venv .envs/uv
	@.envs/uv/bin/python -m pip install $(PIP_FLAGS) --disable-pip-version-check --requirement $< \
	  || echo "make: there is no uv; pip, which takes longer, builds the environments" >&2
	@touch $@

# The oldest and the newest JAX, each with a Python of those it runs on. Where none is found, their tests are skipped.
.envs/jax-oldest: PYTHONS := 3.11 3.12
.envs/jax-newest: PYTHONS := 3.13 3.12
.envs/jax-oldest .envs/jax-newest: .venv
	@python=$$(.venv/bin/python environments/find_python.py $(PYTHONS)) || exit 0; \
	$(MAKE) --no-print-directory $@/.stamp-project PYTHON="$$python"

%/.stamp-project: %/.stamp-requirements pyproject.toml
	@echo "make: installing gradwire into $* (editable)"
	@$(INSTALL) $* $(PIP_FLAGS) --no-deps --editable .
	@touch $@

# Compiles what all of pytest's processes import when they begin, while other environments are still being installed,
.venv/.stamp-imported: .venv/.stamp-project
	@TF_CPP_MIN_LOG_LEVEL=3 .venv/bin/python -c "import equinox, flax, jax, keras, optax, tensorflow, torch" 2>.venv/imported.log \
	  || { cat .venv/imported.log >&2; exit 1; }
	@touch $@

# and then for the workers.
SHARING := .envs/torch .envs/tensorflow .envs/jax .envs/demo .envs/sentences
.envs/.stamp-compiled: .venv/.stamp-imported $(SHARING:=/.stamp-requirements) | .envs/jax-oldest
	@.venv/bin/python environments/share_bytecode.py .venv $(SHARING) .envs/jax-oldest
	@touch $@

.PRECIOUS: .envs/%/.stamp-requirements

define check_python
@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || { \
  echo "make: needs Python 3.11, 3.12 or 3.13 (TensorFlow, as pinned, has no build for others)," \
       "and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)." \
       "Name another interpreter: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
endef

# $(call build_environment,FOLDER,REQUIREMENTS)
define build_environment
$(check_python)
@echo "make: building $(1) from $(2) (minutes, once)"
@rm -rf $(1)
@$(PYTHON) -m venv --without-pip $(1)
@$(INSTALL) $(1) $(PIP_FLAGS) --requirement $(2)
@touch $@
endef

# ---- What one does with them ---------------------------------------------------------------------------------------

demo: .envs/demo .envs/torch .envs/tensorflow
	@.envs/demo/bin/python examples/digits/train.py

test: setup
	$(PYTEST) tests

check: lint
	$(PYTEST) -m "not slow" tests/wire tests/unit

# vermin: what a worker runs must run on Python 3.9, which ruff and mypy hold it to in syntax only.
lint: .venv
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/vermin --quiet --no-tips --target=3.9- wire workers client/gradwire/benchmark/measure.py client/gradwire/benchmark/far_end

fuzz: .venv
	GRADWIRE_FUZZ_S=600 .venv/bin/python -m pytest -s tests/fuzz

soak-page: .venv
	GRADWIRE_PAGE_CALLS=10000000 .venv/bin/python -m pytest -q --timeout=0 tests/wire/test_page.py -k many_calls

soak: .venv
	.venv/bin/python tests/integration/soak.py
	GRADWIRE_SOAK_S=50 .venv/bin/python -m pytest tests/integration/test_field_reports_processes.py -k 20_000

# One question a module, each writes build/NAME.json; all of them run, and make fails where one has missed a limit.
BENCHMARKS := roundtrip start checks training endings idle flat $(notdir $(basename $(wildcard benchmarks/limits.py)))

bench: setup
	@mkdir -p build; missed=; for name in $(BENCHMARKS); do \
	  echo "== $$name"; .venv/bin/python benchmarks/$$name.py --json build/$$name.json || missed="$$missed $$name"; \
	done; [ -z "$$missed" ] || { echo "make: missed:$$missed" >&2; exit 1; }

bench-peers: setup
	@mkdir -p build
	.venv/bin/python benchmarks/peers/run.py --json build/peers.json

format: .venv
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

clean:
	rm -rf .venv .envs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
