"""Paths in a recipe: what they count from, and whether the file system has them.

A relative path counts from the file that names it, from the current folder after `--set`; `output_dir` always
counts from the current folder. A model is a folder where one is meant or found, else a hub id. This module
must not know the schema or YAML.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

# A hub id is one name or owner/name, of the characters that the hub allows.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def absolute(text: str, folder: Path) -> Path:
    """A path as an absolute one, `..` taken out where that does not lead elsewhere through a link."""
    path = os.path.join(folder, os.path.expanduser(text))
    short = os.path.normpath(path)
    return Path(short if os.path.realpath(short) == os.path.realpath(path) else path)


def is_unicode(text: str) -> bool:
    """Whether text is text: names of files may hold bytes that are not, which Python keeps as surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def model_place(text: str, folder: Path) -> str:
    """A model's folder as an absolute path, or the text itself where it is a hub id.

    Args:
        text: `model.name_or_path` as it was written.
        folder: What it counts from.
    """
    if text.startswith((".", "/", "~")):
        return str(absolute(text, folder))
    for base in (folder, Path.cwd()):
        if os.path.exists(base / text):
            return str(absolute(text, base))
    return text


def model_problem(place: str) -> str | None:
    """Why a model's place cannot be one, None where it may be."""
    if os.path.isabs(place):
        if os.path.isdir(place):
            return None
        if not os.path.exists(place):
            return "does not exist"
        # the loader of bases has more to say about a GGUF
        return None if place.endswith(".gguf") else "is a file, not a model folder"
    return None if _HUB_ID.fullmatch(place) else "is neither a folder here nor a hub id"


def file_problem(path: Path) -> str | None:
    """Why a file cannot be read, None where it can."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            return "is a folder, not a file"
        if stat.S_ISREG(mode):
            with open(path, "rb"):
                pass
    except FileNotFoundError:
        return "does not exist"
    except (OSError, ValueError) as error:
        return f"cannot be read: {(getattr(error, 'strerror', None) or str(error)).lower()}"
    return None


def folder_problem(path: Path) -> str | None:
    """Why a folder cannot be read, None where it can."""
    try:
        os.listdir(path)
    except FileNotFoundError:
        return "does not exist"
    except NotADirectoryError:
        return "is a file, not a folder"
    except (OSError, ValueError) as error:
        return f"cannot be read: {(getattr(error, 'strerror', None) or str(error)).lower()}"
    return None
