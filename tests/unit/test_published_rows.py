"""The published tables as rows, and the trials that are them."""

from typing import Any

import pytest
from choicespec.reports.published_rows import PublishedRow, counterparts, decode_rows, scorer_rows
from choicespec.spec.experiment import TrialSpec

DFLASH2 = {"kind": "dflash2", "model": "z-lab/Qwen3.8-27B-DFlash2"}
MTP = {"kind": "mtp"}


def trial(**changes: Any) -> TrialSpec:
    """The published choice of Qwen3.8-27B, with parts of it changed."""
    content: dict[str, Any] = {
        "pair": {"target": {"model": "Qwen/Qwen3.8-27B", "dtype": "bfloat16"}, "drafters": {"d": DFLASH2}, "gpus": 1},
        "runtime": {"kind": "hf"},
        "task": {"kind": "tool_call", "context_tokens": 300},
        "method": {"kind": "choice", "selection": "scorer"},
    }
    return TrialSpec.model_validate(content | changes)


def rates(found: tuple[PublishedRow, ...]) -> list[float]:
    return [row.decode_tokens_per_s for row in found]


def test_the_published_tables_are_whole() -> None:
    """Fails if a row of what others measured is lost, or a number of it is in another column."""
    assert (len(set(decode_rows())), len(set(scorer_rows()))) == (92, 13)
    for row in decode_rows():
        assert row.speedup > 0
        assert row.decode_tokens_per_s > row.speedup
        assert 0 <= (row.match_percent or 0) <= 100
        assert row.block_length in ((8, 16) if row.runtime.startswith("transformers") else (None,))
    for one in scorer_rows():
        assert 0 < one.accepted_prior < one.accepted_scorer < one.accepted_oracle < one.prior_top1_percent <= 100
        assert 0 < one.scorer_top1_percent <= 100


def test_no_two_rows_are_of_one_name() -> None:
    """Fails if a row cannot be told from another without its figures."""
    names = {row[:8] for row in decode_rows()}
    assert len(names) == 92


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [69.3]),
        ({"method": {"kind": "choice"}}, [51.8]),
        ({"method": {"kind": "draft", "drafter": "d", "num_draft_tokens": 8}}, [87.2]),
        ({"method": {"kind": "choice", "selection": "scorer", "drafters": ["d"]}}, [85.6]),
        ({"method": {"kind": "choice", "selection": "scorer", "drafters": ["d"], "gate": "cost"}}, [84.3]),
        ({"runtime": {"kind": "vllm"}, "method": {"kind": "ngram", "num_draft_tokens": 8}}, [50.2]),
        (
            {"runtime": {"kind": "vllm"}, "method": {"kind": "draft", "drafter": "d", "num_draft_tokens": 15}},
            [224.7],
        ),
        ({"pair": {"target": {"model": "Qwen/Qwen3.8-27B-FP8", "dtype": "bfloat16", "quantization": "fp8"}}}, [55.4]),
        ({"pair": {"target": {"model": "Qwen/Qwen3.8-27B", "dtype": "bfloat16"}, "drafters": {"m": MTP}}}, [71.1]),
    ],
)
def test_a_trial_is_the_row_of_its_kind(changes: dict[str, Any], expected: list[float]) -> None:
    """Fails if a figure is compared with that of another method, runtime, precision, or with MTP layers loaded."""
    assert rates(counterparts(trial(**changes))) == expected


def test_plain_decoding_is_one_trial_beside_every_block_length() -> None:
    """Fails if a row of plain decoding, which has no block, is left without a trial."""
    pair = {"target": {"model": "Qwen/Qwen3-4B", "dtype": "bfloat16"}}
    assert rates(counterparts(trial(pair=pair, method={"kind": "autoregressive"}))) == [78.1, 78.2]


@pytest.mark.parametrize(
    "changes",
    [
        {"pair": {"target": {"model": "smollm2", "dtype": "bfloat16"}}},
        {"pair": {"target": {"model": "Qwen/Qwen3.8-27B", "dtype": "float32"}}},
        {"task": {"kind": "tool_call", "context_tokens": 500}},
        {"task": {"kind": "python_repo", "context_tokens": 300}},
        {"method": {"kind": "choice", "selection": "scorer", "block_length": 12}},
        {"method": {"kind": "choice", "drafters": ["d"]}},
        {"method": {"kind": "ngram"}},
        {"runtime": {"kind": "vllm"}},
        {"runtime": {"kind": "scripted"}},
    ],
)
def test_what_was_not_published_has_no_row(changes: dict[str, Any]) -> None:
    """Fails if a figure of ours stands beside one that was measured otherwise."""
    assert counterparts(trial(**changes)) == ()
