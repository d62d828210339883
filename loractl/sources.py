"""Where a push takes its two files from: a directory, the hub, or an S3 bucket.

Only the two files of an adapter are fetched, by this client; the daemon opens no connection.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loractl.output import note
from lorad.errors import LoradError
from lorad.wire import ADAPTER_FILES, CONFIG_FILE, CONFIG_LIMIT, WEIGHTS_FILE

_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_HUB = re.compile(rf"hf://({_PART}/{_PART})(?:@([\w./-]{{1,100}}))?")
_BUCKET = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(\S{1,900}?)/*")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@contextmanager
def adapter_directory(source: str) -> Iterator[Path]:
    """A local directory with the adapter's files, for as long as the block runs."""
    if match := _HUB.fullmatch(source):
        yield _from_hub(match[1], match[2])
    elif match := _BUCKET.fullmatch(source):
        with tempfile.TemporaryDirectory(prefix="loractl-") as folder:
            _from_bucket(f"{match[1]}/{match[2]}", Path(folder))
            yield Path(folder)
    elif _SCHEME.match(source):
        raise LoradError(
            "usage.invalid",
            f"{source[:200]!r} is no source of an adapter",
            hint="give a directory, hf://ORG/REPO[@REVISION] or s3://BUCKET/PREFIX",
        )
    else:
        yield Path(source).expanduser()


def _from_hub(repo: str, revision: str | None) -> Path:
    """Both files of one commit, in the hub client's own cache; HF_ENDPOINT and HF_TOKEN count."""
    config = _hub_file(repo, CONFIG_FILE, revision)
    # The cache keeps a commit's files in a folder of its name.
    commit = config.parent.name
    note(f"hf://{repo} at {commit}")
    _hub_file(repo, WEIGHTS_FILE, commit)
    return config.parent


def _hub_file(repo: str, name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(repo, name, revision=revision))
    except EntryNotFoundError:
        raise _lacks(f"hf://{repo}", name) from None
    except Exception as error:
        # Offline, gated, no such repository or revision, a proxy: a dozen kinds.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise LoradError(
            "path.not_found",
            f"the hub gave no {name} of {repo}: {reason[0][:300]}",
            hint="check the id and the revision; log in for a private repository",
            details={"repo": repo, "file": name},
        ) from None


def _from_bucket(prefix: str, folder: Path) -> None:
    """AWS_* variables and files say who asks and where, as for any S3 client."""
    files = s3_files()
    for name in ADAPTER_FILES:
        try:
            size = files.info(f"{prefix}/{name}")["size"]
            if name == CONFIG_FILE and size > CONFIG_LIMIT:
                raise LoradError(
                    "request.too_large", f"{name} has {size} bytes; the limit is {CONFIG_LIMIT}"
                )
            files.get_file(f"{prefix}/{name}", str(folder / name))
        except FileNotFoundError:
            raise _lacks(f"s3://{prefix}", name) from None
        except LoradError:
            raise
        except Exception as error:
            # botocore's errors have no base that says more.
            raise LoradError(
                "path.not_found",
                f"cannot read s3://{prefix}/{name}: {str(error)[:300] or type(error).__name__}",
                hint="look at AWS_ENDPOINT_URL, the credentials and the bucket's rights",
            ) from None


def s3_files() -> Any:
    """The bucket's files; `usage.invalid` without the extra `s3`."""
    try:
        from s3fs import S3FileSystem
    except ImportError:
        raise LoradError(
            "usage.invalid",
            "s3:// needs the package s3fs",
            hint="pip install 'lorad[s3]'",
        ) from None
    return S3FileSystem(skip_instance_cache=True)


def _lacks(where: str, name: str) -> LoradError:
    missing = "adapter.config_missing" if name == CONFIG_FILE else "adapter.weights_missing"
    return LoradError(
        missing,
        f"{where} has no {name}",
        hint="only adapters saved by PEFT as safetensors can be pushed",
        details={"file": name},
    )
