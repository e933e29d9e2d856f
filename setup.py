"""Everything about the distribution is in setup.cfg, but for two commands of setuptools."""

import gzip
import os
import tarfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

START_FILES = ("autoamp.pth", "autoamp.start")
os.umask(0o022)  # the modes of files are those of everybody's


class BuildWithStartFiles(build_py):
    """Puts the start files at the root of site-packages, the only place where Python reads them.

    In editable installs too: setuptools has no setting that does, and without them the variable
    would silently do nothing in a development environment.
    """

    def run(self) -> None:
        super().run()
        root = self.build_lib
        if self.editable_mode:  # setuptools lets install_purelib be the wheel in the making
            root = self.get_finalized_command("install").install_purelib
        for name in START_FILES:
            self.copy_file(f"sitecustomize/{name}", Path(root, name))


class SdistOfOneMoment(sdist):
    """Dates all files by SOURCE_DATE_EPOCH, where that is set: one commit is one archive.

    Wheels are dated by it already. What setuptools writes itself is as old as the build otherwise.
    """

    def make_archive(self, base_name: str, kind: str, **options: str) -> str:
        moment = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
        if not moment or kind != "gztar":
            return super().make_archive(base_name, kind, **options)

        def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.mtime, member.mode = moment, 0o755 if member.isdir() else 0o644
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            return member

        path = f"{base_name}.tar.gz"
        with (
            open(path, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=moment) as zipped,
            tarfile.open(fileobj=zipped, mode="w") as archive,
        ):
            archive.add(options["base_dir"], filter=anonymous)
        return path


setup(cmdclass={"build_py": BuildWithStartFiles, "sdist": SdistOfOneMoment})
