"""Recording on a real Ray cluster, with a small random target."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from choicespec.cluster.connect import ray_session
from choicespec.cluster.recording import Wanted, record
from choicespec.errors import RecordingError
from choicespec.recordings import RecordingFolder
from choicespec.runtimes.hf import HfRuntime
from choicespec.spec.method import Autoregressive
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import PythonRepo
from choicespec.tasks.prompts import Prompts, open_task
from integration.job_homes import one_node, write_repository
from integration.small_checkpoints import HIDDEN, LAYERS, save_checkpoint, small_llama

_RUNTIME = HfRuntimeSpec(threads=2)  # all of the node: one worker, which stays warm
_BATCH = 2
_NEW_TOKENS = 6


class Recording(NamedTuple):
    """What is recorded, and with what."""

    wanted: Wanted
    prompts: Prompts
    opened: HfRuntime

    def record(self) -> list[str]:
        """Records what is missing; returns the lines for people."""
        lines: list[str] = []
        record(self.wanted, self.prompts, self.opened, _BATCH, lines.append)
        return lines

    def elsewhere(self, folder: Path) -> "Recording":
        return self._replace(wanted=self.wanted._replace(folder=RecordingFolder(folder)))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A connected cluster of one node without GPUs."""
    with one_node(), ray_session():
        yield


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Five prompts of different lengths, recorded."""
    checkpoint = save_checkpoint(tmp_path_factory.mktemp("checkpoint"), small_llama())
    repo = write_repository(tmp_path_factory.mktemp("repo"), modules=30)
    pair = PairSpec(target=TargetSpec(model=str(checkpoint)))
    task = PythonRepo(folder=str(repo), limit=5, max_new_tokens=_NEW_TOKENS)
    opened = HfRuntime(_RUNTIME, pair)
    prompts = open_task(task).prompts(opened.tokenizer, opened.context_tokens)
    folder = RecordingFolder(tmp_path_factory.mktemp("recordings") / "small")
    found = Recording(Wanted(pair, _RUNTIME, task, (1, LAYERS), folder), prompts, opened)
    found.record()
    return found


def _chunks(recording: Recording) -> list[Path]:
    return sorted(recording.wanted.folder.path.glob("chunk-*"))


def test_every_request_is_recorded_in_the_tasks_order(recording: Recording) -> None:
    """Fails if a request is lost, if chunks are given to others' requests, or if a reader sees the order by length in
    which they were recorded."""
    manifest = recording.wanted.folder.manifest()
    requests = recording.prompts.requests
    assert [len(chunk) for chunk in manifest.chunks] == [2, 2, 1]
    assert [request_id for chunk in manifest.chunks for request_id in chunk] != [r.request_id for r in requests]
    found = recording.wanted.folder.read()
    assert tuple(one.request for one in found) == requests
    for one in found:
        trace = recording.opened.generate(one.request, Autoregressive())
        assert (one.output_ids, one.finish_reason) == (trace.output_ids, trace.finish_reason)
        assert one.margins.shape == (_NEW_TOKENS,)
        assert {layer: states.shape for layer, states in one.hidden_states.items()} == {
            1: (_NEW_TOKENS, HIDDEN),
            LAYERS: (_NEW_TOKENS, HIDDEN),
        }
        assert all(np.isfinite(states).all() for states in one.hidden_states.values())


def test_only_what_is_missing_is_recorded_again(recording: Recording) -> None:
    """Fails if a job that goes on records everything anew, or records something else the second time."""
    first, lost, last = _chunks(recording)
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in (first, lost, last)}
    lost.unlink()
    (line,) = recording.record()
    assert line == "recording python_repo (test): 2/3 chunks"
    assert _chunks(recording) == [first, lost, last]
    assert lost.read_bytes() == before[lost][0]
    for file in (first, last):
        assert (file.read_bytes(), file.stat().st_mtime_ns) == before[file]
    assert recording.record() == []


def test_a_pair_that_no_node_can_hold_is_refused(recording: Recording, tmp_path: Path) -> None:
    """Fails if a recording that can never start is waited for, or leaves a folder that looks like one."""
    other = recording.elsewhere(tmp_path / "new")
    on_gpu = other._replace(wanted=other.wanted._replace(pair=recording.wanted.pair.model_copy(update={"gpus": 1})))
    with pytest.raises(RecordingError, match=r"no node can give a worker 2 CPU, 1 GPU .*: 2 CPU, 0 GPU"):
        on_gpu.record()
    assert not (tmp_path / "new").exists()


def test_no_prompt_is_said_with_the_reason(recording: Recording, tmp_path: Path) -> None:
    """Fails if a task whose prompts are all too long ends as an empty recording."""
    nothing = recording.elsewhere(tmp_path / "new")._replace(prompts=Prompts((), ("f.py:3: too long",)))
    with pytest.raises(RecordingError, match=r"python_repo: no prompt fits: f\.py:3: too long"):
        nothing.record()
    assert not (tmp_path / "new").exists()


def test_what_a_worker_refuses_is_said_without_its_traceback(recording: Recording, tmp_path: Path) -> None:
    """Fails if a person sees Ray's report of another process instead of what to change; or if the chunk counts."""
    requests = [request._replace(max_new_tokens=10_000) for request in recording.prompts.requests[:1]]
    refused = recording.elsewhere(tmp_path)._replace(prompts=Prompts(tuple(requests), ()))
    with pytest.raises(RecordingError, match=r"python_repo: .* 10000 new tokens exceed the target's context") as caught:
        refused.record()
    assert "Traceback" not in str(caught.value)
    assert _chunks(refused) == []
