"""Experiments: how they are read, what is said of wrong ones, and which trials they hold."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from choicespec.errors import SpecError
from choicespec.spec.experiment import ExperimentSpec, TrialSpec, parse_experiment
from choicespec.spec.experiment_files import load_experiment
from choicespec.spec.method import Ngram

EXPERIMENTS = Path(__file__).parents[2] / "jobs" / "experiments"
GOOD: dict[str, Any] = {
    "pairs": {"small": {"target": {"model": "m"}}, "large": {"target": {"model": "n"}}},
    "runtimes": {"here": {"kind": "scripted"}},
    "tasks": {"calls": {"kind": "tool_call"}, "code": {"kind": "python_repo"}},
    "methods": {
        "plain": {"kind": "autoregressive"},
        "fast": {"kind": "ngram"},
        "faster": {"kind": "ngram", "max_ngram": 5},
    },
}
SCORER: dict[str, Any] = {"pair": "small", "runtime": "here", "layers": [3], "train_limits": {"calls": 8, "code": 4}}
TRIAL: dict[str, Any] = {
    "pair": {"target": {"model": "m", "tensor_parallel": 2}, "gpus": 4},
    "runtime": {"kind": "hf"},
    "task": {"kind": "tool_call"},
    "method": {"kind": "ngram"},
}
Load = Callable[[str], ExperimentSpec]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Reads a text as the experiment ``mine``, which lies beside one named ``other``."""
    (tmp_path / "other.yaml").write_text("")

    def load_text(text: str) -> ExperimentSpec:
        (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
        return load_experiment("mine", tmp_path)

    return load_text


def changed(content: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """The content with another value at a dotted path."""
    first, _, rest = path.partition(".")
    return {**content, first: changed(content.get(first, {}), rest, value) if rest else value}


def parse(**changes: object) -> ExperimentSpec:
    return parse_experiment({"name": "x", **GOOD, **changes}, "x.yaml")


def labels(experiment: ExperimentSpec) -> list[tuple[str, str, str]]:
    return [(t.pair.target.model, t.task.kind, t.method.label) for t in experiment.trials()]


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_of_the_project_loads(path: Path) -> None:
    """Fails if a field is renamed and an experiment forgotten."""
    experiment = load_experiment(path.stem, EXPERIMENTS)
    assert experiment.name == path.stem
    assert experiment.trials()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("method", {}, "method: unknown field; known fields: name, pairs, runtimes, tasks, methods, matrix, scorer"),
        ("pairs.small.gpu", 1, "pairs.small.gpu: unknown field; known fields: target, drafters, scorer, gpus"),
        ("pairs.small.target.typ", 1, "pairs.small.target.typ: unknown field; known fields: model, revision, dtype"),
        ("runtimes.here.thread", 1, "runtimes.here.thread: unknown field; known fields: kind, threads"),
        ("tasks.calls.limits", 1, "tasks.calls.limits: unknown field; known fields: kind, limit, context_tokens"),
        ("methods.fast.k", 1, "methods.fast.k: unknown field; known fields: exact, pace, kind, num_draft_tokens"),
        ("matrix", [{}, {"method": 1}], "matrix.1.method: unknown field; known fields: pairs, runtimes, tasks"),
        ("methods.fast.kind", "ngrm", "methods.fast.kind: unknown kind 'ngrm'; known kinds: 'autoregressive', "),
        ("methods.new", {}, "methods.new.kind: missing; known kinds: 'autoregressive', 'choice', 'draft', 'ngram'"),
        ("methods", {8: {"kind": "ngram"}}, "methods.8.[key]: Input should be a valid string"),
        ("methods.8", 3, "methods.8: Input should be a valid dictionary"),
        ("methods.fast.max_ngram", 0, "methods.fast.max_ngram: Input should be greater than or equal to 1"),
        ("methods.fast.min_ngram", 9, "methods.fast: min_ngram=9 exceeds max_ngram=3"),
        ("tasks.calls.context_tokens", "big", "tasks.calls.context_tokens: Input should be 'max'"),
        ("tasks.log", {"kind": "chat_log"}, "tasks.log.path: Field required"),
        ("pairs.small.target.dtype", "int4", "pairs.small.target.dtype: Input should be 'float32', 'bfloat16', "),
        ("pairs.small.drafters.d", {"kind": "eagle"}, "pairs.small.drafters.d.kind: Input should be 'draft_model'"),
        ("pairs.small.drafters.d", {"kind": "dflash"}, "pairs.small.drafters.d: a drafter of kind 'dflash' needs"),
        ("pairs.small.target", {"model": "m", "dtype": "gguf", "quantization": "q8_0"},
         "pairs.small.target: quantization=q8_0 rounds other weights; leave it out with dtype=gguf"),
        ("pairs.small.target.tensor_parallel", 2, "pairs.small: target.tensor_parallel=2 needs as many gpus; gpus=0"),
        ("pairs.small.scorer.file", "f", "pairs.small.scorer.file: unknown field; known fields: folder, transfer"),
        ("methods.new", {"kind": "choice", "selection": "best"}, "methods.new.selection: Input should be 'prior', "),
        ("methods.new", {"kind": "choice", "min_survival": 2}, "methods.new.min_survival: Input should be less than"),
        ("scorer", {**SCORER, "layer": 1}, "scorer.layer: unknown field; known fields: pair, runtime, layers"),
        ("scorer", {**SCORER, "fit": {"epoch": 1}}, "scorer.fit.epoch: unknown field; known fields: epochs, "),
        ("scorer", {**SCORER, "fit": {"epochs": 0}}, "scorer.fit.epochs: Input should be greater than or equal to 1"),
        ("scorer", {**SCORER, "layers": []}, "scorer.layers: Tuple should have at least 1 item"),
        ("scorer", {**SCORER, "layers": [0]}, "scorer.layers.0: Input should be greater than or equal to 1"),
        ("scorer", {**SCORER, "pair": "smal"}, "scorer.pair: unknown name 'smal'; known: "),
        ("scorer", {**SCORER, "transfer": ["q"]}, "scorer.transfer: unknown name 'q'; known: "),
        ("scorer", {**SCORER, "runtime": "hf"}, "scorer.runtime: unknown name 'hf'; known: here"),
        ("scorer", {**SCORER, "train_limits": {"cals": 1}}, "scorer.train_limits: unknown name 'cals'; known: calls"),
        ("scorer", {**SCORER, "train_limits": {"calls": 0}}, "scorer.train_limits.calls: Input should be greater than"),
        ("matrix", [{}, {"tasks": ["cals"]}], "matrix.1.tasks: unknown name 'cals'; known: calls, code"),
        ("matrix", [{"methods": []}], "matrix.0.methods: Tuple should have at least 1 item"),
        ("matrix", [], "matrix: Tuple should have at least 1 item"),
        ("methods", {}, "methods: Dictionary should have at least 1 item"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_path(load: Load, path: str, value: object, said: str) -> None:
    """Fails if a misspelt setting is dropped silently, or if the path or the names are not those of the YAML."""
    with pytest.raises(SpecError, match=re.escape(said)) as caught:
        load(yaml.safe_dump(changed(GOOD, path, value)))
    assert "mine.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("other", "accepted"),
    [
        ({"split": "train"}, True),
        ({"split": "train", "categories": ["multiple", "irrelevance"]}, True),
        ({"split": "test", "skip": 24}, True),
        ({"split": "test", "skip": 23}, False),
        ({"split": "test", "skip": 24, "categories": ["multiple"]}, False),
        ({"split": "train", "seed": 1}, False),
    ],
)
def test_a_scorer_is_fitted_to_no_prompt_that_it_is_judged_on(
    load: Load, other: dict[str, Any], accepted: bool
) -> None:
    """Fails if a held-out prompt may be fitted to, or a train split of more categories is refused."""
    content = changed(GOOD, "tasks.others", {"kind": "tool_call", **other})
    content["scorer"] = {**SCORER, "train_tasks": {"calls": "others"}}
    with nullcontext() if accepted else pytest.raises(SpecError, match=r"scorer\.train_tasks\.calls: .*same prompts"):
        load(yaml.safe_dump(content))


def test_everything_that_is_wrong_is_said_at_once(load: Load) -> None:
    """Fails if a person mends one mistake only to be shown the next."""
    content = changed(changed(GOOD, "pairs.small.gpu", 1), "methods.fast.k", 2)
    with pytest.raises(SpecError, match=r"(?s)pairs\.small\.gpu.*methods\.fast\.k"):
        load(yaml.safe_dump(content))


@pytest.mark.parametrize("text", ["pairs: [", "a: b: c", "\tpairs: 1", "day: 2024-99-99", "[1, 2]", "", "just words"])
def test_broken_yaml_names_the_file(load: Load, text: str) -> None:
    """Fails if a parser's own error escapes with a traceback."""
    with pytest.raises(SpecError, match=r"mine\.yaml"):
        load(text)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    """Fails if bytes that are not UTF-8 escape with a traceback."""
    (tmp_path / "mine.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(SpecError, match=r"mine\.yaml"):
        load_experiment("mine", tmp_path)


def test_a_missing_experiment_lists_those_there_are(tmp_path: Path) -> None:
    """Fails if a person must look for the names, by name or by path."""
    for name in ("second", "first"):
        (tmp_path / f"{name}.yaml").write_text("")
    with pytest.raises(SpecError, match=r"third\.yaml; known names: first, second"):
        load_experiment("third", tmp_path)
    with pytest.raises(SpecError, match=r"elsewhere/e\.yaml; known names: first, second"):
        load_experiment("elsewhere/e.yaml", tmp_path)


def test_an_experiment_is_named_after_its_file_unless_it_names_itself(load: Load) -> None:
    """Fails if two experiments share a results folder by default, or if a given name is lost."""
    assert load(yaml.safe_dump(GOOD)).name == "mine"
    assert load(yaml.safe_dump({"name": "given", **GOOD})).name == "given"


def test_without_a_matrix_every_combination_is_a_trial() -> None:
    """Fails if an axis is not expanded, or in another order than it was written."""
    assert labels(parse()) == [
        (model, task, method)
        for model in ("m", "n")
        for task in ("tool_call", "python_repo")
        for method in ("autoregressive", "ngram k=8", "ngram k=8")
    ]


def test_blocks_are_expanded_in_order_and_a_combination_is_measured_once() -> None:
    """Fails if a block takes more than it names, or if what two blocks name is measured twice."""
    blocks = [
        {"pairs": ["large"], "tasks": ["code"], "methods": ["fast"]},
        {"pairs": ["large"], "methods": ["fast", "plain"]},
    ]
    fast, plain = "ngram k=8", "autoregressive"
    assert labels(parse(matrix=blocks)) == [
        ("n", "python_repo", fast),
        ("n", "tool_call", fast),
        ("n", "tool_call", plain),
        ("n", "python_repo", plain),
    ]


def test_two_names_of_one_method_are_one_trial() -> None:
    """Fails if the name that an experiment gives is part of a trial's identity."""
    methods = {"one": {"kind": "ngram"}, "two": {"kind": "ngram", "num_draft_tokens": 8}}
    assert len(parse(methods=methods, tasks={"t": {"kind": "tool_call"}}).trials()) == 2  # a pair each


def test_narrowed_keeps_what_is_named() -> None:
    """Fails if a short run from the command line measures other trials than the long one."""
    narrowed = parse().narrowed(limit=3, tasks=["code"], methods=["fast", "plain"])
    assert {trial.task.limit for trial in narrowed.trials()} == {3}
    assert labels(narrowed) == [
        (model, "python_repo", method) for model in ("m", "n") for method in ("ngram k=8", "autoregressive")
    ]
    assert parse().narrowed() == parse()


def test_narrowed_drops_blocks_that_have_nothing_left() -> None:
    """Fails if a block whose methods are all left out grows to every method instead."""
    blocks = [{"pairs": ["small"], "methods": ["fast"]}, {"pairs": ["large"], "methods": ["plain", "fast"]}]
    narrowed = parse(matrix=blocks).narrowed(methods=["plain"])
    assert [(model, method) for model, _, method in labels(narrowed)] == [("n", "autoregressive")] * 2


def test_an_experiment_that_trains_a_scorer_can_be_narrowed() -> None:
    """Fails if a short measurement of one task is refused because of what is trained for it."""
    narrowed = parse(scorer=SCORER).narrowed(limit=3, tasks=["calls"], methods=["fast"])
    assert labels(narrowed) == [(model, "tool_call", "ngram k=8") for model in ("m", "n")]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"methods": ["fst"]}, "--methods: unknown name 'fst'; known: plain, fast, faster"),
        ({"tasks": ["calls", "cod"]}, "--tasks: unknown name 'cod'; known: calls, code"),
    ],
)
def test_narrowed_refuses_unknown_names(names: dict[str, list[str]], said: str) -> None:
    """Fails if a misspelt name on the command line measures nothing, or everything."""
    with pytest.raises(SpecError, match=re.escape(said)):
        parse().narrowed(**names)  # type: ignore[arg-type]


