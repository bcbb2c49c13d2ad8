"""Where things are kept between commands."""

import os
import sys
from pathlib import Path

# File systems that several machines share, as Linux names them.
NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "sshfs", "9p", "afs", "weka", "panfs")


def cache_dir() -> Path:
    """The user's cache folder for jaxsim, by the platform's convention. Raises `RuntimeError` without a home folder."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxsim"


def is_network(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether other machines may see the same folder; False where the system does not say (that is, outside Linux)."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return False
    folder = folder.resolve()
    above = {str(path) for path in (folder, *folder.parents)}
    kinds = {point.replace("\\040", " "): kind for _, point, kind, *_ in lines}  # the last mount covers earlier ones
    inner = max((point for point in kinds if point in above), key=len, default="")
    return kinds.get(inner, "").removeprefix("fuse.").startswith(NETWORK)
