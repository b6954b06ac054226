# README's two commands: `make demo` and `make test`. Nothing is installed outside .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint chaos bench docs test-kind clean

demo: $(VENV)/.demo
	@$(BIN)/python scripts/demo.py

test: $(VENV)/.test lint
	@$(BIN)/python -m pytest -n 3 --dist loadgroup -q

lint: $(VENV)/.test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

chaos: $(VENV)/.test
	@$(BIN)/python -m pytest -q -m chaos tests/e2e

bench: $(VENV)/.test
	@for b in benchmarks/*.py; do echo "== $$b"; $(BIN)/python $$b || exit 1; done

docs: $(VENV)/.docs
	@$(BIN)/mkdocs build --strict

test-kind:
	@scripts/test_kind.sh

$(VENV)/.%: pyproject.toml constraints.txt scripts/bootstrap.py
	@$(PYTHON) scripts/bootstrap.py $(VENV) $*

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache site
