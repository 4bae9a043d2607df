"""Buckets (gs://): what must be there before a run reads or writes one, told in a line.

Objects are read and written through `etils.epath` (gcsfs), checkpoints by Orbax (tensorstore). An emulator is used where
STORAGE_EMULATOR_HOST and TENSORSTORE_GCS_HTTP_URL name it.
"""

import logging
import os

from lmjax.errors import UserError
from lmjax.files import is_remote

EMULATOR = "STORAGE_EMULATOR_HOST"


def check(path: os.PathLike | str) -> None:
    """Nothing for a local path; a `UserError` where a bucket cannot be used.

    Raises:
      UserError: another kind than gs://; the extra or the credentials are missing; there is no such bucket, or no access.
    """
    name = os.fspath(path)
    if not is_remote(name):
        return
    if not name.startswith("gs://"):
        raise UserError(f"{name}: of buckets, gs:// alone is read and written; mount others")
    try:
        import fsspec
        import gcsfs  # noqa: F401
    except ImportError as error:
        raise UserError(f"{name}: a bucket needs the extra gcs: pip install 'lmjax[gcs]'") from error
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False  # other processes write, too
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # what it logs, it also raises
    if EMULATOR not in os.environ:
        check_credentials(name)
    bucket = name.removeprefix("gs://").partition("/")[0]
    try:
        fsspec.filesystem("gcs").call("GET", "b/{}/o", bucket, maxResults=1, json_out=True)
    except FileNotFoundError as error:
        raise UserError(
            f"{name}: there is no bucket {bucket!r}; make it with `gcloud storage buckets create`"
        ) from error
    except refusals() as error:
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
        raise UserError(f"{name}: the bucket cannot be read ({type(error).__name__}: {first})") from error


def refusals() -> tuple[type[Exception], ...]:
    """What gcsfs raises where a bucket gives no access: HTTP (400 is a ValueError, 403 an OSError), network, authentication."""
    from aiohttp import ClientError
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError

    return OSError, ValueError, HttpError, ClientError, GoogleAuthError


def check_credentials(name: str) -> None:
    """Google's libraries find credentials."""
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError

    try:
        google.auth.default()
    except DefaultCredentialsError as error:
        raise UserError(
            f"{name}: no Google credentials are found; run `gcloud auth application-default login`, or let "
            "GOOGLE_APPLICATION_CREDENTIALS name a key"
        ) from error
