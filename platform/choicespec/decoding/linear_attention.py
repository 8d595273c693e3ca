"""Rollback of Gated DeltaNet layers, the linear attention of Qwen3.5, Qwen3.8 and Qwen3-Next.

Such a layer has no keys and values to forget: the window of a convolution and a recurrent state, which every token
changes as a whole. So each block leaves the state before it and what the rule read of it; a rollback replays the
recurrence alone over the kept tokens, of all layers at once (docs/decisions/0007 has what else was tried).

Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), section 3.

Shapes: B batch, T tokens of a block, C channels of the convolution, W tokens of its window (its kernel less one),
H heads, D key size, E value size.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from transformers.cache_utils import LinearAttentionLayer

GATED_DELTA_MODELS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # transformers' model types

_CHUNK_RULE, _RECURRENT_RULE = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
_CHUNK_TOKENS = 64  # transformers' own, to which it pads every block

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class _Read(NamedTuple):
    """What the rule read of a block: all that the next state depends on, beside the last one."""

    key_BTHD: torch.Tensor
    value_BTHE: torch.Tensor
    g_BTH: torch.Tensor
    beta_BTH: torch.Tensor


class _Recurrence:
    """A recurrent state, and what was read of the block that started from it."""

    def __init__(self, state_BHDE: torch.Tensor) -> None:
        self.state_BHDE = state_BHDE
        self.read: _Read | None = None


class GatedDeltaState(LinearAttentionLayer):
    """The cache of one layer: transformers finds window and state here, and the last block can be taken back.

    Attributes:
        start: tokens in the cache before the last block.
        tokens: tokens of the last block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record_past = True  # else transformers writes the window in place at a single token
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.start, self.tokens = 0, 0
        self.has_previous_state[0] = False
        self.conv_states[0] = self.recurrent_states[0] = None
        self.before: _Recurrence | None = None  # the block; None after a prompt, of which nothing is kept
        self._inputs_BCT: torch.Tensor | None = None  # the window, and the block's inputs of the convolution

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **others: Any
    ) -> torch.Tensor:
        """Begin a block with its (B, C, T) inputs; returns them after the window's, (B, C, W + T)."""
        assert conv_kernel_size is not None, "every Gated DeltaNet layer says its kernel's size"
        self.start, self.tokens = self.start + self.tokens, conv_states.shape[-1]
        if self.has_previous_state[0]:
            inputs_BCT = self._inputs_BCT = torch.cat([self.conv_states[0], conv_states], dim=-1)
        else:
            inputs_BCT = pad(conv_states, (conv_kernel_size - 1, 0))
            self.has_previous_state[0] = True
        self.conv_states[0] = inputs_BCT[..., self.tokens :].clone()  # a view would hold a whole prompt's inputs
        return inputs_BCT

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **others: Any) -> None:
        """End a block with the (B, H, D, E) state after it; the state before it is never written to."""
        self.before = self.recurrent_states[0]
        self.recurrent_states[0] = _Recurrence(recurrent_states)

    def restore(self, tokens: int, state_BHDE: torch.Tensor) -> None:
        """Keep the block's first ``tokens`` tokens, after which the state is the one given."""
        assert self._inputs_BCT is not None, "only a block that was verified is taken back"
        self.tokens = tokens
        window = self.conv_states[0].shape[-1]
        self.conv_states[0] = self._inputs_BCT[..., tokens : tokens + window]
        self.recurrent_states[0] = _Recurrence(state_BHDE)


class _RecordedRule:
    """transformers' own rule; it also notes what it reads where the state is a ``_Recurrence``."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: _Recurrence | torch.Tensor | None = None,
        **settings: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(initial_state, _Recurrence):
            initial_state.read = _Read(key, value, g, beta)
            initial_state = initial_state.state_BHDE
            if key.device.type == "cpu":
                settings["chunk_size"] = min(key.shape[1], _CHUNK_TOKENS)
        return self._rule(query, key, value, g=g, beta=beta, initial_state=initial_state, **settings)


def record_rules(model: Any) -> Rule:
    """Have the rules of a model's library note what they read, for caches of ``GatedDeltaState``; others see no change.

    transformers calls the rules as functions of the model's module and offers no place to listen, so they are replaced
    there, once a process.

    Returns:
        the recurrent rule.
    """
    modeling = sys.modules[type(model).__module__]
    for name in (_CHUNK_RULE, _RECURRENT_RULE):
        rule = getattr(modeling, name)
        if not isinstance(rule, _RecordedRule):
            setattr(modeling, name, _RecordedRule(rule))
    recurrent: Rule = getattr(modeling, _RECURRENT_RULE)
    return recurrent


def roll_back(states: Sequence[GatedDeltaState], length: int, rule: Rule) -> None:
    """Take back every token of the last block after the first ``length`` of the cache.

    Args:
        states: of all layers.
        length: 0 forgets everything; otherwise not less than what was there before the block.
        rule: the recurrent rule, as ``record_rules`` gives it.

    Raises:
        ValueError: tokens from before the block would have to go as well.
    """
    if length == 0:
        for state in states:
            state.clear()
        return
    start, tokens = states[0].start, length - states[0].start
    if tokens >= states[0].tokens:
        return
    befores = [state.before for state in states if state.before is not None]
    if tokens < 0 or not befores:
        raise ValueError(f"cannot keep {length} tokens: only a verified block, here after {start}, can be taken back")
    for state, state_BHDE in zip(states, _replay(befores, tokens, rule), strict=True):
        state.restore(tokens, state_BHDE)


def _replay(befores: Sequence[_Recurrence], tokens: int, rule: Rule) -> Sequence[torch.Tensor]:
    """Each layer's state after the first tokens of its block; the layers are the rows of one batch."""
    if tokens == 0:
        return [before.state_BHDE for before in befores]
    reads = [before.read for before in befores if before.read is not None]
    key, value, g, beta = (torch.cat([part[:, :tokens] for part in parts]) for parts in zip(*reads, strict=True))
    states = torch.cat([before.state_BHDE for before in befores])
    settings = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}  # as all these models call it
    _, states = rule(key, key, value, g=g, beta=beta, initial_state=states, **settings)
    return states.chunk(len(befores))