def test_narrowed_to_no_prompt_is_refused() -> None:
    """Fails if values from the command line are not validated."""
    with pytest.raises(SpecError, match=r"tasks\.calls\.limit"):
        parse().narrowed(limit=0)


def test_narrowed_to_no_trial_is_refused() -> None:
    """Fails if a job with nothing to do ends as if all were well."""
    blocks = [{"tasks": ["calls"], "methods": ["fast"]}, {"tasks": ["code"], "methods": ["plain"]}]
    with pytest.raises(SpecError, match="matrix"):
        parse(matrix=blocks).narrowed(tasks=["code"], methods=["fast"])


def test_the_fingerprint_does_not_depend_on_the_order_or_on_defaults_written_out() -> None:
    """Fails if a YAML that says the same in another order is measured again."""
    turned = {key: TRIAL[key] for key in reversed(TRIAL)}
    turned["method"] = {"max_ngram": 3, "min_ngram": 1, "num_draft_tokens": 8, "kind": "ngram"}
    turned["pair"] = {"gpus": 4, "target": {"tensor_parallel": 2, "model": "m"}}
    assert TrialSpec.model_validate(turned).fingerprint() == TrialSpec.model_validate(TRIAL).fingerprint()


OTHER_VALUES: dict[str, object] = {
    "pair.target.model": "n",
    "pair.target.revision": "v2",
    "pair.target.dtype": "bfloat16",
    "pair.target.quantization": "q4_0",
    "pair.target.tensor_parallel": 1,
    "pair.scorer.folder": "elsewhere",
    "pair.scorer.transfer": True,
    "pair.scorer.sha256": "0" * 64,
    "pair.drafters": {"mtp": {"kind": "mtp"}},
    "pair.gpus": 2,
    "runtime.kind": "scripted",
    "runtime.threads": 1,
    "task.kind": "python_repo",
    "task.limit": 1,
    "task.context_tokens": 300,
    "task.max_new_tokens": 1,
    "task.split": "train",
    "task.seed": 1,
    "task.stop": ["x"],
    "task.categories": ["multiple"],
    "method.kind": "autoregressive",
    "method.num_draft_tokens": 1,
    "method.min_ngram": 2,
    "method.max_ngram": 2,
}


