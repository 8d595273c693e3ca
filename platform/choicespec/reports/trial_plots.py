"""Plots of measured trials: how fast, what was accepted, where the time goes, and where outputs part."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from choicespec.records import Step
from choicespec.reports import words
from choicespec.reports.collected import Group
from choicespec.reports.comparison import COLUMNS, interval
from choicespec.reports.drawing import Lane, Panel, Scale, from_zero, in_lane, key, lanes, part, spread
from choicespec.reports.markup import Sheet
from choicespec.reports.plot import Facet, Plot
from choicespec.reports.published_rows import counterparts
from choicespec.results import Kept

MEASURE = "python -m jobs.bench smollm2"
_NO_DRAFT = -1
_SOURCES = ("prompt", "schema", "repository", "outputs")
_LEAST_MARGIN = 1e-6  # what is smaller is drawn here


class TrialPlots:
    """The plots of what was measured live.

    Args:
        groups: of comparable trials.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        labels = sorted({one.trial.method.label for group in groups for one in group.kept if one.trial.method.drafts})
        self._series: Mapping[str, int] = {label: number for number, label in enumerate(labels)}

    def speedups(self) -> Plot:
        """Speed-up with its interval, beside the published one."""
        scale = from_zero(self._largest_speedups())
        facets, rows = [], []
        for group in self._groups:
            drafting = _drafting(group)
            if not drafting:
                continue
            facets.append(
                Facet(group.title, lanes(scale, [self._speedup(scale, one) for one in drafting], words.TIMES, 1))
            )
            for one in drafting:
                found = one.measurement.speedup
                ends = interval(found, COLUMNS[0])
                rows.append((group.title, one.trial.method.label, f"{found.value:.2f}", ends, str(found.n)))
        head = (words.COMPARED, words.METHOD, words.SPEEDUP, words.INTERVAL, words.PROMPTS)
        return Plot(words.SPEEDUP_PLOT, words.SPEEDUP_PLOT_NOTE, tuple(facets), (), Sheet(head, tuple(rows)), MEASURE)

    def positions(self) -> Plot:
        """The share of proposed tokens that were kept, by their place in the draft."""
        facets, rows, shown = [], [], set()
        for group in self._groups:
            known = [one for one in _drafting(group) if one.measurement.acceptance_by_position]
            if not known:
                continue
            longest = max(len(one.measurement.acceptance_by_position) for one in known)
            panel = Panel(
                Scale(0.5, longest + 0.5, marked=_whole(1, longest)), Scale(0, 1), words.POSITION, words.SHARE_KEPT
            )
            for one in known:
                label = one.trial.method.label
                shown.add(label)
                points = list(enumerate(one.measurement.acceptance_by_position, start=1))
                panel.line(points, self._series[label])
                for position, share in points:
                    panel.mark(position, share, self._series[label], f"{label}, {position}: {share:.2f}")
                    rows.append((group.title, label, str(position), f"{share:.3f}"))
            facets.append(Facet(group.title, panel.html()))
        head = (words.COMPARED, words.METHOD, words.POSITION, words.SHARE_KEPT)
        return Plot(
            words.POSITION_PLOT,
            words.POSITION_PLOT_NOTE,
            tuple(facets),
            self._legend(shown),
            Sheet(head, tuple(rows)),
            MEASURE,
        )

    def sources(self) -> Plot:
        """How many draft tokens a step kept, and who had proposed them."""
        stepwise = [
            (group, one, Counter((step.accepted, step.source) for trace in one.traces() for step in trace.steps))
            for group in self._groups
            for one in _drafting(group)
            if one.measurement.acceptance_by_position  # else single steps are not known
        ]
        series = _by_source({source for _, _, counts in stepwise for _, source in counts})
        facets, rows = [], []
        for group, one, counts in stepwise:
            label = one.trial.method.label
            facets.append(Facet(f"{label} · {group.title}", _lengths(counts, series)))
            rows += [
                (group.title, label, source or words.NO_DRAFT, str(accepted), str(count))
                for (accepted, source), count in sorted(counts.items())
            ]
        legend = tuple(key(number, source or words.NO_DRAFT, "area") for source, number in series.items())
        head = (words.COMPARED, words.METHOD, words.SOURCE, words.TOKENS_KEPT, words.STEPS)
        return Plot(words.SOURCE_PLOT, words.SOURCE_PLOT_NOTE, tuple(facets), legend, Sheet(head, tuple(rows)), MEASURE)

    def times(self) -> Plot:
        """The mean time of a step, in parts."""
        timed = [
            (group, [(one, _mean_parts_ms(one)) for one in group.kept if _is_timed(one)]) for group in self._groups
        ]
        scale = from_zero(sum(parts) for _, found in timed for _, parts in found)
        facets, rows = [], []
        for group, found in timed:
            drawn = []
            for one, parts in found:
                label = one.trial.method.label
                drawn.append(Lane(label, _stacked(scale, parts), f"{sum(parts):.1f} ms"))
                rows.append((group.title, label, *(f"{ms:.2f}" for ms in (*parts, sum(parts)))))
            if drawn:
                facets.append(Facet(group.title, lanes(scale, drawn, words.MS_A_STEP)))
        names = (words.PROPOSE, words.SCORE, words.VERIFY, words.REST)
        legend = tuple(key(number, name, "area") for number, name in enumerate(names))
        head = (words.COMPARED, words.METHOD, *names, words.MS_A_STEP)
        return Plot(words.TIME_PLOT, words.TIME_PLOT_NOTE, tuple(facets), legend, Sheet(head, tuple(rows)), MEASURE)

    def margins(self) -> Plot:
        """The share of outputs that are plain decoding's, and the target's margin where another one parts."""
        parted = [(group, [one for one in group.kept if one.measurement.divergences]) for group in self._groups]
        margins = [abs(d.top2_margin) for _, found in parted for one in found for d in one.measurement.divergences]
        low, high = min([1e-3, *margins]), max([1.0, *margins])
        scale = Scale(max(low, _LEAST_MARGIN) / 2, 2 * high, log=True)
        facets, rows = [], []
        for group, found in parted:
            drawn = []
            for one in found:
                match, label = one.measurement.match, one.trial.method.label
                points = [
                    in_lane(
                        scale,
                        abs(d.top2_margin),
                        self._series.get(label, _NO_DRAFT),
                        f"{d.request_id}: {d.top2_margin:.2g}",
                    )
                    for d in one.measurement.divergences
                ]
                drawn.append(Lane(label, "".join(points), f"{round(match.value * match.n)}/{match.n}"))
                rows += [
                    (group.title, label, d.request_id, str(d.position), f"{d.top2_margin:.2g}")
                    for d in one.measurement.divergences
                ]
            if drawn:
                facets.append(Facet(group.title, lanes(scale, drawn, words.MARGIN)))
        head = (words.COMPARED, words.METHOD, words.REQUEST, words.DIFFERS_AT, words.MARGIN)
        outputs = [one.measurement.match.n for group in self._groups for one in _drafting(group)]
        finding = words.ALL_MATCH.fill(outputs=sum(outputs), trials=len(outputs)) if outputs else None
        return Plot(
            words.MARGIN_PLOT, words.MARGIN_PLOT_NOTE, tuple(facets), (), Sheet(head, tuple(rows)), MEASURE, finding
        )

    def _speedup(self, scale: Scale, one: Kept) -> Lane:
        found, label = one.measurement.speedup, one.trial.method.label
        series = self._series[label]
        value = f"{found.value:.2f}"
        theirs = [
            in_lane(scale, row.speedup, 3, f"{row.target}: {row.speedup:.2f}", hollow=True)
            for row in counterparts(one.trial)
        ]
        drawn = [*theirs, spread(scale, found.low, found.high, series), in_lane(scale, found.value, series, value)]
        return Lane(label, "".join(drawn), f"{value} {interval(found, COLUMNS[0])}")

    def _largest_speedups(self) -> Iterator[float]:
        for group in self._groups:
            for one in group.kept:
                yield one.measurement.speedup.high
                yield from (row.speedup for row in counterparts(one.trial))

    def _legend(self, labels: set[str]) -> tuple[str, ...]:
        return tuple(key(self._series[label], label) for label in sorted(labels))


