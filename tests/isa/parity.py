"""Whole reads by the compiled AMD code, on the emulator, against the CPU's bytes. Unattended:

  STRATA_TINYGRAD=... [STRATA_TRITON=...] python tests/isa/parity.py [--arch gfx1201] [--compiler clang] [--out FILE]

Every variant, T = 1..8, every combination of options, both up kernels, special values, other geometries; code by clang
and by LLVM 24. Prints and writes a table that grows while it runs; exit status 0 where every case is equal. With --gate
the library's own self-test runs there instead.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]
os.environ["STRATA_SELFTEST"] = "0"  # the gate has tests of its own

from card import ARCHS, Card  # noqa: E402
from codegen import BUILD, COMPILERS, Unavailable  # noqa: E402

import support  # noqa: E402
from strata_ops import _core, _inputs, debug  # noqa: E402

VARIANTS = tuple(variant.name for variant in _core.VARIANTS)
LARGE_CARD = 128 * 1024  # bytes of shared memory that take eight tokens in one launch, as some cards have


class Case(NamedTuple):
    tokens: int
    fold: bool = True
    inject: bool = True
    q8_columns: int = 16  # 0: no q8_1
    inputs: str = "normal"  # or "special"
    geometry: tuple[int, int, int] = support.MODEL
    shared_bytes: int = 64 * 1024
    bf16: bool = False  # streams of it

    def __str__(self) -> str:
        asked = [name for name in ("fold", "inject") if getattr(self, name)]
        asked += [f"q8_1 by {self.q8_columns} columns"] if self.q8_columns else []
        more = [f"{self.inputs} values"] if self.inputs != "normal" else []
        more += ["x".join(map(str, self.geometry))] if self.geometry != support.MODEL else []
        more += ["bf16 streams"] if self.bf16 else []
        more += [f"{self.shared_bytes // 1024} KiB"] if self.shared_bytes != 64 * 1024 else []
        return f"T={self.tokens}: " + ", ".join(asked + more)


def cases(variant: str) -> Iterator[Case]:
    for tokens in range(1, 9):
        yield Case(tokens)
        yield Case(tokens, q8_columns=32)
    for fold in (False, True):
        for inject in (False, True):
            for columns in (0, 16, 32):
                yield Case(3, fold, inject, columns)
    yield Case(8, inputs="special")
    yield Case(2, inject=False, q8_columns=0, bf16=True)
    yield Case(8, fold=False, inject=False, q8_columns=0, inputs="special", bf16=True)
    yield Case(8, inject=False, q8_columns=0, inputs="special", bf16=True)
    yield Case(6, inject=False, q8_columns=0)
    if variant in ("staged", "p4"):
        yield Case(7, shared_bytes=LARGE_CARD)
        yield Case(8, shared_bytes=LARGE_CARD)
    if variant == "runtime_geometry":
        for geometry in ((2048, 4, 320), (96, 3, 24), (64, 8, 40)):
            yield Case(2, geometry=geometry)


def make_inputs(case: Case) -> support.Inputs:
    if case.inputs == "special":
        made = _inputs.make_inputs(case.tokens, seed=7, special=True)
        inputs = support.Inputs(*made)
    else:
        inputs = support.make_inputs(case.geometry, 8, seed=3).tokens(slice(0, case.tokens))
    inputs = inputs.bf16_streams() if case.bf16 else inputs
    return inputs.ask(fold=case.fold, inject=case.inject)


def expected(case: Case) -> support.Read:
    return support.named(debug.fused_gr_read(*make_inputs(case), variant="portable", q8_1=case.q8_columns > 0))


def check(card: Card, variant: str, case: Case) -> str | None:
    """What is wrong with a read, or None."""
    card.shared_bytes = case.shared_bytes
    try:
        got = card.read(make_inputs(case), variant, q8_1=case.q8_columns > 0, q8_columns=case.q8_columns)
        support.assert_same(got, expected(case), f"{card.arch} {card.compiler} {variant} {case}")
    except (AssertionError, RuntimeError, ValueError) as error:
        return str(error)
    return None


def run(archs, compilers, variants, out: Path, tell=print) -> bool:
    rows = []
    table = [
        f"{'card':9s}{'compiler':10s}{'variant':18s}{'cases':>6s}{'equal':>7s}{'instructions':>14s}{'seconds':>9s}"
    ]
    tell(table[0])
    for arch in archs:
        for compiler in compilers:
            card = Card(arch, compiler)
            for variant in variants:
                begin, before, wrong = time.time(), card.executed, []
                listed = list(dict.fromkeys(cases(variant)))
                if variant == "stream":
                    # The emulator stores an atomic's result before it reads its address where both are one register, as
                    # both compilers have it in stream's count of q8_1 columns: nothing would be counted.
                    listed = list(dict.fromkeys(case._replace(q8_columns=0) for case in listed))
                for number, case in enumerate(listed):
                    # Every third case lets the waves of a block run in the opposite order.
                    card.backwards = number % 3 == 2
                    if trouble := check(card, variant, case):
                        wrong.append(trouble)
                row = {
                    "arch": arch, "compiler": compiler, "variant": variant, "cases": len(listed),
                    "equal": len(listed) - len(wrong), "instructions": card.executed - before,
                    "seconds": round(time.time() - begin), "wrong": wrong,
                }  # fmt: skip
                rows.append(row)
                table.append(
                    f"{arch:9s}{compiler:10s}{variant:18s}{row['cases']:6d}{row['equal']:7d}"
                    f"{row['instructions']:14,d}{row['seconds']:9d}"
                )
                tell(table[-1])
                for trouble in wrong:
                    table.append(f"  {trouble}")
                    tell(table[-1])
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(rows, indent=1) + "\n")
                out.with_suffix(".txt").write_text("\n".join(table) + "\n")
    return all(row["equal"] == row["cases"] for row in rows)


def gate(arch: str, compiler: str, tell=print) -> bool:
    """The library's own self-test on one card, asked for P4: about two thousand million instructions, some minutes."""
    del os.environ["STRATA_SELFTEST"]
    os.environ["STRATA_HC_SPLIT"] = "7"
    card = Card(arch, compiler)
    begin, answer = time.time(), card.gate()
    tell(
        f"{arch} {compiler} gate: {answer.equal} of {answer.cases} comparisons equal, runs {answer.chosen.decode()} "
        f"({answer.why.decode()}); {card.executed:,} instructions, {time.time() - begin:.0f} s"
    )
    return answer.equal == answer.cases and (answer.chosen == b"p4") == arch.startswith("gfx12")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", choices=ARCHS, help="repeatable; default: all")
    parser.add_argument("--compiler", action="append", choices=COMPILERS, help="repeatable; default: both")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="repeatable; default: all")
    parser.add_argument("--out", type=Path, default=BUILD / "parity.json")
    parser.add_argument("--gate", action="store_true", help="run the library's own self-test instead; one card")
    args = parser.parse_args()
    try:
        if args.gate:
            return 0 if gate((args.arch or ARCHS)[0], (args.compiler or COMPILERS)[0]) else 1
        good = run(
            args.arch or ARCHS, args.compiler or COMPILERS, args.variant or VARIANTS, args.out,
            lambda text: print(text, flush=True),
        )  # fmt: skip
    except Unavailable as reason:
        print(f"parity.py: {reason}", file=sys.stderr)
        return 2
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
