# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OURS := libs/k3wire libs/k3text libs/k3core libs/k3ctl services/gateway services/fetcher \
        services/preprocessor services/encoder services/prefill services/decode loadtest
export OMP_NUM_THREADS ?= 1

.PHONY: help demo up setup setup-dev test test-nightly check format lint types contracts compose \
        dockerfiles layout closures lock clean train-nano eval-nano

help:  ## Shows this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: setup  ## Sets up, starts the whole stack, asks about a picture, stops.
	$(BIN)/k3 demo

up: setup  ## Sets up and keeps the stack running until Ctrl-C.
	$(BIN)/k3 up

setup: $(VENV)/.setup-done

$(VENV)/.setup-done: requirements/cpu.txt $(addsuffix /pyproject.toml,$(OURS))
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --progress-bar on -r requirements/cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps $(addprefix -e ,$(OURS))
	$(BIN)/python -m k3ctl.system_libraries
	$(BIN)/python -m compileall -q libs services
	@echo "What is here (compiles the kernels, once):"
	@$(BIN)/k3 doctor || true
	@touch $@

setup-dev: $(VENV)/.setup-dev-done

$(VENV)/.setup-dev-done: setup requirements/dev.txt
	$(BIN)/python -m pip install --quiet -r requirements/dev.txt
	@touch $@

# Dozens of processes are started: what is compiled once is kept, whatever the shell says.
test: export PYTHONDONTWRITEBYTECODE :=
test: setup-dev  ## Runs the tests, with real NATS, Redis and Mooncake on loopback.
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu and not compose and not nightly"

test-nightly: setup-dev  ## Runs the long ones too.
	K3_NIGHTLY=1 $(BIN)/python -m pytest -m "not gpu and not compose" --timeout=3600

check: lint types contracts compose dockerfiles layout  ## Style, types, import contracts, compose, Dockerfiles, layout.

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-dev
	$(BIN)/pyright

contracts: setup-dev
	$(BIN)/lint-imports

compose: setup-dev
	$(BIN)/docker-compose -f docker-compose.yml config -q
	$(BIN)/docker-compose -f docker-compose.yml -f deploy/compose.gpu.yml config -q

dockerfiles: setup-dev
	$(BIN)/hadolint $(wildcard services/*/Dockerfile) deploy/Dockerfile.tools

layout: setup-dev
	$(BIN)/python -m pytest -q tests/repo

closures: setup-dev  ## Installs each service alone in a fresh environment and looks at what came along.
	$(BIN)/python tools/check_closures.py

TRAIN := GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296 \
         PYTHONPATH=tools $(BIN)/python -m train_nano

train-nano: setup  ## Trains the demo checkpoint anew, hours long, resumable (state in .k3/train_nano).
	$(TRAIN) train
	$(TRAIN) export

NANO ?= checkpoints/k3-nano

eval-nano: setup  ## Measures the demo checkpoint (NANO=DIR another), skill by skill, on questions it never saw.
	OMP_NUM_THREADS=2 $(TRAIN) evaluate --checkpoint $(NANO)

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock:  ## Rewrites the lock files from the present environment.
	$(BIN)/python tools/lock.py

clean:
	rm -rf $(VENV) .k3
