//! The best that can happen to a byte of a tensor at given prices: a longest path over its states,
//! interval by interval.

/// What happens to a tensor in an interval, beside copies and recomputes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// Nothing.
    #[default]
    None,
    /// An operator uses it.
    Use,
    /// An operator writes it, so that its copy on the host is out of date.
    Write,
}

/// An interval of a tensor's course, and the instant at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Step {
    /// The interval.
    pub(super) at: u32,
    /// What operators do to the tensor in it.
    pub(super) event: Event,
    /// What the tensor may do at the instant.
    pub(super) instant: Instant,
    /// Picoseconds for each KiB of making it again in this interval; [`NEVER`] if it can't be.
    pub(super) price: u64,
}

/// A tensor at an instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Instant {
    /// The operator there uses it, or its life is over.
    Held,
    /// It may be away, and counts as resident without a plan.
    Counted,
    /// It may be away, and without a plan its life would be over.
    Extra,
}

/// The price of what can't be made again.
pub(super) const NEVER: u64 = u64::MAX;

/// The steps of a tensor round the iteration or through its life.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Course {
    pub(super) steps: Vec<Step>,
    /// It goes round the end of the iteration.
    pub(super) round: bool,
    /// How many 256ths of a byte are copied for each byte of memory. Memory is whole blocks; the
    /// time to submit a copy counts as bytes.
    pub(super) copied: u32,
}

/// Prices of a relaxation: nanoseconds for each MiB, but for `again` and `room`.
#[derive(Clone, Debug, Default)]
pub(super) struct Prices {
    /// By instant, of a resident MiB.
    pub(super) memory: Vec<f64>,
    /// By interval, of copying a MiB to the device and from it.
    pub(super) back: Vec<f64>,
    pub(super) out: Vec<f64>,
    /// By interval, of a nanosecond of recomputing and of a nanosecond in which the link can copy.
    pub(super) again: Vec<f64>,
    pub(super) room: Vec<f64>,
}

/// What the best paths take: MiB by instant or interval, and nanoseconds.
#[derive(Clone, Debug, Default)]
pub(super) struct Flow {
    /// MiB away, less MiB that only a late update keeps.
    pub(super) away: Vec<f64>,
    pub(super) back: Vec<f64>,
    pub(super) out: Vec<f64>,
    pub(super) again: Vec<f64>,
    /// Nanoseconds of updates.
    pub(super) updates: Vec<f64>,
}

impl Flow {
    pub(super) fn clear(&mut self, count: usize) {
        let Self { away, back, out, again, updates } = self;
        for all in [away, back, out, again, updates] {
            all.clear();
            all.resize(count, 0.0);
        }
    }
}

/// A tensor's states at an instant: resident with a copy on the host that is out of date, resident
/// with one that is right, away over the link, or dropped.
const STALE: usize = 0;
const COPIED: usize = 1;
pub(super) const AWAY: usize = 2;
pub(super) const DROPPED: usize = 3;

const NONE: f64 = f64::NEG_INFINITY;

type Values = [f64; 4];

/// What a step of a course costs for each MiB.
struct Costs {
    out: f64,
    /// For what is away, and for what is dropped.
    back: f64,
    again: f64,
}

/// Nanoseconds for each MiB of what can be made again.
fn remaking(price: u64) -> f64 {
    price as f64 * 1.024
}

impl Costs {
    fn of(course: &Course, step: &Step, prices: &Prices) -> Self {
        let at = step.at as usize;
        let copied_part = f64::from(course.copied) / 256.0;
        let again = match step.price {
            NEVER => f64::INFINITY,
            price => prices.again[at] * remaking(price),
        };
        Self {
            out: prices.out[at] * copied_part,
            back: (prices.back[at] * copied_part).min(again),
            again,
        }
    }

    /// What it costs to be in each state behind an event, from one state before it.
    #[inline]
    fn row(&self, event: Event, from: usize) -> Values {
        let comes = match from {
            AWAY => self.back,
            DROPPED => self.again,
            _ => 0.0,
        };
        let stale = event == Event::Write || from == STALE || from == DROPPED;
        let (stays, out) = if stale { (comes, comes + self.out) } else { (f64::INFINITY, comes) };
        let drops = if self.again == f64::INFINITY { f64::INFINITY } else { comes };
        let mut row = [stays, out, out, drops];
        // What was away or dropped and stays so where nothing uses it.
        if event == Event::None && from >= AWAY {
            row[from] = 0.0;
        }
        row
    }

    // In one piece: several loops ask for it.
    #[inline(never)]
    fn table(&self, event: Event) -> [Values; 4] {
        std::array::from_fn(|from| self.row(event, from))
    }
}

