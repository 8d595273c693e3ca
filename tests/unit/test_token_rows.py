"""Tokens that a scorer's network projects once."""

import torch
from choicespec.scorer.token_rows import TokenRows
from hypothesis import given
from hypothesis import strategies as st

TEXTS = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=12), min_size=1, max_size=8)


@given(TEXTS)
def test_every_token_has_its_own_row_and_is_projected_once(texts: list[list[int]]) -> None:
    """Fails if a token gets another's row when new ones come between, or if the projection is paid at every step."""
    projected: list[int] = []

    def project(token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        projected.extend(token_ids.tolist())
        return token_ids[:, None] * 2.0, token_ids[:, None] * 3.0

    rows = TokenRows(project)
    for token_ids in texts:
        assert rows.tokens(token_ids)[:, 0].tolist() == [3 * token_id for token_id in token_ids]
        assert rows.anchors(token_ids[:1])[:, 0].tolist() == [2 * token_ids[0]]
    assert sorted(projected) == sorted({token_id for token_ids in texts for token_id in token_ids})
