"""Everything about the distribution is in setup.cfg, but for the place of the start files."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

START_FILES = ("autoamp.pth", "autoamp.start")


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


setup(cmdclass={"build_py": BuildWithStartFiles})