def test_the_fingerprint_changes_with_every_field() -> None:
    """Fails if a result is taken for that of another trial; a new field must be added to the table above."""
    trial = TrialSpec.model_validate(TRIAL)
    assert set(_leaves(trial.model_dump(mode="json"))) == set(OTHER_VALUES)
    others = [TrialSpec.model_validate(changed(TRIAL, path, value)) for path, value in OTHER_VALUES.items()]
    assert len({other.fingerprint() for other in (trial, *others)}) == 1 + len(others)


def _leaves(content: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, value in content.items():
        found += _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [f"{prefix}{name}"]
    return found


def test_the_fingerprint_is_the_same_in_every_process_and_spec_loads_nothing_heavy() -> None:
    """Fails if an identity rests on Python's seeded hash, or if asking what a spec holds takes a framework's start."""
    code = (
        "import json, sys\n"
        "from choicespec.spec.experiment import TrialSpec\n"
        "print(TrialSpec.model_validate(json.loads(sys.argv[1])).fingerprint())\n"
        "print(*sorted({'torch', 'ray', 'transformers', 'mlflow', 'numpy'} & set(sys.modules)))\n"
    )
    trial = TrialSpec.model_validate(TRIAL)
    for seed in ("1", "2"):
        command = [sys.executable, "-c", code, trial.model_dump_json()]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.split() == [trial.fingerprint()]


def test_a_changed_chat_log_is_a_new_trial(load: Load, tmp_path: Path) -> None:
    """Fails if resume takes the figures of yesterday's file for those of today's."""
    log = tmp_path / "chats.jsonl"
    content = yaml.safe_dump({**GOOD, "tasks": {"log": {"kind": "chat_log", "path": str(log)}}})
    fingerprints = []
    for text in ("one", "two", "one"):
        log.write_text(text)
        fingerprints.append(load(content).trials()[0].fingerprint())
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]
    assert load(content).narrowed(limit=24).trials()[0].fingerprint() == fingerprints[2]


