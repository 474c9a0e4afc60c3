"""Measures the kernels on a GPU, in one process with FP16 attention of PyTorch and FlashInfer.

    bench.py FOLDER [--fatbins FOLDER] [--out FILE] [--launches N] [--rounds N] [--store-tokens N] [--read-mib N]
    bench.py FOLDER --checks [--fatbins FOLDER] [--out FILE]

FOLDER holds what crates/kvd-emu/tests/fixtures.rs writes of each codec: a few pages, their tables and units
as the daemon launches them for the workloads that are named there, rows to store, and what the kernels answered
on the CPU. Pages are copied, so that each is read from memory of its own, until there are as many tokens as a
workload has, and all of them again until they are several times the L2 cache; launches take turns. Copies of
pages have the outputs of the few and their log-sum-exp plus the logarithm of how many copies there are: what
does not is an error, as is a page that is not the one that was written on the CPU. With --checks shapes in
FOLDER/checks are launched once, for that alone, and nothing is measured: a kernel that faults takes its process
with it. On a GPU that FOLDER's plans are not of nothing is launched. Writes one JSON object to
FILE after each row, or prints it at the end, and fails when a row has an error. Needs driver.py; PyTorch and
FlashInfer where they are installed.
"""

import argparse
import json
import math
import pathlib
import re
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import baselines  # noqa: E402
import driver  # noqa: E402
from driver import Arguments  # noqa: E402

PAGE = struct.Struct("<QQ8I")  # PageEntry of abi.cuh
UNIT_TAIL = struct.Struct("<10I")  # AttendUnit, behind its two sides
MERGE = struct.Struct("<6Q2I")
HEADER_BYTES = 32
# Times the L2 cache that launches read before they come back to what they have read.
COLD = 4
# Bytes that a thread block of kvd_read reads.
READ_PER_BLOCK = 8192 * 16
# Largest error of a log-sum-exp, and of an output relative to the largest: the order of sums.
TOLERANCE = 1e-4
# Words of a GPU's name with which it is another one than that without: other multiprocessors, clocks or memory.
OTHER_FORMS = {"PCIE", "NVL", "D", "LAPTOP", "MIG"}


class Fixture:
    """What fixtures.rs wrote of one codec."""

    def __init__(self, path):
        self.facts = json.loads(path.read_text())
        self.bytes = path.with_suffix(".bin").read_bytes()

    def __getitem__(self, name):
        return self.facts[name]

    def section(self, name):
        start, length = self.facts["sections"][name]
        return self.bytes[start:start + length]

    def floats(self, name):
        raw = self.section(name)
        return struct.unpack(f"<{len(raw) // 4}f", raw)

    def units(self):
        size = self["sides_bytes"] + UNIT_TAIL.size
        raw = self.section("units")
        return [raw[at:at + size] for at in range(0, len(raw), size)]


