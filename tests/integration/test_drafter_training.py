"""Training drafters on recorded outputs of a small target: what is trained is what drafts, and a fit goes on."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from choicespec.decoding.batched import record_batch
from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.decoding.proposer import Proposer
from choicespec.decoding.stopping import StopRule
from choicespec.drafters.checkpoint import TargetShape
from choicespec.drafters.dflash import DFlashCheckpoint
from choicespec.drafters.mtp import MtpCheckpoint
from choicespec.errors import RecordingError
from choicespec.recordings import RecordingFolder, RecordingManifest, pack
from choicespec.records import Request, TargetIdentity
from choicespec.spec.task import PythonRepo
from choicespec.spec.training import DFlashTraining, DrafterFit, MtpTraining
from choicespec.training.evaluate import accepted_at, judge
from choicespec.training.fit import Fit
from choicespec.training.sequences import Recordings, TokenSequence, deviation, most_frequent
from choicespec.training.trainees import DFlashTrainee, MtpTrainee, Trainee
from integration.small_checkpoints import HIDDEN, LAYERS, small_llama

TARGET = TargetShape(HIDDEN, 512, LAYERS)
DFLASH = DFlashTraining(layers=(1, 3), block_length=4, mask_token_id=500, intermediate_size=64)
MTP = MtpTraining(num_draft_tokens=3, intermediate_size=64)
FIT = DrafterFit(epochs=2, batch_size=2, anchors=6, learning_rate=1e-2)


@cache
def _target() -> CausalLmTarget:
    return CausalLmTarget(small_llama().requires_grad_(False))


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    """Three chunks of three requests."""
    torch.manual_seed(3)
    requests = [Request(f"r{i}", tuple(torch.randint(0, 64, (5 + i,)).tolist()), 14) for i in range(9)]
    chunks = [requests[start : start + 3] for start in (0, 3, 6)]
    folder = RecordingFolder(tmp_path_factory.mktemp("recording"))
    identity = TargetIdentity(weights="", tokenizer="", precision="float32", hidden_size=HIDDEN, num_layers=LAYERS)
    names = tuple(tuple(request.request_id for request in chunk) for chunk in chunks)
    folder.begin(
        RecordingManifest(
            target=identity,
            task=PythonRepo(),
            layers=(1, 3),
            prompt_states=True,
            chunks=names,
            request_ids=sum(names, ()),
        )
    )
    for index, chunk in enumerate(chunks):
        stops = [StopRule((), request.max_new_tokens, (), str) for request in chunk]
        folder.add(index, pack(record_batch(small_llama(), chunk, stops, (1, 3), prompt_states=True)))
    return Recordings([folder])


def _trainee(kind: str, recordings: Recordings, size: int = 64) -> Trainee:
    tokens = most_frequent(recordings, 512, size)
    if kind == "dflash":
        return DFlashTrainee(DFLASH, _target(), tokens, deviation(recordings, DFLASH.layers))
    return MtpTrainee(MTP, _target(), LAYERS, tokens)


def _rounded(trainee: Any) -> Any:
    """As it will be after it was saved."""
    for parameter in trainee.net.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return trainee


def _live(drafter: Proposer, sequence: TokenSequence) -> list[int]:
    """Tokens accepted at each anchor by a loop that keeps one token a step."""
    target, ids, at = _target(), sequence.token_ids_N.tolist(), sequence.prompt_tokens
    target.prefill(ids[:at])
    drafter.begin(Request("r", tuple(ids[:at]), 64))
    accepted = []
    for anchor in sequence.anchors.tolist():
        draft = drafter.propose(ids[: anchor + 1], 64).token_ids
        rest = ids[anchor + 1 :]
        right = [ours == theirs for ours, theirs in zip(draft, rest, strict=False)]
        accepted.append((*right, False).index(False))
        target.verify(ids[anchor : anchor + 1])
        target.keep(1)
    return accepted


@pytest.mark.parametrize("kind", ["dflash", "mtp"])
def test_what_is_trained_is_what_drafts(kind: str, recordings: Recordings, tmp_path: Path) -> None:
    """Fails if training shows a place what a live loop does not, or the other way round; or if saving, scaling or the
    reduced vocabulary changes a draft."""
    trainee = _trainee(kind, recordings)
    if isinstance(trainee, DFlashTrainee):
        trainee._deviation_F = trainee._deviation_F.log2().round().exp2()  # a scale that no rounding can tell
    Fit(trainee, recordings, FIT, tmp_path / "fit.safetensors").run(lambda progress: None, 100)
    _rounded(trainee).save(tmp_path / kind, {})
    checkpoint: Any = DFlashCheckpoint if kind == "dflash" else MtpCheckpoint
    drafter = checkpoint(str(tmp_path / kind), TARGET).drafter(_target(), 3)
    found = [_live(drafter, sequence) for chunk in recordings for sequence in chunk]
    assert found == [accepted_at(trainee, sequence) for chunk in recordings for sequence in chunk]
    assert max(map(max, found)) >= 1


@pytest.mark.parametrize("kind", ["dflash", "mtp"])
def test_an_anchor_sees_nothing_of_what_comes_after(kind: str, recordings: Recordings) -> None:
    """Fails if the mask lets a block see later context or another block: it would predict what it was shown."""
    trainee, sequence = _trainee(kind, recordings), recordings[0][0]
    anchor = sequence.prompt_tokens + 4
    ids, states = sequence.token_ids_N.clone(), {layer: one.clone() for layer, one in sequence.states.items()}
    ids[anchor + 1 :] = 7
    for one in states.values():
        one[anchor:] = 1.0
    anchors = torch.tensor([anchor - 2, anchor, anchor + 3])
    with torch.inference_mode():
        expected = trainee.logits(sequence, anchors)[1, 0]
        found = trainee.logits(TokenSequence(ids, sequence.prompt_tokens, states), anchors)[1, 0]
        alone = trainee.logits(sequence, anchors[1:2])[0, 0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-4)


class _Interrupted(Exception):
    pass


@pytest.mark.parametrize("kind", ["dflash", "mtp"])
def test_a_fit_that_was_interrupted_ends_as_one_that_was_not(kind: str, recordings: Recordings, tmp_path: Path) -> None:
    """Fails if the optimiser's state, the order or the anchors are another after going on."""
    whole, parts = _trainee(kind, recordings), _trainee(kind, recordings)
    Fit(whole, recordings, FIT, tmp_path / "whole.safetensors").run(lambda progress: None, 1)

    def interrupt(progress: Any) -> None:
        if progress.chunks == 4:
            raise _Interrupted

    with pytest.raises(_Interrupted):
        Fit(parts, recordings, FIT, tmp_path / "parts.safetensors").run(interrupt, 1)
    parts = _trainee(kind, recordings)  # another process
    fit = Fit(parts, recordings, FIT, tmp_path / "parts.safetensors")
    assert (fit.progress.chunks, len(fit.progress.losses), fit.total) == (4, 4, 6)
    fit.run(lambda progress: None, 1)
    for name, tensor in whole.net.state_dict().items():
        torch.testing.assert_close(parts.net.state_dict()[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_a_broken_state_is_refused(recordings: Recordings, tmp_path: Path) -> None:
    """Fails with a traceback, or begins anew without a word."""
    (tmp_path / "fit.safetensors").write_bytes(b"no tensors")
    with pytest.raises(RecordingError, match="a broken state of a fit"):
        Fit(_trainee("mtp", recordings), recordings, FIT, tmp_path / "fit.safetensors")


@pytest.mark.parametrize("kind", ["dflash", "mtp"])
def test_training_helps(kind: str, recordings: Recordings, tmp_path: Path) -> None:
    """Fails if the labels are not the tokens that the target went on with."""
    trainee = _trainee(kind, recordings)
    before = judge(trainee, "task", recordings)
    fit = Fit(trainee, recordings, FIT.model_copy(update={"epochs": 25}), tmp_path / "fit.safetensors")
    fit.run(lambda progress: None, 1000)
    after = judge(trainee, "task", recordings)
    assert fit.progress.losses[-1] < 0.5 * fit.progress.losses[0]
    assert after.accepted.value > before.accepted.value + 0.5
    assert after.accepted_on_path.n == 9


def test_the_tokens_of_outputs_come_first(recordings: Recordings) -> None:
    """Fails if a reduced vocabulary is filled from the prompts while tokens of outputs are left out."""
    outputs = {
        token for chunk in recordings for one in chunk for token in one.token_ids_N[one.prompt_tokens :].tolist()
    }
    few = most_frequent(recordings, 512, len(outputs))
    assert set(few.tolist()) == outputs
    assert few.tolist() == sorted(outputs)
    assert judge(_trainee("mtp", recordings, len(outputs)), "task", recordings).known == 1.0
    assert judge(_trainee("mtp", recordings, len(outputs) // 2), "task", recordings).known < 1.0
