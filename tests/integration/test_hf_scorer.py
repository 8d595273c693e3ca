"""A scorer from the job to the loop, on a small random target: trained, logged, judged, and asked as it was trained."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from choicespec.candidates.request import RequestCandidates
from choicespec.candidates.sets import Candidate, Ranked
from choicespec.candidates.sources import Store
from choicespec.cluster.connect import ADDRESS_VARIABLE
from choicespec.decoding.cache import RollbackCache
from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.decoding.loop import decode, trace
from choicespec.decoding.stopping import StopRule
from choicespec.decoding.tap import Tap
from choicespec.drafters.choice import ChoiceDrafter, PriorRanker, Survival
from choicespec.errors import ScorerError, Unsupported
from choicespec.recordings import Recorded, RecordingFolder
from choicespec.records import Proposal, Request, Trace
from choicespec.runtimes.hf import HfRuntime
from choicespec.runtimes.pair_parts import scorer_of
from choicespec.runtimes.runtime import check_supported
from choicespec.scorer.corpus import compared_with_sources
from choicespec.scorer.examples import Examples, build_examples, set_arrays
from choicespec.scorer.files import Scorer, check_scorer, load_scorer
from choicespec.scorer.fit import Dataset, batch_of
from choicespec.scorer.model import survivals
from choicespec.scorer.ranker import ScorerRanker
from choicespec.scorer.source_states import TappedText
from choicespec.spec.experiment_files import load_experiment
from choicespec.spec.method import Autoregressive, Choice
from choicespec.spec.pair import PairSpec, ScorerSpec, TargetSpec
from choicespec.spec.runtime import HfRuntimeSpec, ScriptedRuntimeSpec
from choicespec.tasks.prompts import Prompts, open_task
from contracts.lossless import assert_lossless
from integration.job_homes import job_home, write_repository
from integration.small_checkpoints import save_checkpoint, small_llama
from integration.small_drafters import WINDOW, checkpoint_weights, dflash_net, save_drafter, zlab_config
from mlflow.tracking import MlflowClient
from numpy.typing import NDArray
from safetensors.torch import load_file

from jobs import bench, train
from jobs.terminal import EXPERIMENTS, HOME_VARIABLE

NAME = "small"
LAYERS, SOURCE_LAYERS = (2, 3), (1, 3)
ALL_LAYERS = (1, 2, 3)
LENGTH, MOST = 8, 16
HELD_OUT, TRAIN, TRANSFERRED = 4, 12, 2
NEW_TOKENS = 24
EPOCHS = 2
SCORES = Choice(selection="scorer", min_survival=0.0)  # verifies whole candidates: many are rejected midway
NO_CLUSTER = "no-cluster-here:1"  # joining it would be another error
_SPREAD = 0.15  # the target repeats itself now and then, so that candidates are right in part


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where recordings, scorers and the MLflow database lie; jobs join a cluster of one node."""
    with job_home(tmp_path_factory.mktemp("home")) as folder:
        yield folder


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The experiment."""
    model = small_llama(vocab_size=256, initializer_range=_SPREAD)
    target = {"model": str(save_checkpoint(tmp_path_factory.mktemp("checkpoint"), model))}
    drafter = zlab_config(**WINDOW, vocab_size=256, dflash_config={"mask_token_id": 250, "target_layer_ids": [0, 2]})
    dflash = save_drafter(tmp_path_factory.mktemp("drafter"), drafter, checkpoint_weights(dflash_net()))
    drafters = {"dflash": {"kind": "dflash", "model": str(dflash)}}
    repo = write_repository(tmp_path_factory.mktemp("repo"), modules=60)
    code = {"kind": "python_repo", "folder": str(repo), "limit": HELD_OUT, "max_new_tokens": NEW_TOKENS}
    return {
        "pairs": {
            "small": {"target": target, "drafters": drafters},
            "q4_0": {"target": {**target, "quantization": "q4_0"}, "drafters": drafters, "scorer": {"transfer": True}},
        },
        "runtimes": {"hf": {"kind": "hf", "threads": 1}},
        "tasks": {"code": code},
        "methods": {"scorer": {"kind": "choice", "selection": "scorer"}},
        "scorer": {
            "pair": "small",
            "layers": list(LAYERS),
            "source_layers": list(SOURCE_LAYERS),
            "other_layers": [1],
            "other_sets": [["dflash"]],
            "train_limits": {"code": TRAIN},
            "batch_size": 4,
            "fit": {"epochs": EPOCHS, "batch_size": 32},
            "transfer": ["q4_0"],
            "transfer_limit": TRANSFERRED,
        },
    }


def _write(folder: Path, content: Mapping[str, Any]) -> str:
    """The path of the experiment's YAML."""
    path = folder / f"{NAME}.yaml"
    path.write_text(yaml.safe_dump(dict(content)), encoding="utf-8")
    return str(path)


