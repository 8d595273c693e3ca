"""Drafters for one's own model: recorded, fitted, judged on held-out prompts and saved, by ``jobs.train drafter``."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from time import monotonic

from choicespec.cluster.connect import ray_session
from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.errors import SpecError, TrackingError
from choicespec.reports.drafter_table import drafter_table
from choicespec.runtimes.checkpoints import check_checkpoint
from choicespec.runtimes.hf import HfRuntime
from choicespec.spec.experiment import ExperimentSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import Split, TaskSpec
from choicespec.spec.training import DFlashTraining, MtpTraining
from choicespec.tasks.prompts import open_task
from choicespec.tracking.connection import tracking_uri
from choicespec.tracking.runs import ExperimentRun
from choicespec.training.evaluate import Acceptance, judge
from choicespec.training.fit import Fit, Progress
from choicespec.training.sequences import Recordings, deviation, most_frequent
from choicespec.training.trainees import DFlashTrainee, MtpTrainee, Trainee

from jobs.recorded import RecordedTasks, digest, train_split
from jobs.terminal import ProgressLines, console, home, say

_SAVE_EVERY = 8  # chunks


class DrafterJob:
    """An experiment's drafters.

    Raises:
        SpecError: the experiment does not say what to train.
        CheckpointError: the target is missing.
    """

    def __init__(self, experiment: ExperimentSpec) -> None:
        if experiment.drafter is None or not (experiment.drafter.dflash or experiment.drafter.mtp):
            raise SpecError(
                f"{experiment.name}: no field 'drafter' with a 'dflash' or 'mtp', which says what is trained"
            )
        self._experiment, self._spec = experiment, experiment.drafter
        runtime = experiment.runtimes[self._spec.runtime]
        if not isinstance(runtime, HfRuntimeSpec):
            raise SpecError(f"drafter.runtime: {self._spec.runtime!r} has no hidden states; name one of kind hf")
        self._pair = experiment.pairs[self._spec.pair]
        check_checkpoint(self._pair.target.model, self._pair.target.revision)
        for name in self._spec.train_limits:
            if experiment.tasks[name].split != "test":
                raise SpecError(
                    f"tasks.{name}.split: 'train' is what drafters are fitted to; they are judged on 'test'"
                )
            open_task(experiment.tasks[name]).check()
        self._opened = HfRuntime(runtime, self._pair)
        num_layers = self._opened.identity.num_layers
        tapped = self._spec.dflash.layers if self._spec.dflash else ()
        if max(tapped, default=1) > num_layers:
            raise SpecError(f"drafter.dflash.layers: {tapped}; the target has 1 to {num_layers}")
        self._folder = home() / "results" / experiment.name
        self._recorded = RecordedTasks(
            runtime,
            self._opened,
            self._pair,
            layers=tuple(sorted({*tapped, *((num_layers,) if self._spec.mtp else ())})),
            batch_size=self._spec.batch_size,
            prompt_states=True,
        )

    def run(self, output: Path | None) -> None:
        """Record, fit, judge on the held-out prompts, save, log; what an earlier run has done is not done again."""
        train, test = self._record()
        self._opened.load()
        self._opened.model.requires_grad_(False)
        target = CausalLmTarget(self._opened.model)
        token_ids = most_frequent(train, target.config.vocab_size, self._spec.draft_vocab_size)
        if dflash := self._spec.dflash:
            trainee: Trainee = DFlashTrainee(dflash, target, token_ids, deviation(train, dflash.layers))
            self._train("dflash", dflash, trainee, train, test, output)
        if mtp := self._spec.mtp:
            trainee = MtpTrainee(mtp, target, self._opened.identity.num_layers, token_ids)
            self._train("mtp", mtp, trainee, train, test, output)

    def _train(
        self,
        name: str,
        spec: DFlashTraining | MtpTraining,
        trainee: Trainee,
        train: Recordings,
        test: dict[str, Recordings],
        output: Path | None,
    ) -> None:
        trained_on = [task.model_dump_json() for task in self._tasks("train").values()]
        kept = digest(spec.model_dump_json(), str(self._spec.draft_vocab_size), *trained_on)
        fit = Fit(trainee, train, spec.fit, self._folder / "fits" / f"{name}-{kept}.safetensors")
        fit.run(_Reporter(name, fit), _SAVE_EVERY)
        found = [judge(trainee, task, recordings) for task, recordings in test.items()]
        description = {
            "target": self._opened.identity.model_dump(mode="json"),
            "trained_on": train.num_sequences,
            "training": spec.model_dump(mode="json"),
            "held_out": [one.model_dump(mode="json") for one in found],
        }
        folders = [self._folder / name, *([output / name] if output else [])]
        for folder in folders:
            trainee.save(folder, description)
        self._log(name, spec, fit.progress, found)
        console.print(drafter_table(name, trainee.places, found))
        say(f"saved in {folders[-1]}")

    def _record(self) -> tuple[Recordings, dict[str, Recordings]]:
        """The train prompts of all tasks, and the held-out ones of each."""
        train, test = self._tasks("train"), self._tasks("test")
        with ray_session():
            for task in (*train.values(), *test.values()):
                self._recorded.record(task)
        return (
            Recordings([self._recorded.of(task) for task in train.values()]),
            {name: Recordings([self._recorded.of(task)]) for name, task in test.items()},
        )

    def _tasks(self, split: Split) -> dict[str, TaskSpec]:
        held_out = {name: self._experiment.tasks[name] for name in self._spec.train_limits}
        if split == "test":
            return held_out
        return {name: train_split(task, self._spec.train_limits[name]) for name, task in held_out.items()}

    def _log(
        self, name: str, spec: DFlashTraining | MtpTraining, progress: Progress, found: Sequence[Acceptance]
    ) -> None:
        """MLflow where it can be used; the files have everything."""
        params = {key: str(value) for key, value in spec.model_dump(exclude={"fit"}).items()}
        params |= {f"fit.{key}": str(value) for key, value in spec.fit.model_dump().items()}
        try:
            run = ExperimentRun(tracking_uri(home()), self._experiment)
            run.log_drafter(name, params, progress.losses, found, self._folder / name)
            run.finish([])
        except TrackingError as error:
            say(f"{error}\nthe drafter is saved in {self._folder / name} all the same", "yellow")


class _Reporter:
    """Says how far a fit is, and how long it will take at the pace so far."""

    def __init__(self, name: str, fit: Fit) -> None:
        self._name, self._total, self._began = name, fit.total, fit.progress.chunks
        self._started_s, self._lines = monotonic(), ProgressLines()

    def __call__(self, progress: Progress) -> None:
        done = progress.chunks
        left_s = (monotonic() - self._started_s) / (done - self._began) * (self._total - done)
        loss = fmean(progress.losses[-_SAVE_EVERY:])
        self._lines(f"{self._name}: {done}/{self._total} chunks, loss {loss:.3f}, {left_s / 60:.0f} min left")
