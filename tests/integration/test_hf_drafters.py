"""Neural drafters on the hf runtime: read from checkpoints, refused before anything loads, lossless."""

from pathlib import Path

import pytest
from choicespec.decoding.step_cost import StepCosts
from choicespec.errors import Unsupported
from choicespec.records import Request
from choicespec.runtimes.hf import HfRuntime
from choicespec.runtimes.runtime import check_supported
from choicespec.spec.method import Autoregressive, Choice, Draft, MethodSpec, TransformersGenerate
from choicespec.spec.pair import DrafterSpec, PairSpec, TargetSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.spec.task import ToolCall
from choicespec.tasks.prompts import open_task
from contracts.runtime_contract import PLAIN, assert_all_lossless, decode_all
from integration.small_checkpoints import save_checkpoint, small_llama
from integration.small_drafters import (
    BLOCK,
    LAYER,
    checkpoint_weights,
    dflash_net,
    save_drafter,
    save_pair,
    speculators_config,
)
from transformers import Qwen3Config

METHODS = tuple(Draft(drafter=name, num_draft_tokens=3) for name in ("dflash", "dflash2", "mtp"))
TREE = Draft(drafter="dflash", num_draft_tokens=3, width=4)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairSpec:
    """A small target with its drafters, and some that are wrong."""
    folder = tmp_path_factory.mktemp("pair")
    pair, dflash2 = save_pair(folder), str(folder / "dflash2")
    others = {
        "small": DrafterSpec(kind="draft_model", model=pair.target.model),
        "gone": DrafterSpec(kind="dflash", model=str(folder / "gone")),
        "swapped": DrafterSpec(kind="dflash", model=dflash2),
    }
    return pair.model_copy(update={"drafters": {**pair.drafters, **others}})


def test_every_output_is_plain_decodings(pair: PairSpec) -> None:
    """Fails if a drafter changes what is decoded. These drafts are mostly wrong; training has tests with right ones."""
    runtime = HfRuntime(HfRuntimeSpec(threads=2), pair)
    requests = [Request("long", (5, 80, 3, 200, 41, 6), 16), Request("short", (77, 130, 9), 16)]
    assert_all_lossless(requests, decode_all(runtime, (PLAIN, *METHODS, TREE), requests))


def test_each_step_drafts_and_books_on_its_drafter(pair: PairSpec) -> None:
    """Equal outputs say nothing about a drafter that never drafts, or whose first draft waits for the second step."""
    runtime = HfRuntime(HfRuntimeSpec(threads=2), pair)
    for method in METHODS:
        found = runtime.generate(Request("r", (5, 80, 3, 200), 12), method)
        decoded = found.prefill_tokens
        for step in found.steps:
            assert step.proposed == min(3, 12 - decoded - 1), "k, and never beyond what is left"
            decoded += step.accepted + 1
        assert {step.source for step in found.steps if step.proposed} == {method.drafter}


def test_a_tree_holds_the_chain_and_what_else_is_likely(pair: PairSpec) -> None:
    """Fails if the branches of a tree are of other places than the drafter meant them for."""
    runtime = HfRuntime(HfRuntimeSpec(threads=2), pair)
    runtime.load()
    runtime.use_step_costs(StepCosts((1, 64), (1.0, 1.001)))
    proposed = []
    for method in (METHODS[0], TREE):
        proposer, request = runtime._proposers.of(method), Request("r", (5, 80, 3, 200), 12)
        assert runtime._target is not None
        anchor = runtime._target.prefill(request.prompt_ids)
        proposer.begin(request)
        proposed.append(proposer.propose([*request.prompt_ids, anchor], 11))
    chain, tree = proposed
    texts: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        texts.append((*texts[parent], token_id))
    assert chain.token_ids in texts
    assert max(map(len, texts)) == 3
    assert len(set(range(1, len(texts))) - set(tree.parents)) == 4
    assert tree.probabilities[0] == pytest.approx(chain.probabilities[0])


@pytest.mark.parametrize("drafter", ["dflash2", "mtp"])
def test_a_drafter_of_one_token_after_another_has_no_tree(pair: PairSpec, drafter: str) -> None:
    """Fails if a chain passes for a tree."""
    with pytest.raises(Unsupported, match=f"only dflash says .* this is {drafter}; leave width out"):
        check_supported(HfRuntimeSpec(), pair, Draft(drafter=drafter, width=2))


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("none", "the pair has no drafter 'none'; known: dflash, dflash2, mtp"),
        ("small", "drafter 'small' is of kind 'draft_model'; known here: dflash, dflash2, mtp"),
        ("gone", "pair.drafters.gone.model: no folder"),
        ("swapped", "is a drafter of kind 'dflash2', not 'dflash'"),
    ],
)
def test_what_cannot_draft_is_refused_before_anything_loads(pair: PairSpec, drafter: str, message: str) -> None:
    """Fails if a wrong name, a missing folder or another kind of drafter is found out by a worker, minutes later."""
    with pytest.raises(Unsupported, match=message):
        check_supported(HfRuntimeSpec(), pair, Draft(drafter=drafter))