class Step:
    """The block table and units of one decode step, as bytes, made from the fixture's few."""

    def __init__(self, fixture, workload):
        heads = workload["batch"] * workload["heads"]
        self.copies = workload["tokens"] // fixture["tokens"]
        self.pairs = -(-heads // fixture["heads"])
        self.rows, self.partials = 0, []
        length = len(fixture.section("arena"))
        group, sides = fixture["group"], fixture["sides_bytes"]
        base_units, units, pages = fixture.units(), [], []
        base_pages = list(PAGE.iter_unpack(fixture.section("pages")))
        for head in range(heads):
            unit = base_units[head % fixture["heads"]]
            tail = list(UNIT_TAIL.unpack(unit[sides:]))
            start = len(pages)
            for copy in range(self.copies):
                at = (head // fixture["heads"] * self.copies + copy) * length
                for entry in base_pages[tail[0]:tail[0] + tail[1]]:
                    first = entry[5] + copy * fixture["tokens"]
                    pages.append(PAGE.pack(entry[0] + at, entry[1] + at, *entry[2:5], first,
                                           *entry[6:]))
            mine = []
            for page in range(start, len(pages), workload["parts_per_unit"]):
                # Pages, the query's position, and where the partial results go.
                tail[0], tail[1] = page, min(workload["parts_per_unit"], len(pages) - page)
                tail[6], tail[8] = workload["tokens"] - 1, self.rows
                units.append(unit[:sides] + UNIT_TAIL.pack(*tail))
                mine.append(self.rows)
                self.rows += group
            # The fixture says by the top bit which partial results are in coefficients.
            self.partials += [[first + row | fixture["mark"] for first in mine]
                              for row in range(group)]
        self.blocks, self.units, self.pages = len(units), b"".join(units), b"".join(pages)

    def merge_lists(self):
        """End of each row's list of partial results, and the lists."""
        ends, order = [], []
        for row in self.partials:
            order += row
            ends.append(len(order))
        return struct.pack(f"<{len(ends)}I", *ends), struct.pack(f"<{len(order)}I", *order)


def cold_copies(device, size):
    return max(1, -(-COLD * device.attribute(driver.L2_BYTES) // size))


def replicate(device, data, copies):
    """So many copies of `data`, one behind the other."""
    address = device.memory(len(data) * copies)
    device.write(address, data)
    done = 1
    while done < copies:
        more = min(done, copies - done)
        device.copy(address + done * len(data), address, more * len(data))
        done += more
    device.synchronize()
    return address


def compare(fixture, results, sums, copies):
    """The largest errors of log-sum-exps and of outputs against what the CPU lane answered."""
    dim = fixture["dim"]
    wanted_results, wanted_sums = fixture.floats("results"), fixture.floats("sums")
    wanted_rows = len(wanted_results) // 3
    off_lse, off_out = [], []
    for row in range(len(results) // 3):
        at = row % wanted_rows
        lse, weights, coefficients = results[3 * row:3 * row + 3]
        wanted_lse, wanted_weights, wanted_coefficients = wanted_results[3 * at:3 * at + 3]
        off_lse += [abs(lse - wanted_lse - math.log(copies)),
                    abs(coefficients / weights - wanted_coefficients / wanted_weights)]
        got = [value / weights for value in sums[2 * dim * row:2 * dim * (row + 1)]]
        wanted = [value / wanted_weights
                  for value in wanted_sums[2 * dim * at:2 * dim * (at + 1)]]
        largest = max(map(abs, wanted))
        off_out += [abs(a - b) / largest for a, b in zip(got, wanted)]
    # One by one: a comparison with NaN is false, and max would pass it over.
    if not all(off < TOLERANCE for off in off_lse + off_out):
        raise RuntimeError(f"log-sum-exps are off by {max(off_lse)}, outputs by {max(off_out)}")
    off_lse, off_out = max(off_lse), max(off_out)
    return {"lse_error": off_lse, "output_error": off_out}


def merge_shared_bytes(dim):
    """Shared memory of the merge: as the function of that name in kvd-cuda/src/finish.rs."""
    return 4 * (2 * 128 + 4 * (1 + 2 + 2 * dim))


def measure(device, fixture, workload, times):
    """One decode step."""
    step = Step(fixture, workload)
    if step.blocks != workload["units"]:
        raise RuntimeError(f"{step.blocks} thread blocks, but the plan has {workload['units']}")
    dim = fixture["dim"]
    facts = device.prepare(fixture["kernel"], fixture["shared_bytes"])
    device.prepare("kvd_merge", merge_shared_bytes(dim))
    length = len(fixture.section("arena")) * step.copies * step.pairs
    turns = cold_copies(device, length)
    arena = replicate(device, fixture.section("arena"), step.copies * step.pairs * turns)
    ends, order = step.merge_lists()
    rows = len(ends) // 4
    out, stats = device.memory(4 * step.rows * dim), device.memory(8 * step.rows)
    sums, results = device.memory(8 * rows * dim), device.memory(12 * rows)
    placed = [device.placed(fixture.section("tables")), device.placed(step.pages),
              device.placed(step.units), device.placed(fixture.section("queries")),
              device.placed(fixture.section("offsets")), out, stats]
    # Addresses come first; what follows them is as the daemon has it.
    rest = fixture.section("parameters")[8 * (1 + len(placed)):]
    attend = [Arguments(struct.pack("<8Q", arena + turn * length, *placed) + rest)
              for turn in range(turns)]
    merge = Arguments(MERGE.pack(out, stats, device.placed(ends), device.placed(order), sums,
                                 results, dim, 0))

    def work(turn):
        device.launch(fixture["kernel"], step.blocks, fixture["shared_bytes"],
                      attend[turn % turns])
        device.launch("kvd_merge", rows, merge_shared_bytes(dim), merge)

    device.fill(results, 0xFFFFFFFF, 3 * rows)
    seconds = device.time(work, *times)
    got = struct.unpack(f"<{3 * rows}f", device.read(results, 12 * rows))
    got_sums = struct.unpack(f"<{2 * rows * dim}f", device.read(sums, 8 * rows * dim))
    errors = compare(fixture, got, got_sums, step.copies)
    payload = fixture["payload_bytes"] * step.copies * step.pairs
    return {"kernel": fixture["kernel"], "seconds": seconds, "page_bytes": payload,
            "thread_blocks": step.blocks, "shared_bytes": fixture["shared_bytes"],
            "cold_copies": turns, **errors, **facts}


def store(device, fixture, tokens, times):
    """Pages of so many tokens of the fixture's heads, from rows in device memory to pages in scratch memory."""
    facts = fixture["store"]
    size, copies = facts["unit_bytes"], max(1, tokens // fixture["tokens"])
    rows, units = fixture.section("store_arena"), fixture.section("store_units")
    count = len(units) // size
    arena = replicate(device, rows, copies)
    tables, steps = (device.placed(fixture.section(name)) for name in ["tables", "store_steps"])
    pages = device.memory(facts["page_bytes"] * copies)
    words = device.memory(max(4, 4 * facts["words"] * copies))
    launches, first, headers = [], 0, device.memory(HEADER_BYTES * count * copies)
    at_headers = headers
    for launch in facts["launches"]:
        device.prepare(launch["kernel"], launch["shared_bytes"])
        own = [bytearray(units[at * size:(at + 1) * size])
               for at in range(first, first + launch["units"])]
        first += launch["units"]
        every = bytearray()
        for copy in range(copies):
            for unit in own:
                unit = bytearray(unit)
                for field, step in [("rows", len(rows)), ("page", facts["page_bytes"]),
                                    ("words", facts["words"])]:
                    (was,) = struct.unpack_from("<Q", unit, facts["offsets"][field])
                    # All ones: in shared memory.
                    if was != 0xFFFFFFFFFFFFFFFF:
                        struct.pack_into("<Q", unit, facts["offsets"][field], was + copy * step)
                every += unit
        parameters = struct.pack("<7Q2I", arena, tables, steps, device.placed(every), pages,
                                 at_headers, words, launch["row_bytes"], launch["gain_bytes"])
        blocks = len(own) * copies
        launches.append((launch, blocks, at_headers, Arguments(parameters)))
        at_headers += HEADER_BYTES * blocks

    def work(_):
        for launch, blocks, _, arguments in launches:
            device.launch(launch["kernel"], blocks, launch["shared_bytes"], arguments)

    device.fill(pages, 0xFFFFFFFF, facts["page_bytes"] * copies // 4)
    seconds = device.time(work, *times)
    wanted_headers, start = fixture.section("store_headers"), 0
    for launch, blocks, at, _ in launches:
        mine = wanted_headers[start:start + HEADER_BYTES * launch["units"]]
        start += len(mine)
        # A header holds its page's checksum.
        if device.read(at, HEADER_BYTES * blocks) != mine * copies:
            raise RuntimeError(f"{launch['kernel']}: headers differ from those of the CPU lane")
    wanted = fixture.section("store_pages")
    for copy in {0, copies - 1}:
        got = device.read(pages + copy * facts["page_bytes"], facts["page_bytes"])
        for offset, length in facts["pages"]:
            if got[offset:offset + length] != wanted[offset:offset + length]:
                raise RuntimeError(f"the page at {offset} of copy {copy} differs")
    kernels = [launch["kernel"] for launch in facts["launches"]]
    return {"kernels": kernels, "seconds": seconds, "f16_bytes": facts["row_bytes"] * copies,
            "thread_blocks": sum(blocks for _, blocks, _, _ in launches)}


def read_bandwidth(device, size, times):
    """Bytes per second that a kernel reads which only adds them up."""
    device.prepare("kvd_read", 0)
    blocks = size // READ_PER_BLOCK
    memory, sums = device.memory(size), device.memory(4 * driver.THREADS * blocks)
    device.fill(memory, 3, size // 4)
    arguments = Arguments(struct.pack("<3Q", memory, sums, READ_PER_BLOCK // 16))
    seconds = device.time(lambda _: device.launch("kvd_read", blocks, 0, arguments), *times)
    got = device.read(sums, 4 * driver.THREADS * blocks)
    if got != struct.pack("<I", 3 * READ_PER_BLOCK // 4 // driver.THREADS) * (len(got) // 4):
        raise RuntimeError("kvd_read: sums are wrong")
    return size / seconds["median"]


def copy_bandwidth(device, size, times):
    """Bytes per second read, and as many written, by the driver's copy."""
    source, to = device.memory(size), device.memory(size)
    seconds = device.time(lambda _: device.copy(to, source, size), *times)
    return 2 * size / seconds["median"]


def attempt(device, facts, measured):
    """A row of facts with what was measured, or with why not."""
    try:
        row = {**facts, **measured()}
    # Weights of zero are divided by: no sums at all.
    except (RuntimeError, ZeroDivisionError) as error:
        row = {**facts, "error": str(error)}
    try:
        device.free_all()
    except RuntimeError as error:
        row.setdefault("error", str(error))
    return row


def run(device, fixtures, checks, arguments, save):
    """All figures; `save` is called with what there is after each row, as time may end before they do. What is
    others' comes last: it may compile for minutes."""
    times = arguments.launches, arguments.rounds
    group, dim = fixtures[0]["group"], fixtures[0]["dim"]
    figures = {"device": device.name, "planned_for": fixtures[0]["device"], "group": group, "dim": dim,
               "launches": arguments.launches, "rounds": arguments.rounds, "complete": False,
               "polar_keys_alone": "not measured: there is no kernel for keys alone",
               "bandwidth": [], "workloads": [], "stores": [], "checks": []}

    def add(rows, facts, measured):
        rows.append(attempt(device, facts, measured))
        save(figures)

    for fixture in checks:
        add(figures["checks"], {name: fixture[name] for name in ["codec", "dim", "group", "dtype"]},
            lambda: check(device, fixture))
    if arguments.checks:
        figures["complete"] = True
        save(figures)
        return figures
    for name, of in [("read", read_bandwidth), ("copy", copy_bandwidth)]:
        add(figures["bandwidth"], {"of": name},
            lambda: {"bytes_per_second": of(device, arguments.read_mib << 20, times)})
    for index, workload in enumerate(fixtures[0]["workloads"]):
        figures["workloads"].append(
            {**{name: workload[name] for name in ["tokens", "batch", "heads"]},
             "baselines": "not measured", "codecs": []})
        for fixture in fixtures:
            own = fixture["workloads"][index]
            add(figures["workloads"][-1]["codecs"], {"codec": fixture["codec"], "plan": own["plan"]},
                lambda: measure(device, fixture, own, times))
    for fixture in fixtures:
        if fixture["store"]:
            add(figures["stores"], {"codec": fixture["codec"], "kernels_alone": True},
                lambda: store(device, fixture, arguments.store_tokens, times))
    for workload in figures["workloads"]:
        workload["baselines"] = baselines.measure(workload, group, dim, *times)
        save(figures)
    figures["complete"] = True
    save(figures)
    return figures


def check(device, fixture):
    """Attention and a store of a shape that is not measured, for what they answer."""
    seconds = measure(device, fixture, fixture["workloads"][0], (1, 1))
    if fixture["store"]:
        store(device, fixture, fixture["tokens"], (1, 1))
    return {name: seconds[name] for name in ["kernel", "lse_error", "output_error"]}


def errors(figures):
    rows = figures["bandwidth"] + figures["stores"] + figures["checks"]
    rows += [row for workload in figures["workloads"] for row in workload["codecs"]]
    return [f"{row.get('codec', row.get('of'))}: {row['error']}" for row in rows if "error" in row]


def refusal(name, multiprocessors, fixture):
    """Why a GPU is not the one that a fixture's plan is of, or None. The name is the driver's, as nvidia-smi lists
    whole GPUs where this may be an instance of one; not every form has a name of its own."""
    words = set(re.split("[^A-Z0-9]+", name.upper()))
    planned = set(fixture["device"].upper().split()) - {"SXM"}
    if planned <= words and not words & OTHER_FORMS and multiprocessors == fixture["multiprocessors"]:
        return None
    return (f"plans are of {fixture['device']} with {fixture['multiprocessors']} multiprocessors, and "
            f"this GPU is {name} with {multiprocessors}: nothing is launched")


def save(path, figures):
    """A whole file at any time: written beside, and then in place of the last."""
    if path:
        beside = path.with_name(path.name + ".new")
        beside.write_text(json.dumps(figures, indent=1) + "\n")
        beside.replace(path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--fatbins", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--launches", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--store-tokens", type=int, default=1 << 18)
    parser.add_argument("--read-mib", type=int, default=1 << 10)
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--library", default="libcuda.so.1")
    arguments = parser.parse_args()
    fixtures, checks = ([Fixture(path) for path in sorted(folder.glob("*.json"))]
                        for folder in [arguments.folder, arguments.folder / "checks"])
    if not arguments.checks:
        checks = []
    if not fixtures:
        sys.exit(f"no fixtures in {arguments.folder}")
    device = driver.Cuda(arguments.fatbins or arguments.folder, arguments.library)
    other = refusal(device.name, device.attribute(driver.MULTIPROCESSORS), fixtures[0])
    if other:
        sys.exit(other)
    figures = run(device, fixtures, checks, arguments, lambda figures: save(arguments.out, figures))
    if not arguments.out:
        print(json.dumps(figures, indent=1))
    wrong = errors(figures)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
