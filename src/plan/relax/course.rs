//! A job as a relaxation sees it: instants, and what happens to tensors between them.
//!
//! An instant is the start or the end of an operator, twice the operator's number or one more. The
//! operator of both holds all that it touches.

use super::needs::{self, Needs};
use super::path::{Course, Event, Instant, NEVER, Step};
use super::{FINEST, MIB, Member, Rules, Unit};
use crate::arrange::may_wait;
use crate::contract::Latency;
use crate::device::Link;
use crate::job::optimizer::is_update;
use crate::job::{Graph, Replay};
use crate::residency::{Lifetime, Residencies};
use crate::sim::engine::work;
use crate::sim::program::Direction;
use crate::units::{TensorId, id32};

/// A job whose memory is looked at at instants of operators that run in its order.
pub(super) struct Job<'a> {
    graph: &'a Graph,
    link: &'a Link,
    residencies: &'a Residencies<'a>,
    /// By operator: it may run later than in the graph.
    late: Vec<bool>,
    times: Vec<u64>,
    /// Starts and ends of operators.
    pub(super) instants: Vec<u32>,
    /// By instant, the bytes within the budget beside what its operator needs.
    room: Vec<u64>,
    /// By operator, the bytes of what it writes.
    written: Vec<u64>,
    /// What recomputes need, where that counts.
    needs: Option<Needs>,
}

impl<'a> Job<'a> {
    /// With an instant in each of `parts` parts of the iteration.
    pub(super) fn new(
        residencies: &'a Residencies<'a>,
        latencies: &[Latency],
        link: &'a Link,
        Rules { budget, late, needs, ends, proving }: Rules,
        parts: u32,
    ) -> Self {
        let graph = residencies.graph;
        // With updates that may run later, what makes gradients for them may too.
        let elsewhere: Vec<bool> =
            if late { may_wait(graph) } else { graph.operators.iter().map(is_update).collect() };
        let times: Vec<u64> = latencies.iter().map(|l| l.time.0.max(1)).collect();
        let proving = proving.filter(|operator| !elsewhere[*operator as usize]);
        let looked_at = |parts| {
            let mut operators = highest(residencies, &times, &elsewhere, parts);
            if let Some(proving) = proving
                && let Err(at) = operators.binary_search(&proving)
            {
                operators.insert(at, proving);
            }
            operators
        };
        let total: u64 = times.iter().sum();
        let of = |at: u32| {
            let long = times[at as usize] >= total / u64::from(FINEST);
            let end = ends && (long || Some(at) == proving);
            [2 * at].into_iter().chain(end.then_some(2 * at + 1))
        };
        let instants: Vec<u32> = looked_at(parts).into_iter().flat_map(of).collect();
        let written = |operator: &crate::job::Operator| {
            let mut tensors: Vec<TensorId> = operator.writes().map(|o| o.tensor).collect();
            tensors.sort();
            tensors.dedup();
            tensors.into_iter().map(|t| residencies.lifetime(t).bytes).sum()
        };
        let written: Vec<u64> = graph.operators.iter().map(written).collect();
        let none = vec![false; elsewhere.len()];
        let needs = needs.then(|| {
            Needs::new(&needs::Job {
                link,
                residencies,
                times: &times,
                written: &written,
                late: if late { &elsewhere } else { &none },
                instants: &looked_at(FINEST),
            })
        });
        let late = if late { elsewhere } else { none };
        let room = |&instant: &u32| {
            let operator = &graph.operators[(instant / 2) as usize];
            let touched = operator.touches().into_iter();
            let touched: u64 = touched.map(|t| residencies.lifetime(t).bytes).sum();
            budget.0.saturating_sub(touched + operator.workspace.in_blocks().0)
        };
        let room = instants.iter().map(room).collect();
        Self { graph, link, residencies, late, times, instants, room, written, needs }
    }

    /// What a tensor that nothing generates may do at an instant whose operator does not use it.
    /// One that lies in one piece, since an operator that runs as a whole uses it, may not fit
    /// beside what the instant's operator needs. (What is generated stands for what it is made from
    /// too.)
    fn unused(&self, lifetime: &Lifetime, at: usize) -> Instant {
        let fits = lifetime.bytes <= self.room[at] || self.uses(lifetime).next().is_none();
        if fits { Instant::Counted } else { Instant::Away }
    }

    /// The number of instants, and of intervals.
    fn count(&self) -> usize {
        self.instants.len()
    }

    /// The interval before an operator: the one that ends with the first instant at it or after it,
    /// of this iteration or of the next one (then it is the number of instants).
    fn interval(&self, operator: u32) -> usize {
        self.instants.partition_point(|&at| at < 2 * operator)
    }

    /// The interval in which an operator runs: behind its start, if that is an instant.
    fn behind(&self, operator: u32) -> usize {
        self.instants.partition_point(|&at| at <= 2 * operator)
    }

