# The commands of developers and CI. Each target works in a fresh clone: it creates .venv, installs its dependencies and
# builds the Rust extension, each only once.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q --no-input
INSTALL = tools/install.py --uv $(UV) --torch $(TORCH)

# Installs the versions of uv.lock; uv comes from PyPI if it is missing.
UV ?= $(or $(shell command -v uv 2> /dev/null),$(BIN)/uv)

# The build of torch that `make torch` and `make test` install: cpu, cuda, or auto (cpu if there is no GPU and PyTorch's
# index answers).
TORCH ?= auto

RUST_SOURCES := $(shell find rust \( -path rust/fuzz -o -path rust/kv-bench \) -prune -o \( -name '*.rs' -o -name 'Cargo.toml' \) -print) Cargo.toml $(wildcard Cargo.lock)
export PYO3_PYTHON := $(abspath $(BIN)/python)

ENGINE := $(VENV)/.installed-engine
SERVE  := $(VENV)/.installed-serve
WITH_TORCH := $(VENV)/.installed-torch
DEV    := $(VENV)/.installed-dev
DOCS   := $(VENV)/.installed-docs
BUILT  := $(VENV)/.built
COMPILED := $(VENV)/.compiled
LIGHT  := .venv-light
PEERS  := .venv-peers
CLIENTS := .venv-clients
CLUSTER := .venv-cluster
GPU_TESTS := .venv-gpu-tests
GPU_TESTS_TORCH_2_11 := .venv-gpu-tests-torch-2.11
MUTANTS := .venv-mutants
FREE_THREADED := .venv-free-threaded
WHEELS := .venv-wheels
LINT_DEPLOY := .venv-lint-deploy
AUDIT := .venv-audit

# A model and options of `pyengine serve` for `make serve`.
SERVE_ARGS ?=

# Options of `make bench`: BENCH='--quick --only decode'; of `make bench-rust`: BENCH=decode.
BENCH ?=

# Options of the adapter of `make conformance`: CONFORMANCE='--promise deduplicates' shows why vLLM makes no such promise.
CONFORMANCE ?=

# The device of `make gpu-first-run`, and its output folder.
DEVICE ?= cuda
OUT ?= target/gpu

# The oldest supported releases of attention libraries; `make gpu-tests` also tests the newest.
FLASHINFER ?= 0.6.18
FLASH_ATTN ?= 2.8.3

# Releases on GPU machines; `make gpu-tests` tests them and those of uv.lock.
TORCH_2_11 := 'torch==2.11.*' 'triton==3.6.*' 'transformers==5.17.*'

# The file of `make mutants-python`; empty: all.
FILE ?=

# The Python without a GIL for `make test-free-threaded`.
PYTHON_T ?= python3.14t

# The options of `make gpu-tests`.
FAKE_CUDA = -m pytest -m fake_cuda -n auto --dist load tests/fake_cuda --ignore tests/fake_cuda/planner

# Few cases for `make test-aarch64`, because the processor is emulated.
AARCH64_CASES ?= 6

# Few random steps of attention with modelled AMX, where an instruction takes microseconds.
MODELLED_CASES ?= 24
AARCH64_OPS ?= 5000

# The platforms of `make wheels`; empty: all.
PLATFORMS ?=

# The checks of `make deny`; empty: all. Without the network: DENY="licenses bans sources".
DENY ?=

# Options of `make crates`: CRATES_ARGS=--allow-dirty before a commit.
CRATES_ARGS ?=

# `make semver` compares with this revision: the tag of the last release, once there is one.
BASELINE ?= HEAD~1

# The targets of `make help`, and the awk program that prints the lines `target: ... ## TIME: text` and headings `##@`.
COMMON := hello serve quick test check docs
HELP = /^\#\#@ / && !wanted {print "\n" substr($$0, 5)} \
  /^[a-z0-9-]+:.*\#\# / {name = text = $$0; sub(/:.*/, "", name); sub(/.*\#\# /, "", text); time = text; \
  sub(/: .*/, "", time); sub(/^[^:]*: /, "", text); \
  if (!wanted || index(wanted, " " name " ")) printf "  make %-18s %8s  %s\n", name, time, text}

