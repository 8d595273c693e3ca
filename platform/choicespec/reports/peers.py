"""How many times as fast methods decode as transformers' own ``generate``, beside what they are over plain decoding."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from choicespec.intervals import ratio_of_ratios
from choicespec.records import Estimate, Trace
from choicespec.reports.tables import figure
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import TransformersGenerate


class OverPeer(NamedTuple):
    """A method's decode rate over that of transformers' ``generate`` without drafts, paired by prompt."""

    trial: TrialSpec
    peer: TransformersGenerate
    ratio: Estimate


def over_peers(traces: Mapping[TrialSpec, Sequence[Trace]]) -> list[OverPeer]:
    """Every trial over each peer of its pair, runtime and task."""
    groups: dict[tuple[object, ...], list[TrialSpec]] = defaultdict(list)
    for trial in traces:
        groups[trial.pair, trial.runtime, trial.task].append(trial)
    return [
        OverPeer(trial, peer.method, _ratio(traces[trial], traces[peer]))
        for trials in groups.values()
        for peer in trials
        if isinstance(peer.method, TransformersGenerate) and not peer.method.drafts
        for trial in trials
        if trial is not peer
    ]


def peer_table(found: Sequence[OverPeer]) -> Table | None:
    """A line for each; None where no peer was measured."""
    table = Table(
        title="Times as fast as transformers' own generate", caption="95% intervals, paired by prompt; n prompts"
    )
    for name in ("pair", "task", "method", "over"):
        table.add_column(name, overflow="fold")
    for name in ("times as fast", "n"):
        table.add_column(name, justify="right")
    for trial, peer, ratio in found:
        labels = (escape(trial.pair.label), escape(trial.task.label), escape(trial.method.label), peer.label)
        table.add_row(*labels, figure(ratio, digits=2), str(ratio.n))
    return table if table.row_count else None


def _ratio(traces: Sequence[Trace], peers: Sequence[Trace]) -> Estimate:
    peer_of = {trace.request_id: trace for trace in peers}
    pairs = [(trace, peer_of[trace.request_id]) for trace in traces if trace.request_id in peer_of]
    return ratio_of_ratios(
        [float(one.decode_tokens) for one, _ in pairs],
        [one.decode_ms for one, _ in pairs],
        [float(peer.decode_tokens) for _, peer in pairs],
        [peer.decode_ms for _, peer in pairs],
    )
