"""Train and judge a scorer or drafters: ``python -m jobs.train scorer NAME``, here or under ``ray job submit``.

``scorer`` records the target's outputs, fits a scorer to the train split, judges it on held-out prompts and saves it.
``evaluate`` makes its table: other layers, other precisions, the split by function, ablations and seeds.
``drafter`` does as ``scorer`` for a DFlash drafter and a head for multi-token prediction.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from choicespec.candidates.request import RequestCandidates, repository_of
from choicespec.cluster.connect import ray_session
from choicespec.errors import ChoiceSpecError, SpecError, TrackingError
from choicespec.reports.scorer_table import scorer_table
from choicespec.runtimes.checkpoints import check_checkpoint
from choicespec.runtimes.hf import HfRuntime
from choicespec.scorer.corpus import Corpus, RecordedTask
from choicespec.scorer.examples import build_examples
from choicespec.scorer.files import Scorer, ScorerManifest, check_scorer, load_scorer, save_scorer
from choicespec.scorer.model import Embed, ScorerNet
from choicespec.scorer.table import Row, Variant, fit_variant, rows_of, variants
from choicespec.spec.experiment import ExperimentSpec, load_experiment
from choicespec.spec.pair import SCORER_WEIGHTS, PairSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import TaskSpec
from choicespec.tasks.prompts import open_task
from choicespec.tracking.connection import tracking_uri
from choicespec.tracking.runs import ExperimentRun

from jobs.drafters import DrafterJob
from jobs.recorded import RecordedTasks, digest, train_split
from jobs.terminal import EXPERIMENTS, console, home, say


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
        for name in self._spec.train_limits:
            if experiment.tasks[name].split != "test":
                raise SpecError(f"tasks.{name}.split: 'train' is what the scorer is fitted to; it is judged on 'test'")
            open_task(experiment.tasks[name]).check()
        self._folder = home() / "results" / experiment.name
        self._recordings = RecordedTasks(self._folder / "recordings", runtime, self._spec.batch_size)
        self._opened = HfRuntime(runtime, self._pair)
        num_layers = self._opened.identity.num_layers
        if max(self._spec.recorded_layers) > num_layers:
            raise SpecError(
                f"scorer.layers and other_layers: {self._spec.recorded_layers}; the target has 1 to {num_layers}"
            )
        embedding = self._opened.input_embedding()
        self._embed: Embed = lambda token_ids: embedding[token_ids]

    def scorer(self, output: Path | None) -> None:
        """Record, fit, judge on the held-out prompts, save, log."""
        scorer = self._train(self._corpus())
        if output is not None:
            save_scorer(output, scorer)
        num_layers = scorer.manifest.target.num_layers
        console.print(scorer_table(scorer.manifest.held_out, num_layers, self._experiment.name))
        say(f"saved in {output or self._saved}")

    def evaluate(self) -> None:
        """Make the rows of the table that are missing, and print all."""
        corpus = self._corpus()
        if not self._saved.exists():
            self._train(corpus)
        rows = [row for variant in variants(self._spec) for row in self._rows(corpus, variant)]
        rows += self._transferred()
        console.print(scorer_table(rows, self._opened.identity.num_layers, self._experiment.name))

    @property
    def _saved(self) -> Path:
        return self._folder / "scorer"

    def _train(self, corpus: Corpus) -> Scorer:
        """The experiment's scorer, saved in its folder and logged."""
        variant = next(variants(self._spec))
        losses: list[float] = []
        net = self._fit(corpus, variant, losses)
        rows = rows_of(corpus, variant, net, self._pair.target.precision)
        scorer = Scorer(net, self._manifest(corpus, variant, net, rows))
        save_scorer(self._saved, scorer)
        self._log(variant, losses, rows)
        return scorer

    def _corpus(self) -> Corpus:
        """Both splits of each task, recorded where they are not yet."""
        tasks, limits = self._tasks(), self._spec.train_limits
        train = {name: train_split(task, limits[name]) for name, task in tasks.items()}
        with ray_session():
            for task in (*tasks.values(), *train.values()):
                self._recordings.record(self._opened, self._pair, task, self._spec.recorded_layers)
        return Corpus(
            {name: self._read(self._opened, task, self._spec.recorded_layers) for name, task in train.items()},
            {name: self._read(self._opened, task, self._spec.recorded_layers) for name, task in tasks.items()},
        )

    def _read(self, opened: HfRuntime, task: TaskSpec, layers: tuple[int, ...]) -> RecordedTask:
        """A recorded task with its candidate sets, which are drawn anew: they depend on settings, and take a minute."""
        say(f"candidate sets of {task.label} ({task.split})")
        recorded = self._recordings.of(opened, task, layers).read()
        documents = open_task(task).prompts(opened.tokenizer, opened.context_tokens).repository()
        repository = repository_of(documents, opened.tokenizer.encode)
        most, length = self._spec.num_candidates, self._spec.block_length
        candidates = RequestCandidates(length, most, opened.tokenizer.encode, repository)
        return RecordedTask(recorded, build_examples(recorded, candidates, most, length))

    def _fit(self, corpus: Corpus, variant: Variant, losses: list[float]) -> ScorerNet:
        def on_epoch(done: int, loss: float) -> None:
            losses.append(loss)
            say(f"{variant.name}: epoch {done}/{variant.fit.epochs}, loss {loss:.4f}")

        return fit_variant(corpus, variant, self._embed, on_epoch)

    def _manifest(self, corpus: Corpus, variant: Variant, net: ScorerNet, rows: Sequence[Row]) -> ScorerManifest:
        return ScorerManifest(
            target=self._opened.identity,
            layers=variant.layers,
            block_length=self._spec.block_length,
            embedding_size=net.shape.embedding_size,
            width=net.shape.width,
            trained_on=corpus.train_prompts(variant.split_by),
            held_out=tuple(rows),
        )

    def _rows(self, corpus: Corpus, variant: Variant) -> list[Row]:
        """A variant's rows, from its file if they are there."""
        kept = self._kept(variant, self._opened, self._tasks())
        if not kept.exists():
            losses: list[float] = []
            net = self._fit(corpus, variant, losses)
            _keep(kept, rows_of(corpus, variant, net, self._pair.target.precision))
        return _kept_rows(kept)

    def _transferred(self) -> list[Row]:
        """The saved scorer, as it is, on the other pairs' own outputs."""
        variant = next(variants(self._spec))
        rows: list[Row] = []
        for name in self._spec.transfer:
            pair = self._experiment.pairs[name]
            opened = HfRuntime(self._runtime, pair)
            weights = hashlib.sha256((self._saved / SCORER_WEIGHTS).read_bytes()).hexdigest()
            kept = self._kept(variant, opened, self._tasks(self._spec.transfer_limit), weights)
            if not kept.exists():
                manifest = check_scorer(self._saved, opened.identity, transfer=True)
                net = load_scorer(self._saved, manifest, self._embed).net
                _keep(kept, rows_of(self._transfer_corpus(opened, pair), variant, net, pair.target.precision))
            rows += _kept_rows(kept)
        return rows

    def _transfer_corpus(self, opened: HfRuntime, pair: PairSpec) -> Corpus:
        tasks = self._tasks(self._spec.transfer_limit)
        with ray_session():
            for task in tasks.values():
                self._recordings.record(opened, pair, task, self._spec.layers)
        return Corpus({}, {name: self._read(opened, task, self._spec.layers) for name, task in tasks.items()})

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
        of = (variant.model_dump_json(), opened.identity.model_dump_json(), settings, *held_out, scorer)
        return self._folder / "table" / f"{digest(*of)}.json"

    def _log(self, variant: Variant, losses: Sequence[float], rows: Sequence[Row]) -> None:
        """MLflow where it can be used; the files have everything."""
        params = {
            "layers": str(variant.layers),
            "split_by": variant.split_by,
            **{f"fit.{name}": str(value) for name, value in variant.fit.model_dump().items()},
        }
        try:
            run = ExperimentRun(tracking_uri(home()), self._experiment)
            run.log_scorer(variant.name, params, losses, rows, self._saved)
            run.finish([])
        except TrackingError as error:
            say(f"{error}\nthe scorer is saved in {self._saved} all the same", "yellow")


def _keep(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps([row.model_dump(mode="json") for row in rows], indent=1), encoding="utf-8")
    os.replace(partial, path)


def _kept_rows(path: Path) -> list[Row]:
    return [Row.model_validate(row) for row in json.loads(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    sys.exit(main())
