"""Experiments on the scripted runtime, as a person would write them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def scripted_experiment(folder: Path, tasks: dict[str, int], gpus: Sequence[int] = (0,)) -> dict[str, Any]:
    """The content of an experiment's YAML, which is named after its file; a prompt has some 450 tokens of output.

    Args:
        folder: where each task's chat log is written.
        tasks: the number of prompts of each task.
        gpus: of each pair; the targets are ``table-0``, ``table-1`` and so on.
    """
    return {
        "pairs": {
            f"pair{index}": {"target": {"model": f"table-{index}", "tensor_parallel": max(number, 1)}, "gpus": number}
            for index, number in enumerate(gpus)
        },
        "runtimes": {"scripted": {"kind": "scripted"}},
        "tasks": {name: _task(folder / f"{name}.jsonl", prompts) for name, prompts in tasks.items()},
        "methods": {"autoregressive": {"kind": "autoregressive"}, "ngram": {"kind": "ngram"}},
    }


def _task(path: Path, prompts: int) -> dict[str, Any]:
    lines = 2 * prompts + 20  # three quarters of them are in the split
    content = [{"messages": [{"role": "user", "content": f"{path.stem} {number}"}]} for number in range(lines)]
    path.write_text("".join(json.dumps(line) + "\n" for line in content), encoding="utf-8")
    return {"kind": "chat_log", "path": str(path), "limit": prompts, "max_new_tokens": 512, "split": "train"}
