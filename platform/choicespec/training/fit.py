"""Fitting a drafter to recorded outputs, a chunk at a time; it stops and goes on at any chunk.

Shapes: A anchors, K drafted places, D tokens of the drafter, V of the target.
"""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from choicespec.errors import RecordingError
from choicespec.spec.training import DrafterFit
from choicespec.training.sequences import Recordings, TokenSequence
from choicespec.training.trainees import Trainee

_LARGEST_GRADIENT = 1.0
_WARM_UP = 0.05  # of all steps
_LEAST_RATE = 0.02  # of the learning rate, at the end
_UNKNOWN = -100  # a label without a loss: beyond the output's end, or a token that the drafter does not have


class Progress(NamedTuple):
    """How far a fit is.

    Attributes:
        chunks: done, of all epochs.
        losses: the mean of each chunk's.
    """

    chunks: int
    losses: tuple[float, ...]


class Fit:
    """A fit that can be gone on with.

    Args:
        trainee: the network.
        recordings: what it learns from.
        spec: how long, how fast, from which seed.
        kept: the file that holds its state between chunks; what an earlier run left there is gone on with.
    """

    def __init__(self, trainee: Trainee, recordings: Recordings, spec: DrafterFit, kept: Path) -> None:
        self._trainee, self._recordings, self._spec, self._kept = trainee, recordings, spec, kept
        self._parameters = [p for p in trainee.net.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=spec.learning_rate, betas=(0.9, 0.98), weight_decay=spec.weight_decay
        )
        self._draft_ids = torch.zeros(int(_target_ids(trainee).max()) + 1, dtype=torch.long).fill_(_UNKNOWN)
        self._draft_ids[_target_ids(trainee)] = torch.arange(len(_target_ids(trainee)))
        self.progress = self._restored() if kept.exists() else Progress(0, ())

    @property
    def total(self) -> int:
        """Chunks of all epochs."""
        return self._spec.epochs * len(self._recordings)

    def run(self, on_chunk: Callable[[Progress], None], save_every: int) -> None:
        """Fit to the end.

        Args:
            on_chunk: called after each chunk.
            save_every: chunks between two savings of the state.
        """
        self._trainee.net.train()
        while self.progress.chunks < self.total:
            number = self.progress.chunks
            loss = self._chunk(number)
            self.progress = Progress(number + 1, (*self.progress.losses, loss))
            if (number + 1) % save_every == 0 or number + 1 == self.total:
                self._save()
            on_chunk(self.progress)
        self._trainee.net.eval()

    def _chunk(self, number: int) -> float:
        """Learn from one chunk; which one, and which anchors of it, depends on the seed and the number alone."""
        epoch, index = divmod(number, len(self._recordings))
        order = np.random.default_rng((self._spec.seed, epoch)).permutation(len(self._recordings))
        dice = np.random.default_rng((self._spec.seed, epoch, index))
        sequences = [one for one in self._recordings[int(order[index])] if len(one.anchors)]
        dice.shuffle(sequences)  # type: ignore[arg-type]
        batches = [sequences[at : at + self._spec.batch_size] for at in range(0, len(sequences), self._spec.batch_size)]
        losses = []
        for at, batch in enumerate(batches):
            self._set_rate((number + at / len(batches)) / self.total)
            self._optimizer.zero_grad()
            for sequence in batch:
                loss = self._loss(sequence, dice) / len(batch)
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item() * len(batch))
            clip_grad_norm_(self._parameters, _LARGEST_GRADIENT)
            self._optimizer.step()
        return float(np.mean(losses)) if losses else 0.0

    def _loss(self, sequence: TokenSequence, dice: np.random.Generator) -> torch.Tensor:
        """Cross-entropy of the target's own tokens, those close to the anchor weighing more.

        Source of the weights: DFlash (arXiv 2602.06036), exp(-place / decay).
        """
        anchors = sequence.anchors
        if len(anchors) > self._spec.anchors:
            anchors = anchors[np.sort(dice.choice(len(anchors), self._spec.anchors, replace=False))]
        labels_AK = self._labels(sequence, anchors)
        weights_K = torch.exp(-torch.arange(self._trainee.places) / self._spec.decay)
        weights_AK = weights_K * (labels_AK != _UNKNOWN)
        logits_AKD = self._trainee.logits(sequence, anchors)
        losses_AK = cross_entropy(
            logits_AKD.flatten(0, 1), labels_AK.flatten(), ignore_index=_UNKNOWN, reduction="none"
        ).view_as(labels_AK)
        return (losses_AK * weights_AK).sum() / weights_AK.sum().clamp(min=1e-6)

    def _labels(self, sequence: TokenSequence, anchors_A: torch.Tensor) -> torch.Tensor:
        tokens_AK, there_AK = after_anchors(sequence, anchors_A, self._trainee.places)
        known_AK = there_AK & (tokens_AK < len(self._draft_ids))
        return torch.where(known_AK, self._draft_ids[tokens_AK.where(known_AK, torch.tensor(0))], _UNKNOWN)

    def _set_rate(self, done: float) -> None:
        """Linear up, then down along a half cosine."""
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        rate = self._spec.learning_rate * min(done / _WARM_UP, _LEAST_RATE + (1 - _LEAST_RATE) * cosine)
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def _save(self) -> None:
        state = self._optimizer.state_dict()["state"]
        tensors = {f"net.{name}": tensor for name, tensor in self._trainee.net.state_dict().items()}
        tensors |= {f"optimizer.{index}.{name}": value for index, one in state.items() for name, value in one.items()}
        partial = self._kept.with_suffix(".partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"progress": json.dumps(self.progress._asdict())}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata=metadata)
        os.replace(partial, self._kept)

    def _restored(self) -> Progress:
        try:
            with safe_open(self._kept, framework="pt") as file:
                saved = json.loads(file.metadata()["progress"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise RecordingError(
                f"{self._kept}: a broken state of a fit ({error}); delete it and begin again"
            ) from None
        net = {name.removeprefix("net."): tensor for name, tensor in tensors.items() if name.startswith("net.")}
        self._trainee.net.load_state_dict(net)
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, part = name.split(".")
                state.setdefault(int(index), {})[part] = tensor
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        return Progress(saved["chunks"], tuple(saved["losses"]))


def after_anchors(sequence: TokenSequence, anchors_A: torch.Tensor, places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(A, K) the tokens after each anchor, and whether they are there."""
    at_AK = anchors_A[:, None] + 1 + torch.arange(places)
    there_AK = at_AK < len(sequence.token_ids_N)
    return sequence.token_ids_N[at_AK.clamp(max=len(sequence.token_ids_N) - 1)], there_AK


def _target_ids(trainee: Trainee) -> torch.Tensor:
    return trainee.head.target_ids(torch.arange(len(trainee.head.d2t)))
