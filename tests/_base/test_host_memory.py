"""Memory that processes keep."""

import platform
import resource

import pytest
from torch.utils.data import DataLoader, Dataset

from opslot.data.loader import _start_worker

SIZE = 48 << 20


class Faults(Dataset):
    """Page faults of an allocation of `SIZE` bytes."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        assert len(b"x" * SIZE) == SIZE
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_workers_keep_freed_memory():
    """Else each array of a sample is cleared, page by page, by the operating system."""
    _, *later = DataLoader(Faults(), num_workers=1, batch_size=None, worker_init_fn=_start_worker)
    assert max(later) < SIZE // 4096 // 10
