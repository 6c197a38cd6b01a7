# `make demo` and `make test` do all the set-up themselves, in .venv beside this file.
# PYTHON=/path/to/python chooses the interpreter; ARGS="--steps 20" goes to the demo.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ok
CANDIDATES := python3.11 python3.12 python3.13 python3.14 python3
ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

.PHONY: demo test test-all lint clean

demo: $(STAMP)
	@$(BIN)/diffaccel demo $(ARGS)

test: lint
	@$(BIN)/python -m pytest -q -n auto --dist loadfile --durations=10 -m "not slow" --nbmake tests notebooks

test-all: lint
	@$(BIN)/python -m pytest -q -n auto --dist loadfile --durations=10 --nbmake tests notebooks

lint: $(STAMP)
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check .
	@$(BIN)/mypy --no-error-summary

clean:
	rm -rf $(VENV) out dist build .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp comes last, so a failed install is tried again. A .venv that already works is kept.
# torch goes first and by its exact version: that finds a CPU build where pip is set up for one.
$(STAMP): pyproject.toml constraints.txt
	@if ! $(BIN)/python -c '$(ENOUGH)' 2>/dev/null || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		found=; \
		for python in $(or $(PYTHON),$(CANDIDATES)); do \
			if "$$python" -c '$(ENOUGH)' 2>/dev/null; then found=$$python; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "diffaccel: no suitable Python among: $(or $(PYTHON),$(CANDIDATES))." >&2; \
			echo "It needs Python 3.11 or newer (3.10 is not enough: diffusers 0.42 asks for 3.11)." >&2; \
			echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; \
			exit 1; \
		fi; \
		echo "Setting up $(VENV) with $$("$$found" -V); this takes a few minutes, once." >&2; \
		"$$found" -m venv --clear $(VENV) || exit 1; \
	fi
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@
