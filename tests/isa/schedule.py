"""What a kernel's assembly says of its schedule: resources, the steady loop, what its barriers wait for, and how much
arithmetic lies between the request for each prefetched value and the first wait for it.

The steady loop is walked along its longest path, round and round, as the hardware counts: loads return in the order
in which they were asked for; a wait for `n` lets the `n` youngest stay on their way. On gfx9 stores share that counter.
"""

import re
from typing import NamedTuple

# Arithmetic on fp32 values: what a dot is made of. Moves, conversions and selections are not.
FP32 = re.compile(r"^v_(dual_)?(mul|add|sub|subrev|fma|fmac|fmaak|fmamk|mac|mad|pk_mul|pk_add|pk_fma)_(legacy_)?f32")
LOAD = re.compile(r"^(global|flat|buffer|scratch)_load")
STORE = re.compile(r"^(global|flat|buffer|scratch)_store")
LDS_STORE = re.compile(r"^ds_(store|write)")
BARRIER = re.compile(r"^s_barrier(_signal)?\b")
BRANCH = re.compile(r"^s_c?branch")


class Instruction(NamedTuple):
    text: str  # without its comment

    @property
    def name(self) -> str:
        return self.text.split(None, 1)[0]

    @property
    def operands(self) -> list[str]:
        return [part.strip() for part in self.text.partition(" ")[2].split(",")]

    @property
    def fp32(self) -> int:
        """fp32 operations of one lane."""
        halves = [half.strip() for half in self.text.split("::")]
        return sum(2 if half.startswith("v_pk_") else 1 for half in halves if FP32.match(half))

    @property
    def load_wait(self) -> int | None:
        """How many loads this instruction lets be on their way; None where it waits for none."""
        if match := re.match(r"s_wait_loadcnt (0x[0-9a-f]+|\d+)$", self.text):
            return int(match[1], 0)
        if match := re.match(r"s_wait_loadcnt_dscnt (0x[0-9a-f]+|\d+)$", self.text):
            return int(match[1], 0) >> 8 & 0x3F
        if self.name == "s_waitcnt" and (match := re.search(r"vmcnt\((\d+)\)", self.text)):
            return int(match[1])
        if self.name == "s_waitcnt" and self.text == "s_waitcnt 0":
            return 0
        return None


def registers(operand: str) -> set[int]:
    """The vector registers that an operand names."""
    if match := re.match(r"v\[(\d+):(\d+)\]", operand):
        return set(range(int(match[1]), int(match[2]) + 1))
    if match := re.match(r"v(\d+)$", operand):
        return {int(match[1])}
    return set()


class Kernel(NamedTuple):
    name: str  # as in the source: "gr_up_kernel<16>"
    blocks: dict[str, list[Instruction]]  # label -> instructions, in the order of the text
    facts: dict[str, int]  # of the metadata


def demangled(symbol: str) -> str:
    """The source's name of one of our kernels."""
    match = re.match(r"_ZN6strata3gpu(\d+)", symbol)
    at = match.end()
    name, rest = symbol[at : at + int(match[1])], symbol[at + int(match[1]) :]
    values = []
    for kind, value in re.findall(r"(L[ib]|NS_)(\d+\w*)", re.sub(r"(?=L[ib]\d|NS_)", " ", rest)):
        number = int(re.match(r"\d+", value)[0])
        if kind == "NS_":  # a type of strata's: the length of its name, and the name
            values.append(value[len(str(number)) :][:number])
        else:
            values.append(str(number) if kind == "Li" else "true" if number else "false")
    return f"{name}<{', '.join(values)}>" if values else name


def parse(text: str) -> list[Kernel]:
    """The kernels of one assembly file."""
    facts: dict[str, dict[str, int]] = {}
    for entry in re.split(r"(?m)^  - (?=\.)", text[text.index("amdhsa.kernels:") :])[1:]:
        symbol = re.search(r"^ *\.name: +(\S+)", entry, re.M)[1]
        facts[symbol] = {key: int(value) for key, value in re.findall(r"^ *\.(\w+): +(\d+)$", entry, re.M)}
    kernels = []
    for symbol, numbers in facts.items():
        body = text[re.search(rf"^{symbol}:", text, re.M).end() :]
        body = body[: body.index(".Lfunc_end")]
        kernels.append(Kernel(demangled(symbol), _blocks(body), numbers))
    return kernels


def _blocks(body: str) -> dict[str, list[Instruction]]:
    blocks: dict[str, list[Instruction]] = {"entry": []}
    label, count = "entry", 0
    for line in body.splitlines():
        if match := re.match(r"(\.LBB\w+):", line):
            label = match[1]
            blocks[label] = []
            continue
        line = re.split(r"\s*[;/]{1,2}\s", line + " ", maxsplit=1)[0].strip().removeprefix(";")
        if not line or line.startswith((".", ";")) or line.endswith(":"):
            continue
        if blocks[label] and BRANCH.match(blocks[label][-1].text):
            count += 1
            label = f"after {count}"
            blocks[label] = []
        blocks[label].append(Instruction(re.sub(r"\s+", " ", line)))
    return blocks


def _successors(kernel: Kernel) -> dict[str, list[str]]:
    labels = list(kernel.blocks)
    found = {}
    for i, label in enumerate(labels):
        last = kernel.blocks[label][-1].text if kernel.blocks[label] else ""
        following = labels[i + 1 : i + 2]
        if last.startswith("s_endpgm"):
            found[label] = []
        elif BRANCH.match(last):
            target = last.split()[1]
            found[label] = [target] if last.startswith("s_branch") else [*following, target]
        else:
            found[label] = following
    return found


