"""Charts as PNG files."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from choicespec.measuring.cost import Costs
from choicespec.replay.sweep import Tried

_SIZE_INCHES = (7.0, 4.5)


def cost_chart(costs: Costs, title: str, path: Path) -> None:
    """What a verification costs by its tokens, a line a context, with the fastest and the slowest round."""
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    curve = costs.verification
    for context, ms, low, high in zip(curve.contexts, curve.ms, curve.low_ms, curve.high_ms, strict=True):
        [line] = axes.plot(curve.tokens, ms, marker=".", label=f"context {context}")
        axes.fill_between(curve.tokens, low, high, color=line.get_color(), alpha=0.15)
    axes.set(title=title, xlabel="tokens of a verification", ylabel="ms", xlim=(0, None), ylim=(0, None))
    axes.legend()
    figure.savefig(path)


def sweep_chart(tried: Sequence[Tried], chosen: Sequence[Tried], title: str, path: Path) -> None:
    """Every setting replayed: what it accepts a step, and how fast it decodes; the finalists are ringed."""
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    for space in sorted({one.space for one in tried}):
        own = [one for one in tried if one.space == space]
        axes.scatter([o.accepted_per_step for o in own], [o.tokens_per_s for o in own], s=6, alpha=0.4, label=space)
    axes.scatter(
        [o.accepted_per_step for o in chosen],
        [o.tokens_per_s for o in chosen],
        s=60,
        facecolors="none",
        edgecolors="black",
        label="measured live",
    )
    axes.set(title=title, xlabel="accepted/step", ylabel="predicted decode tokens/s", xlim=(0, None), ylim=(0, None))
    axes.legend()
    figure.savefig(path)
