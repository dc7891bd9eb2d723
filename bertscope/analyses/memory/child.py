"""The command line of a Python child process that imports nothing from the working directory."""

import json
import os
import site
import sys

import bertscope

# `-I` leaves the working directory, PYTHONPATH and the user's site-packages out of sys.path. The bootstrap adds the
# last two, and imports this package from the parent's folder.
_BOOTSTRAP = """
import json, pkgutil, site, sys
from importlib.util import module_from_spec, spec_from_file_location
entry, package, user_site, paths = json.loads(sys.argv.pop(1))
sys.path[:] = paths + [path for path in sys.path if path not in paths]
if user_site:
    site.addsitedir(user_site)
spec = spec_from_file_location("bertscope", package)
sys.modules["bertscope"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["bertscope"])
pkgutil.resolve_name(entry)()
"""


def child_command(entry: str) -> list[str]:
    """Return the arguments that start a Python process which calls `entry`, a `module:function`.

    The child sees the packages that this process sees: PYTHONPATH, editable installs, the user's site-packages.
    It imports from the working directory only if PYTHONPATH or an installed package names that directory.
    """
    user_site = site.USER_SITE if site.ENABLE_USER_SITE else None
    settings = json.dumps([entry, bertscope.__file__, user_site, _paths()])
    flags = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
    return [sys.executable, *flags, "-c", _BOOTSTRAP, settings]


def _paths() -> list[str]:
    """Return the absolute paths of sys.path without the working directory, which `python -m` adds."""
    absolute = [path for path in sys.path if os.path.isabs(path)]
    try:
        here = os.path.realpath(os.getcwd())
    except FileNotFoundError:  # the working directory was deleted
        return absolute
    environment = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    if here in (os.path.realpath(path) for path in environment.split(os.pathsep) if path):
        return absolute
    return [path for path in absolute if os.path.realpath(path) != here]