/// What it is worth to be in each state at an instant.
fn worth(instant: Instant, memory: f64) -> Values {
    match instant {
        Instant::Held => [0.0, 0.0, NONE, NONE],
        Instant::Counted => [0.0, 0.0, memory, memory],
        Instant::Extra => [-memory, -memory, 0.0, 0.0],
    }
}

/// The larger one. (Unlike `f64::max` it is one instruction; nothing here is not a number.)
#[inline]
const fn larger(a: f64, b: f64) -> f64 {
    if a > b { a } else { b }
}

#[inline]
fn forward(values: &Values, table: &[Values; 4], worth: &Values) -> Values {
    let mut best = [NONE; 4];
    for (value, row) in values.iter().zip(table) {
        for (best, cost) in best.iter_mut().zip(row) {
            *best = larger(value - cost, *best);
        }
    }
    std::array::from_fn(|to| best[to] + worth[to])
}

#[inline]
fn backward(values: &Values, table: &[Values; 4], worth: &Values) -> Values {
    let ahead: Values = std::array::from_fn(|to| values[to] + worth[to]);
    std::array::from_fn(|from| {
        let value = |to: usize| ahead[to] - table[from][to];
        larger(larger(value(0), value(1)), larger(value(2), value(3)))
    })
}

/// The most states in which a path may begin.
const STARTS: usize = 3;

/// The best values of paths that begin in different states. They are found together, as a step of
/// one waits for the step before it alone.
type All = [Values; STARTS];

/// Memory for paths that is used again.
#[derive(Debug, Default)]
pub(super) struct Paths {
    tables: Vec<[Values; 4]>,
    worths: Vec<Values>,
    forward: Vec<All>,
    behind: Vec<All>,
    /// The states of the path that was walked last.
    pub(super) path: Vec<usize>,
}

impl Paths {
    fn prepare(&mut self, course: &Course, prices: &Prices) {
        self.tables.clear();
        self.worths.clear();
        for step in &course.steps {
            self.tables.push(Costs::of(course, step, prices).table(step.event));
            self.worths.push(worth(step.instant, prices.memory[step.at as usize]));
        }
    }

    /// The best values from each of these states on.
    fn run(&mut self, starts: &[usize]) {
        self.forward.clear();
        let mut all = [[NONE; 4]; STARTS];
        for (values, start) in all.iter_mut().zip(starts) {
            values[*start] = 0.0;
        }
        self.forward.push(all);
        let one = starts.len() == 1;
        for (table, worth) in self.tables.iter().zip(&self.worths) {
            all = if one {
                [forward(&all[0], table, worth), all[1], all[2]]
            } else {
                all.map(|values| forward(&values, table, worth))
            };
            self.forward.push(all);
        }
    }

