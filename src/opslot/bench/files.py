"""The files that a benchmark writes: the result as JSON, as plots and as an HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opslot._base.errors import ConfigError
from opslot.bench.page import page
from opslot.bench.plots import PLOT_FORMATS, draw
from opslot.bench.result import Result, to_json


@dataclass(frozen=True)
class OutputFiles:
    """Where to write; None leaves a file out.

    Raises:
        ConfigError: a file that could not be written when everything has been measured.
    """

    output: str | None = None
    plot: str | None = None
    html: str | None = None

    def __post_init__(self) -> None:
        named: dict[Path, str] = {}
        for option, file in (("--output", self.output), ("--plot", self.plot), ("--html", self.html)):
            if file is None:
                continue
            path = Path(file).resolve()
            if path in named:
                raise ConfigError(f"{named[path]} and {option} name the same file, {file!r}", hint="name two files")
            named[path] = option
            _check_writable(option, file)
        if self.plot and Path(self.plot).suffix.lower() not in PLOT_FORMATS:
            raise ConfigError(
                f"--plot {self.plot!r} is not a format that can be drawn", hint=f"end it in {' or '.join(PLOT_FORMATS)}"
            )

    def write(self, result: Result) -> None:
        """Write every file with all there is."""
        if self.output:
            Path(self.output).write_text(to_json(result))
        if self.plot:
            draw(result, Path(self.plot))
        if self.html:
            Path(self.html).write_text(page(result), encoding="utf-8")


def _check_writable(option: str, file: str) -> None:
    path = Path(file)
    if path.is_dir():
        raise ConfigError(f"{option} {file!r} is a folder", hint="name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {file!r}: the folder {path.parent} does not exist", hint="create it first")
    new = not path.exists()
    try:
        with path.open("a"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"{option} {file!r} cannot be written", found=str(error.strerror), hint="name another file"
        ) from error
