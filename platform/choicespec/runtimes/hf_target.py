"""Which targets the transformers runtime can run: found from the configuration, before any weight is read."""

from typing import Any

from transformers import AutoConfig

from choicespec.decoding.linear_attention import GATED_DELTA_MODELS
from choicespec.errors import CheckpointError
from choicespec.runtimes.checkpoints import EMBEDDED, is_gguf, locate, locate_gguf
from choicespec.runtimes.quantized import quantization_refusal
from choicespec.spec.method import MethodSpec, TransformersGenerate, is_exact, is_tree
from choicespec.spec.pair import PairSpec, TargetSpec


def read_config(target: TargetSpec) -> Any:
    """The configuration of a target; its language model's is ``get_text_config()`` of that. Nothing is converted, but
    for the embedded default.

    Raises:
        CheckpointError: there is none, or transformers does not know the model.
    """
    try:
        if is_gguf(target.model):
            path = locate_gguf(target.model)
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        return AutoConfig.from_pretrained(locate(target.model, target.revision), revision=target.revision)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"target.model: cannot read {target.model!r}: {error}") from error


def target_refusal(pair: PairSpec, method: MethodSpec) -> str | None:
    """Why a pair's target cannot run a method, or None; a missing one is for others to tell."""
    if pair.target.model == EMBEDDED:
        return quantization_refusal(pair, None)  # it runs every method, and is not converted to find out
    try:
        config = read_config(pair.target)
    except CheckpointError as error:
        return str(error) if is_gguf(pair.target.model) else None
    reason = quantization_refusal(pair, config)
    if reason is not None:
        return reason
    if isinstance(method, TransformersGenerate):
        if method.drafts and "linear_attention" in _layer_types(config):
            return (
                f"transformers' generate verifies no drafts on a target with linear attention, like {pair.target.model}"
            )
        return None
    if is_exact(method) and "linear_attention" in _layer_types(config):
        return (
            "exact computes a block's tokens one by one, and linear attention takes a block back as a whole; "
            "leave exact out"
        )
    if is_tree(method) and "linear_attention" in _layer_types(config):
        return (
            "linear attention has one state, which cannot follow the branches of a tree; leave width out, and the best "
            "draft is verified as a chain"
        )
    return layers_refusal(config)


def layers_refusal(config: Any) -> str | None:
    """Why the loop cannot decode with a model, or None: not every kind of layer can be rolled back."""
    model_type = config.get_text_config().model_type
    known = {"full_attention"} | ({"linear_attention"} if model_type in GATED_DELTA_MODELS else set())
    others = sorted(_layer_types(config) - known)
    if not others:
        return None
    return (
        f"the target is a {model_type} that has {', '.join(others)} layers, and of those it can roll back only "
        f"full attention and the linear attention of {', '.join(GATED_DELTA_MODELS)}"
    )


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config.get_text_config(), "layer_types", None) or ())
