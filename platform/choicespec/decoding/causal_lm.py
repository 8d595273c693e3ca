"""A transformers causal language model as the loop's target.

Shapes: T tokens of a block, C tokens in the cache and the block, V vocabulary, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from choicespec.decoding.attention_alone import AttentionAlone, independent_rows
from choicespec.decoding.cache import RollbackCache
from choicespec.decoding.rows_alone import RowsAlone
from choicespec.decoding.sampling import greedy
from choicespec.decoding.tap import Tap
from choicespec.decoding.verification import depths

_FOLLOWED = 16  # tokens of a text that is followed, a pass
_LONGEST_TRIED = 17  # tokens of an exact block; longer ones are computed in the way that needs no trial


class _PromptPass(NamedTuple):
    """What a prompt's pass left beside the cache: the last position's logits, hidden states by layer, and its time."""

    prompt_ids: tuple[int, ...]
    logits_1V: torch.Tensor
    hidden_TH: dict[int, torch.Tensor]
    ms: float


class CausalLmTarget:
    """Choices, rollback and hidden states of one model, one request at a time.

    Args:
        model: an ``AutoModelForCausalLM`` of full-attention and Gated DeltaNet layers, in evaluation mode.

    Attributes:
        spared_ms: what the last prompt's pass would have taken that was not computed again.
        choose: (T, V) logits, and the place in the text of each token chosen, to T tokens; greedy unless set.
        exact: whether a block's logits and cache entries are plain steps' to the last bit; not unless set.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = RollbackCache(model)
        self.choose: Callable[[torch.Tensor, Sequence[int]], list[int]] = greedy
        self.exact = False
        self._length = 0  # tokens in the cache before the block just verified
        self._watched: set[int] = set()
        self._hidden_TH: dict[int, torch.Tensor] = {}
        self._taps: WeakSet[Tap] = WeakSet()  # a drafter that is gone wants no more
        self._last_kept = 0
        self._prompt: _PromptPass | None = None
        self.spared_ms = 0.0

    def watch(self, layer: int) -> None:
        """Keep a decoder layer's hidden states from now on; layers are counted from 1."""
        layers = self._model.get_decoder().layers
        if not 1 <= layer <= len(layers):
            raise ValueError(f"hidden layer {layer} is not one of the target's layers 1 to {len(layers)}")
        if layer not in self._watched:
            self._watched.add(layer)
            layers[layer - 1].register_forward_hook(self._keep_hidden(layer))

    def tap(self, layers: Sequence[int]) -> Tap:
        """From now on, the hidden states of some layers at every kept position; for a drafter, until it reads them."""
        for layer in layers:
            self.watch(layer)
        self._taps.add(tap := Tap(layers))
        return tap

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """Have the prompt and nothing else in the cache; only its last position goes through the LM head.

        The same prompt again, as another method's, is not computed again where the cache can be cut back to it.
        """
        prompt = self._prompt
        if prompt is None or prompt.prompt_ids != tuple(prompt_ids) or not prompt.hidden_TH.keys() >= self._watched:
            prompt, self.spared_ms = self._prompt_pass(prompt_ids), 0.0
        else:
            self._cache.keep(len(prompt_ids))
            self._hidden_TH, self.spared_ms = dict(prompt.hidden_TH), prompt.ms
        self._prompt = prompt if self._cache.can_be_cut else None
        self._length, self._last_kept = len(prompt_ids), len(prompt_ids) - 1
        for tap in self._taps:
            tap.restart()
            tap.keep(self._hidden_TH, len(prompt_ids))
        return self._chosen(prompt.logits_1V, [len(prompt_ids)])[0]

    def verify(self, block_ids: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        """The target's own choice after each of the T tokens of a block, a chain or a tree."""
        with self._exactly(len(block_ids)) if self.exact else nullcontext():
            logits_TV = self._logits(block_ids, logits_to_keep=0, parents=parents)
        after = depths(parents) if parents else range(len(block_ids))
        return self._chosen(logits_TV, [self._length + 1 + depth for depth in after])

    def gather(self, places: Sequence[int]) -> None:
        """Move some tokens of the block just verified to its front: their cache entries and hidden states."""
        if list(places) == list(range(len(places))):
            return
        with torch.inference_mode():
            self._cache.gather(self._length, places)
        self._hidden_TH = {layer: states_TH[list(places)] for layer, states_TH in self._hidden_TH.items()}

    def keep(self, num_tokens: int) -> None:
        """Roll back to the first ``num_tokens`` tokens of the block."""
        self._length += num_tokens
        self._cache.keep(self._length)
        self._last_kept = num_tokens - 1
        for tap in self._taps:
            tap.keep(self._hidden_TH, num_tokens)

    def follow(self, token_ids: Sequence[int]) -> Iterator[None]:
        """See ``along.Follower``: blocks are taken in whole, and shown to taps token by token."""
        for start in range(0, len(token_ids), _FOLLOWED):
            block_ids = token_ids[start : start + _FOLLOWED]
            self._logits(block_ids, logits_to_keep=1)
            self._length += len(block_ids)
            self._cache.keep(self._length)
            for self._last_kept in range(len(block_ids)):
                for tap in self._taps:
                    place = slice(self._last_kept, self._last_kept + 1)
                    tap.keep({layer: hidden_TH[place] for layer, hidden_TH in self._hidden_TH.items()}, 1)
                yield

    def hidden_states(self, layer: int) -> torch.Tensor:
        """The (H,) output of a watched layer at the last token in the cache, which is the one before the anchor."""
        return self._hidden_TH[layer][self._last_kept]

    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The (T, H) rows of the input embedding, as they are stored."""
        rows = torch.tensor(token_ids, dtype=torch.long, device=self._model.device)
        return torch.nn.functional.embedding(rows, self._model.get_input_embeddings().weight)

    def final_norm(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """The (T, H) states that the LM head reads, of the last layer's."""
        normed: torch.Tensor = self._model.get_decoder().norm(hidden_TH)
        return normed

    def lm_head(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """The (T, V) logits of normed states."""
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden_TH)
        return logits

    def lm_head_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The (T, H) rows of the LM head for some tokens."""
        rows: torch.Tensor = self._model.get_output_embeddings().weight[token_ids.to(self._model.device)]
        return rows

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self._model.config.get_text_config()

    @property
    def device(self) -> torch.device:
        """Where the model is, and its drafters go."""
        device: torch.device = self._model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    def top2_margin(self, token_ids: Sequence[int]) -> float:
        """The largest logit minus the second largest after ``token_ids``, without a cache."""
        with torch.inference_mode():
            logits_V = self._model(self._tensor(token_ids), use_cache=False, logits_to_keep=1).logits[0, -1]
        first, second = logits_V.float().topk(2).values.tolist()
        return float(first - second)

    def _exactly(self, num_tokens: int) -> AbstractContextManager[None]:
        """In what a block of so many tokens is computed as plain steps are."""
        if num_tokens == 1:
            return nullcontext()
        return self._attention_alone if num_tokens <= self._independent_rows else self._rows_alone

    @cached_property
    def _rows_alone(self) -> RowsAlone:
        return RowsAlone(self._model)

    @cached_property
    def _attention_alone(self) -> AttentionAlone:
        return AttentionAlone(self._model)

    @cached_property
    def _independent_rows(self) -> int:
        """Tried once, by the first exact block; some twenty passes."""
        return independent_rows(self._model, self._rows_alone, _LONGEST_TRIED)

    def _prompt_pass(self, prompt_ids: Sequence[int]) -> _PromptPass:
        started = perf_counter()
        self._prompt = None  # what the cache held of it goes, even where this pass fails
        self._cache.keep(0)
        logits_1V = self._logits(prompt_ids, logits_to_keep=1)
        return _PromptPass(tuple(prompt_ids), logits_1V, dict(self._hidden_TH), (perf_counter() - started) * 1e3)

    def _logits(self, token_ids: Sequence[int], logits_to_keep: int, parents: Sequence[int] = ()) -> torch.Tensor:
        with torch.inference_mode():
            output = self._model(
                self._tensor(token_ids),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **self._tree(parents),
            )
        logits_TV: torch.Tensor = output.logits[0]
        return logits_TV

    def _tree(self, parents: Sequence[int]) -> dict[str, torch.Tensor]:
        """What the model is told of a tree: each token's position, by its depth, and whom it sees.

        The mask is additive, which every kind of attention takes; of a block that is a chain the model makes its own.
        """
        if not parents:
            return {}
        sees_TT = torch.eye(len(parents) + 1, dtype=torch.bool)
        for place, parent in enumerate(parents, start=1):
            sees_TT[place] |= sees_TT[parent]
        mask_TC = torch.zeros(len(sees_TT), self._length + len(sees_TT), dtype=self.dtype)
        mask_TC[:, self._length :].masked_fill_(~sees_TT, torch.finfo(self.dtype).min)
        positions_T = self._length + torch.tensor(depths(parents))
        return {
            "attention_mask": mask_TC[None, None].to(self.device),
            "position_ids": positions_T[None].to(self.device),
        }

    def _chosen(self, logits_TV: torch.Tensor, positions: Sequence[int]) -> list[int]:
        with torch.inference_mode():
            return self.choose(logits_TV, positions)

    def _tensor(self, token_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([token_ids], dtype=torch.long, device=self._model.device)

    def _keep_hidden(self, layer: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            self._hidden_TH[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook
