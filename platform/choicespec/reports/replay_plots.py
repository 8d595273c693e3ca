"""Plots of what was replayed: step costs, a search's settings, and predictions beside what was measured."""

from collections.abc import Sequence

from choicespec.measuring.cost import Costs
from choicespec.replay.sweep import Tried
from choicespec.reports import words
from choicespec.reports.collected import Foretold, Sweep
from choicespec.reports.comparison import COLUMNS, interval
from choicespec.reports.drawing import Panel, Scale, from_zero, key
from choicespec.reports.markup import Sheet
from choicespec.reports.plot import Facet, Plot
from choicespec.reports.words import Label

_RECORD, _TUNE = "python -m jobs.record search", "python -m jobs.tune search"
_GREY = -1
_CELLS = 120  # of each axis: settings that would be drawn over each other are drawn once


def cost_plot(found: Sequence[tuple[str, Costs]]) -> Plot:
    """What must be accepted for a verification to pay, a drawing a pair, a line a context length."""
    facets, rows = [], []
    contexts = sorted({context for _, costs in found for context in costs.verification.contexts})
    for experiment, costs in found:
        facets.append(Facet(f"{experiment} · {costs.precision}, {costs.device}", _cost_drawing(costs, contexts)))
        curve = costs.verification
        for context, times_ms in zip(curve.contexts, curve.ms, strict=True):
            for tokens, ms in zip(curve.tokens, times_ms, strict=True):
                rows.append(
                    (experiment, str(context), str(tokens), f"{ms:.1f}", f"{costs.break_even(context, tokens):.2f}")
                )
    keys = [key(number, words.CONTEXT_OF.fill(tokens=context)) for number, context in enumerate(contexts)]
    keys.append(key(_GREY, words.ALL_ACCEPTED, "line"))
    head = (words.EXPERIMENT, words.CONTEXT_TOKENS, words.TOKENS_VERIFIED, words.VERIFICATION_MS, words.BREAK_EVEN)
    return Plot(words.COST_PLOT, words.COST_PLOT_NOTE, tuple(facets), tuple(keys), Sheet(head, tuple(rows)), _RECORD)


def _cost_drawing(costs: Costs, contexts: Sequence[int]) -> str:
    curve = costs.verification
    highest = max(high / row[0] - 1 for row, highs in zip(curve.ms, curve.high_ms, strict=True) for high in highs)
    y = from_zero([highest])
    panel = Panel(Scale(1, curve.tokens[-1] * 1.1, log=True, marked=_doubled(curve.tokens[-1])), y, *_COST_LABELS)
    everything = [*range(int(y.high) + 1), y.high]
    panel.line([(1 + accepted, accepted) for accepted in everything], _GREY, dashed=True)
    for number, context in enumerate(contexts):
        if context not in curve.contexts:
            continue
        row = curve.contexts.index(context)
        one_ms = curve.ms[row][0]
        points = [(float(n), ms / one_ms - 1) for n, ms in zip(curve.tokens, curve.ms[row], strict=True)]
        panel.line(points, number)
        for (tokens, needed), low, high in zip(points, curve.low_ms[row], curve.high_ms[row], strict=True):
            panel.whisker(tokens, max(0.0, low / one_ms - 1), high / one_ms - 1, number)
            panel.mark(tokens, needed, number, f"{context}, {tokens:g}: {needed:.2f}")
    return panel.html()


_COST_LABELS: tuple[Label, Label] = (words.TOKENS_VERIFIED, words.BREAK_EVEN)


def _doubled(longest: int) -> tuple[float, ...]:
    return tuple(2.0**power for power in range(longest.bit_length()))


