import hypothesis
import pytest
import torch

from support import devices, runners

hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("suite")


def pytest_generate_tests(metafunc):
    """`device_variants` runs a test on every code path of every device here, `device` on every device."""
    if "device_variants" in metafunc.fixturenames:
        metafunc.parametrize("device_variants", runners(), ids=str)
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", devices())


@pytest.fixture(autouse=True)
def _two_threads():
    """Tests that change the number of threads do so for themselves only."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
