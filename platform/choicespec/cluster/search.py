"""The wide stage of a search on Ray Tune: each of its trials is a shard, which replays its settings by the hundred."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ray import tune
from ray.tune import RunConfig, TuneConfig, Tuner

from choicespec.errors import RecordingError
from choicespec.measuring.cost import Costs
from choicespec.replay.drafts import RecordedDrafts
from choicespec.replay.simulate import Replay, Replayed
from choicespec.replay.sweep import Batch, Tried, merged, sweep
from choicespec.spec.experiment import ExperimentSpec, TrialSpec
from choicespec.spec.search import SearchSpec

_NAME = "tune"  # of Tune's folder


class Wide(NamedTuple):
    """What is swept.

    Attributes:
        experiment: with a search.
        task: the name of the task that is searched.
        drafts: of that task's recording, ready to be sent.
        costs: at which settings are judged.
    """

    experiment: ExperimentSpec
    task: str
    drafts: RecordedDrafts
    costs: Costs


def run_sweep(search: SearchSpec, wide: Wide, folder: Path) -> list[Tried]:
    """Replay a search's settings, shard by shard, over the cluster; a sweep that was cut off goes on.

    Args:
        search: of the experiment.
        wide: what is swept.
        folder: of this sweep alone; Tune keeps its state there, so that nodes that take shards must share it.

    Raises:
        RecordingError: a shard failed.
    """
    space = {"shard": tune.grid_search(list(range(search.shards)))}
    trainable = tune.with_resources(tune.with_parameters(_replay_shard, wide=wide, search=search), {"cpu": 1})
    path = folder.resolve() / _NAME
    if Tuner.can_restore(path):
        tuner = Tuner.restore(str(path), trainable, restart_errored=True, param_space=space)
    else:
        tuner = Tuner(
            trainable,
            param_space=space,
            tune_config=TuneConfig(metric="best", mode="max", reuse_actors=True),
            run_config=RunConfig(name=_NAME, storage_path=str(path.parent), verbose=0),
        )
    results = tuner.fit()
    for error in results.errors:
        raise RecordingError(f"a shard of the sweep failed: {error}")
    return merged(
        Batch(row.shard, row.batch, row.rows) for result in results for row in result.metrics_dataframe.itertuples()
    )


def _replay_shard(config: dict[str, Any], wide: Wide, search: SearchSpec) -> None:
    replay = Replay(wide.drafts, wide.costs)

    def evaluate(trials: Sequence[TrialSpec]) -> list[Replayed]:
        return replay.of([trial.method for trial in trials])

    shard = config["shard"]
    share = search.settings // search.shards + (shard < search.settings % search.shards)
    best = 0.0
    for batch, tried in enumerate(sweep(wide.experiment, wide.task, evaluate, share, search.seed + shard)):
        best = max([best, *(one.tokens_per_s for one in tried)])
        tune.report({"shard": shard, "batch": batch, "best": best, "rows": json.dumps(tried)})