    /// The bytes without a plan at each instant, but for those that may be away for nothing:
    /// tensors that nothing uses, gradients that may be made just before their updates, and what
    /// several updates use behind its last use by another operator.
    pub(super) fn standing(&self) -> Vec<u64> {
        let at = |&instant: &u32| self.residencies.load.at((instant | 1) as usize);
        let mut standing: Vec<u64> = self.instants.iter().map(at).collect();
        for lifetime in &self.residencies.lifetimes {
            let last = lifetime.uses.last().map(|slot| slot / 2);
            let free = match last {
                None if lifetime.long_lived => 0..self.count(),
                Some(last) if self.waits(lifetime) => {
                    let first = lifetime.uses.first().map_or(0, |slot| slot / 2);
                    self.interval(first)..self.interval(last)
                }
                Some(last) if !lifetime.long_lived && self.elsewhere(lifetime).nth(1).is_some() => {
                    let used = self.uses(lifetime).last().unwrap_or(last);
                    let until = self.interval(last);
                    self.instants.partition_point(|&at| at / 2 <= used).min(until)..until
                }
                _ => continue,
            };
            standing[free].iter_mut().for_each(|bytes| *bytes -= lifetime.bytes);
        }
        standing
    }

    /// The time of each interval: of the operators that don't run elsewhere.
    pub(super) fn lengths(&self) -> Vec<u64> {
        let mut lengths = vec![0; self.count()];
        for (at, (time, _)) in self.times.iter().zip(&self.late).enumerate().filter(|(_, o)| !o.1) {
            lengths[self.behind(id32(at)) % self.count()] += time;
        }
        lengths
    }

    /// The operators of a tensor's uses, without those that run elsewhere.
    fn uses<'s>(&'s self, lifetime: &'s Lifetime) -> impl Iterator<Item = u32> + 's {
        lifetime.uses.iter().map(|slot| slot / 2).filter(|&at| !self.late[at as usize])
    }

    /// Whether something makes a tensor, and all that works on it may run elsewhere.
    fn waits(&self, lifetime: &Lifetime) -> bool {
        !lifetime.long_lived && self.uses(lifetime).next().is_none()
    }

    /// Those that run elsewhere.
    fn elsewhere<'s>(&'s self, lifetime: &'s Lifetime) -> impl Iterator<Item = u32> + 's {
        lifetime.uses.iter().map(|slot| slot / 2).filter(|&at| self.late[at as usize])
    }

    /// What the operators in an interval do to a tensor. One whose start is the instant before it
    /// counts where it writes.
    fn event(&self, lifetime: &Lifetime, interval: usize, behind: Option<u32>) -> Event {
        let begins = interval.checked_sub(1).map(|before| self.instants[before]);
        let ends = self.instants.get(interval).copied().unwrap_or(u32::MAX);
        let event = |at: u32| {
            let writes = lifetime.writes.binary_search(&at).is_ok();
            let inside = begins.is_none_or(|begins| 2 * at > begins) && 2 * at < ends;
            match (inside, writes) {
                (true, false) => Event::Use,
                (true, true) => Event::Write,
                (false, true) if begins == Some(2 * at) => Event::Write,
                _ => Event::None,
            }
        };
        self.uses(lifetime).filter(|&at| Some(at) > behind).map(event).max().unwrap_or_default()
    }

    /// How many 256ths of a byte a tensor's copy takes for each byte of its memory, rounded down;
    /// more than all in 16ths.
    fn copied(&self, lifetime: &Lifetime, tensor: TensorId) -> u32 {
        let bytes = self.graph.tensor(tensor).bytes;
        let of = |direction| {
            let moved = work(self.link, direction, bytes) / 1_000_000_000;
            moved * 256 / u128::from(lifetime.bytes)
        };
        let parts = of(Direction::H2d).min(of(Direction::D2h));
        let parts = u32::try_from(parts).unwrap_or(u32::MAX).min(1 << 24);
        if parts < 256 { parts } else { parts / 16 * 16 }
    }

    /// The course of a tensor that nothing generates.
    fn round(&self, tensor: TensorId) -> Course {
        let lifetime = self.residencies.lifetime(tensor);
        let count = self.count();
        let mut events: Vec<Event> = (0..=count).map(|at| self.event(lifetime, at, None)).collect();
        // The iteration ends and begins within one interval.
        events[0] = events[0].max(events[count]);
        let held: Vec<bool> = (0..count)
            .map(|at| self.uses(lifetime).any(|operator| operator == self.instants[at] / 2))
            .collect();
        let step = |at: usize| {
            let instant = if held[at] { Instant::Held } else { self.unused(lifetime, at) };
            Step { at: id32(at), event: events[at], instant, price: NEVER }
        };
        let copied = self.copied(lifetime, tensor);
        Course { steps: (0..count).map(step).collect(), round: true, copied }
    }

