"""The rows of the scorer table: what is varied, and how a row is made."""

from collections.abc import Callable, Iterator

from choicespec.scorer.corpus import Corpus, SplitBy
from choicespec.scorer.evaluate import Comparison, compare
from choicespec.scorer.fit import fit
from choicespec.scorer.model import Embed, Reads, ScorerNet
from choicespec.spec.frozen import Frozen
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
    """

    name: str
    layers: tuple[int, ...]
    split_by: SplitBy = "prompt"
    hidden_states: bool = True
    prior: bool = True
    fit: FitSpec


class Row(Frozen):
    """A row of the table: a variant on a task's held-out prompts.

    Attributes:
        precision: of the target that the prompts were recorded on.
        train_prompts: that the variant was fitted to, of all tasks.
    """

    variant: Variant
    task: str
    precision: str
    train_prompts: int
    found: Comparison


def variants(training: ScorerTraining) -> Iterator[Variant]:
    """What the table compares; the first is the scorer itself."""
    main = Variant(name="scorer", layers=training.layers, fit=training.fit)
    yield main
    yield main.model_copy(update={"name": "split by function", "split_by": "function"})
    for layer in training.recorded_layers:
        if (layer,) != training.layers:
            yield main.model_copy(update={"name": f"layer {layer}", "layers": (layer,)})
    yield main.model_copy(update={"name": "without hidden state", "hidden_states": False})
    yield main.model_copy(update={"name": "without prior features", "prior": False})
    for seed in range(training.fit.seed + 1, training.fit.seed + 1 + OTHER_SEEDS):
        fit_spec = training.fit.model_copy(update={"seed": seed})
        yield main.model_copy(update={"name": f"seed {seed}", "fit": fit_spec})


def fit_variant(corpus: Corpus, variant: Variant, embed: Embed, on_epoch: Callable[[int, float], None]) -> ScorerNet:
    """Fit a variant to the train prompts."""
    dataset = corpus.training_set(variant.layers, variant.split_by)
    return fit(dataset, embed, Reads(variant.hidden_states, variant.prior), variant.fit, on_epoch)


def rows_of(corpus: Corpus, variant: Variant, net: ScorerNet, precision: str) -> list[Row]:
    """Judge a fitted variant on each task's held-out prompts."""
    prompts = sum(corpus.train_prompts(variant.split_by).values())
    return [
        Row(
            variant=variant,
            task=name,
            precision=precision,
            train_prompts=prompts,
            found=compare(net, task.dataset(variant.layers)),
        )
        for name, task in corpus.test.items()
    ]
