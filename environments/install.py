"""``.envs/uv/bin/python environments/install.py ENVIRONMENT ARGUMENTS…``: what ``pip install ARGUMENTS…`` does in it.

uv unpacks a package once for all environments and links its files, where pip downloads and unpacks three frameworks for
each anew: with uv the environments take a third of pip's time, or less. uv is told what pip is configured with, as for
``requirements=``. Where uv cannot, pip does it, as it does with GRADWIRE_INSTALLER=pip; the pip is that of .envs/uv.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "client"), str(ROOT / "wire")]

from gradwire.environments.installers import Uv, find_installer  # noqa: E402 - where it is has just been said

environment, *arguments = sys.argv[1:]
python = str(Path(environment, "bin", "python").absolute())  # its link is not followed: that leads out of it
installer = find_installer(os.environ)
if isinstance(installer, Uv):
    command = installer.install(python, *arguments)
    if subprocess.run(command, env=installer.environment, check=False).returncode == 0:
        sys.exit()
    print(f"make: {installer.name} could not fill {environment}; pip tries", file=sys.stderr)
pip = [sys.executable, "-m", "pip", "--python", python, "install"]
flags = ["--disable-pip-version-check", "--no-compile"]
sys.exit(subprocess.run([*pip, *flags, *arguments], check=False).returncode)
