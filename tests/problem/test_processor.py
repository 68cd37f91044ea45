"""Telling processors apart, from what different systems say of them."""

from __future__ import annotations

import errno

import pytest

from polyattn.problem.processor import (
    Identity,
    _identity,
    _told,
    identity,
    instruction_sets,
    level_of,
)

AMD = {"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "1", "stepping": "1"}
ARM = {"CPU implementer": "0x41", "CPU part": "0xd40", "CPU variant": "0x1", "CPU revision": "1"}


@pytest.mark.parametrize(
    ("told", "system", "machine", "name", "said"),
    [
        (AMD, "linux", "x86_64", "", "AuthenticAMD family 25 model 1 stepping 1"),
        (ARM, "linux", "aarch64", "", "ARM family 3392 model 1 stepping 1"),
        ({"CPU implementer": "0x99"}, "linux", "aarch64", "", "0x99"),
        ({}, "win32", "AMD64", "Intel64 Family 6 Model 143 Stepping 8, GenuineIntel",
         "GenuineIntel family 6 model 143 stepping 8"),
        ({}, "darwin", "arm64", "arm", "Apple"),
        ({}, "darwin", "x86_64", "i386", "vendor unknown"),
        ({"vendor_id": "Odd", "cpu family": "?"}, "linux", "x86_64", "", "Odd"),
    ],
)  # fmt: skip
def test_identities(told: dict[str, str], system: str, machine: str, name: str, said: str) -> None:
    assert str(_identity(told, system, machine, name)) == said


def test_levels() -> None:
    def level(*names: str) -> str | None:
        return level_of(frozenset(names))

    assert level("amx_bf16", "avx512_bf16", "avx512f", "avx2") == "amx"
    assert level("avx512_bf16", "avx512f", "avx2") == "avx512bf16"
    assert level("sve", "neon") == "sve" and level("neon", "bf16") == "neon"
    assert level("avx") is None and level_of(None) is None


def test_here() -> None:
    assert isinstance(identity(), Identity)
    assert level_of(instruction_sets()) in (
        None,
        "amx",
        "avx512bf16",
        "avx512",
        "avx2",
        "sve",
        "neon",
    )


def test_a_process_without_a_file_to_open_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    _told.cache_clear()
    try:
        with monkeypatch.context() as patched:
            patched.setattr("builtins.open", full)
            with pytest.raises(OSError, match="Too many open files"):
                _told()
        assert _told.cache_info().currsize == 0  # nothing is kept
    finally:
        _told.cache_clear()
