"""With ``exact``, a block is computed as plain steps are, to the last bit; without it, outputs part at near-ties.

A processor that computes bfloat16 natively adds up in float32, in an order that depends on how many tokens a block has,
and rounds: that is planted here, so that outputs part on every machine.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from choicespec.decoding.attention_alone import AttentionAlone, independent_rows
from choicespec.decoding.cache import RollbackCache
from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.decoding.grouped_attention import NAME
from choicespec.decoding.loop import decode, trace
from choicespec.decoding.proposer import Proposer
from choicespec.decoding.rows_alone import RowsAlone
from choicespec.decoding.small_blocks import library_kernels, use_small_blocks
from choicespec.decoding.stopping import StopRule
from choicespec.drafters.autoregressive import AutoregressiveDrafter
from choicespec.records import Proposal, Request, Trace
from choicespec.runtimes.hf import HfRuntime
from choicespec.spec.method import Autoregressive, Choice, MethodSpec, Ngram
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import HfRuntimeSpec
from contracts.lossless import assert_lossless
from integration.small_checkpoints import save_checkpoint, small_hybrid, small_llama

BLOCK = [5, 17, 301, 44, 5, 90, 260, 33, 8]


class KnowsTheOutput:
    """Drafts what plain decoding said, so that near-ties alone part the outputs."""

    def __init__(self, outputs: dict[str, Sequence[int]]) -> None:
        self._outputs = outputs

    def begin(self, request: Request) -> None:
        self._said = [*request.prompt_ids, *self._outputs[request.request_id]]

    def propose(self, token_ids: Sequence[int], limit: int) -> Proposal:
        return Proposal(tuple(self._said[len(token_ids) :][: min(limit, 7)]), "known")

    def finish(self, request: Request, output_ids: Sequence[int]) -> None:
        """Nothing to learn."""


def rounding(model: Any) -> Any:
    """A float32 model that rounds to bfloat16 what every layer and every product gives."""

    def rounded(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.bfloat16().float()

    for module in model.modules():
        if isinstance(module, torch.nn.Linear) or "Norm" in type(module).__name__ or "Layer" in type(module).__name__:
            module.register_forward_hook(rounded)
    return model


@pytest.fixture(scope="module")
def target() -> CausalLmTarget:
    model = small_llama(hidden_size=256, intermediate_size=512, initializer_range=0.1)
    use_small_blocks(rounding(model))
    return CausalLmTarget(model)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    torch.manual_seed(0)
    return [Request(f"r{i}", tuple(torch.randint(0, 512, (24,)).tolist()), 33) for i in range(12)]


def run(target: CausalLmTarget, request: Request, proposer: Proposer, exact: bool) -> Trace:
    target.exact = exact
    stop = StopRule((), request.max_new_tokens, (), lambda token_ids: "")
    return trace(request, decode(target, proposer, request, stop))


def assert_exact(target: CausalLmTarget, requests: Iterable[Request], exact: bool) -> None:
    """The check of both tests below: outputs of blocks are plain decoding's."""
    plain = {
        request: run(target, request, AutoregressiveDrafter(Autoregressive()), exact=False) for request in requests
    }
    known = KnowsTheOutput({request.request_id: found.output_ids for request, found in plain.items()})
    found = {request: run(target, request, known, exact) for request in plain}
    assert_lossless(plain, lambda request: plain[request], lambda request: found[request])
    assert all(len(one.steps) == 4 for one in found.values()), "or some draft was not accepted whole"


def test_exact_blocks_decide_as_plain_decoding(target: CausalLmTarget, requests: list[Request]) -> None:
    """Fails if anything of a block is computed otherwise than in single steps, in logits or in the cache."""
    assert_exact(target, requests, exact=True)


def test_blocks_that_are_not_exact_are_caught(target: CausalLmTarget, requests: list[Request]) -> None:
    """The planted fault: the same blocks as they are, or the test above says nothing."""
    with pytest.raises(AssertionError, match="not lossless"):
        assert_exact(target, requests, exact=False)