def sweep_plot(sweeps: Sequence[Sweep]) -> Plot:
    """Every setting replayed, by its work and its rate, with the front of those that no other beats in both."""
    facets, rows = [], []
    spaces = sorted({one.space for sweep in sweeps for one in sweep.tried})
    for sweep in sweeps:
        front = pareto_front(sweep.tried)
        y = Scale(0, 1.06 * max(one.tokens_per_s for one in sweep.tried))
        x = Scale(1, 1.04 * max(map(_work, sweep.tried)))
        panel = Panel(x, y, words.WORK, words.PREDICTED_RATE)
        drawn: set[tuple[int, int]] = set()
        for one in sweep.tried:
            cell = round(x.at(_work(one)) * _CELLS / 100), round(y.at(one.tokens_per_s) * _CELLS / 100)
            if cell not in drawn:
                drawn.add(cell)
                panel.dot(_work(one), one.tokens_per_s, spaces.index(one.space))
        panel.line([(_work(one), one.tokens_per_s) for one in front], _GREY)
        for one in front:
            panel.mark(_work(one), one.tokens_per_s, spaces.index(one.space), f"{one.space} {one.changes}", hollow=True)
            rows.append((sweep.name, one.space, one.changes, f"{_work(one):.2f}", f"{one.tokens_per_s:.1f}"))
        facets.append(Facet(f"{sweep.name}, n={len(sweep.tried)}", panel.html()))
    keys = tuple(key(number, space) for number, space in enumerate(spaces))
    head = (words.TASK, words.METHOD, words.FRONT, words.WORK, words.PREDICTED_RATE)
    return Plot(words.SWEEP_PLOT, words.SWEEP_PLOT_NOTE, tuple(facets), keys, Sheet(head, tuple(rows)), _TUNE)


def pareto_front(tried: Sequence[Tried]) -> list[Tried]:
    """The settings that none is both faster and less work than, from the least work to the fastest."""
    front: list[Tried] = []
    for one in sorted(tried, key=lambda one: (_work(one), -one.tokens_per_s)):
        if not front or one.tokens_per_s > front[-1].tokens_per_s:
            front.append(one)
    return front


def _work(one: Tried) -> float:
    """Tokens verified for each decoded: drafts and anchors over accepted and bonus tokens."""
    return (one.proposed + one.steps) / max(1.0, one.steps * (1 + one.accepted_per_step))


def live_plot(found: Sequence[Foretold]) -> Plot:
    """Predicted and measured decode rates, a drawing an experiment's task."""
    facets, rows = [], []
    methods = sorted({one.predicted.trial.method.kind for one in found})
    tasks = dict.fromkeys((one.experiment, one.predicted.trial.task) for one in found)
    for experiment, task in tasks:
        own = [one for one in found if (one.experiment, one.predicted.trial.task) == (experiment, task)]
        rates = [one.measured.decode_tokens_per_s.high for one in own] + [one.predicted.tokens_per_s for one in own]
        scale = from_zero(rates)
        panel = Panel(scale, scale, words.PREDICTED_RATE, words.LIVE_RATE)
        panel.line([(0, 0), (scale.high, scale.high)], _GREY, dashed=True)
        for one in own:
            predicted, rate = one.predicted.tokens_per_s, one.measured.decode_tokens_per_s
            number, label = methods.index(one.predicted.trial.method.kind), one.predicted.trial.method.label
            panel.whisker(predicted, rate.low, rate.high, number)
            panel.mark(predicted, rate.value, number, f"{label}: {predicted:.1f}, {rate.value:.1f}")
            error = f"{100 * (predicted / rate.value - 1):+.1f}" if rate.value else ""
            figures = (f"{predicted:.1f}", f"{rate.value:.1f}", interval(rate, COLUMNS[1]), error, str(rate.n))
            rows.append((f"{experiment} · {task.label}", label, *figures))
        facets.append(Facet(f"{experiment} · {task.label}", panel.html()))
    keys = (*(key(number, kind) for number, kind in enumerate(methods)), key(_GREY, words.EQUAL, "line"))
    head = (words.TASK, words.METHOD, words.PREDICTED_RATE, words.LIVE_RATE, words.INTERVAL, words.ERROR, words.PROMPTS)
    return Plot(words.LIVE_PLOT, words.LIVE_PLOT_NOTE, tuple(facets), keys, Sheet(head, tuple(rows)), _TUNE)
