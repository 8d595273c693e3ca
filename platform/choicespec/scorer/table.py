"""The rows of the scorer table: what is varied, and how a row is made."""

from collections.abc import Callable, Iterator, Mapping

from pydantic import Field

from choicespec.scorer.corpus import Corpus, SplitBy
from choicespec.scorer.evaluate import Comparison, compare
from choicespec.scorer.fit import fit
from choicespec.scorer.model import Embed, Reads, ScorerNet
from choicespec.spec.frozen import Frozen
from choicespec.spec.pair import DrafterSpec
from choicespec.spec.training import FitSpec, ScorerTraining

OTHER_SEEDS = 2


class Variant(Frozen):
    """One way of fitting a scorer.

    Attributes:
        name: for people.
        layers: that it reads.
        split_by: what train and held-out prompts do not share.
        hidden_states, prior: what it looks at; an ablation turns one off.
        fit: how it is fitted.
        drafters: those whose drafts are candidates too: the name in the pair, and the kind.
        source_layers: of which it compares the states here with those at a candidate's source.
    """

    name: str
    layers: tuple[int, ...]
    split_by: SplitBy = "prompt"
    hidden_states: bool = True
    prior: bool = True
    fit: FitSpec
    # Left out where there are none, so that rows that were made before there were any keep their identity.
    drafters: dict[str, str] = Field(default={}, exclude_if=lambda drafters: not drafters)
    source_layers: tuple[int, ...] = Field(default=(), exclude_if=lambda layers: not layers)

    @property
    def candidates(self) -> str:
        """What its sets hold, for people."""
        return f"union[{','.join(self.drafters)}]" if self.drafters else "finite"

    @property
    def label(self) -> str:
        """Name and sets, for people."""
        return f"{self.name} {self.candidates}" if self.drafters else self.name


class Row(Frozen):
    """A row of the table: a variant on a task's held-out prompts.

    Attributes:
        precision: of the target that the prompts were recorded on.
        train_prompts: that the variant was fitted to, of all tasks.
        transferred: whether it was fitted to the target in another precision.
    """

    variant: Variant
    task: str
    precision: str
    train_prompts: int
    found: Comparison
    transferred: bool = False


def of_sets(training: ScorerTraining, known: Mapping[str, DrafterSpec]) -> list[Variant]:
    """The scorer itself, then one for each of the other sets.

    Args:
        training: what is compared.
        known: the pair's drafters.
    """
    return [
        Variant(
            name="scorer",
            layers=training.layers,
            fit=training.fit,
            source_layers=training.source_layers,
            drafters={name: known[name].kind for name in drafters},
        )
        for drafters in (training.drafters, *training.other_sets)
    ]


def variants(training: ScorerTraining, known: Mapping[str, DrafterSpec]) -> Iterator[Variant]:
    """What the table compares; the first is the scorer itself. See ``of_sets``."""
    main, *others = of_sets(training, known)
    yield from (main, *others)
    for layer in training.judged_layers if training.ablations else training.other_layers:
        if (layer,) != training.layers:
            yield main.model_copy(update={"name": f"layer {layer}", "layers": (layer,), "drafters": {}})
    if not training.ablations:
        return
    yield main.model_copy(update={"name": "split by function", "split_by": "function"})
    yield main.model_copy(update={"name": "without hidden state", "hidden_states": False, "source_layers": ()})
    # What is known of a prefix enters as one: the states at a candidate's source go with the prior's features.
    yield main.model_copy(update={"name": "without prior features", "prior": False, "source_layers": ()})
    if main.source_layers:
        yield main.model_copy(update={"name": "without source states", "source_layers": ()})
    for seed in range(training.fit.seed + 1, training.fit.seed + 1 + OTHER_SEEDS):
        fit_spec = training.fit.model_copy(update={"seed": seed})
        yield main.model_copy(update={"name": f"seed {seed}", "fit": fit_spec})


def fit_variant(corpus: Corpus, variant: Variant, embed: Embed, on_epoch: Callable[[int, float], None]) -> ScorerNet:
    """Fit a variant to the train prompts."""
    dataset = corpus.training_set(variant.layers, variant.split_by, list(variant.drafters), bool(variant.source_layers))
    scale = corpus.scale if variant.source_layers else None
    return fit(dataset, embed, Reads(variant.hidden_states, variant.prior), variant.fit, on_epoch, scale)


def rows_of(corpus: Corpus, variant: Variant, net: ScorerNet, precision: str, transferred: bool = False) -> list[Row]:
    """Judge a fitted variant on each task's held-out prompts. See ``Row``."""
    prompts = sum(corpus.train_prompts(variant.split_by).values())
    return [
        Row(
            variant=variant,
            task=name,
            precision=precision,
            train_prompts=prompts,
            found=compare(net, task.dataset(variant.layers, list(variant.drafters), bool(variant.source_layers))),
            transferred=transferred,
        )
        for name, task in corpus.test.items()
    ]
