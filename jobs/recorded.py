"""The recordings of a job that trains: where each task's lies, and how what is missing of it is made."""

import hashlib
from pathlib import Path

from choicespec.cluster.connect import on_cluster
from choicespec.cluster.recording import Wanted, record
from choicespec.recordings import RecordingFolder
from choicespec.runtimes.hf import HfRuntime
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import TaskSpec
from choicespec.tasks.prompts import open_task

from jobs.terminal import ProgressLines


class RecordedTasks:
    """The recordings of one experiment.

    Args:
        folder: that they lie in.
        runtime: records.
        batch_size: requests recorded together.
        prompt_states: whether the prompts' hidden states are kept as well.
    """

    def __init__(self, folder: Path, runtime: HfRuntimeSpec, batch_size: int, prompt_states: bool = False) -> None:
        self._folder, self._runtime, self._batch_size = folder, runtime, batch_size
        self._prompt_states = prompt_states

    def record(self, opened: HfRuntime, pair: PairSpec, task: TaskSpec, layers: tuple[int, ...]) -> None:
        """Record what is missing of a task; within a Ray session."""
        folder = self.of(opened, task, layers)
        wanted = Wanted(pair, self._runtime, task, layers, folder, self._prompt_states)
        prompts = open_task(task).prompts(opened.tokenizer, opened.context_tokens)
        record(wanted, prompts, opened, self._batch_size, ProgressLines(), can_grow=on_cluster())

    def of(self, opened: HfRuntime, task: TaskSpec, layers: tuple[int, ...]) -> RecordingFolder:
        """Where a task's recording lies: another target, task or set of layers has another place."""
        parts = [opened.identity.model_dump_json(), task.model_dump_json(), str(layers)]
        name = digest(*parts, *(["prompt states"] if self._prompt_states else []))
        return RecordingFolder(self._folder / f"{task.kind}-{task.split}-{name}")


def train_split(task: TaskSpec, limit: int) -> TaskSpec:
    """What a task whose ``test`` split is held out is trained on."""
    return task.model_copy(update={"split": "train", "limit": limit})


def digest(*parts: str) -> str:
    """12 hex digits that name what the parts describe."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
