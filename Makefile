# make demo: the main job, elastic and static, compared.   make test: all tests.
# Both set up .venv on the first call. PYTHON=... uses an active environment instead:
# what is missing there is named, nothing is installed.
TORCH ?= torch==2.13.0
EPOCHS ?= 10
SEED ?= 0
VENV := .venv
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

ifdef PYTHON
  PY := $(PYTHON)
  ENVIRONMENT :=
  DOCS_PY := $(PYTHON)
  DOCS_ENVIRONMENT :=
  export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
  PY := $(VENV)/bin/python
  ENVIRONMENT := $(VENV)/.installed
  # The site needs neither torch nor the extension: an environment of its own.
  DOCS_PY := build/docs-venv/bin/python
  DOCS_ENVIRONMENT := build/docs-venv/.installed
endif
TORCHRUN := $(PY) -m torch.distributed.run --standalone --nproc-per-node=4
# The cores are shared with other programs: one intra-op thread per process.
export OMP_NUM_THREADS ?= 1

.PHONY: demo examples test sanitize lint docs build wheel matrix bench seeds models hosts clean

demo: build
	$(TORCHRUN) examples/finetune_vit.py --epochs $(EPOCHS) --seed $(SEED)
	$(TORCHRUN) examples/finetune_vit.py --epochs $(EPOCHS) --seed $(SEED) \
	  --no-freeze --static 4 --name baseline
	$(PY) examples/compare_runs.py
	$(PY) -m pipetransformer report runs/demo/summary.json runs/demo/baseline.json \
	  --output runs/demo/report.html

# Whole data sets. Without MODEL=DIR and DATA=DIR (with sst2/ and xquad/) names of the hub.
examples: build
	$(TORCHRUN) examples/image_classification.py --check
	$(TORCHRUN) examples/text_classification.py --check $(MODEL:%=--model %) $(DATA:%=--data %/sst2)
	$(TORCHRUN) examples/question_answering.py --check $(MODEL:%=--model %) $(DATA:%=--data %/xquad)
	$(TORCHRUN) examples/lora.py --check --first 3 $(MODEL:%=--model %) $(DATA:%=--data %/sst2)
	$(TORCHRUN) examples/causal_lm.py --check $(DATA:%=--data %/sst2)

# TESTS=... are arguments of pytest; default: all tests.
test: build
	$(PY) -m pytest $(TESTS)

# What has many threads, under thread, address and undefined sanitizers.
sanitize:
	tools/sanitize.sh

# The published measurements: benchmarks/harness/commands.py is the table of them all.
bench: build
	$(PY) benchmarks/bench.py
	$(PY) tools/readme_tables.py

seeds: build
	$(PY) benchmarks/bench.py --part seeds

# Hours: real weights and real text, three seeds.
models: build
	$(PY) benchmarks/bench.py --part models

# A wheel for this torch in dist/, tried in an empty environment.
wheel: build
	$(PY) tools/make_wheel.py

# Each Python and torch that is to be had; gigabytes. MATRIX=... are arguments.
matrix:
	python3 tools/matrix.py $(MATRIX)

# As root, on Linux.
hosts: build
	$(PY) benchmarks/bench.py --part hosts

lint: build
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy benchmarks tools
	# The extension needs torch's libraries, which torch loads.
	PYTHONPATH=. $(PY) -c 'import sys, torch; from mypy import stubtest; sys.exit(stubtest.main())' \
	  pipetransformer._C --concise \
	  --allowlist tools/stubtest_allowlist.txt
	$(PY) tools/check_layers.py
	$(PY) tools/readme_tables.py --check
	$(PY) tools/draw.py --check
	tools/check_torch_free.sh
	"$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/clang-format" \
	  --dry-run -Werror $(SOURCES)

# The documents and the docstrings as a site; a warning is an error. The variable
# silences what the theme prints about its successor.
docs: $(DOCS_ENVIRONMENT)
	NO_MKDOCS_2_WARNING=1 $(DOCS_PY) -m mkdocs build --strict
	@echo build/site/index.html

build/docs-venv/.installed: requirements/docs.txt
	python3 -m venv build/docs-venv
	$(DOCS_PY) -m pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	touch $@

build: build/.built

build/.built: setup.py $(SOURCES) $(ENVIRONMENT)
	@mkdir -p build
	@echo "building the extension (a few minutes the first time; build/build.log)"
	@$(PY) setup.py build_ext --inplace > build/build.log 2>&1 || \
	  { grep -E "error|Error" build/build.log | head -n 30; tail -n 5 build/build.log; exit 1; }
	@touch $@

$(VENV)/.installed: $(filter-out %/docs.txt,$(wildcard requirements/*.txt))
	@python3 -c 'import sys; v = sys.version_info; \
	  sys.exit(0 if v >= (3, 10) else f"python3: expected >= 3.10, got {v.major}.{v.minor}")'
	python3 -m venv $(VENV)
	@$(PY) tools/torch_build.py '$(TORCH)'
	# At once: a torch may bound the versions of the tools (2.12: setuptools < 82).
	$(PY) -m pip install --quiet --disable-pip-version-check '$(TORCH)' \
	  -r requirements/examples.txt -r requirements/dev.txt
	# The checkout itself is on the path; building it once in place is enough.
	echo '$(CURDIR)' > "$$($(PY) -c \
	  'import sysconfig; print(sysconfig.get_path("purelib"))')/pipetransformer.pth"
	touch $@

clean:
	rm -rf build dist *.egg-info pipetransformer/*.so pipetransformer/_build_info.py