    /// The course of a tensor that is generated, up to its last use; and `more` intervals from an
    /// update on that is its last use.
    fn life(&self, tensor: TensorId, until: u32, more: usize) -> Course {
        let lifetime = self.residencies.lifetime(tensor);
        let begins = lifetime.uses.first().map_or(0, |slot| slot / 2);
        let real = self.behind(begins);
        // What it is made from may be copied out in its place, earlier.
        let first = self.needs.as_ref().map_or(real, |of| self.behind(of.begins(begins, tensor)));
        let last = self.interval(until);
        let again = self.prices(tensor);
        let step = |interval: usize| {
            let operator = self.instants.get(interval).copied();
            let instant = match operator {
                _ if interval < real => Instant::Held,
                _ if interval >= last && interval + 1 == last + more.max(1) => Instant::Held,
                _ if interval >= last => Instant::Extra,
                Some(at) if self.uses(lifetime).any(|u| u == at / 2) => Instant::Held,
                _ => Instant::Counted,
            };
            let event = if interval <= last {
                self.event(lifetime, interval, Some(begins))
            } else {
                Event::None
            };
            let before = interval
                .checked_sub(1)
                .map_or(0, |i| self.instants.get(i).map_or(u32::MAX, |at| at.div_ceil(2)));
            Step { at: id32(interval % self.count()), event, instant, price: again(before) }
        };
        let copied = self.copied(lifetime, tensor);
        let steps = (first..last + more.max(1)).map(step).collect();
        Course { steps, round: false, copied }
    }

    /// What it costs to make a tensor again as it is before an operator: two digits, rounded down.
    fn prices(&self, tensor: TensorId) -> impl Fn(u32) -> u64 + '_ {
        let lifetime = self.residencies.lifetime(tensor);
        let replays = |&w: &u32| self.graph.operators[w as usize].replay != Replay::Never;
        move |before| {
            let writers = lifetime.writes.iter().take_while(|&&w| w < before);
            if !writers.clone().all(replays) {
                return NEVER;
            }
            let part = |&w: &u32| {
                let bytes = u128::from(self.written[w as usize].max(1));
                let needed = self.needs.as_ref().map_or(0, |needs| needs.time(w, tensor));
                u128::from(self.times[w as usize]) * 1_024_000 / bytes
                    + u128::from(needed) * 1_024_000 / u128::from(lifetime.bytes)
            };
            let price = u64::try_from(writers.map(part).sum::<u128>()).unwrap_or(NEVER >> 1);
            digits(price, 5)
        }
    }
}

/// Of each of `parts` parts of the iteration the operator with most bytes, but for those that run
/// elsewhere.
fn highest(
    residencies: &Residencies<'_>,
    times: &[u64],
    elsewhere: &[bool],
    parts: u32,
) -> Vec<u32> {
    let total: u64 = times.iter().sum();
    let (mut instants, mut ended, mut part) = (Vec::new(), 0u64, 0);
    let mut highest: Option<(u64, usize)> = None;
    for (at, time) in times.iter().enumerate() {
        ended += time;
        // An operator lies in the part in which it ends.
        let of = u64::from(parts) * (ended - 1) / total.max(1);
        if of > part {
            instants.extend(highest.take().map(|highest| id32(highest.1)));
            part = of;
        }
        let bytes = residencies.load.at(2 * at + 1);
        if !elsewhere[at] && highest.is_none_or(|highest| bytes > highest.0) {
            highest = Some((bytes, at));
        }
    }
    instants.extend(highest.map(|highest| id32(highest.1)));
    instants
}

/// Tensors with the same course.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) course: Course,
    /// Their bytes.
    pub(super) mib: f64,
    pub(super) tensors: Vec<TensorId>,
}

/// A tensor that one update touches and no other: its course, its bytes, and what the update does
/// to it; `None` where its life ends with the update.
type Touched = (Course, u64, Option<Event>);

/// Tensors and updates that are alike together.
#[derive(Debug, Default)]
pub(super) struct Alike {
    pub(super) groups: Vec<Group>,
    pub(super) units: Vec<Unit>,
    /// Updates whose tensors don't matter: the first and the last interval in which they may run,
    /// and their nanoseconds.
    pub(super) updates: Vec<(u32, u32, f64)>,
}

