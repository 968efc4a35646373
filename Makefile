# make install | bench | test | check | check-sanitizers | fuzz | docs | mutations | sass | build | wheel | sdist | release-check | clean. The first call on a machine sets up everything it needs in .venv.
#
#   make bench ARGS="model=mlp"              any flags of ddpcore bench
#   make test ARGS="tests/ops" WORKERS=0       some tests, in this process alone
#   make bench PYTHON=/path/to/python          use an environment that already has torch; downloads nothing

SHELL := /bin/bash
ifdef PYTHON
  PY := $(PYTHON)
  READY :=
  TOOLED :=
  INSTALLED := build
  ENTER := make install PYTHON=$(PYTHON)
else
  PY := .venv/bin/python
  READY := .venv/.ready
  TOOLED := .venv/.tools
  INSTALLED := .venv/.installed
  ENTER := source .venv/bin/activate
endif
# What Python has compiled is kept, also where the environment forbids it: else each process compiles torch again, for 4 s.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
# One in-place build at a time; the stamp carries the name of the Python that it was made for.
BUILT := build/built-for$(subst /,_,$(PY))
CXX_FILES := $(shell find csrc tests/cpp tests/cuda_on_cpu -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
WORKERS ?= 3
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
TOOLS := pytest pytest-xdist hypothesis networkx torchmetrics playwright ruff mypy clang-format build twine torch-abi-audit sphinx myst-parser sphinx-copybutton sphinx-mathjax-offline furo lightning transformers accelerate
CPU_WHEELS := https://download.pytorch.org/whl/cpu

.PHONY: install bench test check check-sanitizers fuzz lint types cpp docs mutations sass build sdist wheel release-check clean
# The command ddpcore, and import ddpcore from any folder. Nothing is compiled twice: the package is installed in editable
# mode, with the library that build has made. Compat mode writes a path: else a folder "ddpcore" beside a script hides the
# package. With PYTHON= only this target changes the environment.
install: $(INSTALLED)
ifdef PYTHON
	@$(EDITABLE)
	@echo "ddpcore is installed for $(PY)"
else
	@echo "ddpcore is installed in .venv. Enter it: $(ENTER)"
endif

bench: $(INSTALLED)
	@$(if $(ARGS),,echo "training handwritten digits with four strategies: about half a minute on two cores")
	@$(PY) -m ddpcore bench $(ARGS)
	@printf '\nnext:  %s\n       %s\n' "$(ENTER)" "ddpcore demo   # one minute: where averaging weights trains and averaging gradients fails"

# Three processes, a file each at a time: what one test file sets up (worlds of ranks) is set up once, and many tests wait.
# Without the tests marked slow: packages, the site, deaths of ranks, stress, ranks that start for one file alone, and most
# cases of the oracle.
SELECT ?= not slow
test: $(INSTALLED) $(TOOLED)
	@$(PY) -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(if $(SELECT),-m "$(SELECT)") $(ARGS)

# Exactly what CI runs. The C++ part needs torch alone, so it starts at once; the package is compiled while the tools are
# downloaded. The C++ part and mypy yield to the tests: ranks that wait for each other lose more by a busy core than a
# compiler does. What failed stands last. The C++ part has a process group of its own, so that it ends when the rest fails.
check: $(READY)
	@tools/system_packages
	@mkdir -p build; set -m; nice $(MAKE) --no-print-directory cpp > build/cpp.txt 2>&1 & cpp=$$!; set +m; \
	  trap 'kill -- -'$$cpp' 2> /dev/null' EXIT; \
	  $(MAKE) --no-print-directory -j2 lint build && $(MAKE) --no-print-directory $(INSTALLED) || exit 1; \
	  nice $(MAKE) --no-print-directory types > build/types.txt 2>&1 & types=$$!; \
	  $(MAKE) --no-print-directory test SELECT= 2>&1 | tee build/tests.txt; tests=$${PIPESTATUS[0]}; \
	  wait $$types; types=$$?; wait $$cpp; cpp=$$?; cat build/types.txt build/cpp.txt; \
	  command -v nvidia-smi > /dev/null || echo "no GPU: the CUDA kernels ran on the CPU alone (tests/cuda_on_cpu)"; \
	  [ $$types = 0 ] || echo "mypy failed: see above"; \
	  [ $$cpp = 0 ] || echo "the C++ tests failed: see above"; \
	  [ $$tests = 0 ] || { echo "the tests failed:"; grep -E '^(FAILED|ERROR) ' build/tests.txt | cut -c1-200 | tail -20; tail -1 build/tests.txt; }; \
	  [ $$tests = 0 ] && [ $$types = 0 ] && [ $$cpp = 0 ]

lint: $(TOOLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(dir $(PY))clang-format --dry-run --Werror $(CXX_FILES)

types: $(TOOLED)
	$(PY) -m mypy

# Where no GPU can run the CUDA kernels, nvcc only looks for errors and warnings, which takes a third of the time.
NVCC_FAST = $(shell command -v nvidia-smi > /dev/null || ! $${CUDACXX:-nvcc} --help 2> /dev/null | grep -q Ofast-compile || \
  echo --Ofast-compile=max -Xptxas=--suppress-stack-size-warning)
cpp: $(READY)
	@tools/system_packages
	cmake -S . -B build/cmake -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CUDA_FLAGS=$(CUDAFLAGS) $(NVCC_FAST)" \
	  -DDDPCORE_TORCH_INCLUDE=$$($(PY) -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent / "include")')
	cmake --build build/cmake -j $$(nproc)
	ctest --test-dir build/cmake --output-on-failure -j $$(nproc)

# The documentation site. A warning is an error.
docs: $(TOOLED)
	@$(PY) -c 'import sphinx, myst_parser, sphinx_copybutton, furo' || \
	  { echo "ddpcore: $(PY) lacks what the line above names: pip install '.[docs]', or run make docs without PYTHON="; exit 2; }
	$(PY) -m sphinx -q -E -W --keep-going -b html docs build/docs
	@echo "open build/docs/index.html"

# Breaks the CUDA kernels on purpose, a line at a time. A test must fail for each break. Takes hours;
# ARGS="adamw" takes those whose name has the word.
mutations:
	@tools/system_packages
	python3 tests/cuda_on_cpu/mutations.py $(ARGS)

# The CPU kernels, the counters in shared memory and the operators under sanitizers, with a stress of a minute each:
# DDPCORE_SANITIZE=address,undefined|thread. Takes minutes.
check-sanitizers: $(TOOLED)
	@tools/system_packages
	PY=$(PY) tools/check_sanitizers

# Fuzzes the readers of files from strangers: make fuzz ARGS="npz surface --seconds 3600". Needs atheris.
fuzz: build $(TOOLED)
	@$(PY) -c 'import atheris' 2> /dev/null || [ "$(PY)" != .venv/bin/python ] || $(PY) -m pip install -q -c constraints.txt atheris
	@$(PY) tests/fuzz/fuzz.py $(ARGS)

# What limits each CUDA kernel on several GPUs, from its machine code. Needs nvcc, and no GPU.
sass:
	python3 benchmarks/sass.py $(ARGS)

# What is published. Wheels are built from the source distribution, so they hold nothing that the latter lacks.
# make wheel CUDA="12 13" also makes the wheels +cu12 and +cu13 (tools/wheels.py). dist/ is an index for pip --find-links.
sdist: $(TOOLED)
	@$(PY) -c 'import build, setuptools; assert int(setuptools.__version__.split(".")[0]) >= 77' 2> /dev/null || \
	  { echo "ddpcore: $(PY) needs build, and setuptools 77 or newer: pip install -U build setuptools"; exit 2; }
	@rm -f dist/*.tar.gz
	DDPCORE_CUDA=0 $(PY) -m build --sdist --no-isolation --outdir dist

wheel: sdist
	@$(PY) tools/wheels.py $(CUDA)

# Installs both beside several versions of torch, and tests them there. Downloads these versions; takes about half an hour.
release-check: wheel
	$(PY) tools/release_check.py $(if $(CUDA),--cuda $(CUDA)) $(ARGS)

build: $(BUILT)

EDITABLE = DDPCORE_PREBUILT=1 $(PY) -m pip install -q --no-deps --no-build-isolation --disable-pip-version-check -e . --config-settings editable_mode=compat
.venv/.installed: pyproject.toml setup.py ddpcore/runtime/version.py $(READY) | build
	@$(EDITABLE)
	@touch $@

$(BUILT): $(SOURCES) setup.py $(READY)
	@rm -f build/built-for*
	@$(PY) -c 'import torch, rich, numpy, scipy, safetensors' || \
	  { echo "ddpcore: $(PY) lacks what the line above names: install it, or run make without PYTHON="; exit 2; }
	@echo "compiling the kernels for $(PY): about a minute on two cores"
	@mkdir -p build
	@$(PY) setup.py -q build_ext --inplace > build/log.txt 2>&1 || { cat build/log.txt; exit 1; }
	@touch $@

# Python compiles a module when it is first imported: to compile all of torch would take 20 s.
# CPU wheels where there is no GPU: first from the configured index, then from PyTorch's own.
.venv/.ready: constraints.txt Makefile
	@echo "making .venv: downloads about 300 MB, half a minute to a minute on a fast line"
	@[ -x .venv/bin/pip ] || $$(tools/base_python) -m venv --clear .venv
	@if command -v nvidia-smi > /dev/null || [ "$$(uname)" != Linux ]; then \
	  .venv/bin/pip install -q --no-compile "torch==$(TORCH)"; \
	else \
	  .venv/bin/pip install -q --no-compile "torch==$(TORCH)+cpu" 2> /dev/null || \
	    .venv/bin/pip install -q --no-compile --index-url $(CPU_WHEELS) "torch==$(TORCH)+cpu"; \
	fi
	.venv/bin/pip install -q --no-compile -c constraints.txt setuptools ninja numpy scipy rich tomli safetensors pooch h5py matplotlib jinja2
	@touch $@

# What tests, documentation and releases need besides.
.venv/.tools: .venv/.ready
	@echo "adding the tools of tests and documentation to .venv: downloads about 110 MB"
	.venv/bin/pip install -q --no-compile -c constraints.txt $(TOOLS)
	@touch $@

clean:
	rm -rf build dist *.egg-info ddpcore/*.so .pytest_cache .mypy_cache .ruff_cache
