"""The one part that is compiled; all else that is installed stands in setup.cfg."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "gossip.compression.lattice_passes",  # no module, but plain functions: see compiled_passes.py
            ["gossip/compression/lattice_passes.c"],
            extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-g0"],
            libraries=["m"],
            optional=True,  # without a compiler, torch makes the same
        )
    ]
)
