"""Every op that opslot ships: importing this package registers them, and imports no kernel vendor.

An op is a folder: `op.py` holds its contract, reference, input cases and costs, `__init__.py` registers it with its
kernels, and each implementation has a separate file that is imported when first used. A new folder is found.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    if _module.ispkg and not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")
