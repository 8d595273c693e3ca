"""Recordings on disk: what comes back is what was put in, and what cannot be read is said with its path."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from choicespec.errors import RecordingError
from choicespec.recordings import Recorded, RecordingFolder, RecordingManifest, as_stored, pack, unpack
from choicespec.records import Request, TargetIdentity
from choicespec.spec.task import PythonRepo, ToolCall
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

LAYERS = (2, 11)
HIDDEN = 3
LARGEST = 65504.0  # of float16
CHUNKS = (("b", "d"), ("a",), ("c", "e"))  # as a recording sorts them: by length
ORDER = ("a", "b", "c", "d", "e")
MANIFEST = RecordingManifest(
    target=TargetIdentity(weights="w", tokenizer="t", precision="float32", hidden_size=HIDDEN, num_layers=12),
    task=PythonRepo(limit=5),
    layers=LAYERS,
    chunks=CHUNKS,
    request_ids=ORDER,
)
OTHERS = {
    "target": MANIFEST.target.model_copy(update={"precision": "q4_0 float32"}),
    "task": ToolCall(limit=5),
    "layers": (2,),
    "chunks": (("a", "b", "c", "d", "e"),),
    "request_ids": ("b", "a", "c", "d", "e"),
}


def recorded(request: Request, output_ids: Sequence[int], seed: int, layers: Sequence[int] = LAYERS) -> Recorded:
    """A request with an output, and numbers that no other seed has."""
    dice = np.random.default_rng(seed)
    shape = (len(output_ids), HIDDEN)
    return Recorded(
        request,
        tuple(output_ids),
        ("eos", "length", "stop")[seed % 3],
        dice.random(len(output_ids), np.float32),
        {layer: dice.random(shape, np.float32).astype(np.float16) for layer in layers},
    )


def one(request_id: str, layers: Sequence[int] = LAYERS) -> Recorded:
    """A request of its own length."""
    number = ord(request_id) - ord("a")
    request = Request(request_id, tuple(range(number + 1)), 64)
    return recorded(request, range(100, 103 + number), number, layers)


def assert_equal(found: Sequence[Recorded], expected: Sequence[Recorded]) -> None:
    """Everything of every request, in this order."""
    for got, put in zip(found, expected, strict=True):
        assert got[:3] == put[:3]
        np.testing.assert_array_equal(got.margins, put.margins, strict=True)
        assert list(got.hidden_states) == list(put.hidden_states)
        for layer, states in put.hidden_states.items():
            np.testing.assert_array_equal(got.hidden_states[layer], states, strict=True)


def complete(path: Path) -> RecordingFolder:
    """A finished recording."""
    folder = RecordingFolder(path)
    for index in folder.begin(MANIFEST):
        folder.add(index, pack([one(request_id) for request_id in CHUNKS[index]]))
    return folder


TOKEN_IDS = st.lists(st.integers(0, 151_935), min_size=1, max_size=6)
TEXTS = st.lists(st.text(max_size=5), max_size=3).map(tuple)
REQUESTS = st.builds(
    Request,
    request_id=st.text(min_size=1, max_size=5),
    prompt_ids=TOKEN_IDS.map(tuple),
    max_new_tokens=st.integers(1, 9),
    stop=TEXTS,
    reference=st.none() | st.text(max_size=5),
    tools=TEXTS,
    document=st.none() | st.text(max_size=5),
)
RECORDED = st.builds(recorded, REQUESTS, TOKEN_IDS, st.integers(0, 1_000_000))


@given(st.lists(RECORDED, min_size=1, max_size=5))
def test_what_was_packed_comes_back(tmp_path_factory: pytest.TempPathFactory, packed: list[Recorded]) -> None:
    """Fails if a field of a request is lost, or if one request's tokens or states are cut out of another's rows."""
    path = tmp_path_factory.mktemp("chunk") / "chunk.safetensors"
    path.write_bytes(pack(packed))
    assert_equal(unpack(path, LAYERS), packed)


def test_only_the_layers_asked_for_are_read(tmp_path: Path) -> None:
    """Fails if a reader that needs one layer must hold them all, or is given another one's states."""
    path = tmp_path / "chunk.safetensors"
    path.write_bytes(pack([one("b"), one("d")]))
    found = unpack(path, (11,))
    assert_equal(found, [o._replace(hidden_states={11: o.hidden_states[11]}) for o in (one("b"), one("d"))])


def test_reading_gives_the_tasks_order(tmp_path: Path) -> None:
    """Fails if requests come as the chunks hold them: later requests would learn from ones that had not been yet."""
    folder = complete(tmp_path / "new" / "folder")
    assert folder.manifest() == MANIFEST
    assert_equal(folder.read(), [one(request_id) for request_id in ORDER])


def test_a_walk_gives_the_prompts_states_of_some_layers(tmp_path: Path) -> None:
    """Fails if a reader of one layer's states at the prompts must hold all, or is given another request's; and if a
    recording without them is taken for one."""
    made = {}
    for number, request_id in enumerate(ORDER):
        found = one(request_id)
        shape = (len(found.request.prompt_ids) - 1, HIDDEN)
        states = {layer: np.full(shape, 10 * number + layer, np.float16) for layer in LAYERS}
        made[request_id] = found._replace(prompt_states=states)
    folder = RecordingFolder(tmp_path / "with")
    for index in folder.begin(MANIFEST.model_copy(update={"prompt_states": True})):
        folder.add(index, pack([made[request_id] for request_id in CHUNKS[index]]))
    walked = list(folder.walk((11,)))
    assert sorted(one.request.request_id for one in walked) == sorted(ORDER)
    for found in walked:
        expected = made[found.request.request_id]
        assert list(found.hidden_states) == list(found.prompt_states) == [11]
        np.testing.assert_array_equal(found.prompt_states[11], expected.prompt_states[11], strict=True)
        np.testing.assert_array_equal(found.hidden_states[11], expected.hidden_states[11], strict=True)
    with pytest.raises(RecordingError, match="prompt_states"):
        list(complete(tmp_path / "without").walk((11,)))


