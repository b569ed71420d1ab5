# make demo   set up everything and run the main job, with two groups killed on the way
# make test   set up everything and run the tests
# make help   the rest
PYTHON ?= python3.11
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
RUN := runs/demo
RUNS ?= 60
SEED ?= 0
# The tests start thousands of processes. Where this is set, each compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: durations help wheel test-oldest test-newest setup demo pictures check test test-long test-system chaos engine-kills checkpoint-kills fuzz soak lint types coverage bench
.PHONY: evidence storage-outage evidence-status host-losses clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# make /make /p' Makefile
	@echo 'Variables: PYTHON=$(PYTHON) (3.11 or newer)  TORCH="$(TORCH)" (e.g. TORCH="torch --index-url ..." or a wheel of yours)'

# torch goes first, so that nothing else can pull in another build of it; one that is installed already is kept.
$(VENV)/.ready: pyproject.toml setup.py
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found; set PYTHON=... to a Python 3.11 or newer"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[dev]'
	@$(BIN)/pip install --quiet --no-deps 'megatron-core==0.16.1' || echo 'megatron-core could not be installed; its tests are skipped'
	@$(BIN)/pip install --quiet 'accelerate>=1.10' 'lightning>=2.6' || echo 'accelerate and lightning could not be installed; their tests are skipped'
	@touch $@

setup: $(VENV)/.ready

# make setup  virtual environment and dependencies only
demo: setup
	$(BIN)/megatron-ft prepare --out data/sotu
	$(BIN)/python examples/pretrain_gpt/demo.py --data data/sotu --run-dir $(RUN)

# make pictures  README's pictures anew, from a new run of the demo, and the record they show (docs/images)
pictures: demo
	mkdir -p docs/images/demo
	cp $(RUN)/history.jsonl docs/images/demo/history.jsonl
	cp $(RUN)/timeline.png docs/images/demo-timeline.png
	cp $(RUN)/loss.png docs/images/demo-loss.png

# make wheel  the package as a wheel, in dist/
wheel: setup
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	rm -rf build

# make lint   ruff: rules and format
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .

# make types  mypy: strict where pyproject.toml says so
types: setup
	$(BIN)/mypy

# WORKERS: number of tests that run at a time; each starts up to a dozen processes.
WORKERS ?= 2
# make check  what one runs while editing: lint, types, unit tests but the slow ones, and transcripts
check: setup lint types
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m 'not slow' tests/unit tests/golden

# make coverage  lines of the package that unit tests and transcripts run
coverage: setup
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --cov=megatron_ft --cov-report=term:skip-covered tests/unit tests/golden

# LONG: which of the tests marked long make test and make test-system play: none, all, or every Nth from K (K/N)
LONG ?= none
test: setup lint types
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --long $(LONG) tests --ignore=tests/system --durations=30

# make durations  the seconds of every test anew (tests/durations.json), which say what is started first
durations:
	PYTEST_ADDOPTS=--record-durations $(MAKE) test test-system LONG=all

# make test-oldest  what calls torch, with the oldest one that is supported, in an environment of its own
# make test-newest  the same with the newest one that pip finds (NEWEST: another one), and recoveries with its own interface
# PyPI's torch has CUDA. Measured with 2.15.0: 6.1 GB on disk, 2.5 minutes to install with two quiet cores (2.14.1 with busy ones:
# 45), then 4 minutes. Therefore it is not in .ci/run.
OLDEST := torch==2.9.1
NEWEST ?= torch
.venv-oldest/.ready .venv-newest/.ready: .venv-%/.ready: pyproject.toml setup.py
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -c 'import torch' 2>/dev/null || $(@D)/bin/pip install --quiet $(if $(filter oldest,$*),$(OLDEST),$(NEWEST))
	$(@D)/bin/pip install --quiet --editable '.[data,train]' 'hypothesis>=6.100' 'pytest>=8.0' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6'
	@touch $@

test-oldest test-newest: test-%: .venv-%/.ready
	.venv-$*/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m 'not slow' $$(grep -l 'import torch' tests/unit/*.py) tests/integration/test_kill.py $(if $(filter newest,$*),tests/integration/test_recoveries.py tests/integration/test_two_levels.py tests/integration/test_device_communicator.py)

# make test-long  the tests of many seconds and the further cases, which make test and make test-system leave out
test-long: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --long all tests -m long

# make test-system  the tests that need what pip cannot install (SimGrid, etcd, namespaces, pdsh, Slurm); skipped with the reason where it is missing
test-system: setup
	$(BIN)/python -m pytest --long $(LONG) tests/system/test_slurm_lab.py  # first and alone: it counts what clusters leave behind
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --long $(LONG) tests/system --ignore=tests/system/test_slurm_lab.py --durations=20

# make chaos  runs in which random faults strike real processes, judged (RUNS=60 SEED=0)
chaos: setup
	$(BIN)/python -m tests.chaos --runs $(RUNS) --seed $(SEED)

# make engine-kills     ranks of every engine killed at every moment of a step
engine-kills: setup
	$(BIN)/python -m tests.engine_kills

# make checkpoint-kills  whole jobs killed at random moments and started again (RUNS jobs, five kills each; SEED)
checkpoint-kills: setup
	$(BIN)/python -m tests.checkpoint_kills $(RUNS) $(SEED)

# make fuzz  random input to everything that listens (INPUTS each, as strangers and as members that say nonsense; SEED)
INPUTS ?= 100000
fuzz: setup
	$(BIN)/python -m tests.fuzz --inputs $(INPUTS) --seed $(SEED)

# make bench  the benchmarks; raw numbers go to benchmarks/results
bench: setup
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/overhead.py --unblock
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/recovery.py --hogs 10
	$(BIN)/python benchmarks/rejoin.py
	$(BIN)/python benchmarks/goodput.py
	$(BIN)/python benchmarks/decisions.py
	$(BIN)/python benchmarks/blend.py
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/simgrid.py
	$(BIN)/python benchmarks/store_growth.py
	$(BIN)/python benchmarks/history.py

# make soak   200 kills and returns of a real run: memory, threads, descriptors and step time of a survivor (KILLS=200)
KILLS ?= 200
soak: setup
	$(BIN)/python benchmarks/soak.py --kills $(KILLS)

# make storage-outage  the datasets of all groups block for 120 s, at default settings; 7 minutes
storage-outage: setup
	$(BIN)/python benchmarks/storage_outage.py

# make host-losses  each host of 2 to 5 is lost in every way with every store, the table of docs/host-losses.md (EVERY=7: one case of 7)
EVERY ?= 1
host-losses: setup
	$(BIN)/python -m tests.host_losses --save --missing --every $(EVERY)
	$(BIN)/python -m tests.slurm_losses --save

# make evidence  every measured number anew, in order (hours on a quiet machine; NAMES="recovery goodput": only these)
NAMES ?=
evidence: setup
	$(BIN)/python benchmarks/evidence.py measure $(NAMES)

# make evidence-status  which measured numbers are older than the code they speak of
evidence-status: setup
	$(BIN)/python benchmarks/evidence.py status

# make clean  delete environment, data and runs
clean:
	rm -rf $(VENV) .venv-oldest .venv-newest data runs build *.egg-info
