# make demo    everything a fresh machine needs, then the main job: the starter model learns arithmetic
# make test    everything a fresh machine needs, then lint, types, layers, the documentation and the test suite
# make long    the tests that take over a second of a processor each, which CI runs too: whole runs, servers, statistics
# make wording the words of all refusals that tests meet, written anew to tests/*/wording.txt, to be read
# make docs    the documentation as a site, in build/site; a dead link is an error
# make vllm    vLLM's CPU build in .venv-vllm (2.5 GB), and its engine against ours (six minutes)
# make ui      the web interface from its sources in ui/ (needs Node; what is built is in the repository)
# make gpu     the proof on one GPU, in about half an hour; what is there already is not run again (results in gpu/)
# make bench   the step benchmark against TRL and the learning curves (minutes; not part of `make test`)

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
# two test processes more than there are cores: some tests wait for processes and deadlines
TESTERS ?= $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 2)')
BIN    := $(VENV)/bin
# pip would compile what it installs on one core
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# what one test process compiles the others read
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test long lint types suite compiled wording docs bench gpu vllm ui clean

demo: $(VENV)/.installed
	$(BIN)/groupwise demo

# types are checked beside the tests, some of which wait
test: lint
	$(MAKE) --no-print-directory -j 2 docs compiled types suite

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests benchmarks examples docs tools
	$(BIN)/ruff format --check src tests benchmarks examples docs tools
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev
	$(BIN)/pyright

suite: compiled
	$(BIN)/pytest -q -n $(TESTERS) --dist loadgroup

long: compiled
	$(BIN)/pytest -q -n $(TESTERS) --dist loadgroup -m "long and not slow"

wording: compiled
	WORDING=write $(BIN)/pytest -q -n $(TESTERS) --dist loadgroup
	git diff --stat -- '*wording.txt'

# once: the tests start hundreds of processes, which would each compile what they import, and pytest rewrites the tests'
# assertions, which each test process would do by itself. What it says of broken tests `suite` says again.
compiled: $(VENV)/.installed-dev
	$(BIN)/python -m compileall -q src
	-$(BIN)/pytest -q --collect-only > /dev/null

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/step_vs_trl.py
	$(BIN)/python benchmarks/learning.py

# also where nothing is installed: GPU="--part learner --limit 280" are options of it
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu $(GPU)

vllm: $(VENV)/.installed-dev .venv-vllm/.installed
	$(BIN)/pytest -q -s -m slow tests/vllm_server/test_real_vllm.py

.venv-vllm/.installed: tests/vllm_server/install.sh
	tests/vllm_server/install.sh $(PYTHON)
	@touch $@

ui:
	cd ui && npm ci && npm run build

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "groupwise needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) "$(TORCH)"
	$(INSTALL) --editable .
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # some packages bring templates that are no Python
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) runs build dist