def test_a_recording_goes_on_with_the_chunks_that_are_missing(tmp_path: Path) -> None:
    """Fails if what was recorded is recorded again, or if a chunk that was half written when a job was killed counts
    as one."""
    folder = RecordingFolder(tmp_path)
    assert folder.begin(MANIFEST) == [0, 1, 2]
    folder.add(1, pack([one("a")]))
    (tmp_path / "chunk-00002.partial").write_bytes(b"half")
    again = RecordingFolder(tmp_path)
    assert again.begin(MANIFEST) == [0, 2]
    for index in (2, 0):
        again.add(index, pack([one(request_id) for request_id in CHUNKS[index]]))
    assert again.begin(MANIFEST) == []
    assert_equal(again.read(), [one(request_id) for request_id in ORDER])
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("field", OTHERS)
def test_another_recordings_folder_is_left_as_it_is(tmp_path: Path, field: str) -> None:
    """Fails if hours of recording are overwritten, or if two targets' states end up in one recording."""
    folder = complete(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    other = MANIFEST.model_copy(update={field: OTHERS[field]})
    with pytest.raises(RecordingError, match=f"{re.escape(str(tmp_path))} holds a recording of something else"):
        folder.begin(other)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def _shorten(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 3 // 4])


def _other_layer(file: Path) -> None:
    file.write_bytes(pack([one("a", layers=(2, 3))]))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "cut": _shorten,
    "empty": lambda file: file.write_bytes(b""),
    "no safetensors": lambda file: file.write_bytes(b'{"format": 1}' * 50),
    "another layer": _other_layer,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_missing_or_broken_chunk_is_named(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    """Fails if a person must find out which of a hundred files to delete, or if a part is taken for the whole."""
    folder = complete(tmp_path)
    file = tmp_path / "chunk-00001.safetensors"
    damage(file)
    with pytest.raises(RecordingError, match=f"{re.escape(str(file))}: a missing or broken chunk"):
        folder.read()


def test_a_chunk_of_other_requests_is_named(tmp_path: Path) -> None:
    """Fails if a chunk that was copied from another recording gives a traceback, or passes for this one's."""
    folder = complete(tmp_path)
    file = tmp_path / "chunk-00001.safetensors"
    file.write_bytes(pack([one("z")]))
    with pytest.raises(RecordingError, match=f"{re.escape(str(file))}.*other requests"):
        folder.read()


def test_a_chunk_whose_description_lacks_something_is_named(tmp_path: Path) -> None:
    """Fails if a file that some other program wrote gives a traceback."""
    folder = complete(tmp_path)
    file = tmp_path / "chunk-00001.safetensors"
    tensors = {
        name: np.zeros((1, 1), np.float32) for name in ("prompt_ids", "output_ids", "margins", "hidden.2", "hidden.11")
    }
    for rows in ('[{"request_id": "a"}]', "[1]", "{}"):
        file.write_bytes(save(tensors, metadata={"requests": rows}))
        with pytest.raises(RecordingError, match=re.escape(str(file))):
            folder.read()


def test_chunks_without_a_manifest_are_nobodys(tmp_path: Path) -> None:
    """Fails if chunks of an unknown target are taken for those of the one that is recorded now."""
    folder = complete(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(RecordingError, match="chunks without a manifest"):
        folder.begin(MANIFEST)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"format": 1}', b"[1, 2]"])
def test_a_broken_manifest_is_named(tmp_path: Path, content: bytes) -> None:
    """Fails if a manifest of another version gives a traceback, or is overwritten by the next recording."""
    folder = complete(tmp_path)
    (tmp_path / "manifest.json").write_bytes(content)
    for use in (folder.manifest, folder.read, lambda: folder.begin(MANIFEST)):
        with pytest.raises(RecordingError, match=re.escape(str(tmp_path / "manifest.json"))):
            use()
    assert (tmp_path / "manifest.json").read_bytes() == content


def test_no_recording_is_said_with_what_to_do(tmp_path: Path) -> None:
    """Fails if a mistyped folder gives a traceback, or an empty recording."""
    missing = RecordingFolder(tmp_path / "nowhere")
    for use in (missing.manifest, missing.read):
        with pytest.raises(RecordingError, match=f"no recording in {re.escape(str(tmp_path / 'nowhere'))}.*record it"):
            use()
    assert not missing.path.exists()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=9))
def test_states_beyond_float16_are_its_largest_number(values: list[float]) -> None:
    """Fails if one large state becomes infinite, and every sum that a scorer makes of it with it; or if any other
    number is changed by more than rounding."""
    states = np.array(values, np.float32)
    found = as_stored(states)
    assert found.dtype == np.float16
    assert np.isfinite(found).all()
    assert found[states >= LARGEST].tolist() == [LARGEST] * int((states >= LARGEST).sum())
    assert found[states <= -LARGEST].tolist() == [-LARGEST] * int((states <= -LARGEST).sum())
    within = np.abs(states) < LARGEST
    np.testing.assert_array_equal(found[within], states[within].astype(np.float16))


def test_the_largest_states_are_known_ones() -> None:
    """Fails if the numbers just above the largest round to infinity; the property above needs these very values."""
    states = np.array([65503, 65504, 65519, 65520, 1e30, np.inf, -65520, -np.inf], np.float32)
    assert as_stored(states).tolist() == [LARGEST] * 6 + [-LARGEST] * 2
