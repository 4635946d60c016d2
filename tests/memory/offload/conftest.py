import pytest

from tests.memory.offload.fake_device import late_device


@pytest.fixture
def platform():
    with late_device() as platform:
        yield platform
