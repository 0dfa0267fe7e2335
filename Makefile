# make demo | make test | make lint | make format | make sanitize | make clean | make distclean
# make soak SECONDS=1200 TARGET=simulated: random work for a long time, watched (tests/soak.py)
# (everything lives in .venv/ and build/)
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TORCH   = $(shell grep '^torch==' constraints.txt)
BUILD_TOOLS = scikit-build-core nanobind cmake ninja

NATIVE_SOURCES = CMakeLists.txt $(shell find cpu_kernels -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name '*.inl' -o -name '*.cmake')

DEMO_MODEL = examples/models/tiny-deepseek-v2
DEMO_PROMPT = Once upon a time there lived in a small house near the forest a poor woodcutter who had two children. One morning the elder of them said to his father,
DEMO = ktgraph run $(DEMO_MODEL) "$(DEMO_PROMPT)" --max-new-tokens 80 --dump ktg_dump --check $(DEMO_MODEL)/reference.json
PYTEST_ARGS ?= -n auto
SECONDS ?= 1200
TARGET ?= simulated

# Random calls of the engine, without Python (tests/cpu_kernels/stress): bits must not depend on threads.
STRESS_CALLS ?= 100
SANITIZE_CALLS ?= 10000
CMAKE = PATH="$(abspath $(BIN)):$$PATH" cmake

.PHONY: help demo test soak stress sanitize sanitize-address sanitize-thread lint format clean distclean check-tools
help:
	@sed -n 's/^# make/make/p' Makefile

demo: $(VENV)/.installed
	PATH="$(abspath $(BIN)):$$PATH" $(DEMO)

# torch's threads sleep while they wait: spinning, on a busy machine, they keep the engine's from the cores
# (16 tokens on a simulated GPU with experts on the CPU, two cores at load 6: 13 s, sleeping 0.2 s).
test soak: export OMP_WAIT_POLICY = passive

test: $(VENV)/.installed stress
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

# Random prompts, batches, cancellations and truncations: no wrong token, no growth, no hang.
soak: $(VENV)/.installed
	$(BIN)/python tests/soak.py --seconds $(SECONDS) --target $(TARGET)

# In the newest build folder of the package, whose kernel objects it shares.
stress: $(VENV)/.installed
	build=$$(ls -dt build/cp*/ | head -1) && $(CMAKE) --build $$build --target ktg_stress && $$build/ktg_stress $(STRESS_CALLS)

# The same under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer.
sanitize: sanitize-address sanitize-thread

sanitize-address: export ASAN_OPTIONS = detect_stack_use_after_return=1
sanitize-address: export UBSAN_OPTIONS = print_stacktrace=1
sanitize-thread: export TSAN_OPTIONS = halt_on_error=1
sanitize-address sanitize-thread: sanitize-%: $(VENV)/.dependencies
	CXX="$(CXX)" $(CMAKE) -G Ninja -DKTGRAPH_SANITIZE=$* -S . -B build/sanitize-$*
	$(CMAKE) --build build/sanitize-$* --target ktg_stress
	build/sanitize-$*/ktg_stress $(SANITIZE_CALLS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find cpu_kernels tests/cpu_kernels -name '*.cpp' -o -name '*.h' | xargs -r $(BIN)/clang-format -i

clean:
	rm -rf build dist ktg_dump .pytest_cache .ruff_cache .hypothesis
	rm -f $(VENV)/.installed $(VENV)/.dependencies
	find . -path './$(VENV)' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

check-tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "ktgraph needs Python >= 3.11, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.11" >&2; exit 1; }
	@v=$$($(CXX) -dumpversion 2>/dev/null | cut -d. -f1); [ "$${v:-0}" -ge 12 ] || { \
	  echo "ktgraph needs g++ >= 12, but '$(CXX)' is version $${v:-none}. Try: make CXX=g++-12" >&2; exit 1; }

# torch comes first and by its exact pin, so that nothing else draws in another build of it.
$(VENV)/.dependencies: pyproject.toml constraints.txt | check-tools
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) $(BUILD_TOOLS)
	touch $@

$(VENV)/.installed: $(VENV)/.dependencies $(NATIVE_SOURCES)
	CXX="$(CXX)" $(PIP) --no-build-isolation --editable '.[dev]'
	touch $@
