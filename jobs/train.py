"""Train and judge a scorer or drafters: ``python -m jobs.train scorer NAME``, here or under ``ray job submit``.

``scorer`` records the target's outputs, fits a scorer to the train split, judges it on held-out prompts and saves it.
``evaluate`` makes its table: other candidate sets, layers and precisions, the split by function, ablations and seeds.
``drafter`` does as ``scorer`` for a DFlash drafter and a head for multi-token prediction.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path

from choicespec.candidates.request import RequestCandidates, repository_of
from choicespec.cluster.connect import ray_session
from choicespec.errors import ChoiceSpecError, SpecError, TrackingError
from choicespec.reports.scorer_table import scorer_table
from choicespec.runtimes.checkpoints import check_checkpoint
from choicespec.runtimes.hf import HfRuntime
from choicespec.runtimes.pair_parts import as_trained, open_drafter
from choicespec.scorer.corpus import Corpus, RecordedTask, compared_with_sources
from choicespec.scorer.examples import build_examples
from choicespec.scorer.files import Scorer, ScorerManifest, check_scorer, load_scorer, save_scorer
from choicespec.scorer.model import Embed, ScorerNet
from choicespec.scorer.source_states import StateScale, scale_of
from choicespec.scorer.table import Row, Variant, fit_variant, of_sets, rows_of, variants
from choicespec.spec.experiment import ExperimentSpec
from choicespec.spec.experiment_files import load_experiment
from choicespec.spec.method import Draft
from choicespec.spec.pair import SCORER_WEIGHTS, PairSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import TaskSpec
from choicespec.tasks.prompts import open_task
from choicespec.tracking.connection import tracking_uri
from choicespec.tracking.runs import ExperimentRun

from jobs.drafters import DrafterJob
from jobs.recorded import RecordedTasks, digest, train_split
from jobs.terminal import EXPERIMENTS, console, home, say

_SCALED_BY = 20  # requests, of which a prompt is hundreds of tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; 0 when it is done, 2 when what was asked is wrong."""
    args = _parse(arguments)
    try:
        experiment = load_experiment(args.experiment, EXPERIMENTS)
        if args.command == "drafter":
            DrafterJob(experiment).run(args.output)
        elif args.command == "scorer":
            Training(experiment).scorer(args.output)
        else:
            Training(experiment).evaluate()
        return 0
    except ChoiceSpecError as error:
        say(f"error: {error}", "red")
        return 2
    except KeyboardInterrupt:
        say("interrupted; what was recorded and fitted is kept, and the same command goes on from there")
        return 130


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="jobs.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("scorer", "evaluate", "drafter"))
    parser.add_argument("experiment", help="a name in jobs/experiments, or the path of a .yaml file")
    parser.add_argument("--output", type=Path, help="a folder to save what was trained in as well")
    return parser.parse_args(arguments)


