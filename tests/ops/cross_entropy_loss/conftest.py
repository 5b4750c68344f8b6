import pytest

from tests.ops.cross_entropy_loss.inputs import KERNELS


@pytest.fixture(params=KERNELS)
def name(request):
    return request.param