@pytest.mark.parametrize("own_tokens", [512, 200])
def test_transformers_own_dflash_drafts_the_same(tmp_path: Path, own_tokens: int) -> None:
    """The peer on the same weights, also where the drafter has some of the tokens only. Fails if a figure is of other
    drafts: every step accepts what a step of ours accepts, and the output is plain decoding's."""
    net = dflash_net(
        decoder=Qwen3Config(**LAYER, vocab_size=1), draft_vocab_size=own_tokens if own_tokens < 512 else None
    )
    layer = {"model_type": "qwen3", **LAYER, "vocab_size": 512}
    config = speculators_config(transformer_layer_config=layer, draft_vocab_size=own_tokens)
    dflash = save_drafter(tmp_path / "dflash", config, checkpoint_weights(net))
    pair = PairSpec(
        target=TargetSpec(model=str(save_checkpoint(tmp_path / "target", small_llama()))),
        drafters={"dflash": DrafterSpec(kind="dflash", model=str(dflash))},
    )
    runtime = HfRuntime(HfRuntimeSpec(threads=2), pair)
    request = Request("r", (5, 80, 3, 200, 41, 6), 24)
    plain = runtime.generate(request, Autoregressive())
    ours = runtime.generate(request, Draft(drafter="dflash", num_draft_tokens=BLOCK - 1))
    peer = runtime.generate(request, TransformersGenerate(drafter="dflash"))
    assert ours.output_ids == peer.output_ids == plain.output_ids
    assert sum(step.proposed for step in peer.steps) > 20
    assert [step.accepted for step in peer.steps][:-1] == [step.accepted for step in ours.steps][: len(peer.steps) - 1]


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("mtp", "transformers' own MTP drafts one token a layer"),
        ("dflash2", "draft with kind 'dflash', but 'dflash2' is of kind 'dflash2'"),
        ("gone", "pair.drafters.gone.model: no folder"),
    ],
)
def test_what_transformers_own_loop_cannot_draft_with_is_refused(pair: PairSpec, drafter: str, message: str) -> None:
    """Fails if a peer that decodes plainly passes for one that drafts."""
    with pytest.raises(Unsupported, match=message):
        check_supported(HfRuntimeSpec(), pair, TransformersGenerate(drafter=drafter))


def test_a_target_without_a_head_is_refused(tmp_path: Path) -> None:
    """Fails if transformers, which drops a head's tensors, is asked for them."""
    target = save_checkpoint(tmp_path / "target", small_llama())
    pair = PairSpec.model_validate({"target": {"model": str(target)}, "drafters": {"mtp": {"kind": "mtp"}}})
    with pytest.raises(Unsupported, match="no safetensors of a head"):
        check_supported(HfRuntimeSpec(), pair, Draft(drafter="mtp"))


def test_on_the_embedded_default_the_drafters_that_ship_are_right_and_change_nothing() -> None:
    """The real target. Fails if what ships was trained for other weights, or if a drafter, alone or beside a candidate
    set, writes into the target's cache or states."""
    drafters = {kind: {"kind": kind, "model": f"smollm2-{kind}"} for kind in ("dflash", "mtp")}
    pair = PairSpec.model_validate({"target": {"model": "smollm2"}, "drafters": drafters})
    runtime = HfRuntime(HfRuntimeSpec(threads=2), pair)
    [request] = open_task(ToolCall(limit=1, max_new_tokens=32)).prompts(runtime.tokenizer, 2048).requests
    plain = runtime.generate(request, Autoregressive())
    methods: tuple[MethodSpec, ...] = (
        Draft(drafter="dflash", num_draft_tokens=7),
        Draft(drafter="mtp", num_draft_tokens=3),
        Choice(selection="scorer", drafters=("dflash", "mtp"), gate="cost"),
    )
    for method in methods:
        found = runtime.generate(request, method)
        assert found.output_ids == plain.output_ids
        assert sum(step.accepted for step in found.steps) > len(found.steps) / 2
