"""Compares every variant of a device with the CPU's portable path, byte for byte.

A token's bits depend on neither the tokens beside it nor on what else is asked for. So the portable path computes each
set of inputs once, with everything asked for, and its first T tokens are what every case with T tokens must give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from . import cards, debug
from ._inputs import MODEL, Geometry, Inputs, make_inputs
from ._libraries import backend_of
from .ops import FusedGrRead

REFERENCE = "portable"
RUNTIME_GEOMETRY = "runtime_geometry"
OTHER_GEOMETRIES = (Geometry(2048, 4, 320), Geometry(32, 1, 8), Geometry(96, 3, 40), Geometry(1056, 8, 272))


class Suite(NamedTuple):
    """Inputs, and the numbers of tokens to read from them."""

    name: str
    geometry: Geometry
    tokens: tuple[int, ...]
    special: bool
    streams_of: torch.dtype = torch.float32


SUITES = (
    Suite("model", MODEL, tuple(range(1, 9)), False),
    Suite("model, special values", MODEL, (8, 9), True),
    Suite("model, many tokens", MODEL, (40,), False),
    Suite("model, bf16 streams", MODEL, (1, 4), False, torch.bfloat16),
    Suite("model, bf16 streams, special values", MODEL, (9,), True, torch.bfloat16),
    *(Suite("x".join(map(str, geometry)), geometry, (1, 2, 8), False) for geometry in OTHER_GEOMETRIES),
    Suite("96x3x40, bf16 streams", Geometry(96, 3, 40), (1, 8), False, torch.bfloat16),
)


class Case(NamedTuple):
    suite: Suite
    tokens: int
    fold: bool
    inject: bool
    q8_1: bool
    q8_columns: int

    def __str__(self) -> str:
        asked = [name for name in ("fold", "inject", "q8_1") if getattr(self, name)]
        columns = [f"q8_columns={self.q8_columns}"] if self.q8_columns else []
        return f"{self.suite.name}: " + " ".join([f"T={self.tokens}", *asked, *columns])


def cases(suite: Suite, on_gpu: bool) -> Iterator[Case]:
    """Every combination of what may be asked for; on a GPU, q8_1 by both up kernels."""
    for tokens in suite.tokens:
        for fold in (False, True):
            for inject in (False, True):
                for q8_1 in (False, True):
                    for columns in (16, 32) if q8_1 and on_gpu else (0,):
                        yield Case(suite, tokens, fold, inject, q8_1, columns)


def parity(
    device: str = "cpu",
    progress: Callable[[str], None] = lambda text: None,
    *,
    card: str | None = None,
    seed: int = 0,
    strict: bool = False,
) -> dict[str, Any]:
    """Runs the comparison: {"device", "ok", "variants": {name: {"cases", "equal", "first_difference"}}}.

    `cases` and `equal` count. `first_difference` is None, or says which case, output, index and bits (hexadecimal), or
    which error. `progress` is told what is being done. A simulated `card` reads in the order of `seed`; at the
    model's geometry a `strict` one only T = 1, 4 and 8, and any card by runtime_geometry only T = 1 (a second each).
    """
    place = torch.device(device)
    backend = backend_of(place) if card is None else cards.open_card(card, seed, strict)
    on_card = {} if card is None else {"card": card, "seed": seed, "strict": strict}
    on_gpu = place.type != "cpu" or card is not None
    # The portable path against itself only says that it repeats itself: compared where there is nothing else.
    variants = [name for name in backend.variants if name != REFERENCE] or [REFERENCE]
    results: dict[str, dict[str, Any]] = {name: {"cases": 0, "equal": 0, "first_difference": None} for name in variants}
    for suite in SUITES:
        progress(f"{suite.name}: the portable path")
        everything = make_inputs(
            max(suite.tokens),
            suite.geometry,
            seed=len(suite.name),
            special=suite.special,
            streams_of=suite.streams_of,
        )
        expected = {
            fold: debug.fused_gr_read(
                *everything.only(max(suite.tokens), fold=fold, inject=True), q8_1=True, variant=REFERENCE
            )
            for fold in (False, True)
        }
        there = everything.to(place)
        for name in variants:
            if on_gpu and suite.geometry != MODEL and name != RUNTIME_GEOMETRY:
                continue  # tuned for the model's geometry alone
            progress(f"{suite.name}: {name}")
            for case in cases(suite, on_gpu):
                if card is not None and suite.geometry == MODEL and _too_slow(name, case, strict):
                    continue
                difference = _compare(name, case, there, expected[case.fold], on_card)
                results[name]["cases"] += 1
                results[name]["equal"] += difference is None
                results[name]["first_difference"] = results[name]["first_difference"] or difference
    ok = all(result["equal"] == result["cases"] > 0 for result in results.values())
    return {"device": str(place), **on_card, "ok": ok, "variants": results}


def _too_slow(variant: str, case: Case, strict: bool) -> bool:
    return case.tokens not in ((1,) if variant == RUNTIME_GEOMETRY else (1, 4, 8) if strict else range(1, 10))


def _compare(
    variant: str, case: Case, inputs: Inputs, expected: FusedGrRead, on_card: dict[str, Any]
) -> dict[str, Any] | None:
    try:
        given = debug.fused_gr_read(
            *inputs.only(case.tokens, fold=case.fold, inject=case.inject),
            q8_1=case.q8_1,
            variant=variant,
            q8_columns=case.q8_columns,
            **on_card,
        )
    except RuntimeError as error:
        return {"case": str(case), "error": str(error)}
    for output, value in given._asdict().items():
        if value is None:
            continue
        found = first_difference(value, getattr(expected, output)[: case.tokens])
        if found is not None:
            return {"case": str(case), "output": output, **found}
    return None


def first_difference(given: torch.Tensor, expected: torch.Tensor) -> dict[str, Any] | None:
    """The first element whose bytes differ: its index and both bit patterns. None where all are equal."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[given.element_size()]
    given, expected = given.cpu().contiguous().view(bits), expected.contiguous().view(bits)
    if torch.equal(given, expected):
        return None
    if given.shape != expected.shape:
        return {"shape": list(given.shape), "expected_shape": list(expected.shape)}
    index = (given != expected).nonzero()[0].tolist()
    digits = 2 * given.element_size()

    def pattern(tensor: torch.Tensor) -> str:
        return f"0x{tensor[tuple(index)].item() % (1 << 4 * digits):0{digits}x}"

    return {"index": index, "bits": pattern(given), "expected_bits": pattern(expected)}


def render(result: dict[str, Any]) -> str:
    """The result as text for people."""
    where = result["device"]
    if "card" in result:
        where = f"simulated {result['card']}{', strict' if result['strict'] else ''}, seed {result['seed']},"
    lines = [f"{where} against the CPU's {REFERENCE} path, byte for byte:"]
    for name, row in result["variants"].items():
        lines.append(f"  {name:<18}{row['equal']} of {row['cases']} cases equal")
        if row["first_difference"]:
            facts = ", ".join(f"{key} {value}" for key, value in row["first_difference"].items())
            lines.append(f"    first difference: {facts}")
    lines.append("all equal" if result["ok"] else "NOT EQUAL: please report this with the output of `info`")
    return "\n".join(lines)