# The tests of `make quick`: import rules, block manager, scheduler, server.
QUICK_TESTS := tests/architecture tests/unit/kv_cache tests/unit/scheduler tests/unit/server

# The oldest Rust.
MSRV := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)

# How long `make fuzz` looks for differences.
SECONDS ?= 600

.PHONY: help help-all quick lint hello serve torch clients cluster cluster-test test test-light test-modelled test-levels test-aarch64 aarch64 test-free-threaded free-threaded check docs wheel soak loom model fuzz mutants mutants-python bench vllm-tests conformance gpu-tests gpu-planner gpu-first-run gpu-first-run-kit bench-rust bench-worst guard guard-update clean
.PHONY: distclean rust-tools valgrind wheels try-wheels try-bare try-musl sdist sbom test-portable test-windows
.PHONY: crates publish-crates msrv semver lint-workflows lint-deploy deny audit release-check release-notes
.DEFAULT_GOAL := help

help: ## 1 s: the targets that you need first
	@awk -v wanted=' $(COMMON) ' '$(HELP)' Makefile
	@echo; echo '  make help-all has the others. Times are about those of two cores; a first run also installs and builds.'

help-all: ## 1 s: all targets, with about the time that each takes on two cores once all is built
	@awk '$(HELP)' Makefile

##@ Use it

hello: $(COMPILED) ## 1 s: ask a real model; the first run installs and builds, which takes about 3 min
	@$(BIN)/pyengine generate --chat --temperature 0 --max-tokens 32 "What is the capital of Japan?"

serve: $(SERVE) $(COMPILED) ## 3 s: serve the embedded model at 127.0.0.1:8000; SERVE_ARGS="MODEL --port 8001"
	@$(BIN)/pyengine serve $(SERVE_ARGS)

torch: $(WITH_TORCH) ## minutes: install torch and transformers for CUDA, compile=True, other families; TORCH=cpu or cuda

##@ While you work

quick: $(DEV) $(COMPILED) ## 2 min: formats, lints, types, tests of block manager, scheduler and server: before every commit
	cargo fmt --all --check
	@$(MAKE) --no-print-directory lint
	$(BIN)/pytest -n 2 -m "not slow" $(QUICK_TESTS)

test: $(DEV) $(COMPILED) ## 20 min: all Rust and Python tests
	cargo test --workspace
	@$(MAKE) --no-print-directory test-modelled
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

check: rust-tools $(DEV) $(BUILT) docs lint-workflows lint-deploy ## minutes: formats, lints, types, import rules, the site; changes none of your files
	cargo fmt --all --check
	cargo fmt --manifest-path rust/fuzz/Cargo.toml --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy -p kv-core -- -D warnings
	RUSTFLAGS="--cfg loom" cargo check -p kv-core --test loom --target-dir target/loom
	RUSTFLAGS="--cfg loom" cargo check -p cpu-kernels --lib --profile test --target-dir target/loom
	PYO3_CONFIG_FILE=$(abspath rust/extension/python3.14t.cfg) cargo clippy -p kv-py -p cpu-py --target-dir target/free-threaded -- -D warnings
	CUSTOM_LIBFUZZER_PATH=none/libfuzzer.a cargo check --locked --manifest-path rust/fuzz/Cargo.toml --target-dir target/fuzz
	@$(MAKE) --no-print-directory lint
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml pyengine._kv pyengine._cpu
	$(UV) lock --check --quiet

docs: $(DOCS) $(BUILT) ## 12 s: build the documentation as a site in target/site and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

clean: ## 1 s: remove what was built, but not .venv
	rm -rf target dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f pyengine/_kv*.so $(BUILT) $(COMPILED)
	find pyengine tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## 1 s: remove the environments, too
	rm -rf $(VENV) $(LIGHT) $(PEERS) $(CLIENTS) $(CLUSTER) $(GPU_TESTS) $(GPU_TESTS_TORCH_2_11) $(MUTANTS) $(FREE_THREADED) $(WHEELS) $(LINT_DEPLOY) $(AUDIT)

