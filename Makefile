# Every command sets up what it needs in .venv and can be run on a fresh clone.
#   make PYTHON=python3.12 test      another interpreter (3.11 to 3.13; used when .venv is made)
#   make PYTEST_WORKERS=8 test       more test processes
#   make PROBLEMS=20000 fuzz         a longer hunt
#   make CXX=clang++ native          another compiler

PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=
PROBLEMS ?= 2000

export PYTHON
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test check native fuzz bench docs clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-8s %s\n", $$1, $$2 }'

demo: ## Embed real sentences with a real model: tuned, explained, compared with the stock model
	@scripts/env torch,demo
	$(BIN)/python examples/embed_sentences.py

test: ## Run every test, the slow ones too
	@scripts/env torch,jax,jax-test,test,demo
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest tests -n $(PYTEST_WORKERS) $(PYTEST_ARGS)

check: ## Lint, format, types, import contracts, sizes
	@scripts/check

native: ## Build the native CPU kernels anew, from nothing
	@scripts/env torch
	scripts/native --force

fuzz: ## Random problems against the float64 reference: PROBLEMS=2000
	@scripts/env torch,test
	$(BIN)/polyattn fuzz --problems $(PROBLEMS)

bench: ## What a call costs over calling the kernel directly, beside other libraries
	@scripts/env torch,bench
	$(BIN)/polyattn bench overhead

docs: ## Build the book into build/docs
	@scripts/env docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean: ## Remove everything these commands made, .venv included
	rm -rf .venv .venv.lock build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	rm -f src/polyattn/_native.*.so
	find src tests scripts examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