def _run(job: Any, *arguments: str) -> tuple[int, str]:
    """A job's exit status, and what it printed on one line each."""
    printed = StringIO()
    with redirect_stdout(printed):
        status: int = job.main(arguments)
    return status, printed.getvalue()


def _done(job: Any, *arguments: str) -> str:
    """What a job prints that must succeed."""
    status, printed = _run(job, *arguments)
    assert status == 0, printed
    return printed


class Trained(NamedTuple):
    """A scorer that the job has trained.

    Attributes:
        yaml: the experiment's file.
        folder: the experiment's results.
        printed: by the job.
    """

    yaml: str
    folder: Path
    printed: str

    @property
    def scorer(self) -> Path:
        return self.folder / "scorer"

    def chunks(self) -> dict[Path, int]:
        """When each recorded chunk was written."""
        return {chunk: chunk.stat().st_mtime_ns for chunk in self.folder.parent.glob("recordings/*/chunk-*")}

    def rows(self) -> dict[Path, int]:
        """When each kept row of the table was written."""
        return {file: file.stat().st_mtime_ns for file in self.folder.glob("table/*.json")}


@pytest.fixture(scope="module")
def trained(home: Path, content: dict[str, Any]) -> Trained:
    """The job, run once."""
    path = _write(home, content)
    printed = _done(train, "scorer", path)
    return Trained(path, home / "results" / NAME, printed)


@pytest.fixture(scope="module")
def evaluated(trained: Trained) -> str:
    """What ``evaluate`` printed the first time."""
    return _done(train, "evaluate", trained.yaml)


class Live(NamedTuple):
    """The runtime with the trained scorer, and the held-out prompts."""

    runtime: HfRuntime
    prompts: Prompts

    @property
    def requests(self) -> Sequence[Request]:
        return self.prompts.requests

    def sources(self) -> RequestCandidates:
        """As the job and the runtime draw them."""
        repository = Store(1_000_000)
        for document in self.prompts.repository():
            repository.add(self.runtime.tokenizer.encode(document.text), name=document.name)
        return RequestCandidates(LENGTH, MOST, self.runtime.tokenizer.encode, repository)


@pytest.fixture(scope="module")
def live(trained: Trained) -> Live:
    experiment = load_experiment(trained.yaml, EXPERIMENTS)
    pair = experiment.pairs["small"].model_copy(update={"scorer": ScorerSpec(folder=str(trained.scorer))})
    runtime = HfRuntime(HfRuntimeSpec(threads=1), pair)
    prompts = open_task(experiment.tasks["code"]).prompts(runtime.tokenizer, runtime.context_tokens)
    runtime.load()
    runtime.use_repository(prompts.repository)
    assert len(prompts.requests) == HELD_OUT
    return Live(runtime, prompts)


def test_the_job_saves_a_scorer_with_what_it_is_for(trained: Trained) -> None:
    """Fails if a scorer is saved without its figures, for another target or layer, or with what only training needs."""
    assert {file.name for file in trained.scorer.iterdir()} == {"scorer.json", "scorer.safetensors"}
    pair = load_experiment(trained.yaml, EXPERIMENTS).pairs["small"]
    manifest = scorer_of(pair.model_copy(update={"scorer": ScorerSpec(folder=str(trained.scorer))}))
    assert (manifest.layers, manifest.source_layers, manifest.block_length) == (LAYERS, SOURCE_LAYERS, LENGTH)
    assert manifest.target.precision == "float32"
    assert manifest.trained_on == {"code": TRAIN}
    (row,) = manifest.held_out
    assert (row.task, row.train_prompts) == ("code", TRAIN)
    assert row.found.scorer.accepted.n == HELD_OUT
    assert 0 < row.found.positions <= HELD_OUT * NEW_TOKENS
    assert row.found.prior.accepted.value <= row.found.oracle.accepted.value
    assert f"saved in {trained.scorer}" in trained.printed
    assert manifest.drafters == {}


