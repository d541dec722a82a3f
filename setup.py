"""The one part of the build that pyproject.toml cannot say: an extension that may be missing."""

import os

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "moqt.quic._packets",
            ["moqt/quic/_packets.c"],
            libraries=["crypto"],
            define_macros=[("Py_LIMITED_API", "0x030b0000")],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            # Without a compiler or the headers of OpenSSL all works in Python, only slower; a wheel
            # that is built for others is not to lack it without a word.
            optional=os.environ.get("KVCS_NATIVE") != "required",
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