##@ Tests of one part

test-light: $(LIGHT)/.built ## 12 min: the Python tests in an environment without torch
	$(LIGHT)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Empty REQUIRE_ISA: a modelled level does not count.
test-modelled: ## minutes: the Rust tests of AMX against a model of its instructions; needs AVX-512 BF16
	ATTENTION_CASES=$(MODELLED_CASES) REQUIRE_ISA= \
	  cargo test -p cpu-kernels --features modelled-tiles -- amx

test-levels: $(DEV) $(COMPILED) ## 3 min: tests that depend on the processor, at each of its instruction levels
	@$(BIN)/python tools/levels.py

test-aarch64: aarch64 ## minutes: Rust tests on an emulated Arm processor; as root it installs the emulator
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu" \
	ATTENTION_CASES=$(AARCH64_CASES) PROPTEST_CASES=$(AARCH64_CASES) KV_OPS=$(AARCH64_OPS) REQUIRE_ISA=plain,neon \
	  cargo test --target aarch64-unknown-linux-gnu -p cpu-kernels -p kv-core -p kv-store -p kv-trace -p suffix-index -p kv-router

test-free-threaded: free-threaded ## minutes: the block manager's threads without a GIL; PYTHON_T=python3.14t
	$(FREE_THREADED)/bin/python -c 'import sys, numpy, pyengine._kv, pyengine._cpu; sys.exit(sys._is_gil_enabled() and "the GIL was enabled by an import")'
	$(FREE_THREADED)/bin/python -m pytest -p no:cacheprovider $(THREADED_TESTS)

test-portable: ## 1 min: Rust tests of the crates that run on every platform
	$(PYTHON) tools/portable.py test

test-windows: $(WHEELS)/.installed ## minutes: the same tests, built for Windows and run by wine, if it is installed
	mkdir -p target/wine
	$(WHEELS)/bin/python -m ziglang cc -target x86_64-windows-gnu -shared -o target/wine/bcryptprimitives.dll tools/bcryptprimitives.c -ladvapi32
	PATH="$(abspath $(WHEELS)/bin):$$PATH" CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER=wine \
	WINEPATH="Z:$(CURDIR)/target/wine" WINEDEBUG=-all WINEPREFIX="$(CURDIR)/target/wine/prefix" \
	  $(PYTHON) tools/portable.py zigbuild-test x86_64-pc-windows-gnu --tests --no-fail-fast

clients: $(CLIENTS)/.installed $(BUILT) ## minutes: other projects' clients against the server; the page needs Debian's chromium
	$(CLIENTS)/bin/python -m pytest -m clients tests/clients

cluster-test: $(CLUSTER)/.installed $(BUILT) ## minutes: replicas on Ray: equal answers, one killed, one added, none left behind
	$(CLUSTER)/bin/python -m pytest -m cluster tests/cluster

conformance: $(ENGINE) ## minutes: vLLM's KVCacheManager in the conformance suite; installs it, as make bench does
	$(BIN)/python benches/peers/env.py
	cargo run --release -q -p kv-conformance -- $(PEERS)/bin/python tests/peers/vllm_conformance.py $(CONFORMANCE)

vllm-tests: $(BUILT) ## 8 min: vLLM's own tests of its block management with ours; both engines, step by step
	$(BIN)/python benches/peers/env.py
	$(BIN)/python tests/peers/vllm_own/run.py --python $(PEERS)/bin/python
	PYTHONPATH=target/vllm-own/site $(PEERS)/bin/python -m pytest -c tests/peers/pytest.ini --rootdir . tests/peers

gpu-tests: $(GPU_TESTS)/.installed $(GPU_TESTS_TORCH_2_11)/.installed $(BUILT) ## 24 min: the GPU path on a simulated CUDA device, with the newest torch and with 2.11
	$(GPU_TESTS)/bin/python $(FAKE_CUDA)
	$(GPU_TESTS_TORCH_2_11)/bin/python $(FAKE_CUDA)