def test_the_loss_the_figures_and_the_files_are_in_mlflow(trained: Trained, home: Path) -> None:
    """Fails if a person cannot see in the UI how a fit went, what came of it, or with which settings."""
    client = MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow.db")
    experiment = client.get_experiment_by_name(NAME)
    runs = client.search_runs([experiment.experiment_id], "tags.kind = 'scorer'")
    run = runs[-1]
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.parentRunId"]
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert sorted(metric.step for metric in losses) == list(range(1, EPOCHS + 1))
    assert all(metric.value > 0 for metric in losses)
    manifest = json.loads((trained.scorer / "scorer.json").read_text(encoding="utf-8"))
    found = manifest["held_out"][0]["found"]
    for who in ("prior", "scorer", "oracle"):
        for figure in ("top1", "accepted", "accepted_on_path"):
            assert run.data.metrics[f"code.{who}.{figure}"] == pytest.approx(found[who][figure]["value"])
    assert run.data.metrics["code.calibration_error_tokens"] == pytest.approx(found["calibration_error_tokens"])
    assert run.data.metrics["code.held_out_prompts"] == HELD_OUT
    assert run.data.params["fit.epochs"] == str(EPOCHS)
    assert run.data.params["layers"] == str(LAYERS)
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == {"scorer.json", "scorer.safetensors"}


def test_training_again_records_nothing_and_gives_the_same_scorer(trained: Trained) -> None:
    """Fails if hours of recording are repeated for another fit, or if a fit depends on more than its seed."""
    chunks, before = trained.chunks(), _weights(trained.scorer)
    assert len(chunks) == TRAIN // 4 + HELD_OUT // 4
    printed = _done(train, "scorer", trained.yaml)
    assert trained.chunks() == chunks
    assert "recording" not in printed
    for name, value in _weights(trained.scorer).items():
        # of so few tokens, many scales are about as good: the last bits of the weights decide between them
        rtol, atol = (0.2, 0.2) if name in ("scale", "shift") else (1e-4, 1e-5)
        torch.testing.assert_close(value, before[name], rtol=rtol, atol=atol)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "scorer.safetensors")


def test_evaluate_prints_every_variant_and_the_transfer(trained: Trained, evaluated: str) -> None:
    """Fails if a row that was paid for is not shown, or if the transferred scorer is judged on its own target."""
    lines = [[cell.strip() for cell in line.split("│")] for line in evaluated.splitlines() if "│" in line]
    rows = [(cells[3], cells[4], cells[5]) for cells in lines if cells[1:3] == ["code", "finite"]]
    n = str(HELD_OUT)
    expected = {
        ("scorer", "float32", n),
        ("split by function", "float32", n),
        *((f"layer {layer}", "float32", n) for layer in ALL_LAYERS),
        ("without hidden state", "float32", n),
        ("without prior features", "float32", n),
        ("without source states", "float32", n),
        ("seed 1", "float32", n),
        ("seed 2", "float32", n),
        ("scorer", "q4_0 float32", str(TRANSFERRED)),
    }
    assert expected <= set(rows)
    assert len(rows) == len(set(rows)) == len(trained.rows()) - 2
    unions = [(cells[3], cells[4], cells[5]) for cells in lines if cells[1] == "code" and cells[2].startswith("union")]
    assert unions == [("scorer", "float32", n), ("scorer", "q4_0 float32", str(TRANSFERRED))]


