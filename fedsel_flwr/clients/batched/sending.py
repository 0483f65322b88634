"""What has to be trained, as bytes for another process, with the modules of one's own that are read from files."""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import sys
from typing import Any

from fedsel_flwr.references import OWN_FILES, load_reference


def packed(what: Any) -> bytes:
    """An object as bytes.

    What was defined in the script or notebook itself is sent along where cloudpickle is installed; everything else is
    imported at the other end, files of one's own (``./mine.py:function``) from where they are.

    Raises:
        Exception: It cannot be sent; pickle raises many kinds.
    """
    by_value = importlib.util.find_spec("cloudpickle")
    pickler = importlib.import_module("cloudpickle") if by_value else pickle
    files = {name: module.__file__ for name, module in list(sys.modules.items()) if name.startswith(OWN_FILES)}
    return pickle.dumps((files, pickler.dumps(what)))


def unpacked(data: bytes) -> Any:
    """The object again.

    Raises:
        Exception: Something that it needs cannot be imported here; pickle raises many kinds.
    """
    files, inner = pickle.loads(data)
    return _Unpickler(inner, files).load()


class _Unpickler(pickle.Unpickler):
    """Finds modules that were read from files.

    Args:
        data: The pickled object.
        files: By the name of the module.
    """

    def __init__(self, data: bytes, files: dict[str, str]) -> None:
        super().__init__(io.BytesIO(data))
        self._files = files

    def find_class(self, module: str, name: str) -> Any:
        """What a name in a module stands for."""
        if module in self._files and module not in sys.modules:
            return load_reference(f"{self._files[module]}:{name}", "model")
        return super().find_class(module, name)
