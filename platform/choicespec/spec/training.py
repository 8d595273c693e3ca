"""How a scorer and drafters are trained, and what the scorer's table compares."""

from typing import Annotated

from pydantic import Field, model_validator

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
        source_layers: the decoder layers of which the scorer compares the states here with those at the place in the
            request's own text that a candidate is copied from; their states at the prompts are recorded too.
        other_layers: further layers, each alone in a row of the table, over finite sets.
        block_length, num_candidates: of the candidate sets.
        drafters: names in ``pair.drafters`` of those whose drafts are candidates of the scorer's too.
        other_sets: drafters of further sets, each with a scorer of its own in a row of the table; none of them is the
            finite set.
        train_limits: prompts of each task's train split; the experiment's tasks say what is held out.
        train_tasks: for some of those tasks, the name of a task whose prompts are taken instead of its train split,
            such as prompts that the drafters were not fitted to, or of more categories; none that is held out.
        batch_size: requests recorded together.
        fit: how the scorer is fitted.
        ablations: whether the table also has the split by function, scorers that read less or one of several layers,
            and other seeds.
        transfer: the names of pairs on which the scorers of the sets that they have the drafters for are evaluated as
            they are; the same model in other precisions.
        transfer_limit: held-out prompts of each task that are recorded on such a pair.
    """

    pair: str
    runtime: str = "hf"
    layers: tuple[Count, ...] = Field(min_length=1)
    source_layers: tuple[Count, ...] = ()
    other_layers: tuple[Count, ...] = ()
    block_length: int = Field(default=8, ge=1, le=LONGEST_BLOCK)
    num_candidates: int = Field(default=16, ge=2)
    drafters: tuple[str, ...] = ()
    other_sets: tuple[tuple[str, ...], ...] = ()
    train_limits: dict[str, Count] = Field(min_length=1)
    train_tasks: dict[str, str] = {}  # noqa: RUF012  (a field's default)
    batch_size: int = Field(default=32, ge=1)
    fit: FitSpec = FitSpec()
    ablations: bool = True
    transfer: tuple[str, ...] = ()
    transfer_limit: int = Field(default=64, ge=1)

    @property
    def judged_layers(self) -> tuple[int, ...]:
        """The layers that have rows of the table of their own, ascending."""
        return tuple(sorted({*self.layers, *self.other_layers}))

    @property
    def recorded_layers(self) -> tuple[int, ...]:
        """The layers that are recorded, ascending."""
        return tuple(sorted({*self.judged_layers, *self.source_layers}))

    @property
    def recorded_drafters(self) -> tuple[str, ...]:
        """The drafters whose drafts are recorded, each once."""
        return tuple(dict.fromkeys(name for drafters in (self.drafters, *self.other_sets) for name in drafters))

    @model_validator(mode="after")
    def _sets_differ(self) -> "ScorerTraining":
        sets = [self.drafters, *self.other_sets]
        if len(set(map(frozenset, sets))) < len(sets) or any(len(set(one)) < len(one) for one in sets):
            raise ValueError(f"drafters={self.drafters} and other_sets={self.other_sets} name a drafter or a set twice")
        return self


class DrafterFit(Frozen):
    """How a drafter is fitted.

    Attributes:
        epochs: passes over the recorded outputs.
        batch_size: sequences a step of the optimiser.
        anchors: of each sequence and epoch, drawn anew.
        decay: places of a draft over which the weight of its loss falls to 1/e.
        seed: of the first weights, the order and the anchors.
    """

    epochs: int = Field(default=4, ge=1)
    batch_size: int = Field(default=8, ge=1)
    learning_rate: float = Field(default=2e-3, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    anchors: int = Field(default=24, ge=1)
    decay: float = Field(default=4.0, gt=0)
    seed: int = 0


class DFlashTraining(Frozen):
    """A DFlash drafter that is trained.

    Attributes:
        layers: the target's layers that it taps, counted from 1.
        block_length: B; it drafts B - 1 tokens.
        mask_token_id: a token that texts do not hold.
        num_layers, intermediate_size: of the draft.
    """

    layers: tuple[Count, ...] = Field(min_length=1)
    block_length: int = Field(default=8, ge=2)
    mask_token_id: int = Field(ge=0)
    num_layers: int = Field(default=1, ge=1)
    intermediate_size: int = Field(default=1536, ge=1)
    fit: DrafterFit = DrafterFit()


class MtpTraining(Frozen):
    """A head for multi-token prediction that is trained.

    Attributes:
        num_draft_tokens: k, how often it is iterated.
        intermediate_size: of its layer.
    """

    num_draft_tokens: int = Field(default=3, ge=1)
    intermediate_size: int = Field(default=1536, ge=1)
    fit: DrafterFit = DrafterFit()


class DrafterTraining(Frozen):
    """What ``jobs.train drafter`` records, and which drafters it fits.

    Attributes:
        pair: the name of the pair whose target the drafters are for.
        runtime: the name of the runtime that records.
        train_limits: prompts of each task's train split; the experiment's tasks say what is held out.
        batch_size: requests recorded together.
        draft_vocab_size: D, how many of the target's tokens the drafters have: those most frequent in its outputs.
        dflash, mtp: the drafters; None leaves one out.
    """

    pair: str
    runtime: str = "hf"
    train_limits: dict[str, Count] = Field(min_length=1)
    batch_size: int = Field(default=32, ge=1)
    draft_vocab_size: int = Field(default=8192, ge=2)
    dflash: DFlashTraining | None = None
    mtp: MtpTraining | None = None
