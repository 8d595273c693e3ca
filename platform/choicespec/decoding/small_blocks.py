"""What a pass over a handful of tokens on the CPU is made of: linear layers in float32, and attention.

A pass over a short block reads every weight once, and should cost little more than a pass over one token. The library
behind ``torch.nn.functional.linear`` reads them on one thread where there is one row, and is slow with 2 to 16. The
same product, with the weights cut into a part a thread, comes closer to the memory's own rate (docs/lab-notes.md has
the figures). Attention is in ``grouped_attention``.

Shapes: T tokens, I input features, O output features, P parts of the weights, R rows of a part (P R = O).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from choicespec.decoding import grouped_attention
from choicespec.decoding.grouped_attention import attention_of, set_attention

_MOST_ROWS = 32


class SmallBlockLinear(torch.nn.Linear):
    """The same function as ``Linear``; where the rows are few, each thread has its own part of the weights."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (torch's own name)
        rows = input.numel() // self.in_features
        parts = torch.get_num_threads()
        if not 1 <= rows <= _MOST_ROWS or self.out_features % parts:
            return super().forward(input)
        x_PTI = input.reshape(rows, self.in_features).expand(parts, -1, -1)
        weight_PRI = self.weight.view(parts, -1, self.in_features)
        y_TPR = torch.bmm(x_PTI, weight_PRI.transpose(1, 2)).transpose(0, 1)
        y = y_TPR.reshape(*input.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


def use_small_blocks(model: torch.nn.Module) -> None:
    """Turn a model's plain float32 linear layers on the CPU into ``SmallBlockLinear``, and its attention there into
    ``grouped_attention`` where it is the library's default; others stay as they are."""
    if isinstance(model, PreTrainedModel) and model.device.type == "cpu" and attention_of(model) == "sdpa":
        set_attention(model, grouped_attention.NAME)
    for module in model.modules():
        if (
            type(module) is torch.nn.Linear
            and module.weight.dtype == torch.float32
            and module.weight.device.type == "cpu"
            and module.weight.is_contiguous()  # so that its parts are views
        ):
            module.__class__ = SmallBlockLinear


@contextmanager
def library_kernels(model: torch.nn.Module) -> Iterator[None]:
    """The model as its library made it, for the length of the block."""
    swapped: list[torch.nn.Module] = [module for module in model.modules() if isinstance(module, SmallBlockLinear)]
    grouped = isinstance(model, PreTrainedModel) and attention_of(model) == grouped_attention.NAME
    for module in swapped:
        module.__class__ = torch.nn.Linear
    if grouped:
        set_attention(model, "sdpa")
    try:
        yield
    finally:
        for module in swapped:
            module.__class__ = SmallBlockLinear
        if grouped:
            set_attention(model, grouped_attention.NAME)
