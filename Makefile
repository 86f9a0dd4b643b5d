# Everything runs in .venv, which is made on first use; nothing but Python 3.11 or newer (with venv and pip) is needed.

PYTHON ?= python3
RUNTIME ?= python3.13
BIN := .venv/bin
SOURCES := functions layers/core/tuneyard host tests benchmarks
unexport PYTHONDONTWRITEBYTECODE # compiling torch's libraries at every start would take longer than the demo

.DEFAULT_GOAL := help
.PHONY: help demo run test check lint bench lock build clean

help: ## This list.
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' Makefile | awk -F'|' '{ printf "make %-8s %s\n", $$1, $$2 }'

demo: .venv/local ## Start the stack, train by RL and SFT through the public API, chat with the result, end.
	@$(BIN)/tuneyard demo

run: .venv/local ## Run the stack until Ctrl-C; it prints its address, a key, and lines to paste.
	@$(BIN)/tuneyard up

test: .venv/dev ## The whole test suite, on the real local stack.
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

check: lint test ## What a change must pass.

lint: .venv/dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check --quiet $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/cfn-lint template.yaml

bench: .venv/bench ## The benchmarks.
	$(BIN)/python benchmarks/run.py

lock: .venv/uv ## Resolve pyproject.toml anew into requirements/ and the layer's requirements.
	$(call lock,requirements/dev.txt,--extra dev --upgrade)
	$(call lock,requirements/bench.txt,--extra bench -c requirements/dev.txt)
	$(call lock,requirements/local.txt,--extra local -c requirements/dev.txt)
	$(call lock,layers/core/requirements.txt,-c requirements/dev.txt)

build: .venv/uv ## What `sam deploy` deploys; RUNTIME=python3.12 where that is the Python that you have.
	test -x .venv-sam/bin/sam || ($(PYTHON) -m venv .venv-sam && $(BIN)/uv pip install -q -p .venv-sam aws-sam-cli)
	PATH="$(CURDIR)/.venv-sam/bin:$$PATH" sam build --parameter-overrides PythonRuntime=$(RUNTIME)

clean: ## Remove what the other targets made, but for the state in .tuneyard.
	rm -rf .venv .venv-sam .aws-sam demo-out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/uv: requirements/first.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one: make PYTHON=python3.13")'
	@echo "Making .venv; this takes a minute or two, once."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -r requirements/first.txt
	@touch $@

.venv/%: requirements/%.txt pyproject.toml .venv/uv
	$(BIN)/uv pip install -q -p .venv -r $<
	$(BIN)/uv pip install -q -p .venv --no-deps -e .
	@touch $@

# uv looks for torch where pip does; the libraries that torch brings for a GPU are left to torch.
define lock
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --no-annotate --no-header --no-emit-index-url \
		--no-emit-find-links -c requirements/first.txt $${PIP_FIND_LINKS:+--find-links "$$PIP_FIND_LINKS"} \
		$(2) pyproject.toml -o .venv/lock
	(echo "# Made by make lock."; sed -E 's/^(torch==[0-9.]+).*/\1/' .venv/lock | grep -Ev '^(cuda|nvidia|triton)' | uniq) > $(1)
endef
