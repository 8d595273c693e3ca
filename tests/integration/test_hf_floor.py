"""The floor of a target's passes: which weights are read, and at which rates."""

import pytest
from choicespec.runtimes.hf_floor import measure_floor
from integration.small_checkpoints import HIDDEN, small_llama


@pytest.mark.parametrize("tied", [True, False])
def test_a_pass_reads_each_weight_once_and_no_embedding(tied: bool) -> None:
    """Fails if an LM head that is the embedding too counts twice or not at all, or if the embedding's rows are read."""
    model = small_llama(tie_word_embeddings=tied)
    everything = sum(weight.numel() for weight in model.parameters())  # each once, however often it is used
    floor = measure_floor(model)
    assert floor.weights == everything - (0 if tied else 512 * HIDDEN)
    assert floor.weight_bytes == 4 * floor.weights
    assert floor.read_bytes_per_s > 1e8
    assert floor.flops_per_s > 1e8
