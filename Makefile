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

.PHONY: help setup demo test test-system chaos deepspeed-kills checkpoint-kills lint bench clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# make /make /p' Makefile
	@echo 'Variables: PYTHON=$(PYTHON) (3.11 or newer)  TORCH="$(TORCH)" (e.g. TORCH="torch --index-url ..." or a wheel of yours)'

# torch goes first, so that nothing else can pull in another build of it; one that is installed already is kept.
$(VENV)/.ready: setup.py
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found; set PYTHON=... to a Python 3.11 or newer"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

setup: $(VENV)/.ready

# make setup  virtual environment and dependencies only
demo: setup
	$(BIN)/megatron-ft prepare --out data/sotu
	$(BIN)/python examples/pretrain_gpt/demo.py --data data/sotu --run-dir $(RUN)

# make lint   ruff
lint: setup
	$(BIN)/ruff check .

# WORKERS: so many tests at a time; each starts up to a dozen processes.
WORKERS ?= 2
test: setup lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests --ignore=tests/system --durations=30

# make test-system  the tests that need what pip cannot install (SimGrid, etcd, namespaces, pdsh, Slurm); skipped with the reason where it is missing
test-system: setup
	$(BIN)/python -m pytest tests/system

# make chaos  runs in which random faults strike real processes, judged (RUNS=60 SEED=0)
chaos: setup
	$(BIN)/python -m tests.chaos --runs $(RUNS) --seed $(SEED)

# make deepspeed-kills  ranks of DeepSpeed pipelines killed at every moment of a flush
deepspeed-kills: setup
	$(BIN)/python -m tests.deepspeed_kills

# make checkpoint-kills  whole jobs killed at random moments and started again (RUNS jobs, five kills each; SEED)
checkpoint-kills: setup
	$(BIN)/python -m tests.checkpoint_kills $(RUNS) $(SEED)

# make bench  the benchmarks; raw numbers go to benchmarks/results
bench: setup
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/overhead.py --unblock
	$(BIN)/python benchmarks/deepspeed_overhead.py
	$(BIN)/python benchmarks/kill_to_commit.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/recovery.py --hogs 10
	$(BIN)/python benchmarks/rejoin.py
	$(BIN)/python benchmarks/goodput.py
	$(BIN)/python benchmarks/decisions.py
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/simgrid.py

# make clean  delete environment, data and runs
clean:
	rm -rf $(VENV) data runs build *.egg-info