def test_a_scorer_over_a_union_is_kept_with_what_it_was_trained_beside(trained: Trained, evaluated: str) -> None:
    """Fails if the scorer of a further set replaces the experiment's, judges no drafts, or is judged on finite sets."""
    pair = load_experiment(trained.yaml, EXPERIMENTS).pairs["small"]
    manifest = scorer_of(pair.model_copy(update={"scorer": ScorerSpec(folder=str(trained.folder / "scorer-dflash"))}))
    assert manifest.drafters == pair.drafters
    (row,) = manifest.held_out
    assert row.variant.candidates == "union[dflash]"
    (finite,) = scorer_of(pair.model_copy(update={"scorer": ScorerSpec(folder=str(trained.scorer))})).held_out
    assert row.found.candidates > finite.found.candidates
    assert row.found.oracle.accepted.value >= finite.found.oracle.accepted.value


def test_evaluate_goes_on_from_the_rows_that_are_kept(trained: Trained, evaluated: str) -> None:
    """Fails if an hour's fits are repeated because the last one was interrupted, or if a lost row is not made again."""
    rows, chunks = trained.rows(), trained.chunks()
    again = _done(train, "evaluate", trained.yaml)
    assert "epoch" not in again
    assert (trained.rows(), trained.chunks()) == (rows, chunks)
    assert _table(again) == _table(evaluated)
    (lost,) = [file for file in rows if json.loads(file.read_text())[0]["variant"]["name"] == "seed 2"]
    lost.unlink()
    third = _done(train, "evaluate", trained.yaml)
    assert {line.split(":")[0] for line in third.splitlines() if "epoch" in line} == {"seed 2"}
    assert {file: written for file, written in trained.rows().items() if file != lost} == {
        file: written for file, written in rows.items() if file != lost
    }
    assert lost.exists()


def _table(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if "│" in line]


