import pytest
@pytest.fixture(params=["torch", "interpret"])
def backend(request, monkeypatch):
    monkeypatch.setenv("MEGARL_KERNELS", request.param)
    return request.param
