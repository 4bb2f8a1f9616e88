"""What C makes of a bucket is what torch makes of it, bit for bit."""

import functools
import itertools
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from covering import covering

from gossip.compression import compiled_passes
from gossip.compression.compiled_passes import passes
from gossip.compression.eager_passes import EagerPasses
from gossip.compression.lattice import BLOCK_NUMEL, COARSEST, FINEST, NOISE_PERIOD, RAW, Layout, levels_of

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NUMELS = (1, 17, 1000, 3 * BLOCK_NUMEL, 5 * BLOCK_NUMEL + 1, 2**18 + 100)
SPECIAL = (
    *(float("nan"), float("inf"), -float("inf"), 0.0, -0.0),
    *(1e-45, -1e-40, 5e-324, 2.0**-126, 3.4e38, -1e38, 1e300, 65504.0),
    *(2.0**22, 2.0**22 - 0.25, -(2.0**22), 2.0**22 + 1, 2.0**17, -(2.0**12), 0.5, -1.0, 1e30, 2.0**121, 2.0**122),
)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


@dataclass(eq=False)
class Encoded:
    """What the passes of one kind make of the same values."""

    points: torch.Tensor
    message: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return same_bits(self.points, other.points) and same_bits(self.message, other.message)

    @classmethod
    def of(cls, made: EagerPasses, layout: Layout, values: torch.Tensor, wanted: torch.Tensor) -> "Encoded":
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        leading = values.shape[:-1]
        points = torch.full((*leading, layout.num_blocks, layout.block_numel), 7.0, dtype=wide)
        # Longer than it need be, as rows of several ranks are.
        memory = torch.full((*leading, layout.num_bytes + 16 - layout.num_bytes % 8), 77, dtype=torch.uint8)
        offsets = torch.randint(NOISE_PERIOD, (layout.num_offsets,), generator=torch.Generator().manual_seed(3))
        assert list(made.encode(values, wanted, offsets, points, memory))[-1] == layout.num_blocks
        return cls(points, memory)

    def check(
        self, made: EagerPasses, layout: Layout, peers: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Differences, resent, sizes and the levels that are wanted."""
        peers = peers.clone()
        wanted = torch.full(self.points.shape[:-1], RAW, dtype=torch.int16)
        wanted[..., 0] = 7
        unpacked = torch.empty(self.points.shape, dtype=torch.int8)
        differences = layout.fields(peers).codes.view(torch.int8) if layout.bits == 8 else unpacked
        resent, sizes = made.check(self.message, peers, 3 / 2**layout.bits, differences, wanted)
        return differences, resent, sizes, wanted


def both_kinds(layout: Layout) -> tuple[EagerPasses, EagerPasses]:
    return EagerPasses(layout, CPU), passes(layout, CPU)


def values_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    values = torch.randn(shape, generator=generator).double()
    if kind == "wide":
        values *= 2.0 ** torch.randint(-140, 120, shape, generator=generator)
    elif kind == "special":
        places = torch.randint(shape[-1], (-(-shape[-1] // BLOCK_NUMEL),), generator=generator)
        for number, place in enumerate(places.tolist()):
            values[..., place] = SPECIAL[(number + shape[-1]) % len(SPECIAL)]
    return values.to(dtype)


def levels_for(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    if kind == "fine":
        return torch.randint(-60, -30, shape, generator=generator).to(torch.int16)
    if kind == "raw":
        return torch.full(shape, RAW, dtype=torch.int16)
    levels = torch.randint(FINEST, COARSEST + 1, shape, generator=generator).to(torch.int16)
    levels.view(-1)[::3] = torch.tensor([RAW, FINEST, COARSEST])[torch.arange(levels.view(-1)[::3].numel()) % 3].to(
        torch.int16
    )
    return levels


CASES = covering(
    itertools.product((8, 4), DTYPES, NUMELS, (None, 3), ("normal", "wide", "special"), ("fine", "raw", "any"))
)


@pytest.mark.parametrize(("bits", "dtype", "numel", "num_ranks", "kind", "levels"), CASES)
def test_what_is_compiled_makes_the_bits_of_what_is_not(
    bits: int, dtype: torch.dtype, numel: int, num_ranks: int | None, kind: str, levels: str
) -> None:
    layout = Layout.of(numel, bits)
    leading = () if num_ranks is None else (num_ranks,)
    eager, compiled = both_kinds(layout)
    values, wanted = values_of(kind, (*leading, numel), dtype), levels_for(levels, (*leading, layout.num_blocks))
    own = Encoded.of(eager, layout, values, wanted)
    assert own == Encoded.of(compiled, layout, values, wanted)
    # A peer that is near, on lattices of its own in some blocks, with a block or two that are far or spoilt.
    others = levels_for("any", wanted.shape)
    near = torch.arange(wanted.numel()).view(wanted.shape) % 4 != 1
    peers = Encoded.of(eager, layout, values + values.abs() / 300, torch.where(near, wanted, others)).message
    peers[..., -1] += 9
    read, again = own.check(eager, layout, peers), own.check(compiled, layout, peers)
    assert all(map(same_bits, read, again))
    differences, _, sizes, _ = read
    reads = [(differences, sizes.to(own.points.dtype) * weight) for weight in (1 / 3, -0.1, 0.7)]
    for number in (1, 3):
        sums = [torch.empty_like(own.points) for _ in range(2)]
        for made, whole in zip((eager, compiled), sums, strict=True):
            for blocks, total in made.decode(reads[:number], own.points.dtype):
                whole[..., blocks, :] = total
        assert same_bits(*sums)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("special", SPECIAL)
def test_special_values_make_the_same_bits(bits: int, special: float) -> None:
    layout = Layout.of(100, bits)
    eager, compiled = both_kinds(layout)
    for dtype, level in itertools.product(DTYPES, (FINEST, -160, 0, 3, 12, COARSEST, RAW)):
        exact = torch.linspace(-1, 1, 100, dtype=torch.float64)
        exact[57] = special
        values = exact.to(dtype)
        wanted = torch.tensor([level], dtype=torch.int16)
        own = Encoded.of(eager, layout, values, wanted)
        assert own == Encoded.of(compiled, layout, values, wanted), (dtype, level)
        size = abs(float(values[57]))
        has_points = size < 2.0**122 or (size == 2.0**122 and level == COARSEST)
        is_lattice = layout.fields(own.message).levels[0] != RAW
        assert bool(is_lattice) == (level != RAW and has_points), (dtype, level)


@pytest.mark.parametrize("bits", [8, 4])
def test_any_bytes_from_a_peer_are_read_alike(bits: int) -> None:
    layout = Layout.of(3 * BLOCK_NUMEL, bits)
    eager, compiled = both_kinds(layout)
    own = Encoded.of(eager, layout, values_of("normal", (layout.numel,), torch.float32), levels_for("fine", (3,)))
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        peers = torch.randint(256, own.message.shape, generator=generator, dtype=torch.uint8)
        one, other = own.check(eager, layout, peers), own.check(compiled, layout, peers)
        assert all(map(same_bits, one, other))
        assert bool(one[1].all())


def test_levels_are_the_finest_that_are_not_finer() -> None:
    sizes = torch.logspace(-31, 31, 20001, base=10, dtype=torch.float64)
    levels = levels_of(sizes).double()
    inside = (levels > FINEST) & (levels < COARSEST)
    assert bool((2 ** (levels / 8) * (1 + 1e-12) >= sizes)[inside].all())
    assert bool((2 ** ((levels - 1) / 8) < sizes * (1 + 1e-12))[inside].all())
    exact = [0.0, float("nan"), float("inf"), -1.0, 2.0**-100, 2.0**-99, 1.0, 2.0**0.125, 2.0, 2.0**100]
    levels = levels_of(torch.tensor(exact, dtype=torch.float64))
    assert levels.tolist() == [FINEST, FINEST, COARSEST, FINEST, FINEST, -792, 0, 1, 8, COARSEST]


def test_it_is_compiled_where_a_compiler_is(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or "false"
    (tmp_path / "tried.c").write_text("#include <math.h>\n#include <stdint.h>\n#include <string.h>\n")
    tried = subprocess.run([compiler, "-c", "tried.c"], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    wanted = "C" if tried.returncode == 0 else "torch"
    assert compiled_passes.quantized_by() == wanted, "bash scripts/environment.sh builds it"


def test_where_it_was_not_built_torch_does_it_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, warnings_told: list[str]
) -> None:
    library = compiled_passes._library.__wrapped__
    monkeypatch.setattr(compiled_passes, "_library", functools.cache(library))
    monkeypatch.setattr(compiled_passes, "__file__", "/nowhere/compiled_passes.py")
    made = [passes(Layout.of(100, 8), CPU) for _ in range(3)]
    assert [type(each) for each in made] == [EagerPasses] * 3
    (line,) = warnings_told
    assert "int8 and int4 run uncompiled" in line
    assert "/nowhere/lattice_passes" in line
