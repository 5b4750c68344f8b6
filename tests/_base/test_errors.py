"""What errors of other libraries say."""

import pytest

from opslot._base.errors import missing_package


@pytest.mark.parametrize(
    ("error", "package"),
    [
        (ImportError("TimmModel requires the timm library: pip install -U timm"), "timm"),
        (ImportError("X requires the PIL library: `pip install pillow`. Please restart your runtime."), "pillow"),
        (ImportError("X requires the librosa library. Install it: pip install librosa."), "librosa"),
        (ImportError("X requires the detectron2 library but it was not found in your environment."), "detectron2"),
        (ModuleNotFoundError("No module named 'scipy.io'", name="scipy.io"), "scipy"),
        (ImportError("cannot import name 'x' from 'y'", name="y"), ""),
        (ValueError("pip install timm"), ""),
    ],
)
def test_missing_package_is_named(error, package):
    assert missing_package(error) == package
