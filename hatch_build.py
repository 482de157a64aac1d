"""The build's only extra: the native code, where there is a C++ compiler.

Without one the package is built without them, is complete all the same, and its workers say so.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeCodeHook(BuildHookInterface[Any]):
    """Compiles the libraries in place; a wheel that contains them is of one platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(self.root, "kernels", "native", "build.py")
        spec = importlib.util.spec_from_file_location("native_build", source)
        assert spec is not None and spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        try:
            libraries: list[Path] = [native.build(), native.build_rest()]
        except native.BuildFailed as error:
            self.app.display_warning(f"no native code, the torch reference computes: {error}")
            return
        if version != "editable":
            names = [f"/{library.relative_to(self.root).as_posix()}" for library in libraries]
            build_data["artifacts"] += names
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