gpu-planner: $(GPU_TESTS)/.installed-cuda $(BUILT) ## minutes: flashinfer's planner against our workspaces; downloads nvcc (300 MB), needs g++
	$(GPU_TESTS)/bin/python -m pytest -m fake_cuda tests/fake_cuda/planner

loom: ## minutes: every interleaving of a dropped pin with the manager's calls, and of parallel regions
	RUSTFLAGS="--cfg loom" cargo test -p kv-core --release --test loom --target-dir target/loom
	RUSTFLAGS="--cfg loom" cargo test -p cpu-kernels --release --lib --target-dir target/loom region::

model: ## 3 min: every state of the block manager's model, in larger worlds than make test has
	MODEL=full cargo test --release -p kv-model -- --nocapture --test-threads 1

soak: $(DEV) $(BUILT) ## hours: ten million random operations, 2,000 kills, the full token comparison
	KV_OPS=10000000 KILLS=2000 cargo test --release --workspace
	$(BIN)/pytest -m soak

fuzz: ## 10 min: operations and recordings chosen by a fuzzer for SECONDS=600; needs a C++ compiler
	@command -v cargo-fuzz > /dev/null || cargo install cargo-fuzz --locked
	mkdir -p target/fuzz/corpus
	cargo fuzz run operations --sanitizer none --fuzz-dir rust/fuzz --target-dir target/fuzz \
	  target/fuzz/corpus rust/fuzz/corpus/operations -- -max_total_time=$(SECONDS) -max_len=1024
	mkdir -p target/fuzz/corpus-replay
	cargo fuzz run replay --sanitizer none --fuzz-dir rust/fuzz --target-dir target/fuzz \
	  target/fuzz/corpus-replay rust/fuzz/corpus/replay -- -max_total_time=$(SECONDS) -max_len=4096

mutants: mutants-python ## hours: change kv-core and the Python below in every known way: which changes pass the tests?
	@command -v cargo-mutants > /dev/null || cargo install cargo-mutants --locked
	PROPTEST_MAX_SHRINK_ITERS=0 cargo mutants -p kv-core -j2 --timeout 60 --shuffle -o target/mutants

mutants-python: $(MUTANTS)/.installed $(BUILT) ## hours: the same for the scheduler, batches, recovery, keys; one FILE=pyengine/...: minutes
	$(MUTANTS)/bin/python tools/mutants.py $(FILE)

##@ Figures

bench: $(BUILT) ## 3 min: the block manager against vLLM's, SGLang's and nano-vllm's; installs them (6.5 GB)
	$(BIN)/python benches/peers/env.py
	$(PEERS)/bin/python -m benches.peers $(BENCH)

bench-rust: ## minutes: times of the hot operations in Rust, by criterion; BENCH=decode for one of them
	cargo bench -p kv-bench -- $(BENCH)

bench-worst: ## minutes: the slowest of each call in a million steps, and the median; BENCH='BLOCKS STEPS ROUNDS'
	cargo run --release -p kv-bench --bin worst -- $(BENCH)

guard: valgrind ## minutes: the hot operations take no more instructions than recorded; needs valgrind
	$(PYTHON) benches/guard.py

guard-update: valgrind ## minutes: record how many instructions they take now
	$(PYTHON) benches/guard.py --update

cluster: $(CLUSTER)/.installed $(BUILT) ## 1 min: two replicas on Ray behind the router, under load: a line of figures
	$(CLUSTER)/bin/python -m benches.cluster.show

gpu-first-run: $(DEV) $(BUILT) ## 9 min: is the GPU path right, and how fast? DEVICE=cpu runs it at a tiny size
	$(BIN)/python -m benches.gpu.first_run --device $(DEVICE) --out $(OUT)

gpu-first-run-kit: $(GPU_TESTS)/.installed $(BUILT) ## minutes: pack it for a machine without a network: target/gpu-first-run; needs g++
	$(GPU_TESTS)/bin/python -m benches.gpu.first_run.kit

##@ Releases