class Training:
    """An experiment's recordings and scorers.

    Raises:
        SpecError: the experiment does not say how to train.
        CheckpointError: a target is missing.
    """

    def __init__(self, experiment: ExperimentSpec) -> None:
        if experiment.scorer is None:
            raise SpecError(f"{experiment.name}: no field 'scorer', which says what is recorded and how it is fitted")
        runtime = experiment.runtimes[experiment.scorer.runtime]
        if not isinstance(runtime, HfRuntimeSpec):
            raise SpecError(f"scorer.runtime: {experiment.scorer.runtime!r} has no hidden states; name one of kind hf")
        self._experiment, self._spec, self._runtime = experiment, experiment.scorer, runtime
        self._pair = experiment.pairs[self._spec.pair]
        for name in (self._spec.pair, *self._spec.transfer):
            check_checkpoint(experiment.pairs[name].target.model, experiment.pairs[name].target.revision)
        for name, train in zip(self._spec.train_limits, self._train_tasks(), strict=True):
            if experiment.tasks[name].split != "test":
                raise SpecError(f"tasks.{name}.split: 'train' is what the scorer is fitted to; it is judged on 'test'")
            for task in (experiment.tasks[name], train):
                open_task(task).check()
        self._folder = home() / "results" / experiment.name
        self._sets = of_sets(self._spec, self._pair.drafters)
        self._opened = HfRuntime(runtime, self._pair)
        num_layers = self._opened.identity.num_layers
        if max(self._spec.recorded_layers) > num_layers:
            raise SpecError(
                f"scorer.layers, source_layers and other_layers: {self._spec.recorded_layers}; the target has 1 to "
                f"{num_layers}"
            )
        for name in self._spec.recorded_drafters:
            open_drafter(self._pair, name)
        embedding = self._opened.input_embedding()
        self._embed: Embed = lambda token_ids: embedding[token_ids]

    def scorer(self, output: Path | None) -> None:
        """Record, fit, judge on the held-out prompts, save, log."""
        scorer = self._train(self._corpus(), self._sets[0])
        if output is not None:
            save_scorer(output, scorer)
        num_layers = scorer.manifest.target.num_layers
        console.print(scorer_table(scorer.manifest.held_out, num_layers, self._experiment.name))
        say(f"saved in {output or self._saved(self._sets[0])}")

    def evaluate(self) -> None:
        """Make the rows of the table that are missing, and print all."""
        corpus = self._corpus()
        rows = [row for variant in variants(self._spec, self._pair.drafters) for row in self._rows(corpus, variant)]
        rows += [row for name in self._spec.transfer for row in self._transferred(name, corpus.scale)]
        console.print(scorer_table(rows, self._opened.identity.num_layers, self._experiment.name))

    def _saved(self, of_set: Variant) -> Path:
        """The folder of the scorer of one of the sets."""
        parts = [] if of_set == self._sets[0] else [*of_set.drafters] or ["finite"]
        return self._folder / "-".join(["scorer", *parts])

    def _train(self, corpus: Corpus, of_set: Variant) -> Scorer:
        """The scorer of one of the sets, saved in its folder and logged."""
        losses: list[float] = []
        net = self._fit(corpus, of_set, losses)
        rows = rows_of(corpus, of_set, net, self._pair.target.precision)
        scorer = Scorer(net, self._manifest(corpus, of_set, net, rows))
        save_scorer(self._saved(of_set), scorer)
        _keep(self._kept(of_set, self._opened, self._tasks()), rows)
        self._log(of_set, losses, rows)
        return scorer

    def _corpus(self) -> Corpus:
        """Both splits of each task, recorded where they are not yet."""
        tasks, recorded = self._tasks(), self._recorded(self._opened, self._pair, self._spec.recorded_layers)
        train = dict(zip(tasks, self._train_tasks(), strict=True))
        with ray_session():
            for task in (*tasks.values(), *train.values()):
                recorded.record(task)
        scale = self._scale(recorded, next(iter(train.values())))
        return Corpus(
            {name: self._read(recorded, task, scale) for name, task in train.items()},
            {name: self._read(recorded, task, scale) for name, task in tasks.items()},
            scale,
        )

    def _scale(self, recorded: RecordedTasks, task: TaskSpec) -> StateScale | None:
        """Of the first requests of a recorded task; None where no states are compared."""
        layers = self._spec.source_layers
        return scale_of(islice(recorded.of(task).walk(layers), _SCALED_BY), layers) if layers else None

    def _train_tasks(self) -> list[TaskSpec]:
        """What the scorer is fitted to, a task for each that is held out."""
        tasks, limits, others = self._experiment.tasks, self._spec.train_limits, self._spec.train_tasks
        return [
            tasks[others[name]].model_copy(update={"limit": limit})
            if name in others
            else train_split(tasks[name], limit)
            for name, limit in limits.items()
        ]

    def _recorded(self, opened: HfRuntime, pair: PairSpec, layers: tuple[int, ...]) -> RecordedTasks:
        """A pair's recordings, with the drafts of those of the wanted drafters that it has."""
        length = self._spec.block_length
        drafts = [
            as_trained(pair, Draft(drafter=name, num_draft_tokens=length))
            for name in self._spec.recorded_drafters
            if name in pair.drafters
        ]
        prompt_states = bool(self._spec.source_layers)
        return RecordedTasks(self._runtime, opened, pair, layers, self._spec.batch_size, drafts, prompt_states)

    def _read(self, recorded: RecordedTasks, task: TaskSpec, scale: StateScale | None) -> RecordedTask:
        """A recorded task with its candidate sets, which are drawn anew: they depend on settings, and take a minute.
        The prompts' states, most of a recording, are not kept in memory."""
        say(f"candidate sets of {task.label} ({task.split})")
        opened, outputs = recorded.opened, recorded.read(task)
        documents = open_task(task).prompts(opened.tokenizer, opened.context_tokens).repository()
        repository = repository_of(documents, opened.tokenizer.encode)
        most, length = self._spec.num_candidates, self._spec.block_length
        candidates = RequestCandidates(length, most, opened.tokenizer.encode, repository)
        examples = build_examples(outputs, candidates, most, length, recorded.drafted(task))
        if scale is not None:
            requests, layers = [one.request.request_id for one in outputs], self._spec.source_layers
            examples = compared_with_sources(examples, requests, recorded.of(task).walk(layers), layers, scale)
        return RecordedTask(outputs, examples, recorded.drafters)

    def _fit(self, corpus: Corpus, variant: Variant, losses: list[float]) -> ScorerNet:
        def on_epoch(done: int, loss: float) -> None:
            losses.append(loss)
            say(f"{variant.label}: epoch {done}/{variant.fit.epochs}, loss {loss:.4f}")

        return fit_variant(corpus, variant, self._embed, on_epoch)

    def _manifest(self, corpus: Corpus, variant: Variant, net: ScorerNet, rows: Sequence[Row]) -> ScorerManifest:
        return ScorerManifest(
            target=self._opened.identity,
            layers=variant.layers,
            source_layers=variant.source_layers,
            block_length=self._spec.block_length,
            embedding_size=net.shape.embedding_size,
            width=net.shape.width,
            drafters={name: self._pair.drafters[name] for name in variant.drafters},
            trained_on=corpus.train_prompts(variant.split_by),
            held_out=tuple(rows),
        )

    def _rows(self, corpus: Corpus, variant: Variant) -> list[Row]:
        """A variant's rows, from its file if they are there; so is a set's scorer then."""
        kept = self._kept(variant, self._opened, self._tasks())
        if variant in self._sets and not (kept.exists() and self._saved(variant).exists()):
            self._train(corpus, variant)
        elif not kept.exists():
            net = self._fit(corpus, variant, [])
            _keep(kept, rows_of(corpus, variant, net, self._pair.target.precision))
        return _kept_rows(kept)

    def _transferred(self, name: str, scale: StateScale | None) -> list[Row]:
        """The saved scorers, as they are, on another pair's own outputs; of the sets whose drafters it has."""
        pair = self._experiment.pairs[name]
        opened = HfRuntime(self._runtime, pair)
        corpus = cache(partial(self._transfer_corpus, opened, pair, scale))
        rows: list[Row] = []
        for of_set in self._sets:
            kinds = {name: drafter.kind for name, drafter in pair.drafters.items()}
            if not of_set.drafters.items() <= kinds.items():
                continue
            folder = self._saved(of_set)
            weights = hashlib.sha256((folder / SCORER_WEIGHTS).read_bytes()).hexdigest()
            kept = self._kept(of_set, opened, self._tasks(self._spec.transfer_limit), weights)
            if not kept.exists():
                manifest = check_scorer(folder, opened.identity, transfer=True)
                net = load_scorer(folder, manifest, self._embed).net
                _keep(kept, rows_of(corpus(), of_set, net, pair.target.precision, transferred=True))
            rows += _kept_rows(kept)
        return rows

    def _transfer_corpus(self, opened: HfRuntime, pair: PairSpec, scale: StateScale | None) -> Corpus:
        """Features of sources are made as they were for the scorer, whatever the other pair's states are like."""
        layers = tuple(dict.fromkeys((*self._spec.layers, *self._spec.source_layers)))
        tasks, recorded = self._tasks(self._spec.transfer_limit), self._recorded(opened, pair, layers)
        with ray_session():
            for task in tasks.values():
                recorded.record(task)
        return Corpus({}, {name: self._read(recorded, task, scale) for name, task in tasks.items()}, scale)

    def _tasks(self, limit: int | None = None) -> dict[str, TaskSpec]:
        """What is held out of each task; all of it, or so many prompts."""
        tasks = {name: self._experiment.tasks[name] for name in self._spec.train_limits}
        if limit is None:
            return tasks
        return {name: task.model_copy(update={"limit": limit}) for name, task in tasks.items()}

    def _kept(self, variant: Variant, opened: HfRuntime, tasks: Mapping[str, TaskSpec], scorer: str = "") -> Path:
        """The file of a variant's rows: another target, task, setting or kept scorer has another."""
        settings = self._spec.model_dump_json(include={"train_limits", "block_length", "num_candidates"})
        held_out = [task.model_dump_json() for task in tasks.values()]
        others = [self._experiment.tasks[name].model_dump_json() for name in self._spec.train_tasks.values()]
        drafters = [self._pair.drafters[name].model_dump_json() for name in variant.drafters]
        target = opened.identity.model_dump_json()
        of = (variant.model_dump_json(), target, settings, *held_out, *others, *drafters, scorer)
        return self._folder / "table" / f"{digest(*of)}.json"

    def _log(self, of_set: Variant, losses: Sequence[float], rows: Sequence[Row]) -> None:
        """MLflow where it can be used; the files have everything."""
        params = {
            "layers": str(of_set.layers),
            "source_layers": str(of_set.source_layers),
            "split_by": of_set.split_by,
            "candidates": of_set.candidates,
            **{f"fit.{name}": str(value) for name, value in of_set.fit.model_dump().items()},
        }
        try:
            run = ExperimentRun(tracking_uri(home()), self._experiment)
            run.log_scorer(self._saved(of_set).name, params, losses, rows, self._saved(of_set))
            run.finish([])
        except TrackingError as error:
            say(f"{error}\nthe scorer is saved in {self._saved(of_set)} all the same", "yellow")


def _keep(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps([row.model_dump(mode="json") for row in rows], indent=1), encoding="utf-8")
    os.replace(partial, path)


def _kept_rows(path: Path) -> list[Row]:
    return [Row.model_validate(row) for row in json.loads(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    sys.exit(main())