def test_a_changed_scorer_is_a_new_trial(load: Load, tmp_path: Path) -> None:
    """Fails if resume takes the figures of yesterday's scorer for those of the one that was trained today."""
    folder = tmp_path / "scorer"
    folder.mkdir()
    (folder / "scorer.json").write_text("{}")
    pair = {"target": {"model": "m"}, "scorer": {"folder": str(folder)}}
    methods = {"scores": {"kind": "choice", "selection": "scorer"}}
    content = yaml.safe_dump({**GOOD, "pairs": {"small": pair}, "methods": methods})
    fingerprints = []
    for weights in (b"one", b"two", b"one"):
        (folder / "scorer.safetensors").write_bytes(weights)
        fingerprints.append(load(content).trials()[0].fingerprint())
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]


def test_a_changed_drafter_is_a_new_trial(load: Load, tmp_path: Path) -> None:
    """Fails if resume takes the figures of yesterday's drafter for those of the one that was trained today."""
    pair = {"target": {"model": "m"}, "drafters": {"block": {"kind": "dflash", "model": str(tmp_path)}}}
    methods = {"drafts": {"kind": "draft", "drafter": "block"}}
    content = yaml.safe_dump({**GOOD, "pairs": {"small": pair}, "methods": methods})
    fingerprints = []
    for weights in (b"one", b"two", b"one"):
        (tmp_path / "model.safetensors").write_bytes(weights)
        fingerprints.append(load(content).trials()[0].fingerprint())
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]


def test_a_missing_chat_log_is_said_with_the_tasks_path(load: Load) -> None:
    """Fails if a wrong path is found only once a model is loaded."""
    content = {**GOOD, "tasks": {"log": {"kind": "chat_log", "path": "/no/such.jsonl"}}}
    with pytest.raises(SpecError, match=r"tasks\.log\.path: no file '/no/such\.jsonl'"):
        load(yaml.safe_dump(content))


def test_a_specification_cannot_be_changed() -> None:
    """Fails if a trial could drift from its fingerprint."""
    with pytest.raises(ValueError, match="frozen"):
        Ngram().num_draft_tokens = 4  # type: ignore[misc]
