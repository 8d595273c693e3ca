"""Experiments with a search."""

from typing import Any

from choicespec.spec.experiment import ExperimentSpec, parse_experiment


def content(**search: Any) -> dict[str, Any]:
    """An experiment with a search, some of its fields changed."""
    return {
        "name": "e",
        "pairs": {"p": {"target": {"model": "m"}}, "on_gpu": {"target": {"model": "m"}, "gpus": 1}},
        "runtimes": {"hf": {"kind": "hf"}, "engine": {"kind": "vllm"}},
        "tasks": {
            "searched": {"kind": "tool_call", "split": "train", "limit": 4},
            "held_out": {"kind": "tool_call", "limit": 9},
            "behind": {"kind": "tool_call", "split": "train", "skip": 4},
        },
        "methods": {"ngram": {"kind": "ngram"}, "prior": {"kind": "choice"}, "peer": {"kind": "transformers_generate"}},
        "search": {
            "pair": "p",
            "tasks": {"searched": "held_out"},
            "default": "ngram",
            "spaces": {"choice": {"start": "prior", "vary": {"method.block_length": {"low": 2, "high": 8}}}},
            **search,
        },
    }


def parsed(**search: Any) -> ExperimentSpec:
    return parse_experiment(content(**search), "e.yaml")
