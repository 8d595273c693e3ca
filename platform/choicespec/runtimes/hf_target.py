"""Which targets the transformers runtime can run: found from the configuration, before any weight is read."""

from typing import Any

from transformers import AutoConfig

from choicespec.decoding.linear_attention import GATED_DELTA_MODELS
from choicespec.errors import CheckpointError
from choicespec.runtimes.checkpoints import EMBEDDED, locate
from choicespec.spec.method import MethodSpec, TransformersGenerate
from choicespec.spec.pair import TargetSpec


def read_config(target: TargetSpec) -> Any:
    """The configuration of a target's language model; of a model that also sees, the text part.

    Raises:
        CheckpointError: there is none, or transformers does not know the model.
    """
    checkpoint = locate(target.model, target.revision)
    try:
        return AutoConfig.from_pretrained(checkpoint, revision=target.revision).get_text_config()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"target.model: cannot read {target.model!r}: {error}") from error


def target_refusal(target: TargetSpec, method: MethodSpec) -> str | None:
    """Why a target cannot run a method, or None; a target that is not there is nothing to judge here."""
    if target.model == EMBEDDED:
        return None  # it can run them all, and is not converted to find out
    try:
        config = read_config(target)
    except CheckpointError:
        return None
    if isinstance(method, TransformersGenerate):
        if method.prompt_lookup_num_tokens is not None and "linear_attention" in _layer_types(config):
            return f"transformers' generate verifies no drafts on a target with linear attention, like {target.model}"
        return None
    return layers_refusal(config)


def layers_refusal(config: Any) -> str | None:
    """Why the loop cannot decode with a model, or None: not every kind of layer can be rolled back."""
    known = {"full_attention"} | ({"linear_attention"} if config.model_type in GATED_DELTA_MODELS else set())
    others = sorted(_layer_types(config) - known)
    if not others:
        return None
    return (
        f"the target is a {config.model_type} that has {', '.join(others)} layers, and of those it can roll back only "
        f"full attention and the linear attention of {', '.join(GATED_DELTA_MODELS)}"
    )


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ())
