"""The proposer that never proposes."""

from choicespec.spec.method import Autoregressive, MethodSpec
from contracts.proposer_contract import ProposerContract
from hypothesis import strategies as st


class TestAutoregressive(ProposerContract):
    """The contract, with k = 0: any draft would make the baseline something else than plain decoding."""

    methods = st.just(Autoregressive())

    def most_tokens(self, method: MethodSpec) -> int:
        return 0
