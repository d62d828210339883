"""Whether a version's files still are what was pushed."""

from __future__ import annotations

from lorad.adapters.peft_format import adapter_digest
from lorad.errors import LoradError
from lorad.registry.records import Version
from lorad.registry.store import Store, storage_errors

# What the reader says both of a missing file and of one that cannot be opened just now.
_NOT_OPENED = {
    "path.not_found",
    "path.permission",
    "adapter.config_missing",
    "adapter.weights_missing",
    "adapter.unsafe_format",
}


def damage_by_size(store: Store, version: Version) -> str:
    """Why the files cannot be the stored ones, from their sizes alone; "" when they can."""
    sizes = (version.config_bytes, version.weights_bytes)
    return store.damage(version.ref.name, version.label, sizes)


def damage(store: Store, version: Version) -> str:
    """The same from every byte. Raises `store.unavailable` when they cannot be read just now.

    A daemon that is out of file descriptors must not take its versions for lost.
    """
    sizes = (version.config_bytes, version.weights_bytes)
    directory = store.fetch(version.ref.name, version.label, sizes)
    with storage_errors(f"cannot read {version.ref}"):
        try:
            found = adapter_digest(directory)
        except LoradError as error:
            if error.code in _NOT_OPENED and not damage_by_size(store, version):
                raise OSError(error.message) from error
            store.forget(version.ref.name, version.label)
            return error.message
    if found == version.ref.digest:
        return ""
    store.forget(version.ref.name, version.label)
    return f"the digest of its stored files is {found}"
