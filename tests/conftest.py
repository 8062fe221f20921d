import pytest


@pytest.fixture(scope="module")
def run_ranks():
    """`Worlds.run` of worlds that end with the test file."""
    from tests.fsdp.ranks import Worlds

    worlds = Worlds()
    yield worlds.run
    worlds.close()
