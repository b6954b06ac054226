# `make demo`, `make test`, `make test-all`: see README.md and CONTRIBUTING.md. Nothing is installed outside .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS := pyproject.toml embedded_cluster/pyproject.toml constraints.txt scripts/bootstrap.py
# hundreds of processes import the same modules
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-often waits lint reverts unit thorough conformance others test-other-cluster test-browser chaos soak test-matrix bench plots docs test-kind test-gpu test-horovod test-executors clean

# KIND=mpijob or KIND=trainjob for another kind than PyTorchJob
demo: $(VENV)/.demo
	@KIND=$(KIND) $(BIN)/python scripts/demo.py

# each promise and each feature. The linters run beside the tests, which sometimes wait
test: $(VENV)/.test
	@$(MAKE) --no-print-directory -j2 lint unit

# then all others: conformance, replays, example DAGs, what waits for programs, longer properties, and the oldest Airflow
test-all: test
	@$(MAKE) --no-print-directory thorough
	@$(MAKE) --no-print-directory test-matrix QUICK=1 ONLY=3.2.2

PYTEST = $(BIN)/python -m pytest $(OPTIONS)
# xdist's loadgroup waits for ever when it replaces a worker that died (pytest-xdist issues 1323, 1327, 1378)
OPTIONS := -q --dist loadgroup --no-loadscope-reorder --max-worker-restart=0
# these have targets of their own
SEPARATE := not chaos and not browser and not index and not horovod and not executors

CONFORMANCE := embedded_cluster/tests/conformance
# of folders without such tests, the tables take seconds to read
UNIT := -n 3 -m 'not thorough and $(SEPARATE)' $(addprefix --ignore=,$(CONFORMANCE) tests/browser tests/executors)

unit: $(VENV)/.test
	@$(PYTEST) $(UNIT)

# the tests of `make test` N times, each time in another order, which a seed repeats; some beside busy processes
test-often: $(VENV)/.test
	@$(BIN)/python scripts/test_often.py --runs $(or $(N),12) -- $(OPTIONS) $(UNIT)

thorough: $(VENV)/.test
	@$(MAKE) --no-print-directory -j2 conformance others

# the scenarios are about seconds, and mostly wait: what runs beside them yields to them
conformance: $(VENV)/.test
	@$(PYTEST) -n 1 $(CONFORMANCE)

others: $(VENV)/.test
	@HYPOTHESIS_PROFILE=thorough nice -n 10 $(PYTEST) -n 6 -m '(thorough or hypothesis) and $(SEPARATE)' \
		--ignore=$(CONFORMANCE)

# the tests of `make test` that wait for real time, and that tests/waiting.py has no reason for; on an idle machine
waits: $(VENV)/.test
	@$(PYTEST) -p tests.waiting $(subst -n 3,-n 1,$(UNIT))

lint: $(VENV)/.test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/pod_schema.py
	@$(BIN)/python scripts/reverts.py check

# takes back each correction of scripts/reverts alone: a test must notice it. NAMES="R1 R7" for some
reverts: $(VENV)/.test
	@$(BIN)/python scripts/reverts.py run $(NAMES)

# tests as on a real cluster: they reach another embedded one by its kubeconfig only. FOLDERS=tests/cli for some
OTHER := tests/engine tests/operators tests/job_control tests/cli tests/hooks $(CONFORMANCE)
test-other-cluster: $(VENV)/.test
	@failed=0; for folder in $(or $(FOLDERS),$(OTHER)); do \
		$(BIN)/python -m tests.other_cluster $$folder -n 4 -q -rs || failed=1; \
	done; exit $$failed

# the training page in the system's Chromium, driven by Playwright; skipped where there is no browser.
# QUICK=1 for the page of one training alone; AIRFLOW=3.2.2 for one of tests/matrix/*.txt instead of .venv
ifdef AIRFLOW
test-browser:
	@$(PYTHON) scripts/matrix.py --browser $(AIRFLOW)
else
test-browser: $(VENV)/.browser
	@$(BIN)/python -m pytest -q -rs -m browser $(if $(QUICK),tests/browser/test_training_page.py,tests/browser)
endif

# 6,000 random trainings whose API server gives wrong answers (tests/adversary). Then the chaos tests: on SQLite with
# one triggerer, then on PostgreSQL with two (skipped where there is no server)
chaos: $(VENV)/.test
	@failed=0; KTRAIN_LIVES=6000 $(PYTEST) -n 6 tests/adversary -k test_lives_with_lies || failed=1; \
	for database in sqlite postgresql; do echo "== $$database"; \
		KTRAIN_TEST_DATABASE=$$database $(BIN)/python -m pytest -q -rs -m chaos tests/e2e || failed=1; \
	done; exit $$failed

# TRAININGS=20 for a quick run; SEED=N repeats the disturbances of an earlier run
TRAININGS ?= 200
soak: $(VENV)/.test
	@failed=0; for database in sqlite postgresql; do KTRAIN_TEST_DATABASE=$$database \
		$(BIN)/python -m tests.e2e.soak --trainings $(TRAININGS) $(if $(SEED),--seed $(SEED)) || failed=1; \
	done; exit $$failed

# QUICK=1 for core, operators, triggers and kills alone; ONLY="3.2.2 3.3.0" for some of tests/matrix/*.txt
test-matrix:
	@$(PYTHON) scripts/matrix.py $(if $(QUICK),--quick) $(ONLY)

bench: $(VENV)/.test
	@for b in $(filter-out benchmarks/plot.py,$(sort $(wildcard benchmarks/*.py))); do echo "== $$b"; $(BIN)/python $$b || exit 1; done

# benchmarks/plots/*.svg, from the tables in benchmarks/README.md
plots: $(VENV)/.bench
	@$(BIN)/python benchmarks/plot.py

docs: $(VENV)/.docs
	@$(BIN)/mkdocs build --strict

test-kind:
	@embedded_cluster/scripts/test_kind.sh

# on a machine with NVIDIA GPUs: NCCL between as many ranks as there are GPUs, with the CUDA build of PyTorch
test-gpu: $(VENV)-gpu/.gpu
	@$(VENV)-gpu/bin/python scripts/test_gpu.py

$(VENV)-gpu/.gpu: $(REQUIREMENTS)
	@$(PYTHON) scripts/bootstrap.py $(VENV)-gpu gpu

# the guide's elastic MPIJob with the real Horovod. Needs a C++ compiler: the first run builds a wheel in ~/.cache
test-horovod: $(VENV)/.test
	@image=$$(mktemp -d); trap 'rm -rf "$$image"' EXIT; $(BIN)/python scripts/horovod_image.py "$$image" && \
		KTRAIN_TEST_HOROVOD=$$image $(PYTEST) -n 0 -m horovod tests/e2e/test_horovod.py

# the CeleryExecutor and the KubernetesExecutor at once, with PostgreSQL and Redis; skipped where there is no server
test-executors: $(VENV)/.test $(VENV)/.executors
	@KTRAIN_TEST_DATABASE=postgresql $(PYTEST) -n 2 -rs -m executors tests/executors

$(VENV)/.%: $(REQUIREMENTS)
	@$(PYTHON) scripts/bootstrap.py $(VENV) $*

clean:
	rm -rf $(VENV) $(VENV)-gpu .venv-matrix .pytest_cache .mypy_cache .ruff_cache site
