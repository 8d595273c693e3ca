"""The two published tables as typed rows, and which of them a trial is."""

import csv
from collections.abc import Collection, Iterator
from functools import cache
from importlib import resources
from pathlib import PurePosixPath
from typing import NamedTuple

from choicespec.spec.experiment import ExperimentSpec, TrialSpec
from choicespec.spec.method import Autoregressive, Choice, Draft, MethodSpec, Ngram
from choicespec.spec.pair import PairSpec, TargetSpec

_FOLDER = resources.files("choicespec.reports") / "published"
_TARGETS = {
    "Qwen/Qwen3-4B": "Qwen3-4B",
    "Qwen/Qwen3.8-27B": "Qwen3.8-27B",
    "Qwen/Qwen3.8-27B-FP8": "Qwen3.8-27B",
    "cyankiwi/Qwen3.8-27B-AWQ-INT4": "Qwen3.8-27B",
    "RedHatAI/Qwen3.8-27B-NVFP4": "Qwen3.8-27B",
    "Qwen/Qwen3.8-Flash-Next-FP8": "Qwen3.8-Flash-Next (MoE)",
}
_GGUFS = dict.fromkeys(("Qwen3.8-27B-Q4_K_M.gguf", "Qwen3.8-27B-UD-Q4_K_M.gguf"), ("Qwen3.8-27B", "GGUF Q4_K_M"))
_QUANTIZATIONS = {None: "bf16", "fp8": "FP8", "nf4": "NF4 bitsandbytes", "awq": "AWQ INT4", "nvfp4": "NVFP4"}
_RUNTIMES = {"hf": "transformers (eager)", "vllm": "vLLM 0.29", "llamacpp": "llama.cpp"}
_TASKS = {"tool_call": "Tool Call", "python_repo": "Python (repo)"}
_BLOCK_DRAFTERS = ("dflash", "dflash2")
_SCORED_TASKS = {"tool_call": "", "python_repo": " (Python)"}  # behind the target's name
_USUAL_NGRAM_TOKENS = 8  # the k of the rows that name none; the source does not say
_TRAINED_DRAFT, _TRAINED_BLOCK = 15, 16  # a block drafter's block holds the anchor too


class PublishedRow(NamedTuple):
    """A row of the published decode table.

    Attributes:
        target, quantization, runtime, task, method: as the table writes them.
        mtp_loaded: the pair held MTP layers too; told apart only where both were published.
        context_tokens: that the prompts were fitted to.
        block_length: L; None on runtimes with a loop of their own.
        speedup: over plain decoding.
        accepted_per_step, match_percent: None where the source gives none.
    """

    target: str
    quantization: str
    mtp_loaded: bool
    runtime: str
    context_tokens: int
    task: str
    block_length: int | None
    method: str
    speedup: float
    decode_tokens_per_s: float
    accepted_per_step: float | None
    match_percent: float | None


class PublishedScorerRow(NamedTuple):
    """A row of the published scorer table.

    Attributes:
        hidden: the precision and layer of the hidden states.
        candidates: the kind of the candidate sets.
        accepted_prior, accepted_scorer, accepted_oracle: tokens, over all positions.
    """

    target: str
    hidden: str
    candidates: str
    prior_top1_percent: float
    scorer_top1_percent: float
    accepted_prior: float
    accepted_scorer: float
    accepted_oracle: float

    @property
    def figures(self) -> str:
        """Top-1 and accepted tokens over all positions."""
        return (
            f"{self.prior_top1_percent:.1f} -> {self.scorer_top1_percent:.1f}; "
            f"{self.accepted_prior:.2f} -> {self.accepted_scorer:.2f} ({self.accepted_oracle:.2f})"
        )


@cache
def decode_rows() -> tuple[PublishedRow, ...]:
    """The published decode table."""
    return tuple(
        PublishedRow(
            target=line["target"],
            quantization=line["quantization"],
            mtp_loaded=line["mtp_loaded"] == "yes",
            runtime=line["runtime"],
            context_tokens=int(line["context"]),
            task=line["task"],
            block_length=int(line["block_length"]) if line["block_length"] else None,
            method=line["method"],
            speedup=float(line["speedup"]),
            decode_tokens_per_s=float(line["decode_tokens_per_s"]),
            accepted_per_step=_number(line["accepted_per_step"]),
            match_percent=_number(line["match_percent"]),
        )
        for line in _lines("decode.csv")
    )


@cache
def scorer_rows() -> tuple[PublishedScorerRow, ...]:
    """The published scorer table."""
    return tuple(
        PublishedScorerRow(
            target=line["target"],
            hidden=line["hidden"],
            candidates=line["candidates"],
            prior_top1_percent=float(line["prior_top1_percent"]),
            scorer_top1_percent=float(line["scorer_top1_percent"]),
            accepted_prior=float(line["accepted_prior"]),
            accepted_scorer=float(line["accepted_scorer"]),
            accepted_oracle=float(line["accepted_oracle"]),
        )
        for line in _lines("scorer.csv")
    )


def scorer_candidates(kinds: Collection[str]) -> str | None:
    """What the scorer table calls sets with the drafts of drafters of these kinds; None where none were published."""
    of = tuple(sorted("block" if kind in _BLOCK_DRAFTERS else kind for kind in kinds))
    return {(): "finite", ("block",): "union", ("mtp",): "union_mtp", ("block", "mtp"): "union_all"}.get(of)


