import pytest


@pytest.fixture
def served():
    """A published configuration, as a server has one."""
    from sglang_here import get_context

    with get_context().override_server_args():
        yield


@pytest.fixture(params=[1, 2], ids=["chain", "tree"])
def topk(request):
    """Branches of a server that speculates."""
    from rounds import DRAFTS, STEPS
    from sglang_here import get_context

    sizes = {"speculative_num_steps": STEPS, "speculative_num_draft_tokens": DRAFTS}
    with get_context().override_server_args(
        speculative_algorithm="EAGLE", speculative_eagle_topk=request.param, **sizes
    ):
        yield request.param
