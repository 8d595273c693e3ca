"""How a method is said to llama.cpp's server, and why some cannot be: found from the GGUFs' headers alone."""

from choicespec.errors import Unsupported
from choicespec.runtimes.checkpoints import locate_gguf
from choicespec.runtimes.gguf_header import GgufHeader, read_header
from choicespec.spec.method import NO_TREES, Autoregressive, Draft, MethodSpec, Ngram, decided_live, is_tree
from choicespec.spec.pair import DrafterSpec, PairSpec

RUNTIME = "llamacpp"
_MASK = "tokenizer.ggml.mask_token_id"
_MOST_ADDED_TOKENS = 128  # by which llama.cpp lets a draft model's vocabulary differ in size


class _CannotBe(Exception):
    """Why a method cannot be expressed."""


def speculation_flags(pair: PairSpec, method: MethodSpec) -> tuple[str, ...]:
    """The flags that make a server decode by a method; none for plain decoding.

    Raises:
        Unsupported: the server cannot run the method, or not with these files.
        CheckpointError: a file is missing, or no GGUF.
    """
    try:
        return _flags(pair, method)
    except _CannotBe as error:
        raise Unsupported(RUNTIME, method.label, str(error)) from None


def _flags(pair: PairSpec, method: MethodSpec) -> tuple[str, ...]:
    target = pair.target
    if target.dtype != "gguf":
        raise _CannotBe(f"it runs a GGUF as it is stored, but target.dtype={target.dtype}; set dtype: gguf")
    if target.tensor_parallel != 1:
        raise _CannotBe(f"it splits a target by layers, but target.tensor_parallel={target.tensor_parallel}")
    header = read_header(locate_gguf(target.model))
    if isinstance(method, Autoregressive):
        return ()
    if is_tree(method):
        raise _CannotBe(NO_TREES)
    if decided_live(method):
        raise _CannotBe("exact and pace=adaptive are settings of choicespec's own loop; leave them out, or use hf")
    if isinstance(method, Ngram):
        return _ngram_flags(method)
    if isinstance(method, Draft):
        return _draft_flags(pair, header, method)
    raise _CannotBe("it decodes in a loop of its own, which takes no proposer of choicespec's")


def _ngram_flags(method: Ngram) -> tuple[str, ...]:
    size, most = method.max_ngram, method.num_draft_tokens
    if method.min_ngram != size:
        raise _CannotBe(
            f"its ngram-simple looks up n-grams of one size, but min_ngram={method.min_ngram} and max_ngram={size}; "
            "set both to the same"
        )
    if most < size:
        raise _CannotBe(
            f"its ngram-simple never drafts fewer tokens than it looks up, but num_draft_tokens={most} is less than "
            f"max_ngram={size}"
        )
    sizes = ("--spec-ngram-simple-size-n", str(size), "--spec-ngram-simple-size-m", str(most))
    return ("--spec-type", "ngram-simple", *sizes)


def _draft_flags(pair: PairSpec, target: GgufHeader, method: Draft) -> tuple[str, ...]:
    drafter = pair.drafters.get(method.drafter)
    if drafter is None:
        raise _CannotBe(f"the pair has no drafter {method.drafter!r}; known: {', '.join(pair.drafters) or 'none'}")
    if drafter.kind == "eagle3":
        raise _CannotBe(f"it is told of no EAGLE-3 drafters, but drafter {method.drafter!r} is one")
    header, file = target, tuple[str, ...]()  # an MTP head may be the target's own
    if drafter.model is not None:
        header = read_header(locate_gguf(drafter.model))
        file = ("--spec-draft-model", str(header.path))
        _check_vocabulary(target, header)
    if drafter.kind == "mtp":
        _check_mtp(target, header, method)
    elif drafter.kind in ("dflash", "dflash2"):
        _check_dflash(target, header, drafter, method)
    kind = {"draft_model": "draft-simple", "mtp": "draft-mtp"}.get(drafter.kind, "draft-dflash")
    # Every draft has k tokens, whatever the drafter thinks of them: a build's own default may end one earlier.
    return ("--spec-type", kind, *file, "--spec-draft-n-max", str(method.num_draft_tokens), "--spec-draft-p-min", "0")


def _check_vocabulary(target: GgufHeader, drafter: GgufHeader) -> None:
    ours, theirs = target.vocabulary, drafter.vocabulary
    common = min(len(ours), len(theirs))
    if abs(len(ours) - len(theirs)) > _MOST_ADDED_TOKENS or ours[:common] != theirs[:common]:
        raise _CannotBe(
            f"the drafter's vocabulary is not the target's: {len(theirs)} tokens in {drafter.path}, {len(ours)} in "
            f"{target.path}; give a drafter made for this target"
        )


def _check_width(target: GgufHeader, drafter: GgufHeader) -> None:
    if drafter.hidden_size != target.hidden_size:
        raise _CannotBe(
            f"{drafter.path} drafts from hidden states of {drafter.hidden_size} numbers, but the target's have "
            f"{target.hidden_size}; give a drafter made for this target"
        )


def _check_mtp(target: GgufHeader, head: GgufHeader, method: Draft) -> None:
    if head.nextn_layers == 0:
        raise _CannotBe(f"{head.path} has no layers for multi-token prediction (nextn_predict_layers)")
    _check_width(target, head)
    if 1 < head.nextn_layers < method.num_draft_tokens:
        raise _CannotBe(
            f"{head.path} drafts at most one token a head, {head.nextn_layers}, but "
            f"num_draft_tokens={method.num_draft_tokens}"
        )


def _check_dflash(target: GgufHeader, drafter: GgufHeader, spec: DrafterSpec, method: Draft) -> None:
    if drafter.architecture != "dflash":
        raise _CannotBe(f"{drafter.path} is of architecture {drafter.architecture!r}, not 'dflash'")
    found = "dflash2" if "selector_hidden.weight" in drafter.shapes else "dflash"
    if spec.kind != found:
        raise _CannotBe(f"drafter {method.drafter!r} is of kind {spec.kind!r}, but {drafter.path} is a {found}")
    _check_width(target, drafter)
    layers = drafter.metadata.get("dflash.target_layers", ())
    read = drafter.shapes.get("fc.weight", (0,))[0]
    if not layers or max(layers) >= target.num_layers or read != len(layers) * target.hidden_size:
        raise _CannotBe(
            f"{drafter.path} reads {read} numbers from layers {list(layers)} of a target, but this target has "
            f"{target.num_layers} layers of {target.hidden_size}; give a drafter made for this target"
        )
    if _MASK not in drafter.metadata:
        raise _CannotBe(f"{drafter.path} names no mask token ({_MASK}); convert it anew")
    most = drafter.number("block_size") - 1
    if method.num_draft_tokens > most:
        raise _CannotBe(f"{drafter.path} drafts at most {most} tokens, but num_draft_tokens={method.num_draft_tokens}")