def scorer_counterparts(experiment: ExperimentSpec) -> tuple[PublishedScorerRow, ...]:
    """The published rows of its own target that an experiment's scorers reproduce: each set's, and on the pairs that it
    is transferred to."""
    training = experiment.scorer
    named = _target(experiment.pairs[training.pair].target) if training is not None else None
    if training is None or named is None:
        return ()
    tasks = [named[0] + _SCORED_TASKS.get(experiment.tasks[name].kind, "?") for name in training.train_limits]
    sets = [
        (drafters, scorer_candidates([experiment.pairs[training.pair].drafters[name].kind for name in drafters]))
        for drafters in (training.drafters, *training.other_sets)
    ]
    made = {(_hidden(training.layers), candidates) for _, candidates in sets}
    made |= {("bf16", candidates) for _, candidates in sets}
    made |= {(_hidden((layer,)), "finite") for layer in training.judged_layers}
    for pair in (experiment.pairs[name] for name in training.transfer):
        hidden = f"{str(pair.target.quantization).upper()}, scorer trained on bf16"
        made |= {(hidden, candidates) for drafters, candidates in sets if {*drafters} <= {*pair.drafters}}
    return tuple(row for row in scorer_rows() if row.target in tasks and (row.hidden, row.candidates) in made)


def _hidden(layers: tuple[int, ...]) -> str:
    return f"bf16 (layer {max(layers)})"


def counterparts(trial: TrialSpec) -> tuple[PublishedRow, ...]:
    """The published rows that a trial reproduces; none where nothing like it was published.

    Plain decoding has no L: where it was published beside several, one trial stands for each of them.
    """
    named = _target(trial.pair.target)
    if named is None:
        return ()
    target, quantization = named
    runtime, task = _RUNTIMES.get(trial.runtime.kind), _TASKS.get(trial.task.kind)
    place = (target, quantization, runtime, trial.task.context_tokens, task)
    mtp_loaded = _holds_mtp(trial.pair) and (target, quantization, runtime) in _told_apart()
    block_length, method = _method(trial)
    return tuple(
        row
        for row in decode_rows()
        if (row.target, row.quantization, row.runtime, row.context_tokens, row.task) == place
        and row.mtp_loaded == mtp_loaded
        and row.method == method
        and (row.block_length == block_length or isinstance(trial.method, Autoregressive))
    )


def cpu_refusal(trial: TrialSpec) -> str | None:
    """Why a trial's path cannot be tried on a CPU, even with a small random model of its architecture; None if it can.

    The GPUs, and the format that weights are stored in, are then left out.
    """
    kind, pair, method = trial.runtime.kind, trial.pair, trial.method
    if kind == "vllm" and pair.target.tensor_parallel > 1:
        return "vllm: a forward pass over several GPUs, of a family that it has kernels of for GPUs alone"
    if kind == "vllm" and isinstance(method, Draft) and pair.drafters[method.drafter].kind == "dflash2":
        return "vllm: DFlash2 runs in its second model runner, which needs a GPU"
    return None


def _lines(name: str) -> Iterator[dict[str, str]]:
    return csv.DictReader((_FOLDER / name).read_text(encoding="utf-8").splitlines())


def _number(text: str) -> float | None:
    return float(text) if text else None


@cache
def _told_apart() -> frozenset[tuple[str, str, str]]:
    """Where rows with MTP layers loaded stand beside rows without."""
    return frozenset((row.target, row.quantization, row.runtime) for row in decode_rows() if row.mtp_loaded)


def _target(target: TargetSpec) -> tuple[str, str] | None:
    """Target and quantization, as the table writes them."""
    if target.dtype == "gguf":
        return _GGUFS.get(PurePosixPath(target.model).name)
    name, quantization = _TARGETS.get(target.model), _QUANTIZATIONS.get(target.quantization)
    if name is None or quantization is None or target.dtype != "bfloat16":
        return None
    return name, quantization if target.tensor_parallel == 1 else f"{quantization} TP={target.tensor_parallel}"


def _holds_mtp(pair: PairSpec) -> bool:
    return any(drafter.kind == "mtp" for drafter in pair.drafters.values())


def _method(trial: TrialSpec) -> tuple[int | None, str | None]:
    """L and the method, as the table writes them."""
    if trial.runtime.kind == "hf":
        return _hf_method(trial.pair, trial.method)
    return None, _other_method(trial)


def _hf_method(pair: PairSpec, method: MethodSpec) -> tuple[int | None, str | None]:
    if isinstance(method, Autoregressive):
        return None, method.kind
    if isinstance(method, Draft):
        k = method.num_draft_tokens
        return _TRAINED_BLOCK if k == _TRAINED_DRAFT else k, _kind(pair, method.drafter)
    if not isinstance(method, Choice):
        return None, None
    if not method.drafters:
        return method.block_length, {"prior": "prior", "scorer": "choice"}.get(method.selection)
    if method.selection != "scorer":
        return method.block_length, None
    called = ",".join(str(_kind(pair, name)) for name in method.drafters)
    hybrid = "hybrid" if len(method.drafters) == 1 else "hybrid-all"
    return method.block_length, f"choice-{'union' if method.gate is None else hybrid}[{called}]"


def _other_method(trial: TrialSpec) -> str | None:
    method = trial.method
    if isinstance(method, Autoregressive):
        return method.kind
    if isinstance(method, Draft):
        return f"{_kind(trial.pair, method.drafter)} k={method.num_draft_tokens}"
    if not isinstance(method, Ngram):
        return None
    if trial.runtime.kind == "llamacpp":
        return "ngram-simple"
    k = method.num_draft_tokens
    return "ngram" if k == _USUAL_NGRAM_TOKENS else f"ngram k={k}"


def _kind(pair: PairSpec, drafter: str) -> str:
    return pair.drafters[drafter].kind
