# make demo   200 virtual phones, first on Ray, then three selectors, 20 seeds each: a table, a picture, a verdict
# make test   the tests, on two cores
# Each makes .venv first, with the versions in constraints.txt. It needs Python 3.11 or newer and nothing else.

PYTHON ?= python3
BIN := .venv/bin

export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help demo test slow e2e flower-matrix lint house prose docs linkcheck package resolve clean

help:
	@sed -n '/^# make/s/^# //p' Makefile

demo: .venv/installed
	$(BIN)/fedsel compare phones --selectors bsfl,cs-ucb,random --seeds 20 --rounds-on-flower 5 --jobs 2

test: .venv/installed
	$(BIN)/python -m pytest -n 2

# make slow   the tests that take longer than 20 seconds each
slow: .venv/installed
	$(BIN)/python -m pytest -m slow

# make e2e    the fault table of docs/operating.md on real SuperLinks and SuperNodes; about an hour
e2e: .venv/installed
	$(BIN)/python -m pytest -m e2e

# make lint   ruff and mypy
lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# make flower-matrix   the tests of the strategies, and programs of both APIs, with the oldest, pinned, newest and nightly Flower
flower-matrix: .venv/installed
	$(BIN)/python tools/flower_matrix.py

# make house   files, lines, floors and import arrows of each folder; AGAINST=COMMIT compares
house: .venv/installed
	$(BIN)/python tools/house.py $(if $(AGAINST),--against $(AGAINST))

# make prose   listed words and sentences past 25 words, in pages, docstrings and messages; AGAINST=COMMIT compares
prose: .venv/installed
	$(BIN)/python tools/prose.py $(if $(AGAINST),--against $(AGAINST))

# make docs   the documentation site, in docs/_build/html; a warning is an error
docs: .venv/installed
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going docs docs/_build/html

# make linkcheck   the links of the site to other sites; needs the internet
linkcheck: .venv/installed
	$(BIN)/python -m sphinx --builder linkcheck docs docs/_build/linkcheck

# make package   build and check the archives, then install the wheel, and each extra, outside the repository
package: .venv/installed
	$(BIN)/python -m tools.installation

# make resolve   the Python versions and platforms on which each extra can be installed
resolve: .venv/installed
	$(BIN)/python -m tools.resolving

# make clean  remove .venv and the tools' caches; runs/ stays
clean:
	rm -rf .venv .ci-venv* .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist docs/_build docs/api

.venv/installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed, but there is no $(PYTHON); name one: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, but $(PYTHON) is $$($(PYTHON) -V); name another: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) lacks its venv module; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[sim,dev,docs]"
	@touch $@
