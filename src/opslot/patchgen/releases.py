"""Transformers releases by version: the installed one, or its sources fetched into the cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from opslot._base.errors import PatchError
from opslot.patchgen.cache import cache_root
from opslot.patchgen.names import PACKAGE
from opslot.patchgen.source import Release, installed_release

# What patches read and depend on; the rest of a release is not kept.
_KEPT = re.compile(r"transformers/([^/]+|(integrations|loss|utils)/[^/]+|models/[^/]+/modeling_[^/]+)\.py")


def find_release(version: str, *, download: bool = True) -> Release:
    """The release of that version.

    Raises:
        PatchError: it is neither installed nor cached, and cannot be (or must not be) downloaded.
    """
    if not re.fullmatch(r"\d+(\.\w+)*", version):
        raise PatchError(f"{version!r} is not a Transformers version", hint="use one such as 5.24.0")
    installed = installed_release()
    if installed.version == version:
        return installed
    folder = cache_root() / PACKAGE / version
    if not (folder / PACKAGE / "__init__.py").is_file():
        if not download:
            raise PatchError(
                f"transformers {version} is neither installed nor in {folder.parent}", hint="allow the download"
            )
        try:
            _download(version, folder)
        except OSError as error:
            raise PatchError(
                f"cannot keep transformers {version} in {folder}",
                found=str(error),
                hint="set OPSLOT_CACHE to another directory",
            ) from error
    return Release(version, folder / PACKAGE)


def _download(version: str, folder: Path) -> None:
    """Fetch a release's wheel with pip and keep its sources in `folder`, which appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{version}-") as work:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
        command += ["--retries", "1", "--timeout", "15", "--disable-pip-version-check", "--dest", work]
        done = subprocess.run([*command, f"{PACKAGE}=={version}"], capture_output=True, text=True, check=False)
        wheels = list(Path(work).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            reason = (done.stderr.strip().splitlines() or ["pip gave no wheel"])[-1]
            raise PatchError(
                f"transformers {version} could not be downloaded: {reason}",
                hint=f"go online once, or unpack its wheel into {folder}",
            )
        unpacked = Path(work) / "unpacked"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(unpacked, [name for name in wheel.namelist() if _KEPT.fullmatch(name)])
        try:
            os.rename(unpacked, folder)
        except OSError:
            if not (folder / PACKAGE / "__init__.py").is_file():
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(unpacked, folder)
