"""What a pair has beside its target, a scorer and drafters: found and checked by description, without weights."""

from typing import Any

from choicespec.drafters.checkpoint import TargetShape
from choicespec.drafters.registry import DRAFTERS, made_on_use
from choicespec.errors import CheckpointError, ScorerError
from choicespec.runtimes.checkpoints import identify, locate
from choicespec.runtimes.hf_target import read_config
from choicespec.scorer.files import ScorerManifest, check_scorer, find_scorer
from choicespec.spec.method import Choice, Draft, is_tree
from choicespec.spec.pair import PairSpec


def scorer_of(pair: PairSpec) -> ScorerManifest:
    """What a pair's scorer is for, read without loading the target.

    Raises:
        CheckpointError: the target is missing.
        ScorerError: the scorer is missing, broken or for another target.
    """
    identity = identify(locate(pair.target.model, pair.target.revision), pair.target)
    return check_scorer(find_scorer(pair.scorer, identity), identity, pair.scorer.transfer)


def scorer_refusal(pair: PairSpec, method: Choice) -> str | None:
    """Why the pair's scorer cannot rank for a method, or None."""
    try:
        manifest = scorer_of(pair)
    except (CheckpointError, ScorerError) as error:
        return str(error)
    if method.block_length > manifest.block_length:
        return f"its scorer judges {manifest.block_length} tokens at most, but block_length is {method.block_length}"
    drafters = {name: pair.drafters[name] for name in method.drafters if name in pair.drafters}
    return manifest.draft_refusal(drafters, pair.scorer.transfer)


def open_drafter(pair: PairSpec, name: str) -> Any:
    """The checkpoint of one of a pair's drafters, compared with the target by both their descriptions; no weights.

    Raises:
        CheckpointError: it is missing, of a kind that has no proposer here, or made for another target.
    """
    spec = pair.drafters.get(name)
    if spec is None:
        raise CheckpointError(f"the pair has no drafter {name!r}; known: {', '.join(pair.drafters) or 'none'}")
    if spec.kind not in DRAFTERS:
        raise CheckpointError(f"drafter {name!r} is of kind {spec.kind!r}; known here: {', '.join(DRAFTERS)}")
    config = read_config(pair.target).get_text_config()
    target = TargetShape(config.hidden_size, config.vocab_size, config.num_hidden_layers)
    if spec.model is None:
        place, revision = locate(pair.target.model, pair.target.revision), pair.target.revision
    else:
        place, revision = locate(spec.model, None, f"pair.drafters.{name}.model"), None
    return made_on_use(DRAFTERS[spec.kind])(place, target, revision)


def as_trained(pair: PairSpec, method: Draft) -> Draft:
    """A draft with no more tokens than its drafter was trained for: what it drafts beside a candidate set.

    Raises:
        CheckpointError: as ``open_drafter``.
    """
    trained: int | None = open_drafter(pair, method.drafter).trained_tokens
    k = method.num_draft_tokens
    return method.model_copy(update={"num_draft_tokens": min(k, trained or k)})


def drafter_refusal(pair: PairSpec, method: Draft) -> str | None:
    """Why a drafter cannot draft for the pair's target, or None."""
    try:
        open_drafter(pair, method.drafter)
    except CheckpointError as error:
        return str(error)
    return None


def branches_refusal(pair: PairSpec, method: Draft) -> str | None:
    """Why a method's drafter has no branches to verify, or None."""
    kind = pair.drafters[method.drafter].kind
    if is_tree(method) and kind != "dflash":
        return f"of drafters only dflash says what else is likely at each place, and this is {kind}; leave width out"
    return None


def peer_refusal(pair: PairSpec, name: str) -> str | None:
    """Why transformers' own generators cannot draft with one of a pair's drafters, or None."""
    reason = drafter_refusal(pair, Draft(drafter=name))
    if reason is not None:
        return reason
    kind = pair.drafters[name].kind
    if kind == "mtp":
        return (
            "transformers' own MTP drafts one token a layer, by layers in the target's checkpoint and its LM head, but "
            f"{name!r} iterates its one layer"
        )
    if kind != "dflash":
        return f"transformers' own generators draft with kind 'dflash', but {name!r} is of kind {kind!r}"
    return None
