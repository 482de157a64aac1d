"""Which code computes: the setting `kernels`, the processor, and whether the library was built."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.native import open_library

from kvrelay.kernels.native import binding
from kvrelay.kernels.native.binding import Library, NativeError, Variant
from kvrelay.shared.errors import ConfigError
from kvrelay.shared.worker import compute
from kvrelay.shared.worker.compute import choose_kernels, numerics_id

LIBRARY = open_library()


def test_auto_takes_the_fastest_and_a_name_takes_that_one() -> None:
    best = LIBRARY.variants[-1]
    chosen = choose_kernels("auto", 3)
    if best is Variant.PORTABLE:
        assert chosen is None
    else:
        assert chosen is not None and (chosen.variant, chosen.threads) == (best, 3)
    portable = choose_kernels("native-portable", 1)
    assert portable is not None and portable.variant is Variant.PORTABLE
    assert numerics_id(portable, "float32") == f"native-portable-v{binding.VERSION}"
    assert choose_kernels("reference", 1) is None
    assert numerics_id(None, "float32").startswith("torch-")


def test_without_the_library_auto_says_what_is_lost_and_a_name_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compute, "Library", lambda: Library(tmp_path / "libnone.so"))
    with caplog.at_level(logging.WARNING):
        assert choose_kernels("auto", 1) is None
    assert [record.getMessage() for record in caplog.records] == [
        "no native kernels, steps take several times as long: "
        "libnone.so was not built: no C++ compiler at install"
    ]
    with pytest.raises(ConfigError, match=r"kernels: native-avx2 cannot be used: libnone\.so was"):
        choose_kernels("native-avx2", 1)


def test_a_variant_of_another_processor_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Old(Library):
        def __init__(self) -> None:
            super().__init__()
            self.variants = (Variant.PORTABLE,)

    monkeypatch.setattr(compute, "Library", Old)
    assert choose_kernels("auto", 1) is None
    message = "kernels: native-amx cannot run on this processor, which has native-portable"
    with pytest.raises(ConfigError, match=message):
        choose_kernels("native-amx", 1)


def test_a_file_that_is_no_library_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "libbroken.so"
    file.write_bytes(b"\x7fELF and no more")
    with pytest.raises(NativeError, match=r"libbroken\.so cannot be loaded"):
        Library(file)
