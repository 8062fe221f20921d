import pytest
import torch

from tests.fsdp.claims import check_claim


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def check(request, run_ranks, tmp_path_factory):
    """`check(size, name)` of the test file's `CLAIMS`, after what the claim needs."""
    claims, shared = request.module.CLAIMS, str(tmp_path_factory.mktemp("shared"))
    held = set()

    def check(size, name):
        if (size, name) in held:
            return
        entry = claims[name]
        if entry.after:
            check(2, entry.after)
        run_ranks(check_claim, size, entry.check.__module__, name, shared, timeout_s=600)
        held.add((size, name))

    return check
