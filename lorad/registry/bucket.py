"""The version store in an S3 bucket: `s3://bucket/prefix/{base_model}/{tenant}/{adapter}/{version}/`.

A version's row in the registry is what makes it exist; objects without a row are removed at the
next start. What is loaded is read from a cache on the local disk, whose bytes are compared with
the digest at every load like any others.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lorad.adapter_ref import AdapterName, check_version_label
from lorad.errors import LoradError
from lorad.registry.store import StagingArea, base_folder, storage_errors
from lorad.wire import ADAPTER_FILES

_CACHE = "cache"


class BucketStore(StagingArea):
    """Like VersionStore, with the objects of one prefix instead of directories."""

    def __init__(self, url: str, base_model: str, local: Path, cache_bytes: int) -> None:
        """`local` holds what is on its way in, and the cache. Raises `store.unavailable`."""
        super().__init__(local)
        self._files = _s3_files()
        self._prefix = f"{url.removeprefix('s3://').rstrip('/')}/{base_folder(base_model)}"
        self._cache = local / _CACHE
        self._cache_bytes = cache_bytes
        with storage_errors(f"cannot make the cache {self._cache}"):
            self._cache.mkdir(exist_ok=True)
        with _bucket_errors(f"cannot reach {url}"):
            self._files.exists(self._prefix)

    def publish(self, staged: Path, name: AdapterName, label: str) -> None:
        """The configuration goes last, so that a version with one is whole."""
        target = self._key(name, label)
        with _bucket_errors(f"cannot store {name}@{label}"):
            for file in reversed(ADAPTER_FILES):
                self._files.put_file(str(staged / file), f"{target}/{file}")
        shutil.rmtree(self._cached(name, label), ignore_errors=True)

    def remove(self, name: AdapterName, label: str) -> None:
        shutil.rmtree(self._cached(name, label), ignore_errors=True)
        with _bucket_errors(f"cannot remove {name}@{label}"), suppress(FileNotFoundError):
            self._files.rm(self._key(name, label), recursive=True)
        self._files.invalidate_cache()

    def stored(self) -> Iterator[tuple[AdapterName, str]]:
        """Every version with an object under the prefix, with or without a row."""
        with _bucket_errors("cannot list the store"):
            self._files.invalidate_cache()
            keys = self._files.find(self._prefix)
        found = {tuple(key.removeprefix(f"{self._prefix}/").split("/")[:3]) for key in keys}
        for parts in sorted(found):
            with suppress(LoradError, ValueError):  # somebody else's object
                tenant, adapter, label = parts
                yield AdapterName.parse(f"{tenant}/{adapter}"), check_version_label(label)

    def damage(self, name: AdapterName, label: str, sizes: tuple[int, int]) -> str:
        """Why a version cannot be what was stored, by the objects' sizes; "" when it can."""
        for file, size in zip(ADAPTER_FILES, sizes, strict=True):
            try:
                with _bucket_errors(f"cannot look at {name}@{label}"):
                    self._files.invalidate_cache()
                    found = self._files.info(f"{self._key(name, label)}/{file}")["size"]
            except FileNotFoundError:
                return f"{file} is not in the bucket"
            if found != size:
                return f"{file} has {found} bytes, not the {size} that were stored"
        return ""

    def fetch(self, name: AdapterName, label: str, sizes: tuple[int, int]) -> Path:
        """The local copy of a version, downloaded unless it is there with the right sizes."""
        target = self._cached(name, label)
        if _has_sizes(target, sizes):
            os.utime(target)
            return target
        shutil.rmtree(target, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(dir=self._staging))
        try:
            for file in ADAPTER_FILES:
                with _bucket_errors(f"cannot download {name}@{label}"), suppress(FileNotFoundError):
                    self._files.get_file(f"{self._key(name, label)}/{file}", str(partial / file))
            with storage_errors(f"cannot cache {name}@{label}"):
                target.parent.mkdir(parents=True, exist_ok=True)
                partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._evict(keep=target)
        return target

    def forget(self, name: AdapterName, label: str) -> None:
        shutil.rmtree(self._cached(name, label), ignore_errors=True)

    def _key(self, name: AdapterName, label: str) -> str:
        checked = AdapterName.parse(name.qualified)
        return f"{self._prefix}/{checked.tenant}/{checked.name}/{check_version_label(label)}"

    def _cached(self, name: AdapterName, label: str) -> Path:
        checked = AdapterName.parse(name.qualified)
        folder = self._prefix.rpartition("/")[2]
        parts = (folder, checked.tenant, checked.name, check_version_label(label))
        return self._cache.joinpath(*parts)

    def _evict(self, keep: Path) -> None:
        """Remove the copies used longest ago until the rest fits."""
        copies = sorted(self._cache.glob("*/*/*/*"), key=lambda copy: copy.stat().st_mtime)
        sizes = {copy: sum(file.stat().st_size for file in copy.iterdir()) for copy in copies}
        total = sum(sizes.values())
        for copy in copies:
            if total > self._cache_bytes and copy != keep:
                shutil.rmtree(copy, ignore_errors=True)
                total -= sizes[copy]


def _s3_files() -> Any:
    try:
        from s3fs import S3FileSystem
    except ImportError:
        raise LoradError(
            "config.invalid",
            "a store in S3 needs the package s3fs",
            hint="pip install 'lorad[s3]'",
        ) from None
    return S3FileSystem(skip_instance_cache=True)


def _has_sizes(directory: Path, sizes: tuple[int, int]) -> bool:
    try:
        found = tuple((directory / file).stat().st_size for file in ADAPTER_FILES)
    except OSError:
        return False
    return found == sizes


@contextmanager
def _bucket_errors(what: str) -> Iterator[None]:
    """Turn what an S3 client raises into `store.unavailable`; a missing object stays one."""
    try:
        yield
    except (FileNotFoundError, LoradError):
        raise
    except Exception as error:
        # botocore's errors and aiohttp's have no common base.
        raise LoradError(
            "store.unavailable",
            f"{what}: {str(error)[:300] or type(error).__name__}",
            hint="look at AWS_ENDPOINT_URL, the credentials and the bucket's rights",
        ) from error
