"""Runs the hand-written PTX of this project without a GPU: a warp at a time, lanes as NumPy arrays.

It knows the instructions that ptx/*.ptx use, and is stricter than a GPU: whatever lies outside an
array, is not aligned, was never written, or diverges within a warp at a branch is an error.
"""

import re

import numpy as np

LANES = np.arange(32)
WIDTHS = {"b16": 16, "b32": 32, "b64": 64}
BITS = re.compile(r"[busf](\d+)$")


class Memory:
    """Global memory: arrays that know their addresses."""

    def __init__(self):
        self.arrays = []
        self.end = 0x7F00_0000_0000

    def add(self, array, base=None):
        """Give an array, of which NumPy holds every byte, an address, as aligned as CuPy's are."""
        flat = array.reshape(-1).view(np.uint8)
        assert np.shares_memory(flat, array) or not flat.size
        if base is None:
            base = self.end
            self.end += (len(flat) // 512 + 2) * 512
        self.arrays.append((base, flat))
        return base

    def __call__(self, addresses, size):
        """Return the array and the places in it of `size` bytes at each address."""
        addresses = addresses.astype(np.int64)
        assert (addresses % size == 0).all(), "an address is not aligned"
        for base, flat in reversed(self.arrays):
            if len(addresses) and base <= addresses[0] < base + len(flat):
                places = (addresses - base)[:, None] + np.arange(size)
                assert places.min() >= 0, "an address lies before its array"
                assert places.max() < len(flat), "an address lies past its array"
                return flat, places
        raise AssertionError(f"no array at {addresses[0]:#x}")


class Module:
    """The kernels of a PTX file."""

    def __init__(self, source):
        text = re.sub(r"//[^\n]*", "", source)
        self.entries = {}
        for name, size, body in re.findall(
            r"\.visible \.entry (\w+)\(\.param \.align 8 \.b8 params\[(\d+)\]\)[^{]*\{(.*?)\n\}",
            text,
            re.DOTALL,
        ):
            self.entries[name] = Entry(name, int(size), body)

    def launch(self, name, grid, block, params, memory):
        """Run a kernel; `params` is its struct."""
        data = np.frombuffer(bytes(params), np.uint8)
        assert len(data) == self.entries[name].param_bytes
        for index in range(grid):
            self.entries[name].run_block(index, block, data, memory)


class Entry:
    def __init__(self, name, param_bytes, body):
        self.name, self.param_bytes = name, param_bytes
        self.widths, self.shared, self.code, self.labels = {}, {}, [], {}
        shared_bytes = 0
        for raw in re.sub(r"^(\w+):$", r"\1:;", body, flags=re.MULTILINE).split(";"):
            line = " ".join(raw.split())
            if line.startswith(".reg"):
                kind, names = re.match(r"\.reg \.(\w+) (.*)", line).groups()
                width = 1 if kind == "pred" else WIDTHS[kind]
                for register in names.split(", "):
                    assert register not in self.widths, register
                    self.widths[register] = width
            elif line.startswith(".shared"):
                symbol, size = re.match(r"\.shared \.align 16 \.b8 (\w+)\[(\d+)\]", line).groups()
                self.shared[symbol] = shared_bytes
                shared_bytes += int(size)
            elif line.endswith(":"):
                self.labels[line[:-1]] = len(self.code)
            elif line:
                guard, op, rest = re.match(r"(?:@(!?\w+) )?([\w.:]+)\s*(.*)", line).groups()
                operands = [part.strip() for part in re.split(r",(?![^{]*\})", rest)]
                self.code.append((guard, op.split("."), operands if rest else []))
        self.shared_bytes = shared_bytes

    def run_block(self, index, threads, params, memory):
        shared = np.full(self.shared_bytes, 0xA5, np.uint8)
        warps = [Warp(self, index, first, params, shared, memory) for first in
                 range(0, threads, 32)]  # fmt: skip
        running = {warp: warp.run() for warp in warps}
        answer = None
        while running:
            votes = {}
            for warp, steps in list(running.items()):
                try:
                    votes[warp] = steps.send(answer)
                except StopIteration:
                    del running[warp]
            if not votes:
                continue
            assert len(votes) == len(warps), "some warps never come to the barrier"
            kinds = {kind for kind, _ in votes.values()}
            assert len(kinds) == 1, f"barriers {kinds} at a time"
            bits = np.concatenate([bits for _, bits in votes.values()])
            answer = bits.any() if "or" in kinds.pop()[0] else bits.all()
            running = {warp: running[warp] for warp in votes}


class Warp:
    def __init__(self, entry, block, first, params, shared, memory):
        self.entry, self.params, self.shared, self.memory = entry, params, shared, memory
        self.values = {}
        self.special = {
            "%tid.x": first + LANES,
            "%ctaid.x": np.full(32, block),
            "%lanemask_lt": (1 << LANES) - 1,
        }

    def get(self, operand, width):
        """Return an operand as unsigned integers of `width` bits."""
        if operand in self.special:
            found = self.special[operand].astype(np.uint64)
        elif operand in self.entry.widths:
            assert operand in self.values, f"{operand} is read before it is written"
            found = self.values[operand]
            assert self.entry.widths[operand] >= width, f"{operand} is narrower than {width}"
        elif operand in self.entry.shared:
            found = np.full(32, self.entry.shared[operand], np.uint64)
        elif operand == "params":
            found = np.zeros(32, np.uint64)
        else:
            found = np.full(32, int(operand, 0) % 2**64, np.uint64)
        return cut(found, width)

    def put(self, register, value, where):
        width = self.entry.widths[register]
        value = np.asarray(value)
        value = value.astype(bool) if width == 1 else cut(value.astype(np.uint64), width)
        old = self.values.get(register)
        if where.all():
            self.values[register] = value
        else:
            assert old is not None, f"{register} is written for some lanes only"
            self.values[register] = np.where(where, value, old)

    def run(self):
        at, code = 0, self.entry.code
        while True:
            guard, op, args = code[at]
            at += 1
            where = np.ones(32, bool)
            if guard:
                where = self.values[guard.lstrip("!")] ^ guard.startswith("!")
            if op[0] in ("bra", "ret"):
                assert where.all() or not where.any(), f"lanes diverge at {op[0]} {args}"
                if where.all():
                    if op[0] == "ret":
                        return
                    at = self.entry.labels[args[0]]
            elif op[:2] == ["bar", "red"]:
                answer = yield (op[2], args[1]), self.values[args[2]]
                self.put(args[0], np.full(32, answer), where)
            else:
                self.step(op, args, where)

    def step(self, op, args, where):
        name, kind = op[0], op[-1]
        match = BITS.match(kind)
        width = int(match.group(1)) if match else 0
        if name in ("ld", "st", "red"):
            self.access(op, args, where, width // 8)
        elif name == "bar":
            assert op[1] == "warp"
        elif name == "vote":
            assert where.all()
            votes = int((self.values[args[1]] * (1 << LANES)).sum())
            self.put(args[0], np.full(32, votes), where)
        elif name == "setp":
            found = COMPARE[op[1]](*self.operands(args[1:3], kind, width))
            if len(op) == 4:
                assert op[2] == "and"
                found &= self.values[args[3]]
            self.put(args[0], found, where)
        elif name == "selp":
            a, b = self.operands(args[1:3], kind, width)
            self.put(args[0], np.where(self.values[args[3]], a, b), where)
        elif name == "cvt":
            self.put(args[0], self.get(args[1], int(op[2][1:])), where)
        elif name == "prmt":
            a, b, selector = self.operands(args[1:], kind, width)
            both = a | b << np.uint64(32)
            found = np.zeros(32, np.uint64)
            for byte in range(4):
                pick = selector >> np.uint64(4 * byte) & np.uint64(15)
                assert (pick < 8).all()
                picked = both >> np.uint64(8) * pick & np.uint64(255)
                found |= picked << np.uint64(8 * byte)
            self.put(args[0], found, where)
        else:
            operands = self.operands(args[1:], kind, width, wide="wide" in op)
            assert self.entry.widths[args[0]] == (64 if "wide" in op else width), (op, args)
            self.put(args[0], COMPUTE[name](width, *operands), where)

    def operands(self, args, kind, width, wide=False):
        found = [self.get(arg, width) for arg in args]
        if kind.startswith("s") and not wide:
            sign = np.uint64(64 - width)
            found = [(x << sign).view(np.int64) >> sign.view(np.int64) for x in found]
        return found

    def access(self, op, args, where, size):
        """Load, store or add to memory; a vector is one access, aligned to its size."""
        registers, address = args if op[0] == "ld" else args[::-1]
        registers = registers.strip("{}").split(", ")
        base, _, offset = address.strip("[]").partition(" + ")
        addresses = self.get(base, 32 if op[1] == "shared" else 64) + np.uint64(offset or 0)
        addresses = addresses[where]
        total = size * len(registers)
        if op[1] == "global":
            if not where.any():
                return
            flat, places = self.memory(addresses, total)
        else:
            flat = self.shared if op[1] == "shared" else self.params
            places = addresses.astype(np.int64)[:, None] + np.arange(total)
            assert (addresses % total == 0).all()
            assert places.max(initial=0) < len(flat), "outside shared memory or parameters"
        for i, register in enumerate(registers):
            part = places[:, size * i : size * (i + 1)]
            if op[0] == "ld":
                value = np.zeros(32, np.uint64)
                for byte in range(size):
                    value[where] |= flat[part[:, byte]].astype(np.uint64) << np.uint64(8 * byte)
                self.put(register, value, where)
                continue
            value = self.get(register, size * 8)[where]
            for byte in range(size):
                byte_of = (value >> np.uint64(8 * byte)).astype(np.uint8)
                if op[0] == "red":
                    assert op[2] == "or"
                    np.bitwise_or.at(flat, part[:, byte], byte_of)
                else:
                    flat[part[:, byte]] = byte_of


def cut(value, width):
    return value if width in (1, 64) else value & np.uint64(2**width - 1)


def shifted(function):
    """A shift by the width or more leaves nothing (PTX ISA, shl and shr)."""
    return lambda width, x, by: np.where(
        by < width, function(x, np.minimum(by, np.uint64(63))), np.uint64(0)
    )


COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "ge": np.greater_equal}
COMPUTE = {
    "mov": lambda width, x: x,
    "add": lambda width, x, y: x + y,
    "sub": lambda width, x, y: x - y,
    "mul": lambda width, x, y: x * y,
    "mad": lambda width, x, y, z: x * y + z,
    "div": lambda width, x, y: x // y,
    "min": lambda width, x, y: np.minimum(x, y),
    "max": lambda width, x, y: np.maximum(x, y),
    "and": lambda width, x, y: x & y,
    "or": lambda width, x, y: x | y,
    "shl": shifted(np.left_shift),
    "shr": shifted(np.right_shift),
    "popc": lambda width, x: np.unpackbits(x.view(np.uint8).reshape(32, 8), axis=1).sum(axis=1),
}