def _loops(successors: dict[str, list[str]]) -> list[tuple[str, set[str]]]:
    """Natural loops: (head, blocks). A jump to a block that the depth-first walk has not left yet closes one."""
    predecessors: dict[str, list[str]] = {label: [] for label in successors}
    for label, targets in successors.items():
        for target in targets:
            predecessors[target].append(label)
    loops: dict[str, set[str]] = {}
    on_path, seen = set(), set()
    stack = [("entry", iter(successors["entry"]))]
    on_path.add("entry")
    seen.add("entry")
    while stack:
        label, targets = stack[-1]
        target = next(targets, None)
        if target is None:
            stack.pop()
            on_path.discard(label)
        elif target in on_path:
            body = loops.setdefault(target, {target})
            work = [label]
            while work:
                block = work.pop()
                if block not in body:
                    body.add(block)
                    work += predecessors[block]
        elif target not in seen:
            seen.add(target)
            on_path.add(target)
            stack.append((target, iter(successors[target])))
    return list(loops.items())


def steady_loop(kernel: Kernel) -> list[Instruction]:
    """Once round the loop that has barriers and most of the arithmetic, along its longest path; empty without one."""
    successors = _successors(kernel)
    best: tuple[int, str, set[str]] | None = None
    for head, body in _loops(successors):
        instructions = [i for label in body for i in kernel.blocks[label]]
        if any(BARRIER.match(i.text) for i in instructions):
            weight = sum(i.fp32 for i in instructions)
            if best is None or weight > best[0]:
                best = (weight, head, body)
    if best is None:
        return []
    _, head, body = best
    longest: dict[str, tuple[int, list[str]]] = {}
    walking: set[str] = set()

    def walk(label: str) -> tuple[int, list[str]]:
        if label in longest:
            return longest[label]
        walking.add(label)
        options = [(-1, [])] if head not in successors[label] else [(0, [])]
        for target in successors[label]:
            if target in body and target != head and target not in walking:
                options.append(walk(target))
        walking.discard(label)
        length, path = max(options, key=lambda option: option[0])
        reaches = (-1, []) if length < 0 else (length + len(kernel.blocks[label]), [label, *path])
        longest[label] = reaches
        return reaches

    return [i for label in walk(head)[1] for i in kernel.blocks[label]]


class Prefetch(NamedTuple):
    group: str  # "weights", "half_a", "half_b", or "tile": what staged copies at once
    fp32: int  # operations between the request and the first wait for it


class Schedule(NamedTuple):
    loop: list[Instruction]
    fp32: int  # operations once round
    barriers: int
    barriers_waiting: int  # barriers that some load must have arrived for
    prefetches: list[Prefetch]


def schedule(kernel: Kernel) -> Schedule:
    loop = steady_loop(kernel)
    size = len(loop)
    stores_count = not any(i.name.startswith(("s_wait_", "ds_load", "ds_store")) for i in loop)  # gfx9's names
    pending: list[tuple[int, int]] = []  # (position, operations so far), oldest first
    first_wait: dict[int, int] = {}
    done = 0
    waiting = 0
    barriers = [n for n, i in enumerate(loop) if BARRIER.match(i.text)]
    for n in range(3 * size):
        i = loop[n % size]
        allowed = i.load_wait
        if allowed is not None and len(pending) > allowed:
            arrived, pending = pending[: len(pending) - allowed], pending[len(pending) - allowed :]
            for position, before in arrived:
                if size <= position < 2 * size:
                    first_wait[position - size] = done - before
            waiting += size <= n < 2 * size and _barrier_follows(loop, n % size)
        if LOAD.match(i.text) or (stores_count and STORE.match(i.text)):
            pending.append((n, done))
        done += i.fp32
    prefetches = []
    for position, i in enumerate(loop):
        if LOAD.match(i.text):
            group = _group(loop, position, barriers)
            prefetches.append(Prefetch(group, first_wait.get(position, done)))
    return Schedule(loop, sum(i.fp32 for i in loop), len(barriers), waiting, prefetches)


def _barrier_follows(loop: list[Instruction], n: int) -> bool:
    """Whether the wait at `n` is a barrier's: no vector or shared-memory instruction in between that could need it."""
    for i in loop[n + 1 :] + loop[:n]:
        if BARRIER.match(i.text):
            return True
        if BRANCH.match(i.text) or not i.name.startswith(("s_", "global_wb", "buffer_wb")):
            return False
    return False


def _group(loop: list[Instruction], position: int, barriers: list[int]) -> str:
    """Weights go to arithmetic, activations to shared memory. Half B is asked for between the barriers of the dots."""
    wanted = registers(loop[position].operands[0])
    for i in loop[position + 1 :] + loop[:position]:
        used = set().union(*(registers(operand) for operand in i.operands))
        if not used & wanted:
            continue
        if not LDS_STORE.match(i.text):
            return "weights"
        if len(barriers) == 2 and barriers[0] < position < barriers[1]:
            return "half_b"
        after = [j for j in loop[position + 1 :] if BARRIER.match(j.text) or LDS_STORE.match(j.text)]
        stored_first = bool(after) and bool(LDS_STORE.match(after[0].text))
        return "tile" if stored_first else "half_a"
    return "weights"
