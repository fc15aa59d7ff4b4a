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
    /// It must be away, and counts as resident without a plan.
    Away,
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

    /// Adds what other paths take.
    pub(super) fn add(&mut self, other: &Self) {
        let Self { away, back, out, again, updates } = self;
        let others = [&other.away, &other.back, &other.out, &other.again, &other.updates];
        for (all, other) in [away, back, out, again, updates].into_iter().zip(others) {
            all.iter_mut().zip(other).for_each(|(all, other)| *all += other);
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

/// A value for each state, for paths that begin in different states: one in each lane. They are
/// found together, as a step of one waits for the step before it alone.
type Values<const L: usize> = [[f64; L]; 4];

/// The states in which a path round the iteration may begin. Processors like an even number of
/// lanes, so one is left empty.
const STARTS: [usize; 3] = [STALE, COPIED, AWAY];
const LANES: usize = 4;

/// What a step of a course costs for each MiB, and what it is worth. What can't be done costs
/// infinitely much, so that no step has to ask.
#[derive(Clone, Copy, Debug)]
struct Costs {
    /// Copying it out.
    out: f64,
    /// Bringing back what is away, and what is dropped.
    back: f64,
    again: f64,
    /// Resting where it is, if that is not the device.
    rests: f64,
    /// That its copy on the host gets out of date, and that it stays right.
    writes: f64,
    keeps: f64,
    /// Dropping it.
    drops: f64,
    /// What it is worth to be on the device at the instant, and not to be.
    here: f64,
    gone: f64,
}

/// Nanoseconds for each MiB of what can be made again.
fn remaking(price: u64) -> f64 {
    price as f64 * 1.024
}

/// The larger one. (Unlike `f64::max` it is one instruction; nothing here is not a number.)
#[inline]
const fn larger(a: f64, b: f64) -> f64 {
    if a > b { a } else { b }
}

impl Costs {
    /// Of a step in which `event` happens.
    #[inline(never)]
    fn new(course: &Course, step: &Step, event: Event, prices: &Prices) -> Self {
        let at = step.at as usize;
        let copied_part = f64::from(course.copied) / 256.0;
        let free_if = |free| if free { 0.0 } else { f64::INFINITY };
        let again = match step.price {
            NEVER => f64::INFINITY,
            price => prices.again[at] * remaking(price),
        };
        let memory = prices.memory[at];
        let (here, gone) = match step.instant {
            Instant::Held => (0.0, NONE),
            Instant::Counted => (0.0, memory),
            Instant::Extra => (-memory, 0.0),
            Instant::Away => (NONE, memory),
        };
        Self {
            out: prices.out[at] * copied_part,
            back: (prices.back[at] * copied_part).min(again),
            again,
            rests: free_if(event == Event::None),
            writes: free_if(event == Event::Write),
            keeps: free_if(event != Event::Write),
            drops: free_if(step.price != NEVER),
            here,
            gone,
        }
    }

    /// The best values behind a step, from those before it.
    #[inline]
    fn forward<const L: usize>(&self, values: &Values<L>) -> Values<L> {
        let mut next = [[NONE; L]; 4];
        for lane in 0..L {
            let [stale, copied, away, dropped] = values.map(|lanes| lanes[lane]);
            let right = larger(copied, away - self.back);
            let stale = larger(larger(stale, dropped - self.again), right - self.writes);
            let right = right - self.keeps;
            let left = larger(stale - self.out, right);
            let drops = larger(stale, right) - self.drops;
            next[STALE][lane] = stale + self.here;
            next[COPIED][lane] = left + self.here;
            next[AWAY][lane] = larger(left, away - self.rests) + self.gone;
            next[DROPPED][lane] = larger(drops, dropped - self.rests) + self.gone;
        }
        next
    }

    /// The best values before a step, from those behind it.
    #[inline]
    fn backward<const L: usize>(&self, values: &Values<L>) -> Values<L> {
        let mut before = [[NONE; L]; 4];
        for lane in 0..L {
            let [stale, copied, away, dropped] = values.map(|lanes| lanes[lane]);
            let (away, dropped) = (away + self.gone, dropped + self.gone);
            let left = larger(copied + self.here, away);
            let drops = dropped - self.drops;
            let stale = larger(larger(stale + self.here, left - self.out), drops);
            let right = larger(larger(left, drops) - self.keeps, stale - self.writes);
            before[STALE][lane] = stale;
            before[COPIED][lane] = right;
            before[AWAY][lane] = larger(right - self.back, away - self.rests);
            before[DROPPED][lane] = larger(stale - self.again, dropped - self.rests);
        }
        before
    }

    /// What it costs to go from one state to another.
    fn way(&self, from: usize, to: usize) -> f64 {
        if from == to && from >= AWAY && self.rests == 0.0 {
            return 0.0;
        }
        let comes = match from {
            AWAY => self.back,
            DROPPED => self.again,
            _ => 0.0,
        };
        let stale = from == STALE || from == DROPPED || self.writes == 0.0;
        match to {
            STALE if !stale => f64::INFINITY,
            COPIED | AWAY if stale => comes + self.out,
            DROPPED => comes + self.drops,
            _ => comes,
        }
    }

    /// The state from which the best path comes to a state, by the values before the step.
    fn from<const L: usize>(&self, values: &Values<L>, lane: usize, to: usize) -> usize {
        let value = |from: usize| values[from][lane] - self.way(from, to);
        (0..4).max_by(|&a, &b| value(a).total_cmp(&value(b))).unwrap_or(STALE)
    }
}

/// Memory for paths that is used again.
#[derive(Debug, Default)]
pub(super) struct Paths {
    costs: Vec<Costs>,
    /// The best values before each step and behind the last one: round the iteration, and through
    /// a life, which begins as it is generated.
    round: Vec<Values<LANES>>,
    life: Vec<Values<1>>,
    behind: Vec<Values<LANES>>,
    /// The states of the path that was walked last.
    pub(super) path: Vec<usize>,
}

/// No value, but for nothing in some states, each in its lane.
fn start<const L: usize>(states: &[usize]) -> Values<L> {
    let mut values = [[NONE; L]; 4];
    for (lane, state) in states.iter().enumerate() {
        values[*state][lane] = 0.0;
    }
    values
}

/// The best values before each step and behind the last one.
fn run<const L: usize>(costs: &[Costs], mut values: Values<L>, all: &mut Vec<Values<L>>) {
    all.clear();
    all.push(values);
    for costs in costs {
        values = costs.forward(&values);
        all.push(values);
    }
}

/// Finds the states of the best path to a state at the end.
fn trace<const L: usize>(
    (costs, all): (&[Costs], &[Values<L>]),
    lane: usize,
    end: usize,
    path: &mut Vec<usize>,
) {
    path.clear();
    path.push(end);
    let mut to = end;
    for (costs, before) in costs.iter().zip(all).rev() {
        to = costs.from(before, lane, to);
        path.push(to);
    }
    path.reverse();
}

impl Paths {
    // In one piece: several loops ask for it.
    #[inline(never)]
    fn prepare(&mut self, course: &Course, prices: &Prices) {
        self.costs.clear();
        let of = |step| Costs::new(course, step, step.event, prices);
        self.costs.extend(course.steps.iter().map(of));
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
        self.costs[update] = Costs::new(course, step, event.max(step.event), prices);
        self.walk(course)
    }

    /// The best path over what was prepared.
    fn walk(&mut self, course: &Course) -> f64 {
        let Self { costs, round, life, path, .. } = self;
        if !course.round {
            run(costs, start(&[STALE]), life);
            let [[stale], [copied], ..] = life[costs.len()];
            let (value, end) = if stale >= copied { (stale, STALE) } else { (copied, COPIED) };
            trace((costs, life), 0, end, path);
            return value;
        }
        run(costs, start(&STARTS), round);
        let ends = &round[costs.len()];
        let value = |lane: usize| ends[STARTS[lane]][lane];
        let mut best = 0;
        for lane in 1..STARTS.len() {
            if value(lane) > value(best) {
                best = lane;
            }
        }
        trace((costs, round), best, STARTS[best], path);
        value(best)
    }

    /// For each of these steps what the best path round the iteration is worth on which an update
    /// happens there.
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
        let Self { costs, round, behind, .. } = self;
        run(costs, start(&STARTS), round);
        let mut values = start(&STARTS);
        behind.clear();
        behind.resize(costs.len() + 1, values);
        for (costs, behind) in costs.iter().zip(behind.iter_mut()).rev() {
            values = costs.backward(&values);
            *behind = values;
        }
        for (worth, at) in worths.iter_mut().zip(steps) {
            let step = &course.steps[at];
            let costs = Costs::new(course, step, event.max(step.event), prices);
            let through = costs.backward(&behind[at + 1]);
            let mut best = NONE;
            for (before, through) in round[at].iter().zip(&through) {
                for (before, through) in before.iter().zip(through) {
                    best = larger(before + through, best);
                }
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
        run(&self.costs, start(&[STALE]), &mut self.life);
        let first = course.steps.len() - worths.len();
        for (at, worth) in (first..).zip(worths.iter_mut()) {
            *worth += bytes * self.ending(course, prices, at).0;
        }
    }

    /// The best path that ends with a use in a step: its worth, and the states before and behind
    /// that step.
    fn ending(&self, course: &Course, prices: &Prices, at: usize) -> (f64, usize, usize) {
        let step = &course.steps[at];
        let costs = Costs::new(course, step, step.event.max(Event::Use), prices);
        let mut best = (NONE, STALE, STALE);
        for (from, [before]) in self.life[at].iter().enumerate() {
            for to in [COPIED, STALE] {
                let value = before - costs.way(from, to);
                if value >= best.0 {
                    best = (value, from, to);
                }
            }
        }
        best
    }

    /// Walks the best path that ends with a use in a step.
    pub(super) fn walk_until(&mut self, course: &Course, prices: &Prices, at: usize) -> f64 {
        self.prepare(course, prices);
        run(&self.costs, start(&[STALE]), &mut self.life);
        let (value, from, to) = self.ending(course, prices, at);
        trace((&self.costs[..at], &self.life), 0, from, &mut self.path);
        self.path.push(to);
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
                    let again = prices.again[at] * remaking(step.price);
                    step.price == NEVER || again > prices.back[at] * copied_part
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
                Instant::Counted | Instant::Away if to >= AWAY && !ends => flow.away[at] += mib,
                Instant::Extra if to < AWAY && !ends => flow.away[at] -= mib,
                _ => {}
            }
        }
    }
}
