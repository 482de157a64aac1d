# make up          install, fetch the default model, start everything (ARGS="--port 8123")
# make test        the fast suites; make test-system: what needs root or Debian packages
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install up test test-system oracle test-clients test-clients-all lint format types imports fuzz fuzz-api corpus proto wheel clean

ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := engine,ucx,local,bench,dev
STAMP := $(VENV)/.installed

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

install: $(STAMP) ## .venv with everything in it, as pinned in constraints.txt

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard kernels/native/*.cpp kernels/native/*.h) shared/store/rest.cpp
	@test -x $(BIN)/python || $$(bash .ci/find-python) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

up: $(STAMP) ## all parts on this machine, until Ctrl-C
	@exec $(BIN)/kvrelay up $(ARGS)

test: $(STAMP) ## fast suites: no network but loopback, no root
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not system and not oracle' --durations=5 $(ARGS)

test-system: $(STAMP) ## namespaces, a real redis-server: installs those as root where missing
	@bash .ci/system-packages
	$(BIN)/python -m pytest -m system tests/system $(ARGS)

oracle: $(STAMP) ## greedy tokens against transformers, 100 prompts
	$(BIN)/python -m pytest -m oracle tests/golden -s $(ARGS)

test-clients: $(STAMP) ## what people ask it with, installed as they would (ARGS="lm-eval" for one)
	$(BIN)/python -m tests.clients.run $(ARGS)

test-clients-all: $(STAMP) ## with those too that take gigabytes (nightly)
	$(BIN)/python -m tests.clients.run --all $(ARGS)

lint: $(STAMP) ## ruff, and the limits on file sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/size_check.py

format: $(STAMP) ## what ruff can do by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy -p kvrelay -p loadtests

imports: $(STAMP) ## who may import whom
	$(BIN)/lint-imports

sanitize: $(STAMP) ## 10,000 steps of the native kernels under address and thread sanitizers
	$(BIN)/python tests/sanitize.py $(ARGS)

fuzz: $(STAMP) ## 1,000,000 random events around an engine, and 100 lives of each kind of cluster (nightly)
	$(BIN)/python tests/fuzz.py $(ARGS)
	KVRELAY_TEST_SEEDS=100 KVRELAY_TEST_DEPTH=8 $(BIN)/python -m pytest -n auto tests/sim/test_cluster.py \
		tests/sim/test_explore.py

fuzz-api: $(STAMP) ## 20,000 random bodies, and 10 minutes of schemathesis against a real cluster (nightly)
	KVRELAY_TEST_BODIES=20000 $(BIN)/python -m pytest tests/unit/edge/test_fuzz_bodies.py
	$(BIN)/python tests/fuzz_api.py $(ARGS)

corpus: $(STAMP) ## 300 requests over all fields: the same streamed or not, split or not, and a worker killed (nightly)
	KVRELAY_TEST_REQUESTS=300 $(BIN)/python -m pytest tests/integration/test_corpus.py $(ARGS)

proto: $(STAMP) ## generated gRPC code, committed beside its source
	$(BIN)/python -m grpc_tools.protoc -I src --python_out=src --grpc_python_out=src --pyi_out=src \
		src/kvrelay/shared/rpc/gen/*.proto

wheel: $(STAMP) ## sdist, and the wheel built from it, checked
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python tests/wheel_check.py dist

clean: ## everything that make made
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
