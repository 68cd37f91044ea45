"""Memory of exactly the size that is asked for: for weights on the host, locked for a device.

Torch's own allocator of pinned memory rounds up to powers of two, which locks up to twice the
weights; here the operating system gives whole pages, and CUDA is asked to lock those.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import weakref

import torch
from torch import Tensor

from polyattn.errors import OffloadError

__all__ = ["Block", "Lock", "locked_bytes", "pages", "tensor_over"]

_LARGE_PAGE = 2 << 20
_LOCKED: dict[int, int] = {}


def locked_bytes() -> int:
    """Return how many bytes of host memory offload has locked for devices in this process."""
    return sum(_LOCKED.values())


def tensor_over(pages: mmap.mmap, offset: int, nbytes: int) -> Tensor:
    """Return a part of mapped memory as a tensor (uint8) whose storage is exactly that part."""
    with torch.inference_mode(False):  # whoever writes to it later may be outside of it
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=offset)


class Block:
    """Host memory (`whole`, uint8) that goes back to the system when no tensor lies in it."""

    def __init__(self, nbytes: int) -> None:
        try:
            self._pages = None if nbytes == 0 else pages(nbytes)
        except (OSError, ValueError) as error:
            raise OffloadError(
                f"got no {nbytes:,} bytes of memory on the host ({error}), expected them for the "
                "weights: give disk= a folder, so that they stay in files"
            ) from error
        self.whole = self.part(0, nbytes)

    def part(self, offset: int, nbytes: int) -> Tensor:
        """Return bytes of it as a tensor (uint8) with a storage of its own."""
        if self._pages is None or nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return tensor_over(self._pages, offset, nbytes)


def pages(nbytes: int) -> mmap.mmap:
    """Return memory, in large pages where there are any: a disk fills those in one go."""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= _LARGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


class Lock:
    """Pages that CUDA has locked, so that it copies from them by itself, until `release()`."""

    def __init__(self, memory: Tensor) -> None:
        address, nbytes = memory.data_ptr(), memory.numel()
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code:
            raise OffloadError(
                f"got error {code} from cudaHostRegister for {nbytes:,} bytes, expected that the "
                "host may lock them: raise the limit of locked memory (ulimit -l), or pass "
                "pinned=False"
            )
        _LOCKED[address] = nbytes
        # holds the memory: it is not given back before it is unlocked
        self.release = weakref.finalize(self, _unlock, address, memory)


def _unlock(address: int, memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
    _LOCKED.pop(address, None)
    del memory