def _drafting(group: Group) -> list[Kept]:
    return [one for one in group.kept if one.trial.method.drafts]


def _whole(low: int, high: int) -> tuple[float, ...]:
    """Whole numbers, at most a dozen."""
    return tuple(float(number) for number in range(low, high + 1, 1 + (high - low) // 12))


def _by_source(names: set[str]) -> dict[str, int]:
    """A series each: those of candidates always the same, then whatever else proposes; grey for no draft."""
    others = sorted(names - {*_SOURCES, ""})
    series = {source: number for number, source in enumerate((*_SOURCES, *others))} | {"": _NO_DRAFT}
    return {source: number for source, number in series.items() if source in names}


def _lengths(counts: Mapping[tuple[int, str], int], series: dict[str, int]) -> str:
    steps, longest = sum(counts.values()), max(accepted for accepted, _ in counts)
    totals: Counter[int] = Counter()
    for (accepted, _), count in counts.items():
        totals[accepted] += count
    top = from_zero(count / steps for count in totals.values())
    panel = Panel(Scale(-0.6, longest + 0.6, marked=_whole(0, longest)), top, words.TOKENS_KEPT, words.SHARE_OF_STEPS)
    for accepted in sorted(totals):
        bottom = 0.0
        for source in reversed(list(series)):
            share = counts.get((accepted, source), 0) / steps
            if share:
                panel.bar(accepted, 0.8, bottom, bottom + share, series[source], f"{source}: {share:.1%}")
            bottom += share
    return panel.html()


def _is_timed(one: Kept) -> bool:
    """Whether its steps have times."""
    return any(step.verify_ms for trace in one.traces() for step in trace.steps)


def _mean_parts_ms(one: Kept) -> tuple[float, float, float, float]:
    """Propose, score, verify, rest: the mean of each over steps."""
    steps: list[Step] = [step for trace in one.traces() for step in trace.steps]
    propose, score, verify, rest = (
        sum(getattr(step, name) for step in steps) / len(steps)
        for name in ("propose_ms", "score_ms", "verify_ms", "settle_ms")
    )
    return propose - score, score, verify - rest, rest


def _stacked(scale: Scale, parts: Sequence[float]) -> str:
    ends = [sum(parts[:number]) for number in range(len(parts) + 1)]
    return "".join(
        part(scale, low, high, number, f"{high - low:.2f} ms") for number, (low, high) in enumerate(pairwise(ends))
    )
