"""The CPU path where Python has less than on Linux: imported and run under stand-ins.

It shows that no function is missed which macOS or Windows does not have, not that it runs there.
"""

import subprocess
import sys

import pytest

# What `os` has on Linux and not there.
MISSING = {
    "darwin": ["sched_getaffinity", "RTLD_DEEPBIND"],
    "win32": ["sched_getaffinity", "RTLD_DEEPBIND", "geteuid", "getuid", "fchmod", "fchown",
              "register_at_fork", "fork"],
}  # fmt: skip
SCRIPT = """
import importlib.util, os, pkgutil, sys, tempfile
# Modules that have forms of their own for a platform.
import concurrent.futures.process, multiprocessing.spawn, subprocess
import numpy, scipy.sparse, ml_dtypes, threadpoolctl, tqdm
for name in ("cupy", "dask"):  # whose own imports differ from platform to platform
    sys.modules[name] = None

found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if "openblas" in name else found(name, *rest)
for name in {missing}:
    delattr(os, name)
sys.platform = {platform!r}

import numpy as np
import fa_cupy
from fa_cupy import reference
from fa_cupy.gpu.driver import cubin_cache

for module in pkgutil.walk_packages(fa_cupy.__path__, "fa_cupy."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # of an optional library
            assert error.name.split(".")[0] in ("cupy", "dask", "torch", "jax", "matplotlib"), error

q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 300, 16))
mask = fa_cupy.BitMask.from_dense(np.tri(300, dtype=bool))
with tempfile.TemporaryDirectory() as folder:
    for _ in range(2):  # a new file, and one that takes the place of another
        mask.save(os.path.join(folder, "mask.npz"))
    assert fa_cupy.BitMask.load(os.path.join(folder, "mask.npz")).density == mask.density
    os.environ.pop("FA_CUPY_CACHE_DIR", None)
    os.environ["XDG_CACHE_HOME"] = folder
    assert str(cubin_cache.cache_dir()).startswith(folder)
out, lse = fa_cupy.attention(q, k, v, mask=mask, return_lse=True)
np.testing.assert_allclose(out, reference.attention(q, k, v, mask=mask.to_dense())[0], 1e-10)
fa_cupy.attention_backward(dout, q, k, v, out, lse, mask=mask)
product = fa_cupy.causal_product(q, k, v)
np.testing.assert_allclose(product, reference.causal_product(q, k, v)[0], 1e-8, 1e-8)
"""


@pytest.mark.parametrize("platform", MISSING)
def test_the_cpu_path_where_functions_are_missing(platform):
    script = SCRIPT.format(missing=MISSING[platform], platform=platform)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
