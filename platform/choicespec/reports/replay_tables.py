"""Tables of what was replayed: costs, methods, and a search's settings against what was measured live."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from choicespec.measuring.cost import Costs
from choicespec.records import Estimate, Measurement
from choicespec.replay.simulate import Replayed
from choicespec.reports.tables import figure
from choicespec.spec.experiment import TrialSpec

_SHOWN = (1, 2, 5, 9, 17, 33, 64)  # tokens of a verification
_BESIDE_FLOOR = (1, 9)


class Finalist(NamedTuple):
    """A setting that was measured live.

    Attributes:
        name: for people: where it comes from, and what it changes.
        predicted: on the requests that it was measured on; None where nothing can be replayed.
    """

    name: str
    trial: TrialSpec
    measured: Measurement
    predicted: Replayed | None


class Margin(NamedTuple):
    """How many times as fast the winner decoded as another on the held-out prompts, paired by request."""

    over: str
    ratio: Estimate

    @property
    def verdict(self) -> str:
        """What may be said of it."""
        if self.ratio.low > 1:
            return "faster"
        return "slower" if self.ratio.high < 1 else "no difference shown"


def cost_table(costs: Costs, title: str) -> Table:
    """Milliseconds of a verification by context and tokens, and what must be accepted for it to pay."""
    verification = costs.verification
    shown = [size for size in _SHOWN if size <= verification.tokens[-1]]
    table = Table(
        title=f"{title}: ms of a verification [fastest, slowest of {costs.rounds}]",
        caption=f"below each: accepted tokens a step from which it beats plain decoding; besides, a step takes "
        f"{costs.rest_ms:.1f} ms; look-ups {costs.ngram.step_ms:.2f} (ngram) and {costs.candidates.step_ms:.2f} ms "
        f"(candidates), the scorer "
        + (f"{costs.scorer.step_ms:.2f} ms" if costs.scorer else "-")
        + "".join(f", {name} {cost.ms[-1].step_ms:.2f} ms" for name, cost in costs.drafters.items())
        + _floor_line(costs),
    )
    table.add_column("context", justify="right")
    for size in shown:
        table.add_column(f"{size} tokens", justify="right")
    for row, context in enumerate(verification.contexts):
        cells = []
        for size in shown:
            if size not in verification.tokens:
                cells.append("-")
                continue
            column = verification.tokens.index(size)
            ms, low, high = (getattr(verification, name)[row][column] for name in ("ms", "low_ms", "high_ms"))
            cells.append(f"{ms:.1f} \\[{low:.1f}, {high:.1f}]\n{costs.break_even(context, size):.2f}")
        table.add_row(str(context), *cells)
    return table


def _floor_line(costs: Costs) -> str:
    """How far the shortest context's verifications are from the least that the machine allows."""
    if costs.floor is None:
        return ""
    floor, curve = costs.floor, costs.verification
    times = ", ".join(
        f"{ms / floor.ms(size):.2f} times the floor with {size} ({floor.ms(size):.1f} ms)"
        for size, ms in zip(curve.tokens, curve.ms[0], strict=True)
        if size in _BESIDE_FLOOR
    )
    return (
        f"; at context {curve.contexts[0]} {times}: {floor.weight_bytes / 1e6:.0f} MB of weights read at "
        f"{floor.read_bytes_per_s / 1e9:.1f} GB/s, or multiplied at {floor.flops_per_s / 1e9:.0f} GFLOP/s"
    )


def replay_table(rows: Sequence[tuple[TrialSpec, Replayed, Replayed]], title: str) -> Table:
    """Methods with what is predicted of them, beside plain decoding's prediction."""
    table = Table(title=title, caption="accepted/step as the live loop's; times are predicted from measured costs")
    for name in ("pair", "task", "method"):
        table.add_column(name, overflow="fold")
    for name in (
        "decode tok/s",
        "speed-up",
        "accepted/step",
        "steps",
        "search %",
        "score %",
        "draft %",
        "verify %",
        "n",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for trial, found, plain in rows:
        total_ms = float(found.decode_ms.sum()) or 1.0
        shares = [
            100 * float(ms.sum()) / total_ms
            for ms in (found.search_ms, found.score_ms, found.draft_ms, found.verify_ms)
        ]
        table.add_row(
            escape(trial.pair.label),
            escape(trial.task.label),
            escape(trial.method.label),
            f"{found.tokens_per_s:.1f}",
            f"{found.tokens_per_s / plain.tokens_per_s:.2f}" if plain.tokens_per_s else "-",
            f"{found.accepted_per_step:.2f}",
            str(int(found.steps.sum())),
            *(f"{share:.1f}" for share in shares),
            str(len(found.steps)),
        )
    return table


def finalist_table(finalists: Sequence[Finalist], front: Sequence[TrialSpec], title: str) -> Table:
    """Settings, predicted and live; the front of several objectives is marked."""
    table = Table(
        title=title,
        caption="95% intervals in brackets; a setting with fewer prompts ended early, being surely slower than another"
        + ("; * no other is better in all objectives" if front else ""),
    )
    table.add_column("setting", overflow="fold")
    rates = ("predicted tok/s", "live tok/s", "error %", "accepted/step predicted", "live", "speed-up")
    for name in (*rates, "match %", "n", "first token ms", "memory MiB"):
        table.add_column(name, justify="right")
    for one in finalists:
        live, predicted = one.measured, one.predicted
        rate = live.decode_tokens_per_s
        error = "-" if predicted is None else f"{100 * (predicted.tokens_per_s / rate.value - 1):+.1f}"
        table.add_row(
            escape(one.name) + (" *" if one.trial in front else ""),
            "-" if predicted is None else f"{predicted.tokens_per_s:.1f}",
            figure(rate, digits=1),
            error,
            "-" if predicted is None else f"{predicted.accepted_per_step:.3f}",
            f"{live.accepted_per_step.value:.3f}",
            figure(live.speedup, digits=2),
            f"{100 * live.match.value:.1f}",
            str(live.match.n),
            f"{live.prefill_ms.value:.1f}",
            "-" if live.memory_bytes is None else f"{live.memory_bytes / 2**20:.1f}",
        )
    return table


def margin_table(winner: str, speedup: Estimate, margins: Sequence[Margin], title: str) -> Table:
    """The winner on prompts that it was not chosen by."""
    table = Table(title=title, caption=f"winner: {winner}; n={speedup.n} prompts, 95% intervals, paired by prompt")
    table.add_column("the winner against", overflow="fold")
    table.add_column("times as fast", justify="right")
    table.add_column("verdict")
    plain = Margin("plain decoding", speedup)
    for margin in (plain, *margins):
        table.add_row(escape(margin.over), figure(margin.ratio, digits=3), margin.verdict)
    return table
