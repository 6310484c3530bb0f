"""What a quarter of an hour leaves: two files of one folder, which are whole at any time."""

from __future__ import annotations

import io
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

PAGE, ARCHIVE, OTHERS = "quarter.md", "results.tar.gz", "others.tar.gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A folder with a page to read, the files of results as bench/results has them, and others: logs and tables.

    Archives, since a result has pictures, and all of them are more files than may be fetched from some machines.
    """

    folder: Path

    def result_names(self) -> list[str]:
        return sorted(_members(self.folder / ARCHIVE))

    def documents(self) -> list[str]:
        """The results that are pages."""
        found = _members(self.folder / ARCHIVE)
        return [found[name].decode("utf-8") for name in sorted(found) if name.endswith(".md")]

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
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f".{name}.part"
        part.write_bytes(content)
        os.replace(part, self.folder / name)


def _members(archive: Path) -> dict[str, bytes]:
    if not archive.exists():
        return {}
    with tarfile.open(archive, "r:gz") as read:
        files = ((one.name, read.extractfile(one)) for one in read.getmembers())
        return {name: file.read() for name, file in files if file is not None}
