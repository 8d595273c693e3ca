"""How a scorer is trained, and what its table compares."""

from typing import Annotated

from pydantic import Field

from choicespec.spec.frozen import Frozen
from choicespec.spec.method import LONGEST_BLOCK

Count = Annotated[int, Field(ge=1)]


class FitSpec(Frozen):
    """How a scorer is fitted.

    Attributes:
        epochs: passes over the recorded positions.
        batch_size: positions a step of the optimiser.
        listwise_weight: of the loss that compares the candidates of a set, beside the one that judges each token.
        seed: of the first weights and the order.
    """

    epochs: int = Field(default=3, ge=1)
    batch_size: int = Field(default=128, ge=1)
    learning_rate: float = Field(default=3e-3, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    listwise_weight: float = Field(default=2.0, ge=0)
    seed: int = Field(default=0, ge=0)


class ScorerTraining(Frozen):
    """What ``jobs.train`` records, fits and compares for an experiment.

    Attributes:
        pair: the name of the pair that is recorded and that the scorer is for.
        runtime: the name of the runtime that records.
        layers: the decoder layers that the scorer reads, counted from 1.
        other_layers: further layers, each alone in a row of the table.
        block_length, num_candidates: of the candidate sets.
        train_limits: prompts of each task's train split; the experiment's tasks say what is held out.
        batch_size: requests recorded together.
        fit: how the scorer is fitted.
        transfer: the names of pairs on which the scorer is evaluated as it is; the same model in other precisions.
        transfer_limit: held-out prompts of each task that are recorded on such a pair.
    """

    pair: str
    runtime: str = "hf"
    layers: tuple[Count, ...] = Field(min_length=1)
    other_layers: tuple[Count, ...] = ()
    block_length: int = Field(default=8, ge=1, le=LONGEST_BLOCK)
    num_candidates: int = Field(default=16, ge=2)
    train_limits: dict[str, Count] = Field(min_length=1)
    batch_size: int = Field(default=32, ge=1)
    fit: FitSpec = FitSpec()
    transfer: tuple[str, ...] = ()
    transfer_limit: int = Field(default=64, ge=1)

    @property
    def recorded_layers(self) -> tuple[int, ...]:
        """The layers that are recorded, ascending."""
        return tuple(sorted({*self.layers, *self.other_layers}))
