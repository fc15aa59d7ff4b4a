"""Capuchin's execution as its paper has it: a passive iteration that measures, then iterations
that are guided by what was measured, with nothing known in advance.

neap's planner `capuchin` is given the latencies and makes one plan that is proved to fit. Here:

- A first iteration is passive: where an operator's tensors have no room, the least recently used
  tensors leave, and computing waits. It is the one of `neap simulate --passive`.
- From it come the times of all accesses and the bytes that were evicted, and from these the tensors
  to swap or to compute again: by falling free time as long as copies are hidden, then by the
  smaller overhead, until they amount to the bytes that were evicted. Parameters and optimizer
  states are no candidates, and leave passively alone.
- A copy out starts with the end of the access before it, a copy in with the access nearest before
  the next one less the copy's time. Where an operator still has to wait for a copy in, that copy
  starts earlier by 5 % of its time in the next iteration.
- What has no room in a guided iteration makes others leave passively, and what is missing is
  fetched on demand. A copy in that finds no room is not started.

Each direction of the link carries one copy at a time. Room is counted in bytes, in blocks of 512.
What computing again needs besides is not counted, which favours Capuchin.
"""

import bisect
import gzip
import json
from collections import OrderedDict, deque

BLOCK = 512
ITEM = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i16": 2}
# Of one copy, and of several.
ITERATIONS, BESIDE = 10, 5
# What an iteration waits for, in nanoseconds.
CAUSES = ["passive", "fetch", "swap_in", "swap_out", "recompute"]


def operands(value):
    """All tensors among an operator's arguments."""
    if isinstance(value, dict):
        return [value] if "tensor" in value else []
    return [o for inner in value for o in operands(inner)] if isinstance(value, list) else []


