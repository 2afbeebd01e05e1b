# `make demo` and `make test` do all their own set-up on a machine with Python 3.11 or later and a package registry.
PYTHON ?= python3
BIN := .venv/bin
CHECK_PYTHON = @$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "undrift needs Python 3.11 or later; set PYTHON=…")'

.PHONY: demo docs docs-serve install test flower soak mutants bench compat gpu gpu-full sbom audit wheel-check clean

install: .venv/ready

# In an environment of its own with what the demo needs, unless make install has made the whole one.
demo: $(if $(wildcard .venv/ready),.venv/ready,.venv/demo/ready)
	PYTHONPATH=src $(if $(wildcard .venv/ready),$(BIN),.venv/demo/bin)/python examples/demo.py

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal

# Real SuperLinks and SuperNodes on this machine, those of several files side by side, since they mostly wait. Here the tests
# of federations fail where they would be skipped.
FEDERATIONS := $(addprefix tests/test_flower,.py _labels.py _lost.py _up.py _secagg.py)
flower: .venv/flower/ready
	UNDRIFT_FLOWER=required OMP_NUM_THREADS=1 .venv/flower/bin/python -m pytest -n 3 --dist loadfile $(FEDERATIONS)

# The documentation as a site, in site/; it opens from there, search included. docs-serve shows it on port 8000.
docs: .venv/ready
	$(BIN)/python -m sphinx -q -E -W --keep-going -c docs -d .venv/doctrees . site
	@echo "written: site/index.html"

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 -d site 8000

# Longer trials: twenty kills of five methods, damage at 200 places of run folders, memory, ten thousand made-up files, and the tests that take long.
soak: .venv/ready
	$(BIN)/pytest tests/soak -s
	$(BIN)/pytest -m long
	$(MAKE) mutants

# A random sample of mutants, and the share that the tests notice; it goes on where it stopped. AGAIN=1 tries survivors again.
mutants: .venv/ready
	$(BIN)/pip install --disable-pip-version-check -q -e '.[mutation]'
	nice $(BIN)/python -m tests.soak.mutation --count $(or $(COUNT),200) --seed $(or $(SEED),0) $(if $(AGAIN),--again)

bench: .venv/ready
	$(BIN)/python -m benchmarks.cpu

# Models of other libraries, trained by every engine and compared with plain PyTorch: tests/compat/results.json and the
# table in docs/how-to/compatibility.md. ONLY=resnet runs some of them, which changes neither; LOG=file gets the tracebacks.
compat: .venv/compat/ready
	.venv/compat/bin/python -m tests.compat $(if $(ONLY),--only '$(ONLY)') $(if $(LOG),--log $(LOG))

# What must hold on a GPU, eight minutes of it, and eight minutes more. Both run where nothing can be installed, so they
# need no .venv. ONLY=b runs one group; LOG=file gets the tracebacks of failures.
gpu:
	PYTHONPATH=src $(PYTHON) -m tests.gpu $(if $(ONLY),--only $(ONLY)) $(if $(LOG),--log $(LOG))

gpu-full:
	PYTHONPATH=src $(PYTHON) -m tests.gpu --full $(if $(ONLY),--only $(ONLY)) $(if $(LOG),--log $(LOG))

# What undrift is tested with, as a software bill of materials (CycloneDX): dist/sbom.json.
sbom: .venv/ready .venv/tools/ready
	mkdir -p dist
	.venv/tools/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-format JSON --output-file dist/sbom.json
	@echo "written: dist/sbom.json"

# The pins against the advisory database, which needs the network. Without --strict, pip-audit finds "no known
# vulnerabilities" in packages that it could not look up.
audit: .venv/tools/ready
	@mkdir -p dist
	@.venv/tools/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r requirements.txt > dist/audit.txt 2>&1; \
	status=$$?; tail -n 20 dist/audit.txt; \
	if grep -qE "could not be audited|ConnectionError|Max retries|Timeout" dist/audit.txt; then \
		echo "make audit: NOT AUDITED: the advisory database cannot be reached from here, or lacks a package named above."; exit 1; \
	fi; exit $$status

# Wheel and sdist, each installed into an empty environment of 1.5 GB, run the README's quickstart outside of the repository.
# Takes some five minutes.
wheel-check:
	$(PYTHON) tests/wheel_check.py

.venv/demo/ready: requirements.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv/demo
	.venv/demo/bin/pip install --disable-pip-version-check -q -c requirements.txt torch numpy safetensors matplotlib rich
	@echo "The demo's environment, .venv/demo: $$(du -sm .venv/demo | cut -f1) MB, most of it PyTorch."
	@touch $@

# Apart from .venv, so that they are not themselves listed.
.venv/tools/ready:
	$(PYTHON) -m venv .venv/tools
	.venv/tools/bin/pip install --disable-pip-version-check -q cyclonedx-bom pip-audit
	touch $@

# The libraries that make compat takes models from, apart from .venv but on top of it. They come without dependencies:
# several ask for torch, and would replace its build.
.venv/compat/ready: .venv/ready tests/compat/requirements.txt
	$(BIN)/python -m venv --without-pip .venv/compat
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$(.venv/compat/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/above.pth
	$(BIN)/pip --python .venv/compat/bin/python install --disable-pip-version-check -q --no-deps -r tests/compat/requirements.txt
	touch $@

# Flower, apart from .venv but on top of it: it asks for older versions of some packages.
.venv/flower/ready: .venv/ready requirements-flower.txt
	$(BIN)/python -m venv --without-pip .venv/flower
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$(.venv/flower/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/above.pth
	$(BIN)/pip --python .venv/flower/bin/python install --disable-pip-version-check -q --no-deps -r requirements-flower.txt
	touch $@

# The pins are what we test with; the package itself asks for less (pyproject.toml).
.venv/ready: pyproject.toml requirements.txt
	$(CHECK_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check -q -r requirements.txt
	$(BIN)/pip install --disable-pip-version-check -q --no-deps -e .
	touch $@

clean:
	rm -rf .venv site .mypy_cache .pytest_cache .ruff_cache .hypothesis