wheel: $(DEV) $(BUILT) ## minutes: the abi3 wheel in dist/, tried in an empty environment of another Python
	rm -rf dist
	$(BIN)/maturin build --release --out dist
	$(BIN)/python tools/try_wheel.py dist/*.whl

wheels: $(WHEELS)/.installed ## 9 min: wheels for Linux, macOS and Windows in dist/; PLATFORMS="linux-x86_64 windows-x86_64"
	$(WHEELS)/bin/python -m tools.wheels $(PLATFORMS)

try-wheels: $(WHEELS)/.installed ## 2 min: use them where this machine can; first make aarch64, and musl-tools for musl
	$(WHEELS)/bin/python -m tools.try_wheels

try-bare: ## minutes: as root: the wheel in a new Debian with Python alone; block manager, generate, serve
	@command -v debootstrap > /dev/null || { apt-get update && apt-get install -y debootstrap; }
	sh tools/try_bare.sh dist/*manylinux*x86_64.whl

try-musl: ## minutes: use the musl wheel of dist/ in a container; needs docker
	docker run --rm --volume "$(CURDIR):/src:ro" --workdir /src python:3.13-alpine python tools/try_wheel.py dist/*musllinux*.whl

sdist: $(WHEELS)/.installed ## 2 s: the sources as pip takes them, in dist/
	rm -f dist/*.tar.gz
	$(WHEELS)/bin/python -m maturin sdist --out dist

sbom: ## 1 s: the list of crates in the extension in dist/, in target/sbom
	mkdir -p target/sbom
	$(PYTHON) tools/sbom.py dist > target/sbom/pyengine-kv.cdx.json

crates: ## 1 min: are the crates ready for crates.io? documentation without warnings, packages that build
	RUSTDOCFLAGS="-D warnings" $(PYTHON) tools/portable.py doc --no-deps
	$(PYTHON) tools/portable.py package --locked $(CRATES_ARGS)

publish-crates: ## minutes: publish the crates on crates.io, in the order of their dependencies
	$(PYTHON) tools/portable.py publish --locked

msrv: ## 2 min: build and test the crates with the oldest Rust that Cargo.toml names
	rustup toolchain install --profile minimal $(MSRV)
	$(PYTHON) tools/portable.py +$(MSRV) test --locked --target-dir target/msrv

semver: ## 1 min: is the crates' API compatible with BASELINE=v1.2.3, as their versions say?
	@command -v cargo-semver-checks > /dev/null || cargo install cargo-semver-checks --locked
	$(PYTHON) tools/portable.py semver-checks --baseline-rev $(BASELINE)

deny: ## 1 s: licences, sources and known vulnerabilities of the crates; the last need the network
	@command -v cargo-deny > /dev/null || cargo install cargo-deny --locked
	cargo deny --workspace check $(DENY)

audit: $(AUDIT)/.installed ## minutes: known vulnerabilities of the Python packages; needs the network
	$(BIN)/python tools/requirements.py serve > $(AUDIT)/serve.txt
	$(BIN)/python tools/requirements.py engine >> $(AUDIT)/serve.txt
	$(BIN)/python tools/requirements.py torch >> $(AUDIT)/serve.txt
	$(AUDIT)/bin/pip-audit --strict --progress-spinner off -r $(AUDIT)/serve.txt

lint-workflows: $(LINT_DEPLOY)/.installed ## 1 s: errors and weak points of .github
	$(LINT_DEPLOY)/bin/actionlint
	$(LINT_DEPLOY)/bin/zizmor --offline --no-progress -q .github
	$(LINT_DEPLOY)/bin/check-jsonschema -q --builtin-schema vendor.dependabot .github/dependabot.yml

lint-deploy: $(LINT_DEPLOY)/.installed ## 2 s: the Dockerfile, compose and Kubernetes files of deploy/ against their schemas
	$(LINT_DEPLOY)/bin/hadolint deploy/Dockerfile
	$(LINT_DEPLOY)/bin/check-jsonschema -q --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(LINT_DEPLOY)/bin/kubernetes-validate --strict deploy/kubernetes/*.yaml

release-check: ## 1 s: does TAG=v1.2.3 name the version of Cargo.toml and of the changelog?
	$(PYTHON) tools/release.py check $(TAG)

release-notes: ## 1 s: print the changelog's part on TAG=v1.2.3
	$(PYTHON) tools/release.py notes $(TAG)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "pyengine needs Python 3.11 or later, '$(PYTHON)' is $$($(PYTHON) -V 2>&1); use make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(ENGINE): pyproject.toml uv.lock tools/install.py | $(VENV)/bin/python
	@command -v $(UV) > /dev/null || $(PIP) install uv
	$(BIN)/python $(INSTALL) engine
	@touch $@

$(SERVE): $(ENGINE)
	$(BIN)/python $(INSTALL) serve
	@touch $@

$(WITH_TORCH): $(ENGINE)
	$(BIN)/python $(INSTALL) torch
	@touch $@

$(DEV): $(SERVE)
	$(BIN)/python $(INSTALL) dev
	@touch $@

$(DOCS): $(DEV)
	$(BIN)/python $(INSTALL) docs
	@touch $@

$(LIGHT)/.installed: pyproject.toml uv.lock tools/install.py | $(VENV)/bin/python
	@command -v $(UV) > /dev/null || $(PIP) install uv
	$(PYTHON) -m venv $(LIGHT)
	$(LIGHT)/bin/python $(INSTALL) dev-light
	@touch $@

# $(call environment,FOLDER,GROUP,REQUIREMENTS): an environment with a group of pyproject.toml, and further
# requirements. Python's own pip may be too old to find compatible versions.
define environment
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip --disable-pip-version-check -q --no-input install 'pip>=25'
	$(BIN)/python tools/requirements.py $(2) > $(1)/requirements.txt
	printf '%s\n' $(3) >> $(1)/requirements.txt
	$(1)/bin/python -m pip -q --no-input install -r $(1)/requirements.txt
endef

# $(call borrow,FOLDER): adds the packages of .venv, after its own ones.
define borrow
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pyengine-venv.pth"
endef

$(CLIENTS)/.installed: pyproject.toml $(DEV)
	$(call environment,$(CLIENTS),clients)
	$(call borrow,$(CLIENTS))
	$(call environment,$(CLIENTS)/litellm,litellm) # it needs an older openai
	@touch $@

$(CLUSTER)/.installed: pyproject.toml $(DEV)
	$(call environment,$(CLUSTER),cluster)
	$(call borrow,$(CLUSTER))
	@touch $@

$(GPU_TESTS)/.installed: pyproject.toml $(DEV)
	$(call gpu_tests,$(GPU_TESTS),)
	@touch $@

$(GPU_TESTS_TORCH_2_11)/.installed: pyproject.toml Makefile $(DEV)
	$(call gpu_tests,$(GPU_TESTS_TORCH_2_11),$(TORCH_2_11))
	@touch $@

# $(call gpu_tests,FOLDER,REQUIREMENTS): Python code of attention libraries, whose kernels are not built, and the sources
# of flash-attn.
define gpu_tests
	$(call environment,$(1),gpu-tests,$(2))
	$(call borrow,$(1))
	$(1)/bin/python -m pip -q --no-input install --no-deps flashinfer-python==$(FLASHINFER)
	$(1)/bin/python -m pip -q --no-input install --no-deps --target $(1)/newest flashinfer-python
	$(call flash_attn,$(1),oldest,flash-attn==$(FLASH_ATTN))
	$(call flash_attn,$(1),newest,flash-attn)
endef

# $(call flash_attn,ENVIRONMENT,FOLDER,REQUIREMENT): sources of flash-attn, of both versions.
define flash_attn
	mkdir -p $(1)/flash-attn/$(2)
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $(1)/bin/python -m pip -q --no-input download --no-deps \
	  --no-build-isolation --no-binary :all: --dest $(1)/flash-attn/$(2) $(3)
	tar -xzf $(1)/flash-attn/$(2)/*.tar.gz --strip-components 1 -C $(1)/flash-attn/$(2)
endef

$(GPU_TESTS)/.installed-cuda: $(GPU_TESTS)/.installed
	$(BIN)/python tools/requirements.py gpu-planner > $(GPU_TESTS)/cuda.txt
	$(GPU_TESTS)/bin/python -m pip -q --no-input install --no-deps --target $(GPU_TESTS)/cuda -r $(GPU_TESTS)/cuda.txt
	@touch $@

$(MUTANTS)/.installed: pyproject.toml $(DEV)
	$(call environment,$(MUTANTS),mutants)
	$(call borrow,$(MUTANTS))
	@touch $@

$(WHEELS)/.installed: pyproject.toml | $(VENV)/bin/python
	$(call environment,$(WHEELS),wheels)
	@touch $@

$(LINT_DEPLOY)/.installed: pyproject.toml | $(VENV)/bin/python
	$(call environment,$(LINT_DEPLOY),lint-deploy)
	@touch $@

$(AUDIT)/.installed: pyproject.toml | $(VENV)/bin/python
	$(call environment,$(AUDIT),audit)
	@touch $@

# maturin gives pip the libraries of all extras; unless quiet, pip prints a line for each that it ignores.
$(BUILT): $(RUST_SOURCES) $(ENGINE)
	@command -v cargo > /dev/null || \
	  { echo "cargo was not found: the block manager is Rust; install the toolchain from https://rustup.rs"; exit 1; }
	$(BIN)/python -m maturin --version > /dev/null 2>&1 || $(PIP) install "$$($(BIN)/python tools/requirements.py build)"
	PIP_QUIET=1 VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/python -m maturin develop --release
	@touch $@

# Bytecode of the package; uv compiles that of the libraries. Where PYTHONDONTWRITEBYTECODE is set, Python writes none.
$(COMPILED): $(BUILT) $(shell find pyengine -name '*.py')
	@$(BIN)/python -m compileall -q pyengine
	@touch $@

# The same extension file as that of .venv: both are editable.
$(LIGHT)/.built: $(RUST_SOURCES) $(LIGHT)/.installed
	PIP_QUIET=1 VIRTUAL_ENV=$(abspath $(LIGHT)) $(LIGHT)/bin/python -m maturin develop --release
	@touch $@

rust-tools:
	@cargo fmt --version > /dev/null 2>&1 || { echo "rustfmt is missing, asking rustup for it"; rustup component add rustfmt; }
	@cargo clippy --version > /dev/null 2>&1 || { echo "clippy is missing, asking rustup for it"; rustup component add clippy; }

valgrind:
	@command -v valgrind > /dev/null || sh tools/get_valgrind.sh

# The tests that need only NumPy, in a separate environment, because its extension is not abi3.
THREADED_TESTS := tests/concurrency/test_arrays.py tests/concurrency/test_pins.py tests/concurrency/test_storm.py \
	tests/unit/kv_cache/test_step_buffers.py tests/unit/kv_cache/test_manager.py
free-threaded:
	@command -v $(PYTHON_T) > /dev/null || \
	  { echo "$(PYTHON_T) was not found: install a Python 3.14 without a GIL, or set PYTHON_T=..."; exit 1; }
	@$(PYTHON_T) -c 'import sys, sysconfig; sys.exit(not sysconfig.get_config_var("Py_GIL_DISABLED") or sys.version_info < (3, 14))' || \
	  { echo "$(PYTHON_T) is $$($(PYTHON_T) -VV): a 3.14 or later without a GIL is needed"; exit 1; }
	test -d $(FREE_THREADED) || $(PYTHON_T) -m venv $(FREE_THREADED)
	$(FREE_THREADED)/bin/python -m pip --disable-pip-version-check -q --no-input install numpy hypothesis pytest pytest-timeout 'maturin>=1.9.4,<2'
	PYO3_PYTHON=$(abspath $(FREE_THREADED)/bin/python) VIRTUAL_ENV=$(abspath $(FREE_THREADED)) \
	  $(FREE_THREADED)/bin/python -m maturin develop --release --skip-install --target-dir target/free-threaded

aarch64:
	@rustup target list --installed 2> /dev/null | grep -q aarch64-unknown-linux-gnu || rustup target add aarch64-unknown-linux-gnu
	@command -v qemu-aarch64-static > /dev/null && command -v aarch64-linux-gnu-gcc > /dev/null || sh tools/get_aarch64.sh
