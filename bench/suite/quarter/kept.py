"""What a quarter of an hour leaves: three files of one folder, which are whole at any time."""

from __future__ import annotations

import io
import os
import tarfile
import zlib
from dataclasses import dataclass
from errno import EISDIR
from pathlib import Path

PAGE, ARCHIVE, OTHERS = "quarter.md", "results.tar.gz", "others.tar.gz"


class UnusableFolder(RuntimeError):
    """Results cannot be kept there; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A folder with a page to read, the files of results as bench/results has them, and others: logs and tables.

    Archives, since a result has pictures, and all of them are more files than may be fetched from some machines.
    """

    folder: Path

    def check(self) -> None:
        """Try what is done when a part ends, before it has taken minutes.

        Raises:
            UnusableFolder: it cannot be written, or what it has cannot be read.
        """
        try:
            self._write(ARCHIVE, b"").unlink()
            for name in (PAGE, ARCHIVE, OTHERS):
                if (self.folder / name).is_dir():
                    raise IsADirectoryError(EISDIR, f"{name} is a folder")
        except OSError as error:
            raise UnusableFolder(f"--out {self.folder}: {error.strerror or error}; name another folder") from error
        for name in (ARCHIVE, OTHERS):
            try:
                _members(self.folder / name)
            except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
                raise UnusableFolder(
                    f"--out {self.folder}: {name} cannot be read ({error}); move it away, or name another folder"
                ) from error

    def result_names(self) -> list[str]:
        return sorted(_members(self.folder / ARCHIVE))

    def documents(self) -> dict[str, str]:
        """The results that are pages, by the names of their files."""
        found = _members(self.folder / ARCHIVE)
        return {name: found[name].decode("utf-8", "replace") for name in sorted(found) if name.endswith(".md")}

    def add_results(self, folder: Path) -> None:
        self._add(ARCHIVE, folder)

    def add_others(self, folder: Path) -> None:
        self._add(OTHERS, folder)

    def write_page(self, text: str) -> None:
        self._replace(PAGE, text.encode("utf-8"))

    def _add(self, archive: str, folder: Path) -> None:
        """Those files; they take the place of others of the same name."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        if not files:
            return
        members, data = _members(self.folder / archive) | files, io.BytesIO()
        with tarfile.open(fileobj=data, mode="w:gz") as written:
            for name in sorted(members):
                info = tarfile.TarInfo(name)
                info.size = len(members[name])
                written.addfile(info, io.BytesIO(members[name]))
        self._replace(archive, data.getvalue())

    def _replace(self, name: str, content: bytes) -> None:
        os.replace(self._write(name, content), self.folder / name)

    def _write(self, name: str, content: bytes) -> Path:
        """A file beside that of this name, which may take its place."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f".{name}.part"
        part.write_bytes(content)
        return part


def _members(archive: Path) -> dict[str, bytes]:
    if not archive.exists():
        return {}
    with tarfile.open(archive, "r:gz") as read:
        files = ((one.name, read.extractfile(one)) for one in read.getmembers())
        return {name: file.read() for name, file in files if file is not None}
