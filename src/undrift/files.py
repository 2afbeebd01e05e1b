"""Atomic and verified files.

Every file is written under a temporary name, synced and renamed, and then its folder is synced. The temporary name is
random and created exclusively, so no existing file is written to, and no link is followed. `seal` writes JSON with its
checksum; `digest` computes that of any other file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from undrift.errors import UndriftError, quoted

PARTIAL = re.compile(r"\.(.+)\.[0-9a-f]{16}\.partial")
"""The temporary name of a file; the first group is the file's own name."""


LONGEST = 200
"""The most bytes in a file's name that is made from something else's."""


def file_name(text: str) -> str:
    """The name of a file, without its suffix, for what is called `text`: never a path, and the same for the same text.

    Names that differ stay different: where letters are lost, a digest is added.
    """
    plain = re.sub(r"[^\w .,=+()@-]", "_", text).lstrip(" .-")
    raw = plain.encode()
    if plain == text and 0 < len(raw) <= LONGEST:
        return text
    short = raw[: LONGEST - 9].decode(errors="ignore")
    return f"{short}-{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:8]}".lstrip("-")


class DamagedError(UndriftError):
    """Raised if a file is missing or does not have the contents that were written."""


@contextlib.contextmanager
def replacing(file: Path, secret: bool = False) -> Iterator[Path]:
    """A context with a new, empty file to write to, which becomes `file` when the block ends without an error.

    Its mode follows the umask, even if a library replaces it by another file. A secret is its owner's alone.
    """
    partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}.partial")
    handle = os.open(
        partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600 if secret else 0o666
    )
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    os.close(handle)
    try:
        yield partial
        partial.chmod(mode)
        atomic_replace(partial, file)
    except Exception as error:  # a full disk, for example; after a crash, `remove_partial` removes the partial file
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(partial)):
            error.filename = str(file)
        raise


def atomic_replace(partial: Path, file: Path) -> None:
    """Rename a file that was written under a temporary name; after a crash, either the old or the new file exists."""
    sync(partial)
    partial.replace(file)
    sync(file.parent)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(file: Path, text: str) -> None:
    with replacing(file) as partial:
        partial.write_text(text, encoding="utf-8")


def remove_partial(folder: Path, names: re.Pattern[str]) -> None:
    """Remove the temporary files that a crash left in `folder`, of files whose names match."""
    for file in folder.iterdir():
        found = PARTIAL.fullmatch(file.name)
        if found and names.fullmatch(found[1]) and regular(file):
            file.unlink()


def regular(file: Path) -> bool:
    """Return whether this is a regular file: no folder, link or device."""
    try:
        return stat.S_ISREG(file.lstat().st_mode)
    except OSError:
        return False


def open_regular(file: Path) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading. Anything else is not opened: a pipe may block, and a device
    may never end.

    Raises:
        OSError: If it is something else, or cannot be opened.
    """
    _refuse_irregular(os.stat(file).st_mode, file)
    # Without waiting for a writer, in case the file has been replaced by a pipe since.
    handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _refuse_irregular(os.fstat(handle).st_mode, file)
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _refuse_irregular(mode: int, file: Path) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))


def read_bytes(file: Path) -> bytes:
    """Return the contents of a regular file."""
    with open_regular(file) as opened:
        return opened.read()


def read_text(file: Path, encoding: str = "utf-8") -> str:
    """Return the text of a regular file."""
    return read_bytes(file).decode(encoding)


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return what JSON says, as `json.loads` does, but raise `ValueError` also if it is nested too deeply."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def digest(file: Path) -> str:
    """Return the file's sha256, in hexadecimal."""
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def verify(file: Path, sha256: str) -> None:
    """Raises `DamagedError` unless the file has this checksum."""
    try:
        found = digest(file) if regular(file) else None
    except OSError as error:
        raise DamagedError(f"{file} cannot be read ({error.strerror}).") from error
    if found is None:
        raise DamagedError(f"{file} is missing.")
    if found != sha256:
        raise DamagedError(f"{file} is damaged: its checksum is not the one that was recorded.")


def seal(file: Path, body: Any) -> None:
    """Write JSON together with its own checksum."""
    write_text(file, json.dumps({"sha256": _checksum(body), "body": body}))


def unseal(file: Path) -> Any:
    """Read what `seal` wrote. Raises `DamagedError` if the file is missing or was changed."""
    if not regular(file):
        raise DamagedError(f"{file} is missing.")
    try:
        whole = parse_json(read_bytes(file))
        body, expected = whole["body"], whole["sha256"]
        if _checksum(body) == expected:
            return body
    except OSError as error:
        raise DamagedError(f"{file} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, RecursionError):  # what was read may be nested too deeply to write again
        pass
    raise DamagedError(f"{file} is damaged: its checksum is not the one that was recorded.")


def _checksum(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def untouched(paths: Sequence[Path]) -> Iterator[None]:
    """A context that leaves files and folders as they were if it raises: new ones are removed, changed ones restored.

    Of files larger than `KEPT` bytes, changes stay: the contents of the others are in memory meanwhile.
    """
    before = {inner: _content(inner) for path in paths for inner in _with_all_in(path)}
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the error itself says more than a folder that cannot be written to
            _restore(paths, before)
        raise


KEPT = 2**20


def _with_all_in(path: Path) -> list[Path]:
    """A path, if it exists, and everything below it. Links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return [path] if os.path.lexists(path) else []
    return [path, *(inner for child in path.iterdir() for inner in _with_all_in(child))]


def _content(path: Path) -> bytes | str | None:
    """The bytes of a file, or where a link leads; None for folders, and for large and unreadable files."""
    try:
        if path.is_symlink():
            return os.readlink(path)
        return path.read_bytes() if regular(path) and path.stat().st_size <= KEPT else None
    except OSError:
        return None


def _restore(paths: Sequence[Path], before: dict[Path, bytes | str | None]) -> None:
    for path in reversed([inner for outer in paths for inner in _with_all_in(outer)]):
        if path.is_dir() and not path.is_symlink():
            if path not in before:
                path.rmdir()
        elif path not in before or (path.is_symlink() and _content(path) != before[path]):
            path.unlink()
    for path, content in before.items():
        if isinstance(content, str) and not path.is_symlink():
            path.symlink_to(content)
        elif isinstance(content, bytes) and not (regular(path) and path.read_bytes() == content):
            with replacing(path) as partial:
                partial.write_bytes(content)


@contextlib.contextmanager
def lock(folder: Path, holder: Path | None = None) -> Iterator[None]:
    """A context in which no other process runs in this folder, on systems with `flock`.

    The lock ends with the process, however that ends. `holder` is a file that has the process's number meanwhile, for
    the error in others.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            number = _number_in(holder)
            who = f", number {number}," if number else ""
            raise UndriftError(f"Another process{who} uses {folder}; wait for it, or choose another folder.") from None
        if holder:
            write_text(holder, f"{os.getpid()}\n")
        try:
            yield
        finally:
            if holder:
                holder.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _number_in(file: Path | None) -> int | None:
    try:
        return int(file.read_bytes()[:20]) if file and regular(file) else None
    except (OSError, ValueError):  # it is not written yet, or already removed
        return None


@contextlib.contextmanager
def made(folder: Path) -> Iterator[None]:
    """A context with this folder, which is removed again if nothing is left in it.

    Raises `UndriftError` if it cannot be created.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UndriftError(f"The folder {quoted(str(folder), 200)} cannot be created ({error.strerror}).") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # something has been written
            for path in new:
                path.rmdir()