@pytest.fixture
def elsewhere(home: Path, evaluated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of everything recorded and fitted, for a test to change."""
    folder = tmp_path / "home"
    shutil.copytree(home, folder)
    monkeypatch.setenv(HOME_VARIABLE, str(folder))
    return folder


def test_a_scorer_that_was_saved_elsewhere_is_evaluated_too(elsewhere: Path, content: dict[str, Any]) -> None:
    """Fails if ``make scorer`` saves where ships what ``make scorer-table`` then looks for in the results: the table
    would end in an error after an hour of fits."""
    path = _write(elsewhere, content)
    results = elsewhere / "results" / NAME
    shutil.rmtree(results / "scorer")
    shutil.rmtree(results / "table")
    _done(train, "scorer", path, "--output", str(elsewhere / "mine"))
    assert {file.name for file in (elsewhere / "mine").iterdir()} == {"scorer.json", "scorer.safetensors"}
    assert "q4_0 float32" in _done(train, "evaluate", path)


def test_more_transferred_prompts_are_other_rows(elsewhere: Path, content: dict[str, Any]) -> None:
    """Fails if a table says of more prompts what was found on fewer."""
    changed = {**content, "scorer": {**content["scorer"], "transfer_limit": TRANSFERRED + 1}}
    printed = _done(train, "evaluate", _write(elsewhere, changed))
    transferred = [[cell.strip() for cell in line.split("│")] for line in _table(printed) if "q4_0" in line]
    assert [cells[5] for cells in transferred] == [str(TRANSFERRED + 1)] * 2, "one of each set"


def test_live_the_outputs_are_plain_decodings(live: Live) -> None:
    """Fails if a scorer can change what is decoded, whatever it chooses and however much of it is verified."""
    plain = {request: live.runtime.generate(request, Autoregressive()) for request in live.requests}
    methods = (SCORES, Choice(selection="scorer"), Choice(selection="scorer", block_length=3, num_candidates=2))
    for method in methods:
        assert_lossless(live.requests, plain.__getitem__, partial(live.runtime.generate, method=method))


def test_live_something_is_accepted_and_something_rejected(live: Live) -> None:
    """Fails if the other tests compare plain decoding with itself, or never roll back."""
    steps = [step for request in live.requests for step in live.runtime.generate(request, SCORES).steps]
    assert any(step.accepted for step in steps)
    assert any(step.accepted < step.proposed for step in steps)


def test_a_cache_that_forgets_too_little_is_caught(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: one rejected token stays in the cache. The comparison above must see it."""
    plain = {request: live.runtime.generate(request, Autoregressive()) for request in live.requests}
    right = RollbackCache.keep
    monkeypatch.setattr(RollbackCache, "keep", lambda self, length: right(self, length + 1 if length else 0))
    with pytest.raises(AssertionError, match="not lossless"):
        assert_lossless(live.requests, plain.__getitem__, partial(live.runtime.generate, method=SCORES))


class Asked(NamedTuple):
    """What a live ranker was asked, and what it said."""

    number: int
    known: int
    ranked: Ranked
    candidates: Sequence[Candidate]
    features_NF: NDArray[np.float32]


class _Noting(PriorRanker):
    """A scorer's ranker that notes what it says."""

    def __init__(self, ranker: ScorerRanker) -> None:
        self._ranker = ranker
        self.place = (0, 0)
        self.asked: list[Asked] = []

    def best(self, candidates: Sequence[Candidate], anchor: int) -> Ranked:
        found = self._ranker.best(candidates, anchor)
        features = self._ranker._features(set_arrays([candidates], len(candidates), LENGTH))
        self.asked.append(Asked(*self.place, found, candidates, features[0]))
        return found


class _Placed:
    """A proposer that tells its ranker where the loop stands."""

    def __init__(self, drafter: ChoiceDrafter, ranker: _Noting) -> None:
        self._drafter, self._ranker = drafter, ranker
        self.number = 0

    def begin(self, request: Request) -> None:
        self._prompt_tokens = len(request.prompt_ids)
        self._drafter.begin(request)

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        self._ranker.place = (self.number, len(token_ids) - self._prompt_tokens)
        return self._drafter.propose(token_ids, limit)

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        self._drafter.finish(request, output_ids)


class Decoded(NamedTuple):
    """What a live ranker was asked, and what came of it."""

    asked: Sequence[Asked]
    traces: Sequence[Trace]


class Compared(NamedTuple):
    """A recording, and the same requests to be decoded live."""

    live: Live
    scorer: Scorer
    recorded: Sequence[Recorded]
    examples: Examples
    survivals_PNL: torch.Tensor

    def decode(self) -> Decoded:
        """Decodes each request with the scorer; the outputs must be the recorded ones."""
        target = CausalLmTarget(self.live.runtime.model)
        for layer in self.scorer.manifest.layers:
            target.watch(layer)
        layers, scale = self.scorer.manifest.source_layers, self.scorer.net.source_scale
        text = TappedText(target.tap(layers), len(layers), scale)
        ranker = _Noting(ScorerRanker(self.scorer, target.hidden_states, text.cosines))
        proposer = _Placed(ChoiceDrafter(self.live.sources(), ranker, Survival(0.0), block_length=8), ranker)
        traces = []
        for number, one in enumerate(self.recorded):
            proposer.number = number
            stop = StopRule((), one.request.max_new_tokens, (), self.live.runtime.tokenizer.decode)
            found = trace(one.request, decode(target, proposer, one.request, stop))
            assert found.output_ids == one.output_ids
            proposer.finish(one.request, found.output_ids)
            traces.append(found)
        return Decoded(ranker.asked, traces)

    def assert_same(self, asked: Sequence[Asked]) -> None:
        """At each live position, the ranker says what the recording's hidden state makes it say there."""
        places = [
            (number, known) for number, one in enumerate(self.recorded) for known in range(1, len(one.output_ids))
        ]
        row_of = {place: row for row, place in enumerate(places)}
        assert asked
        for one in asked:
            row = row_of[one.number, one.known]
            sets = self.examples.sets
            assert int((sets.lengths[row] > 0).sum()) == len(one.candidates)
            column = one.candidates.index(one.ranked.candidate)
            length = int(sets.lengths[row, column])
            assert tuple(sets.token_ids[row, column, :length].tolist()) == one.ranked.candidate.token_ids
            features_NF = sets.features[row, : len(one.candidates)]
            np.testing.assert_allclose(one.features_NF, features_NF, rtol=0, atol=_ROUNDING, err_msg=str(one))
            survivals_NL = self.survivals_PNL[row]
            np.testing.assert_allclose(
                one.ranked.survival, survivals_NL[column, :length].numpy(), rtol=0, atol=_ROUNDING, err_msg=str(one)
            )
            most = survivals_NL.sum(dim=-1).max()
            assert survivals_NL[column].sum() == pytest.approx(float(most), abs=LENGTH * _ROUNDING)


_ROUNDING = 0.01  # what float16 and a batch may change of a probability


@pytest.fixture(scope="module")
def compared(trained: Trained, live: Live) -> Compared:
    folders = [RecordingFolder(path) for path in trained.folder.parent.glob("recordings/python_repo-test-*")]
    (folder,) = [one for one in folders if one.manifest().target == live.runtime.identity]
    recorded = folder.read()
    assert tuple(one.request for one in recorded) == tuple(live.requests)
    manifest = check_scorer(trained.scorer, live.runtime.identity, transfer=False)
    embedding = live.runtime.input_embedding()
    scorer = load_scorer(trained.scorer, manifest, lambda token_ids: embedding[token_ids])
    examples = build_examples(recorded, live.sources(), MOST, LENGTH)
    ids, layers = [one.request.request_id for one in recorded], manifest.source_layers
    examples = compared_with_sources(examples, ids, folder.walk(layers), layers, scorer.net.source_scale)
    assert examples.sets.own_ages.any()
    states = [np.concatenate([one.hidden_states[layer] for one in recorded]) for layer in manifest.layers]
    batch = batch_of(Dataset(examples, np.concatenate(states, axis=1)), np.arange(len(examples.anchors)))
    with torch.inference_mode():
        found = survivals(scorer.net(batch), batch.lengths_PN)
    return Compared(live, scorer, recorded, examples, found)


def test_live_a_scorer_says_what_it_says_of_the_recording(compared: Compared) -> None:
    """Fails if a scorer is asked with other hidden states, anchors or candidates than it was trained and judged on."""
    asked, _ = compared.decode()
    known = [one.known for one in asked]
    assert 1 in known, "right after the prompt"
    assert any(len(one.candidates) > 1 for one in asked)
    compared.assert_same(asked)


def _last_of_the_block(self: CausalLmTarget, layer: int) -> torch.Tensor:
    """Also where that token was rejected."""
    return self._hidden_TH[layer][-1]


def _first_of_the_block(self: CausalLmTarget, layer: int) -> torch.Tensor:
    """Also where more was accepted; of a prompt, its first token."""
    return self._hidden_TH[layer][0]


def _one_before(self: CausalLmTarget, layer: int) -> torch.Tensor:
    """The token before the last one kept, where the block has one."""
    return self._hidden_TH[layer][max(self._last_kept - 1, 0)]


def _one_behind(self: CausalLmTarget, layer: int) -> torch.Tensor:
    """The token after the last one kept, where the block has one."""
    states_TH = self._hidden_TH[layer]
    return states_TH[min(self._last_kept + 1, len(states_TH) - 1)]


def _another_layer(self: CausalLmTarget, layer: int) -> torch.Tensor:
    """The layers in another order."""
    other = dict(zip(LAYERS, reversed(LAYERS), strict=True))[layer]
    return self._hidden_TH[other][self._last_kept]


FAULTS = (_last_of_the_block, _first_of_the_block, _one_before, _one_behind, _another_layer)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_a_hidden_state_of_another_place_is_caught(
    compared: Compared, fault: Callable[[CausalLmTarget, int], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted faults: the outputs stay plain decoding's, and only the comparison with the recording can tell."""
    monkeypatch.setattr(CausalLmTarget, "hidden_states", fault)
    asked, _ = compared.decode()
    with pytest.raises(AssertionError):  # other probabilities, or another choice
        compared.assert_same(asked)


@pytest.mark.parametrize("rows", [1, -1])
def test_a_state_of_another_place_at_a_source_is_caught(
    compared: Compared, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted faults: the states that a scorer compares are those of the tokens before, or after."""
    read = Tap.read
    monkeypatch.setattr(Tap, "read", lambda tap: read(tap).roll(rows, dims=0))
    asked, _ = compared.decode()
    with pytest.raises(AssertionError):
        compared.assert_same(asked)


def test_a_runtime_ranks_with_the_scorer_that_the_pair_names(compared: Compared) -> None:
    """Fails if ``generate`` chooses by the prior, or by another scorer, under the scorer's name."""

    def steps(method: Choice) -> list[list[tuple[int, int, str]]]:
        """Of each request, by a runtime that has seen no other."""
        runtime = compared.live.runtime
        runtime.use_repository(compared.live.prompts.repository)
        return [_steps(runtime.generate(request, method)) for request in compared.live.requests]

    assert steps(SCORES) == [_steps(found) for found in compared.decode().traces]
    assert steps(SCORES) != steps(Choice(min_survival=0.0)), "or this test says nothing"


def _steps(found: Trace) -> list[tuple[int, int, str]]:
    return [(step.proposed, step.accepted, step.source) for step in found.steps]


def test_measuring_a_scorer_shows_what_it_was_saved_with(
    trained: Trained, home: Path, content: dict[str, Any], tmp_path: Path
) -> None:
    """Fails if a live figure stands without the scorer's own, or if a scored trial cannot be measured by the job."""
    small = {**content["pairs"]["small"], "scorer": {"folder": str(trained.scorer)}}
    measured = {
        **content,
        "pairs": {"small": small, "q4_0": content["pairs"]["q4_0"]},
        "matrix": [{"pairs": ["small"]}],
    }
    printed = _done(bench, _write(tmp_path, measured))
    assert "choice scorer L=8" in printed
    assert "100.0 [" in printed
    assert "the scorer, as it was saved" in printed


def _bad(content: dict[str, Any], **scorer: object) -> dict[str, Any]:
    return {**content, "scorer": {**content["scorer"], **scorer}}


@pytest.fixture
def nothing_starts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that goes on to start or join a Ray fails with a traceback."""
    monkeypatch.setenv(ADDRESS_VARIABLE, NO_CLUSTER)


@pytest.mark.parametrize("command", ["scorer", "evaluate"])
def test_an_experiment_that_trains_nothing_is_said(nothing_starts: None, command: str) -> None:
    """Fails if a person is shown a traceback, or waits for a recording, where the experiment says nothing to train."""
    status, printed = _run(train, command, "smollm2")
    assert status == 2
    assert "smollm2: no field 'scorer', which says what is recorded" in printed


def test_a_runtime_without_hidden_states_is_said(nothing_starts: None, content: dict[str, Any], tmp_path: Path) -> None:
    """Fails if it is found out by recording."""
    changed = _bad(content, runtime="table") | {"runtimes": {**content["runtimes"], "table": {"kind": "scripted"}}}
    status, printed = _run(train, "scorer", _write(tmp_path, changed))
    assert status == 2
    assert "scorer.runtime: 'table' has no hidden states; name one of kind hf" in printed


def test_a_missing_target_is_said(nothing_starts: None, content: dict[str, Any], tmp_path: Path) -> None:
    """Fails if a pair to which the scorer is transferred is looked for only when everything else is done."""
    pairs = {**content["pairs"], "q4_0": {"target": {"model": str(tmp_path / "nowhere")}}}
    status, printed = _run(train, "evaluate", _write(tmp_path, {**content, "pairs": pairs}))
    assert status == 2
    assert f"no folder '{tmp_path / 'nowhere'}'" in printed


@pytest.mark.parametrize("layers", [[0], [4], [-1, 2]])
def test_a_layer_that_the_target_lacks_is_said(
    nothing_starts: None, content: dict[str, Any], tmp_path: Path, layers: list[int]
) -> None:
    """Fails if it is found out by a worker, with a traceback; or if layer 0 is recorded as the last one."""
    status, printed = _run(train, "scorer", _write(tmp_path, _bad(content, layers=layers)))
    assert status == 2
    assert "scorer.layers" in printed


def test_held_out_prompts_are_not_the_train_prompts(
    nothing_starts: None, content: dict[str, Any], tmp_path: Path
) -> None:
    """Fails if a scorer is judged on the prompts that it was fitted to, and ships with these figures."""
    changed = {**content, "tasks": {"code": {**content["tasks"]["code"], "split": "train"}}}
    status, printed = _run(train, "scorer", _write(tmp_path, changed))
    assert status == 2
    assert "tasks.code" in printed
    assert "split" in printed


def _verdicts(printed: str) -> list[str]:
    """The last column of a dry run's table, a trial each, with the reason below the table that it points at."""
    lines = printed.splitlines()
    notes = {line.partition(" ")[0]: line for line in lines if line.startswith("(")}
    cells = [line.split("│")[-2].strip() for line in lines if line.startswith("│")]
    return [notes.get(cell.removeprefix("no "), cell) for cell in cells]


def test_a_dry_run_says_that_a_scorer_is_missing(
    home: Path, content: dict[str, Any], trained: Trained, tmp_path: Path
) -> None:
    """Fails if it is said only once the target is loaded, or not with the way to one."""
    folders = {
        "named": {"folder": str(tmp_path / "nowhere")},
        "shipped": {},
        "good": {"folder": str(trained.scorer)},
    }
    pairs = {name: {**content["pairs"]["small"], "scorer": scorer} for name, scorer in folders.items()}
    pairs["q4_0"] = {**content["pairs"]["q4_0"], "scorer": {"folder": str(trained.scorer)}}
    changed = {**content, "pairs": {**pairs, "small": pairs["good"]}}
    methods = {**content["methods"], "long": {"kind": "choice", "selection": "scorer", "block_length": LENGTH + 1}}
    matrix = [
        {"pairs": ["named", "shipped", "good", "q4_0"], "methods": ["scorer"]},
        {"pairs": ["good"], "methods": ["long"]},
    ]
    arguments = _write(tmp_path, {**changed, "methods": methods, "matrix": matrix}), "--dry-run"
    named, shipped, good, precision, long = _verdicts(_done(bench, *arguments))
    assert f"cannot read {tmp_path / 'nowhere' / 'scorer.json'}" in named
    assert "no scorer ships for this target" in shipped
    assert good in ("yes", "measured already")
    assert "trained for precision float32, but this pair has q4_0 float32" in precision
    assert "judges 8 tokens at most, but block_length is 9" in long
    assert all("train" in verdict for verdict in (named, shipped))


def test_a_block_longer_than_the_scorers_is_refused(live: Live) -> None:
    """Fails if a candidate meets a network that has no place for its last tokens, in the middle of a decode."""
    longer = Choice(selection="scorer", block_length=LENGTH + 1)
    pair = live.runtime._pair
    with pytest.raises(Unsupported, match="judges 8 tokens at most, but block_length is 9"):
        check_supported(HfRuntimeSpec(), pair, longer)
    assert HfRuntime.refusal(pair, Choice(selection="scorer", block_length=LENGTH)) is None
    assert HfRuntime.refusal(pair, Choice(block_length=LENGTH + 1)) is None


def test_a_scorer_that_vanishes_is_said_at_its_first_use(live: Live, tmp_path: Path) -> None:
    """Fails if a method that scores goes on as another method."""
    gone = live.runtime._pair.model_copy(update={"scorer": ScorerSpec(folder=str(tmp_path / "gone"))})
    runtime = HfRuntime(HfRuntimeSpec(threads=1), gone)
    with pytest.raises(ScorerError, match="gone"):
        runtime.generate(live.requests[0], SCORES)
    assert runtime.generate(live.requests[0], Choice()).output_ids


def test_the_scripted_runtime_names_the_one_that_can_score(live: Live) -> None:
    """Fails if a person is not told where a method that scores runs."""
    with pytest.raises(Unsupported, match=r"a scorer reads hidden states.*supported by: hf"):
        check_supported(ScriptedRuntimeSpec(), live.runtime._pair, SCORES)


def test_the_scripted_runtime_refuses_to_score_for_a_target_of_no_weights() -> None:
    """Fails if the reason is lost, or weights are looked for, where the pair is a table, as the runtime's pairs are."""
    table = PairSpec(target=TargetSpec(model="./table"))
    with pytest.raises(Unsupported, match="a scorer reads hidden states"):
        check_supported(ScriptedRuntimeSpec(), table, SCORES)