    /// The states in which a path may begin. One through a life begins as it is generated.
    const fn starts(course: &Course) -> &'static [usize] {
        if course.round { &[STALE, COPIED, AWAY] } else { &[STALE] }
    }

    /// What the best path is worth.
    pub(super) fn best(&mut self, course: &Course, prices: &Prices) -> f64 {
        self.prepare(course, prices);
        self.walk(course)
    }

    /// The same, where an update happens at the step `update`.
    pub(super) fn best_with(
        &mut self,
        course: &Course,
        prices: &Prices,
        (update, event): (usize, Event),
    ) -> f64 {
        self.prepare(course, prices);
        let step = &course.steps[update];
        self.tables[update] = Costs::of(course, step, prices).table(event.max(step.event));
        self.walk(course)
    }

    /// The best path over what was prepared.
    fn walk(&mut self, course: &Course) -> f64 {
        let starts = Self::starts(course);
        self.run(starts);
        let ends = self.forward.last().copied().unwrap_or([[NONE; 4]; STARTS]);
        let mut best: Option<(f64, usize)> = None;
        for (number, (ends, &start)) in ends.iter().zip(starts).enumerate() {
            let end = if course.round { ends[start] } else { ends[STALE].max(ends[COPIED]) };
            if best.is_none_or(|best| end > best.0) {
                best = Some((end, number));
            }
        }
        let Some((value, number)) = best else { return 0.0 };
        let (start, ends) = (starts[number], ends[number]);
        self.trace(
            number,
            if course.round || ends[STALE] >= ends[COPIED] { start } else { COPIED },
        );
        value
    }

    /// Finds the states of the best path from one of the starts to a state at the end.
    fn trace(&mut self, start: usize, end: usize) {
        self.path.clear();
        self.path.push(end);
        let mut to = end;
        for at in (0..self.tables.len()).rev() {
            let value = |from: usize| self.forward[at][start][from] - self.tables[at][from][to];
            let from = (0..4).max_by(|&a, &b| value(a).total_cmp(&value(b))).unwrap_or(STALE);
            self.path.push(from);
            to = from;
        }
        self.path.reverse();
    }

    /// For each of these steps what the best path is worth on which an update happens there.
    pub(super) fn with_updates(
        &mut self,
        course: &Course,
        prices: &Prices,
        event: Event,
        steps: impl Iterator<Item = usize> + Clone,
        worths: &mut [f64],
        bytes: f64,
    ) {
        self.prepare(course, prices);
        let n = course.steps.len();
        let starts = Self::starts(course);
        self.run(starts);
        let mut all = [[NONE; 4]; STARTS];
        for (values, start) in all.iter_mut().zip(starts) {
            if course.round {
                values[*start] = 0.0;
            } else {
                (values[STALE], values[COPIED]) = (0.0, 0.0);
            }
        }
        self.behind.clear();
        self.behind.resize(n + 1, all);
        for at in (0..n).rev() {
            let (table, worth) = (&self.tables[at], &self.worths[at]);
            all = all.map(|values| backward(&values, table, worth));
            self.behind[at] = all;
        }
        for (worth, at) in worths.iter_mut().zip(steps) {
            let step = &course.steps[at];
            let table = Costs::of(course, step, prices).table(event.max(step.event));
            let mut best = NONE;
            for start in 0..starts.len() {
                let through = backward(&self.behind[at + 1][start], &table, &self.worths[at]);
                let value = (0..4).map(|from| self.forward[at][start][from] + through[from]);
                best = value.fold(best, larger);
            }
            *worth += best * bytes;
        }
    }

    /// For each of the last steps what the best path is worth that ends there with a use.
    pub(super) fn until(
        &mut self,
        course: &Course,
        prices: &Prices,
        worths: &mut [f64],
        bytes: f64,
    ) {
        self.prepare(course, prices);
        self.run(&[STALE]);
        let first = course.steps.len() - worths.len();
        for (at, worth) in (first..).zip(worths.iter_mut()) {
            *worth += bytes * self.ending(course, prices, at).0;
        }
    }

    /// The best path that ends with a use in a step, and the state before it.
    fn ending(&self, course: &Course, prices: &Prices, at: usize) -> (f64, usize) {
        let costs = Costs::of(course, &course.steps[at], prices);
        let event = course.steps[at].event.max(Event::Use);
        let before = &self.forward[at][0];
        let value = |from: usize| {
            let row = costs.row(event, from);
            larger(before[from] - row[STALE], before[from] - row[COPIED])
        };
        let from = (0..4).max_by(|&a, &b| value(a).total_cmp(&value(b))).unwrap_or(STALE);
        (value(from), from)
    }

    /// Walks the best path that ends with a use in a step.
    pub(super) fn walk_until(&mut self, course: &Course, prices: &Prices, at: usize) -> f64 {
        self.prepare(course, prices);
        self.run(&[STALE]);
        let (value, from) = self.ending(course, prices, at);
        self.tables.truncate(at);
        self.trace(0, from);
        let step = &course.steps[at];
        let costs = Costs::of(course, step, prices);
        let event = step.event.max(Event::Use);
        let row = costs.row(event, from);
        let stale = row[STALE] <= row[COPIED];
        self.path.push(if stale { STALE } else { COPIED });
        value
    }

    /// Adds what the path that was walked last takes. An update happens at the step `update`.
    pub(super) fn add(
        &self,
        course: &Course,
        prices: &Prices,
        update: Option<(usize, Event)>,
        mib: f64,
        flow: &mut Flow,
    ) {
        let copied_part = f64::from(course.copied) / 256.0;
        let steps = self.path.len() - 1;
        for (number, step) in course.steps[..steps].iter().enumerate() {
            let (from, to) = (self.path[number], self.path[number + 1]);
            let at = step.at as usize;
            let event = match update {
                Some((update, event)) if update == number => event.max(step.event),
                _ => step.event,
            };
            let rests = event == Event::None && from >= AWAY && from == to;
            if !rests {
                let copied = from == AWAY && {
                    let costs = Costs::of(course, step, prices);
                    costs.again > prices.back[at] * copied_part
                };
                if copied {
                    flow.back[at] += mib * copied_part;
                } else if from >= AWAY {
                    flow.again[at] += mib * remaking(step.price);
                }
                let stale = event == Event::Write || from == STALE || from == DROPPED;
                if stale && (to == COPIED || to == AWAY) {
                    flow.out[at] += mib * copied_part;
                }
            }
            // A life ends with a use, and not at an instant.
            let ends = !course.round && number + 1 == steps;
            match step.instant {
                Instant::Counted if to >= AWAY && !ends => flow.away[at] += mib,
                Instant::Extra if to < AWAY && !ends => flow.away[at] -= mib,
                _ => {}
            }
        }
    }
}
