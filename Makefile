# `make demo` and `make test` do all their own set-up on a machine with Python 3.11 or later and a package registry.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo docs docs-serve install test soak mutants bench gpu gpu-full clean

install: .venv/ready

demo: .venv/ready
	$(BIN)/python examples/demo.py

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

# The documentation as a site, in site/.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# Longer trials: ten kills of five methods, memory, and the tests that take long.
soak: .venv/ready
	$(BIN)/pytest soak -s
	$(BIN)/pytest -m long
	$(MAKE) mutants

# A random sample of mutants, and the share that the tests notice; it goes on where it stopped. AGAIN=1 tries survivors again.
mutants: .venv/ready
	$(BIN)/pip install --disable-pip-version-check -q -e '.[mutation]'
	nice $(BIN)/python -m soak.mutation --count $(or $(COUNT),200) --seed $(or $(SEED),0) $(if $(AGAIN),--again)

bench: .venv/ready
	$(BIN)/python -m benchmarks.cpu

# What must hold on a GPU, eight minutes of it, and eight minutes more. Both run where nothing can be installed, so they
# need no .venv. ONLY=b runs one group; LOG=file gets the tracebacks of failures.
gpu:
	PYTHONPATH=src $(PYTHON) -m gpu $(if $(ONLY),--only $(ONLY)) $(if $(LOG),--log $(LOG))

gpu-full:
	PYTHONPATH=src $(PYTHON) -m gpu --full $(if $(ONLY),--only $(ONLY)) $(if $(LOG),--log $(LOG))

# The pins are what we test with; the package itself asks for less (pyproject.toml).
.venv/ready: pyproject.toml requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "undrift needs Python 3.11 or later; set PYTHON=…")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check -q -r requirements.txt
	$(BIN)/pip install --disable-pip-version-check -q --no-deps -e .
	touch $@

clean:
	rm -rf .venv site .mypy_cache .pytest_cache .ruff_cache .hypothesis