def row_by_row(model: Any) -> Any:
    """A model whose products have the same bits however many rows there are, on every machine."""

    class RowByRow(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (torch's own name)
            rows = [super(RowByRow, self).forward(row.clone()) for row in torch.split(input, 1, dim=-2)]
            return torch.cat(rows, dim=-2)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = RowByRow
    return model


@pytest.mark.parametrize("implementation", ["sdpa", NAME])
def test_attention_alone_is_exact_where_a_products_rows_are_independent(implementation: str) -> None:
    """Fails if a block's attention has other shapes or inputs than plain steps', at a context that was not tried."""
    model = row_by_row(small_llama(hidden_size=256))
    model.set_attn_implementation(implementation)
    assert independent_rows(model, RowsAlone(model), 6) == 6
    attends = AttentionAlone(model)

    def logits(blocks: Sequence[Sequence[int]], way: AbstractContextManager[None]) -> torch.Tensor:
        cache = RollbackCache(model)
        with torch.inference_mode():
            model(torch.arange(75)[None], past_key_values=cache)
            with way:
                found = [model(torch.tensor([block]), past_key_values=cache).logits for block in blocks]
        entries = [
            part[0, :, 75:84].transpose(0, 1).flatten(1) for one in cache.layers for part in (one.keys, one.values)
        ]
        return torch.cat([torch.cat(found, dim=1)[0], *entries], dim=1)

    singles = logits([[token] for token in BLOCK], nullcontext())
    assert torch.equal(logits([BLOCK[:6], BLOCK[6:]], attends), singles)
    assert not torch.equal(logits([BLOCK[:6], BLOCK[6:]], nullcontext()), singles), "or this test says nothing"
    assert model.config._attn_implementation == implementation, "plain steps go on as before"


def test_rows_that_depend_on_their_number_are_found() -> None:
    """Fails if blocks are taken as exact on a processor that adds up three rows in another order than one."""
    model = row_by_row(small_llama(hidden_size=256))
    linear = type(model.lm_head)

    class OtherOrder(linear):  # type: ignore[misc, valid-type]
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (torch's own name)
            halves = [
                torch.nn.functional.linear(*part)
                for part in zip(input.chunk(2, -1), self.weight.chunk(2, -1), strict=True)
            ]
            return halves[0] + halves[1] if input.shape[-2] == 3 else super().forward(input)

    model.model.layers[1].mlp.down_proj.__class__ = OtherOrder
    assert independent_rows(model, RowsAlone(model), 6) == 2


def test_attention_that_cannot_be_told_and_experts_are_not_tried() -> None:
    """Fails if a router, whose experts' shapes depend on the text, is believed because of one text that was tried."""
    model = row_by_row(small_llama())
    model.config.num_experts = 4
    assert independent_rows(model, RowsAlone(model), 6) == 1
    model.config.num_experts = None
    model.set_attn_implementation("eager")
    assert independent_rows(model, RowsAlone(model), 6) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_cache_are_equal_to_the_last_bit(dtype: torch.dtype) -> None:
    """Fails if outputs are equal only for want of a near-tie: float32 has hardly any."""
    model = small_llama(hidden_size=256).to(dtype)
    use_small_blocks(model)
    target = CausalLmTarget(model)
    seen: list[torch.Tensor] = []

    def choose(logits_TV: torch.Tensor, positions: Sequence[int]) -> list[int]:
        seen.append(logits_TV.clone())
        return [0]

    target.choose = choose

    def passes(blocks: Sequence[Sequence[int]], exact: bool) -> list[torch.Tensor]:
        target.exact = exact
        target.prefill(range(30))
        seen.clear()
        for block in blocks:
            target.verify(block)
            target.keep(len(block))
        layers = target._cache.layers
        return [torch.cat(seen), *(layer.keys[:, :, : layer.length].clone() for layer in layers)]

    singles = passes([[token] for token in BLOCK], exact=False)
    alone = passes([BLOCK[:5], BLOCK[5:]], exact=True)
    assert all(map(torch.equal, singles, alone))
    if dtype == torch.float32:
        together = passes([BLOCK], exact=False)
        assert not all(map(torch.equal, singles, together)), "or this test says nothing"


def test_the_peer_still_runs_on_the_librarys_layers() -> None:
    """Fails if an exact method leaves its own LM head behind where transformers' generate is measured."""
    model = small_llama()
    block = torch.tensor([BLOCK])
    with torch.inference_mode():
        expected = model(block).logits
        use_small_blocks(model)
        target = CausalLmTarget(model)
        target.exact = True
        target.prefill(BLOCK)
        target.verify(BLOCK)
        with library_kernels(model):
            assert torch.equal(model(block).logits, expected)


def test_a_runtime_runs_exact_and_adaptive_methods(tmp_path: Path) -> None:
    """Fails if a method's setting does not reach the target, or costs are measured on other passes than are run."""
    pair = PairSpec(target=TargetSpec(model=str(save_checkpoint(tmp_path, small_llama()))))
    runtime = HfRuntime(HfRuntimeSpec(threads=1), pair)
    request = Request("r", tuple(b"one two one two one two"), 16)
    methods: list[MethodSpec] = [
        Ngram(exact=True),
        Ngram(exact=True, pace="adaptive"),
        Choice(exact=True),
        Choice(pace="adaptive"),
    ]
    plain = runtime.generate(request, Autoregressive())
    for method in methods:
        assert runtime.generate(request, method).output_ids == plain.output_ids
        assert runtime._target is not None
        assert runtime._target.exact == (method.exact if isinstance(method, Ngram | Choice) else False)
    assert {exact for exact, _ in runtime._costs} == {False, True}


def test_a_target_whose_blocks_go_back_as_a_whole_refuses(tmp_path: Path) -> None:
    """Fails if linear attention, whose state follows no single token of a block, is run wrong instead of refused."""
    pair = PairSpec(target=TargetSpec(model=str(save_checkpoint(tmp_path, small_hybrid()))))
    assert "leave exact out" in str(HfRuntime.refusal(pair, Ngram(exact=True)))
    assert HfRuntime.refusal(pair, Ngram()) is None
