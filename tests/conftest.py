"""Shape annotations are checked while the tests run (jaxtyping with beartype), on eight virtual CPU devices."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

from jaxtyping import install_import_hook

install_import_hook("lmjax", "beartype.beartype")