class Net:
    """What an iteration touches when, and what that takes on a device."""

    def __init__(self, bench, graph, device, latencies):
        timeline = bench.folder / "capuchin.timeline.json"
        bench.answer(
            *("simulate", graph, "--device", device, "--latencies", latencies),
            *("--timeline", timeline),
        )
        events = json.loads(timeline.read_text())["traceEvents"]
        self.times = [round(e["dur"] * 1000) for e in events if e["ph"] == "X" and e["tid"] == 1]
        self.link = bench.answer("device", "show", device)["link"]
        reader = gzip.open if graph.suffix == ".gz" else open
        with reader(graph, "rt") as file:
            form = json.load(file)
        self.exact, self.place = {}, {}
        for tensor in form["tensors"]:
            self.place[tensor["name"]] = len(self.place)
            count = 1
            for extent in tensor["shape"]:
                count *= extent
            self.exact[tensor["name"]] = count * ITEM.get(tensor["dtype"], 1)
        self.bytes = {name: -(-size // BLOCK) * BLOCK for name, size in self.exact.items()}
        self.touched, self.written, self.workspace = [], [], []
        self.maker, self.uses, self.writers = {}, {}, {}
        for index, operator in enumerate(form["operators"]):
            written = [o for o in operator["outputs"] if o] + operator.get("hidden", [])
            names = [o["tensor"] for o in operands(operator["args"]) + written]
            self.touched.append(list(dict.fromkeys(names)))
            self.written.append([o["tensor"] for o in written])
            self.workspace.append(-(-operator.get("workspace_bytes", 0) // BLOCK) * BLOCK)
            for operand in written:
                self.writers.setdefault(operand["tensor"], []).append(index)
                if not operand.get("version", 0):
                    self.maker[operand["tensor"]] = index
            for name in self.touched[-1]:
                self.uses.setdefault(name, []).append(index)
        self.order = [sorted(names, key=self.place.get) for names in self.touched]
        self.starts = [0]
        for time in self.times:
            self.starts.append(self.starts[-1] + time)

    def copy(self, name, way):
        """The time of a copy that is alone on the link."""
        return self.link["overhead_ns"] + -(-self.exact[name] * 10**9 // self.link[way])

    def over(self, budget):
        """The operators at which a job without a plan is above the budget."""
        held = sum(size for name, size in self.bytes.items() if name not in self.maker)
        found = []
        for index, names in enumerate(self.touched):
            held += sum(self.bytes[n] for n in names if self.maker.get(n) == index)
            if held + self.workspace[index] > budget:
                found.append(index)
            gone = [n for n in names if n in self.maker and self.uses[n][-1] == index]
            held -= sum(self.bytes[n] for n in gone)
        return found


class Guide:
    """What passive mode taught: the gaps in which tensors leave, and how they come back."""

    def __init__(self, net, budget, wanted):
        self.net, self.swaps, self.again, self.early = net, {}, {}, {}
        over, found = net.over(budget), []
        for name, uses in net.uses.items():
            if name in net.maker:
                for last, back in zip(uses, uses[1:]):
                    # Idle while memory is at its peak.
                    at = bisect.bisect_right(over, last)
                    if at < len(over) and over[at] < back:
                        out, into = net.copy(name, "d2h"), net.copy(name, "h2d")
                        free = net.starts[back] - into - net.starts[last + 1] - out
                        found.append((-free, name, last, back))
        saved, gone = 0, set()
        for hurry, name, last, back in sorted(found):
            if saved >= wanted:
                break
            if name in gone:
                continue
            cost = self.cost(name, last, back) if hurry > 0 else None
            if cost is not None and cost < hurry:
                self.again[name, back] = cost
            else:
                self.swaps[name, back] = last
            gone.add(name)
            saved += net.bytes[name]

    def cost(self, name, last, back, depth=0):
        """Nanoseconds of computing a tensor again just before an operator, from what is there
        then; None where that has no end."""
        if depth > 50 or name not in self.net.maker:
            return None
        total = 0
        for index in [w for w in self.net.writers[name] if w <= last]:
            total += self.net.times[index]
            for other in self.net.touched[index]:
                made = self.net.maker.get(other)
                if other != name and made is not None and made < index:
                    alive = self.net.uses[other][-1] >= back
                    if not alive or (other, back) in self.again:
                        more = self.cost(other, index, back, depth + 1)
                        if more is None:
                            return None
                        total += more
        return total

    def plan(self):
        """The tensors that leave after each operator, those that are dropped, and the copies in
        that start with each operator."""
        leave, drop, fetch = {}, {}, {}
        for (name, back), last in self.swaps.items():
            leave.setdefault(last, []).append(name)
            lead = self.net.copy(name, "h2d") * (100 + 5 * self.early.get((name, back), 0)) // 100
            at = bisect.bisect_right(self.net.starts, self.net.starts[back] - lead) - 1
            fetch.setdefault(max(at, last + 1), []).append((name, back))
        for name, back in self.again:
            last = max(use for use in self.net.uses[name] if use < back)
            drop.setdefault(last, []).append(name)
        return leave, drop, fetch


class Clock:
    """The time, in nanoseconds."""

    now = 0


class Copy:
    """A copy of so many nanoseconds, which waits for its turn, runs and is done. One that is not
    wanted any more before it has begun is dropped.
    """

    def __init__(self, length):
        self.length, self.begun, self.done, self.dropped = length, False, False, False


class Wire:
    """One direction of the link, which carries one copy at a time."""

    def __init__(self, clock):
        self.clock, self.queue, self.now, self.end = clock, deque(), None, None

    def add(self, copy):
        """A copy queues up."""
        self.queue.append(copy)
        self.settle()
        return copy

    def settle(self):
        """Ends the copy whose time has passed, and begins the next."""
        if self.now and self.end <= self.clock.now:
            self.now.done = True
            self.now = None
        while not self.now and self.queue:
            copy = self.queue.popleft()
            if not copy.dropped:
                self.now, copy.begun = copy, True
                self.end = self.clock.now + copy.length


class Memory:
    """The bytes of a device that jobs share, or of one job's part of it."""

    def __init__(self, budget):
        self.budget, self.used, self.jobs = budget, 0, []

    def lacks(self, more):
        """Whether `more` bytes have no room; copies that have ended free theirs first."""
        for job in self.jobs:
            job.settle()
        return self.used + more > self.budget


class Job:
    """A job over several iterations.

    What it does is a generator, which says what it needs next: ("compute", nanoseconds), ("wait",
    a copy) or ("memory", None), when only others can make room.
    """

    def __init__(self, net, memory, part, clock, wires):
        self.net, self.memory, self.part, self.clock, self.wires = net, memory, part, clock, wires
        self.held, self.host, self.going, self.coming = OrderedDict(), set(), {}, {}
        memory.jobs.append(self)
        self.took, self.done, self.first_evicted, self.guide = [], [], 0, None
        # Whether it has to go on without the memory that it lacks.
        self.stuck = False
        older = [name for name in net.uses if name not in net.maker]
        room = part
        for name in sorted(older, key=lambda name: (net.uses[name][0], net.place[name])):
            if net.bytes[name] <= room:
                room -= net.bytes[name]
                self.hold(name)
            else:
                self.host.add(name)
        for name in sorted(self.held, key=net.place.get):
            self.hold(name)

    def hold(self, name):
        """The tensor takes bytes, and was used last."""
        if name not in self.held:
            self.memory.used += self.net.bytes[name]
        self.held[name] = True
        self.held.move_to_end(name)

    def release(self, name):
        """Its bytes are free."""
        if self.held.pop(name, None):
            self.memory.used -= self.net.bytes[name]

    def life(self, iterations):
        """A passive iteration, then those that are guided by it."""
        for _ in range(iterations):
            begun = self.clock.now
            self.lost, self.evicted = dict.fromkeys(CAUSES, 0), 0
            yield from self.iteration(self.guide)
            self.took.append(self.clock.now - begun)
            self.done.append(self.lost)
            if not self.guide:
                self.first_evicted = self.evicted
                self.guide = Guide(self.net, self.part, self.evicted)

    def until(self, copy, cause):
        """Waits for a copy, for a cause."""
        begun = self.clock.now
        if not copy.done:
            yield "wait", copy
        self.lost[cause] += self.clock.now - begun

    def copy(self, name, way):
        """Queues a copy."""
        return self.wires[way].add(Copy(self.net.copy(name, way)))

    def iteration(self, guide):
        """One iteration."""
        leave, drop, fetch = guide.plan() if guide else ({}, {}, {})
        for index, names in enumerate(self.net.touched):
            self.pinned = set(names)
            for name, back in fetch.get(index, ()):
                self.prefetch(name, back)
            for name in names:
                if name not in self.held or name in self.going or name in self.coming:
                    yield from self.present(name, index, guide)
            workspace = self.net.workspace[index]
            if self.memory.lacks(workspace):
                yield from self.room(workspace)
            self.memory.used += workspace
            yield "compute", max(self.net.times[index], 1)
            self.memory.used -= workspace
            self.stuck = False
            self.host.difference_update(self.net.written[index])
            for name in self.net.order[index]:
                self.hold(name)
                if name in self.net.maker and self.net.uses[name][-1] == index:
                    self.release(name)
                    self.host.discard(name)
            for name in leave.get(index, ()):
                self.send(name)
            for name in drop.get(index, ()):
                self.release(name)
        while self.going:
            yield from self.until(next(iter(self.going.values())), "swap_out")
            self.settle()

    def settle(self):
        """Copies out that have ended free their bytes."""
        # They are in the order in which they end.
        while self.going and next(iter(self.going.values())).done:
            name = next(iter(self.going))
            del self.going[name]
            self.release(name)
            self.host.add(name)

    def present(self, name, index, guide):
        """Brings a tensor that an operator touches."""
        self.settle()
        if name in self.going:
            self.stay(name)
            self.going.pop(name, None)
        if name in self.coming:
            copy, back = self.coming.pop(name)
            if not copy.done:
                guide.early[name, back] = guide.early.get((name, back), 0) + 1
                yield from self.until(copy, "swap_in")
        elif name not in self.held:
            yield from self.room(self.net.bytes[name])
            # Others may take the room while it is fetched.
            self.hold(name)
            if self.net.maker.get(name) != index:
                again = guide and guide.again.get((name, index))
                if again:
                    self.lost["recompute"] += again
                    yield "compute", again
                else:
                    yield from self.until(self.copy(name, "h2d"), "fetch")
        self.hold(name)

    def stay(self, name):
        """A tensor whose copy out has not begun stays."""
        if name in self.going and not self.going[name].begun:
            self.going.pop(name).dropped = True

    def prefetch(self, name, back):
        """Starts a copy in, if there is room."""
        self.stay(name)
        missing = name not in self.held and name in self.host
        if missing and not self.memory.lacks(self.net.bytes[name]):
            self.hold(name)
            self.coming[name] = (self.copy(name, "h2d"), back)

    def send(self, name):
        """Starts a copy out, or frees at once what the host has."""
        if name in self.host:
            self.release(name)
        elif name in self.held:
            self.going[name] = self.copy(name, "d2h")

    def room(self, more):
        """Waits for copies out, then evicts the least recently used, until `more` bytes fit."""
        while self.memory.lacks(more):
            # They are in the order in which they end.
            going = (copy for name, copy in self.going.items() if name not in self.pinned)
            copy = next(going, None)
            if copy:
                yield from self.until(copy, "swap_out")
                continue
            idle = (n for n in self.held if n not in self.pinned and n not in self.coming)
            name = next(idle, None)
            if name is None:
                if self.stuck or len(self.memory.jobs) == 1:
                    return
                yield "memory", None
                continue
            if name not in self.host:
                yield from self.until(self.copy(name, "d2h"), "passive")
                self.host.add(name)
                self.evicted += self.net.exact[name]
            self.release(name)


def play(jobs, clock, wires, part, iterations):
    """Runs jobs beside each other to their end. Each uses `part` of the device while it computes;
    where that is more than all of it, all computing is slowed by the same ratio.
    """
    lives = {job: job.life(iterations) for job in jobs}
    working, waiting, ready = {}, {}, list(jobs)
    while lives:
        # A job that lacks memory asks again whenever something has happened.
        starved = []
        for job in ready:
            asked, value = next(lives[job], ("end", None))
            if asked == "end":
                del lives[job]
            elif asked == "memory":
                starved.append(job)
            else:
                {"compute": working, "wait": waiting}[asked][job] = value
        slow = max(1, len(working) * part)
        ends = [clock.now + left * slow for left in working.values()]
        ends += [wire.end for wire in wires.values() if wire.now]
        if not ends:
            # No job will free any memory: the first one goes on without.
            ready = starved
            for job in starved[:1]:
                job.stuck = True
            continue
        passed, clock.now = min(ends) - clock.now, min(ends)
        working = {job: left - passed / slow for job, left in working.items()}
        over = [job for job, left in working.items() if left < 1e-3]
        for wire in wires.values():
            wire.settle()
        over += [job for job, copy in waiting.items() if copy.done]
        for job in over:
            working.pop(job, None)
            waiting.pop(job, None)
        ready = starved + over


# How several copies have memory: each a part of what TENSILE needs for all, all of them that in one
# memory from which each evicts only its own tensors, or each as much as one alone.
KINDS = {"parts": "a part each", "one": "one memory", "same": "as much as one alone"}


def measured(of, copies, budget, kind, part):
    """Copies of a net that begin at once within a budget. Times are over those of as many copies
    without a plan.
    """
    clock, shared = Clock(), kind == "one"
    wires = {way: Wire(clock) for way in ["d2h", "h2d"]}
    pool, each = Memory(budget), budget // copies
    jobs = [Job(of, pool if shared else Memory(each), each, clock, wires) for _ in range(copies)]
    iterations = ITERATIONS if copies == 1 else BESIDE
    play(jobs, clock, wires, part, iterations)
    bare = sum(of.times) * max(1, copies * part)

    def eor(number):
        return round(sum(job.took[number - 1] for job in jobs) / copies / bare, 4)

    def of_last(cause):
        return round(sum(job.done[-1][cause] for job in jobs) / copies)

    return {
        "copies": copies,
        "memory": kind,
        "budget_bytes": budget,
        "bare_ns": round(bare),
        "part": round(part, 4),
        "first_eor": eor(1),
        "first_evicted_bytes": sum(job.first_evicted for job in jobs) // copies,
        "swapped": sum(len(job.guide.swaps) for job in jobs),
        "recomputed": sum(len(job.guide.again) for job in jobs),
        "eor_2": eor(2),
        "eor_last": eor(iterations),
        "eor": round(sum(sum(job.took[:BESIDE]) for job in jobs) / copies / bare / BESIDE, 4),
        **{f"{cause}_ns": of_last(cause) for cause in CAUSES},
        "evicted_bytes": sum(job.evicted for job in jobs) // copies,
    }


def rows(bench, job, budgets, part):
    """A row for each kind of link, number of copies and way to share memory. `budgets` has one for
    each number of copies, which use `part` of the device each.
    """
    made = []
    of = Net(bench, job.graph, job.device, job.real)
    full = dict(of.link)
    for slower in [1, 8]:
        of.link = full | {way: full[way] // slower for way in ["h2d", "d2h"]}
        for copies, budget in budgets.items():
            for kind in KINDS if copies > 1 else ["parts"]:
                within = budgets[1] * copies if kind == "same" else budget
                row = measured(of, copies, within, kind, part)
                made.append({"net": job.net, "slower": slower} | row)
    return made


def section(rows, known, real, table):
    """The part of the page about Capuchin's execution; `table` makes a table of a head and rows."""
    theirs = {
        (row["table"], row["net"]): row["eor"] for row in known if row["planner"] == "Capuchin"
    }
    yield (
        "**Capuchin as it measures and evicts: EOR of the passive first iteration, of the second "
        f"and the tenth, and what the tenth waits for, % of the unplanned iteration. {real}** In "
        "the rows above, Capuchin knows all latencies, moves parameters, and its plan is proved to "
        "fit. Here (`capuchin.py`) it knows what its passive iteration measured, leaves parameters "
        "to passive eviction, and starts a copy that came late 5 % of its time earlier in the next "
        "iteration. The budget is that of Table II. The link is the profile's pinned memory, or an "
        "eighth of it, about the rate of pageable memory. In brackets what is published: the first "
        "iteration (Table II) and the steady one (Table III). The first iteration is that of `neap "
        "simulate --passive`; a run that finds another ends with an error."
    )
    body, shares = [], {}
    single = [row for row in rows if row["copies"] == 1]
    for row in sorted(single, key=lambda row: row["slower"]):
        parts = [row[f"{cause}_ns"] / row["bare_ns"] for cause in CAUSES]
        late = row["eor_last"] - 1
        shares.setdefault(row["slower"], []).append((parts[0] + parts[1]) / late if late else 0)
        net = row["net"]
        body.append(
            [
                f"{net}, link / {row['slower']}",
                f"{row['first_eor']:.2f} ({theirs['first', net]:.2f})",
                f"{row['eor_2']:.2f}",
                f"{row['eor_last']:.2f} ({theirs['single', net]:.2f})",
                *(f"{part:.1%}" for part in parts),
                f"{row['swapped']} / {row['recomputed']}",
            ]
        )
    yield table(
        [
            *("net", "first", "second", "tenth", "passive eviction", "fetch on demand"),
            *("late swap-in", "swap-out", "recomputation", "tensors swapped / recomputed"),
        ],
        body,
    )
    passive = {slower: sum(of) / len(of) for slower, of in shares.items()}
    yield (
        f"Passive evictions and the fetches after them are {passive[1]:.1%} of the tenth "
        f"iteration's extra time in the mean over the nets, and {passive[8]:.1%} on the slower "
        "link; the paper's Fig. 2 has 32.1 % for passive evictions."
    )
    yield from beside(rows, table)


def beside(rows, table):
    """The measured execution by the number of copies."""
    most = max(row["copies"] for row in rows)
    nets = list(dict.fromkeys(row["net"] for row in rows))
    yield (
        "**Capuchin's measured execution by the number of copies, seed 1: EOR of the first / the "
        f"last / the first {BESIDE} iterations (one copy makes {ITERATIONS}, several {BESIDE}).** "
        "The copies begin at once within TENSILEcs's peak for as many (one: its arena), each in "
        "its part of it (*a part each*), or all in one memory, from which each evicts its own "
        "tensors alone, and where others' tensors may leave it less room than it measured (*one "
        "memory*); or each in as much as the arena of one (*as much as one alone*). The link has "
        "one queue in each direction; what computes at once is slowed as in the unplanned run, "
        "over whose time EOR is."
    )
    body, words = [], []
    for slower in [1, 8]:
        for memory, how in KINDS.items():
            grows = []
            for net in nets:
                of = [case(rows, net, slower, n, memory) for n in range(1, most + 1)]
                cells = (
                    f"{row['first_eor']:.2f} / {row['eor_last']:.2f} / {row['eor']:.2f}"
                    for row in of
                )
                body.append([f"{net}, link / {slower}, {how}", *cells])
                grows.append(of[-1]["eor"] / of[0]["eor"] - 1)
            words.append(
                f"{how}, link / {slower}: higher on {sum(g > 0 for g in grows)} of {len(nets)} nets"
                f" ({min(grows):+.0%} to {max(grows):+.0%})"
            )
    yield table(["net", *(f"{n} job{'s' * (n > 1)}" for n in range(1, most + 1))], body)
    yield f"EOR of {BESIDE} iterations with {most} copies against one: {'; '.join(words)}."
    parts = [row["part"] for row in rows]
    fewer = [
        case(rows, net, 1, most, "parts")["first_evicted_bytes"]
        / case(rows, net, 1, 1, "parts")["first_evicted_bytes"]
        for net in nets
    ]
    yield (
        "Why it does not rise as the paper's Fig. 6 shows: TENSILE swaps in time alone, over one "
        f"link for all, so that it saves less of each of {most} copies, and Capuchin within its "
        f"arena evicts {min(fewer):.0%} to {max(fewer):.0%} of the bytes that one copy alone does. "
        "And while one copy waits, the others compute. Where each copy keeps the budget of one "
        "alone, the copies fill the link, but the time without a plan grows with their number too: "
        f"each uses {min(parts):.0%} to {max(parts):.0%} of the device, so that a job that waits "
        f"for nothing but the link can rise to at most {1 / min(parts):.2f} times its EOR alone."
    )


def case(rows, net, slower, copies, memory):
    """A row; one copy has all memory in either way."""
    return next(
        row
        for row in rows
        if (row["net"], row["slower"], row["copies"]) == (net, slower, copies)
        and (copies == 1 or row["memory"] == memory)
    )