impl Job<'_> {
    /// The last interval, counted from the one of an update, in which it may run: before what it
    /// writes is used in the next iteration.
    fn latest(&self, update: usize) -> usize {
        let (count, operators) = (self.count(), self.times.len());
        let early = self.interval(id32(update)) % count;
        let away = |at: u32| {
            let at = at as usize;
            if at > update { at - update } else { at + operators - update }
        };
        let writes = self.graph.operators[update].writes();
        let next = writes
            .flat_map(|o| self.uses(self.residencies.lifetime(o.tensor)).map(away))
            .min()
            .map(|away| self.interval(id32((update + away) % operators)) % count);
        match next {
            Some(next) if next != early => (next + count - early) % count,
            _ => count - 1,
        }
        .min(count - self.interval(id32(update)))
    }

    /// Everything that a relaxation knows of the job's tensors.
    pub(super) fn alike(&self) -> Alike {
        let mut touched: Vec<(u32, Touched)> = Vec::new();
        let mut others: Vec<(Course, TensorId)> = Vec::new();
        for (index, lifetime) in self.residencies.lifetimes.iter().enumerate() {
            let tensor = TensorId::from_index(index);
            let Some(last) = lifetime.uses.last().map(|slot| slot / 2) else { continue };
            if lifetime.bytes == 0 || self.waits(lifetime) {
                continue;
            }
            let mut updates = self.elsewhere(lifetime);
            // With several updates it is as if none touched it.
            let update = updates.next().filter(|_| updates.next().is_none());
            let course = match update {
                Some(update) if lifetime.long_lived => {
                    let writes = lifetime.writes.binary_search(&update).is_ok();
                    let event = if writes { Event::Write } else { Event::Use };
                    touched.push((update, (self.round(tensor), lifetime.bytes, Some(event))));
                    continue;
                }
                Some(update) if update == last => {
                    let course = self.life(tensor, update, self.latest(update as usize) + 1);
                    touched.push((update, (course, lifetime.bytes, None)));
                    continue;
                }
                _ if lifetime.long_lived => self.round(tensor),
                _ => self.life(tensor, self.uses(lifetime).last().unwrap_or(last), 0),
            };
            if course.steps.iter().any(|step| step.instant != Instant::Held) {
                others.push((course, tensor));
            }
        }
        touched.sort();
        others.sort();
        let (units, updates) = self.units(touched);
        Alike { groups: self.groups(others), units, updates }
    }

    /// Tensors, sorted by course, together.
    fn groups(&self, tensors: Vec<(Course, TensorId)>) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        for (course, tensor) in tensors {
            let mib = self.residencies.lifetime(tensor).bytes as f64 / MIB;
            match groups.last_mut().filter(|group| group.course == course) {
                Some(group) => {
                    group.mib += mib;
                    group.tensors.push(tensor);
                }
                None => groups.push(Group { course, mib, tensors: vec![tensor] }),
            }
        }
        groups
    }

    /// Updates that are alike, with what they touch, sorted by update; and those parts of their
    /// time that are not alike.
    fn units(&self, touched: Vec<(u32, Touched)>) -> (Vec<Unit>, Vec<(u32, u32, f64)>) {
        let count = self.count();
        let mut touched = touched.into_iter().peekable();
        let mut alike: Vec<(u32, usize, u64, Vec<Touched>, u64)> = Vec::new();
        let mut updates = Vec::new();
        for update in (0..self.late.len()).filter(|&at| self.late[at]) {
            let (early, latest) = (self.interval(id32(update)) % count, self.latest(update));
            let mut of = Vec::new();
            while let Some((_, one)) = touched.next_if(|touched| touched.0 as usize == update) {
                of.push(one);
            }
            // Of alike updates one is a multiple of the other.
            let parts = of.iter().map(|touched| touched.1).fold(0, gcd);
            let time = self.times[update];
            let each = time.checked_div(parts).map_or(0, |each| digits(each, 4));
            let until = id32((early + latest) % count);
            updates.push((id32(early), until, (time - each * parts) as f64));
            if parts > 0 {
                of.iter_mut().for_each(|touched| touched.1 /= parts);
                alike.push((id32(early), latest + 1, each, of, parts));
            }
        }
        alike.sort();
        let mut units: Vec<Unit> = Vec::new();
        let mut before = None;
        for (early, width, each, of, parts) in alike {
            let key = (early, width, each, of);
            if before.as_ref() != Some(&key) {
                let member = |(course, _, event): &Touched| Member {
                    course: course.clone(),
                    mib: 0.0,
                    event: *event,
                };
                let members = key.3.iter().map(member).collect();
                units.push(Unit { early: early as usize, width, time: 0.0, members });
            }
            if let Some(unit) = units.last_mut() {
                unit.time += (each * parts) as f64;
                for (member, touched) in unit.members.iter_mut().zip(&key.3) {
                    member.mib += (touched.1 * parts) as f64 / MIB;
                }
            }
            before = Some(key);
        }
        (units, updates)
    }
}

/// The first binary digits of a number, rounded down.
const fn digits(number: u64, most: u32) -> u64 {
    let cut = (u64::BITS - number.leading_zeros()).saturating_sub(most);
    number >> cut << cut
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
