//! How scripts that share one GPU take turns in lanes.
//!
//! A script keeps its persistent bytes and needs its ephemeral ones only within an iteration. The
//! [`scheduler`](super::scheduler) admits scripts, gives them lanes and says whose iteration is
//! next; here that becomes a *token*, which a script holds while it runs. Before a script gets it,
//! scripts that wait give free memory back as far as its bytes are not there otherwise.
//!
//! A script whose needs are not known runs its first iterations alone: all others wait, have given
//! back what they can, and the rest of the budget is its own. If it then doesn't fit beside them it
//! goes on alone to its end, since that is where it is known to fit.
//!
//! Nothing here waits or asks for the time: a server passes on what real scripts say, and
//! [`replay`](super::replay) what simulated ones would.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::events::{Event, What};
use super::memory::Need;
use super::policy::{Policy, Style};
use super::scheduler::{Needs, Order, Scheduler};
use crate::units::{Bytes, Nanos, saturated};

/// The longest name of a script that others are shown, in characters.
const LONGEST_NAME: usize = 100;
/// More bytes are no need.
pub(super) const LARGEST: Bytes = Bytes(1 << 50);
/// A script may hold the token for this many times its longest iteration.
const TIMES: u64 = 10;
/// It may hold it at least this long: a checkpoint or an evaluation lies between two iterations.
pub(super) const LEAST: Nanos = Nanos(10_000_000_000);
/// The same while nothing is known of its iterations.
pub(super) const FIRST: Nanos = Nanos(600_000_000_000);
/// How long a script that waits may take to give memory back.
pub(super) const GIVING: Nanos = Nanos(5_000_000_000);

/// What a script asks for when it comes.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct Asked {
    /// Its persistent and ephemeral bytes, where they are known.
    #[serde(default)]
    pub needs: Option<(u64, u64)>,
    /// The time of all its iterations, where that is known.
    #[serde(default)]
    pub work_ns: Option<u64>,
}

/// What a script's first iterations showed.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Measured {
    /// What it keeps between iterations.
    pub persistent_bytes: u64,
    /// What it needs besides within one.
    pub ephemeral_bytes: u64,
}

/// An iteration has ended.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Ended {
    /// What the script's allocator has reserved.
    pub holds_bytes: u64,
    /// The most that it had reserved since it was measured.
    pub peak_bytes: u64,
    /// Whether it waits for the token; it goes on otherwise.
    pub waits: bool,
}

/// What the server says to a script.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Say {
    /// It has the token.
    Go {
        /// Until it is asked back; otherwise for one iteration.
        kept: bool,
        /// What it may reserve while nothing is known of it.
        #[serde(skip_serializing_if = "Option::is_none")]
        most_bytes: Option<Bytes>,
    },
    /// It waits at the end of its iteration.
    Back,
    /// It gives free memory back, and says what it holds then.
    GiveBack,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It waits at the end of an iteration, or before its first one.
    Waits,
    /// It is its turn, once there is room.
    Next,
    /// It has the token.
    Runs,
    /// It had the token for too long, and has not come back.
    Late,
}

struct Member {
    name: String,
    /// Unknown until it was measured.
    needs: Option<Need>,
    work: Option<Nanos>,
    /// What its allocator had reserved when it last said so.
    holds: Bytes,
    state: State,
    /// When its present iteration began.
    since: Nanos,
    /// Whether it goes on until it is asked back, and whether it was asked.
    kept: bool,
    asked_back: bool,
    /// Since when it has been asked to give memory back.
    gives: Option<Nanos>,
    /// Whether it has given back what it can since it ran last.
    gave: bool,
    longest: Nanos,
    /// Whether the log says that it has the token.
    shown: bool,
    /// Whether it was said that it needs more than it was admitted with.
    grew: bool,
    /// Whether it fits only alone, so that the scheduler does not know it.
    outside: bool,
}

impl Member {
    fn most(&self) -> Bytes {
        self.needs.map_or(self.holds, |(persistent, ephemeral)| persistent + ephemeral)
    }

    /// The bytes that count for it: within an iteration it may need all of its own.
    fn counts(&self) -> Bytes {
        if self.state == State::Waits { self.holds } else { self.most().max(self.holds) }
    }

    /// What it could give back now.
    fn spare(&self) -> Bytes {
        let kept = self.needs.map_or(Bytes::ZERO, |needs| needs.0);
        let may = self.state == State::Waits && !self.gave && self.gives.is_none();
        if may { self.holds.saturating_sub(kept) } else { Bytes::ZERO }
    }
}

/// What is to be done now.
#[derive(Default)]
pub struct Next {
    /// What the server says to which script.
    pub say: Vec<(u64, Say)>,
    /// What happened.
    pub log: Vec<Event>,
    /// Lines for the user.
    pub notes: Vec<String>,
}

/// The scripts of a GPU, by the number of their connection.
pub struct Tokens {
    budget: Bytes,
    style: Style,
    pub(super) scheduler: Scheduler,
    members: BTreeMap<u64, Member>,
    /// The script that runs alone, or shall: it is measured, or fits only so.
    alone: Option<u64>,
    /// How long a token may be held, if the user says so.
    limit: Option<Nanos>,
    next: Next,
}

impl Tokens {
    /// No script yet.
    pub fn new(budget: Bytes, policy: &Policy, limit: Option<Nanos>) -> Self {
        let mut made = Self {
            budget,
            style: policy.style,
            scheduler: Scheduler::of_scripts(policy, budget),
            members: BTreeMap::new(),
            alone: None,
            limit,
            next: Next::default(),
        };
        made.log(Nanos::ZERO, What::began(budget, policy.name));
        made
    }

    /// How many scripts there are.
    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// The scripts that are there, each by its connection and name, with the bytes that count for
    /// it.
    pub fn holding(&self) -> impl Iterator<Item = (u64, &str, Bytes)> {
        self.members.iter().map(|(&id, member)| (id, &*member.name, member.counts()))
    }

    /// What is to be done since this was last asked.
    pub fn take(&mut self) -> Next {
        std::mem::take(&mut self.next)
    }

    /// A script has come.
    ///
    /// # Errors
    /// Why it can't be in.
    pub fn came(&mut self, id: u64, name: &str, asked: Asked, now: Nanos) -> Result<(), String> {
        let name: String = name.chars().take(LONGEST_NAME).collect();
        if self.members.contains_key(&id) {
            return Err(format!("{name} has joined already"));
        }
        let needs = asked.needs.map(|(kept, within)| (Bytes(kept), Bytes(within)));
        if let Some((kept, within)) = needs
            && (kept > LARGEST || within > LARGEST || kept + within > self.budget)
        {
            return Err(format!("{name} needs {kept} + {within}, of {} here", self.budget));
        }
        let work = asked.work_ns.map(Nanos);
        if let Some(needs) = needs {
            self.scheduler.submit_script(job(id), bytes(needs), work, false, now);
        }
        let member = Member {
            name: name.clone(),
            needs,
            work,
            holds: Bytes::ZERO,
            state: State::Waits,
            since: now,
            kept: false,
            asked_back: false,
            gives: None,
            gave: false,
            longest: Nanos::ZERO,
            shown: false,
            grew: false,
            outside: false,
        };
        self.members.insert(id, member);
        self.log(now, What::Came { script: id, name: name.clone(), work_ns: work });
        self.note(format!("neap: {name} has come"));
        self.log_needs(id, now);
        self.advance(now);
        Ok(())
    }

    /// A script's first iterations have shown what it needs; it waits.
    ///
    /// # Errors
    /// Why that can't be true.
    pub fn measured(&mut self, id: u64, found: Measured, now: Nanos) -> Result<(), String> {
        let needs = (Bytes(found.persistent_bytes), Bytes(found.ephemeral_bytes));
        let alone = self.alone == Some(id);
        let Some(member) = self.members.get_mut(&id) else { return Err(lies("is not there")) };
        let was_late = member.state == State::Late;
        if !was_late && member.state != State::Runs || member.needs.is_some() {
            return Err(lies("was measured already, or has not run"));
        }
        if needs.0 > LARGEST || needs.1 > LARGEST {
            return Err(lies("needs more than any device has"));
        }
        let took = now.saturating_sub(member.since);
        member.needs = Some(needs);
        (member.holds, member.state, member.since) = (needs.0, State::Waits, now);
        // The first one, which loads and makes states, is not like those that follow.
        (member.longest, member.gave) = (took, true);
        let (name, work) = (member.name.clone(), member.work);
        let (kept, within) = needs;
        self.note(format!(
            "neap: {name} keeps {kept} between iterations and needs {within} within one (--needs \
             {}+{} says so beforehand)",
            kept.0, within.0
        ));
        self.log(now, What::Iteration { script: id, took_ns: took, holds_bytes: kept });
        self.log_needs(id, now);
        if alone {
            self.alone = None;
        }
        self.enters(id, needs, work, now);
        self.scheduler.went_on(job(id), took);
        self.advance(now);
        Ok(())
    }

    /// An iteration of a script has ended.
    ///
    /// # Errors
    /// Why that can't be true.
    pub fn ended(&mut self, id: u64, ended: Ended, now: Nanos) -> Result<(), String> {
        let Some(member) = self.members.get_mut(&id) else { return Err(lies("is not there")) };
        if !matches!(member.state, State::Runs | State::Late) {
            return Err(lies("has ended an iteration without the token"));
        }
        if !ended.waits && !member.kept && member.needs.is_some() {
            return Err(lies("went on without the token"));
        }
        let (holds, peak) = (Bytes(ended.holds_bytes), Bytes(ended.peak_bytes));
        if holds > LARGEST || peak > LARGEST {
            return Err(lies("holds more than any device has"));
        }
        let took = now.saturating_sub(member.since);
        let was_late = member.state == State::Late;
        member.longest = if was_late { member.longest } else { member.longest.max(took) };
        (member.since, member.holds, member.gave) = (now, holds, false);
        self.log(now, What::Iteration { script: id, took_ns: took, holds_bytes: holds });
        self.grows(id, peak, now);
        match ended.waits {
            true => {
                self.member(id, |member| member.state = State::Waits);
                self.scheduler.ran(job(id), took);
            }
            false => self.scheduler.went_on(job(id), took),
        }
        let known = self.members.get(&id).and_then(|m| Some((m.needs?, m.work)));
        if let Some((needs, work)) = known.filter(|_| was_late && ended.waits) {
            self.enters(id, needs, work, now);
        }
        self.advance(now);
        Ok(())
    }

    /// A script has given back what it can.
    pub fn gave_back(&mut self, id: u64, holds: Bytes, now: Nanos) {
        self.member(id, |member| {
            (member.gives, member.gave) = (None, true);
            member.holds = holds.min(LARGEST);
        });
        self.log(now, What::GaveBack { script: id, holds_bytes: holds.min(LARGEST) });
        self.advance(now);
    }

    /// A script has gone.
    pub fn left(&mut self, id: u64, now: Nanos) {
        let Some(member) = self.members.remove(&id) else { return };
        self.scheduler.ended(job(id));
        if self.alone == Some(id) {
            self.alone = None;
        }
        self.log(now, What::Left { script: id });
        self.note(format!("neap: {} has gone", member.name));
        self.advance(now);
    }

    /// Time has passed: takes tokens that were held for too long.
    pub fn passed(&mut self, now: Nanos) {
        for member in self.members.values_mut() {
            if member.gives.is_some_and(|since| now.saturating_sub(since) > GIVING) {
                (member.gives, member.gave) = (None, true);
            }
        }
        let waits = |m: &Member| matches!(m.state, State::Waits | State::Next);
        if self.members.values().any(waits) {
            let held =
                |m: &Member| m.state == State::Runs && now.saturating_sub(m.since) > self.limit(m);
            let late = self.members.iter().filter(|(_, m)| held(m)).map(|(id, _)| *id);
            for id in late.collect::<Vec<_>>() {
                self.is_late(id, now);
            }
        }
        self.advance(now);
    }

    /// How long a script may hold the token.
    fn limit(&self, member: &Member) -> Nanos {
        let times = |longest: Nanos| Nanos(longest.0.saturating_mul(TIMES)).max(LEAST);
        let known = Some(member.longest).filter(|longest| *longest > Nanos::ZERO);
        self.limit.unwrap_or_else(|| known.map_or(FIRST, times))
    }

    /// A script has held the token for too long: its lane is free. What it holds counts, as far as
    /// there is room for that.
    fn is_late(&mut self, id: u64, now: Nanos) {
        let Some(member) = self.members.get_mut(&id) else { return };
        member.state = State::Late;
        let why = format!(
            "{} has held the token for {}: the others go on without it",
            member.name,
            now.saturating_sub(member.since)
        );
        if member.kept && !member.asked_back {
            member.asked_back = true;
            self.next.say.push((id, Say::Back));
        }
        let (kept, most) = (member.needs.map_or(Bytes::ZERO, |needs| needs.0), member.most());
        self.scheduler.ended(job(id));
        let lanes = &mut self.scheduler.memory.lanes;
        if !lanes.hold(job(id), most.max(kept)) {
            lanes.hold(job(id), kept.min(lanes.free()));
        }
        if self.alone == Some(id) {
            self.alone = None;
        }
        self.hides(id, now, Some(why.clone()));
        self.note(format!("neap: {why}"));
    }

    /// A script that has run waits at the end of an iteration: the scheduler learns of it.
    fn enters(&mut self, id: u64, needs: Need, work: Option<Nanos>, now: Nanos) {
        // What was counted for it while it was late.
        self.scheduler.memory.lanes.leave(job(id));
        let is_in = self.scheduler.submit_script(job(id), bytes(needs), work, true, now);
        let mut name = String::new();
        self.member(id, |member| {
            member.outside = !is_in;
            name.clone_from(&member.name);
        });
        if is_in {
            self.log_lane(id, now);
        } else {
            self.note(format!(
                "neap: {name} does not fit beside the others: it goes on alone to its end, and \
                 they wait"
            ));
        }
    }

    /// A script has needed more than was known of it.
    fn grows(&mut self, id: u64, peak: Bytes, now: Nanos) {
        let Some(member) = self.members.get_mut(&id) else { return };
        let Some((kept, within)) = member.needs else { return };
        if peak <= kept + within {
            return;
        }
        let needs = (kept, peak.saturating_sub(kept));
        let fits = self.scheduler.grow(job(id), bytes(needs));
        member.needs = Some(needs);
        let first = !std::mem::replace(&mut member.grew, true);
        if first {
            let (name, more) = (member.name.clone(), peak - (kept + within));
            let room = if fits { "there is room" } else { "there is no room beside the others" };
            self.note(format!("neap: {name} needs {more} more than was measured: {room}"));
        }
        self.log_needs(id, now);
    }

    /// The script that is measured next: under a policy of one at a time when all that came before
    /// have gone, else at once.
    fn to_measure(&self) -> Option<u64> {
        let (&id, member) = match self.style {
            Style::One => self.members.iter().find(|(_, m)| m.state != State::Late)?,
            _ => self.members.iter().find(|(_, m)| m.needs.is_none() && m.state == State::Waits)?,
        };
        (member.needs.is_none() && member.state == State::Waits).then_some(id)
    }

    /// Passes tokens on as far as that is possible now.
    fn advance(&mut self, now: Nanos) {
        let outside = |(_, m): &(&u64, &Member)| m.outside && m.state == State::Waits;
        let stays = || self.members.iter().find(outside).map(|(id, _)| *id);
        self.alone = self.alone.or_else(stays).or_else(|| self.to_measure());
        if self.alone.is_none() {
            for (job, order) in self.scheduler.decide(now) {
                let id = u64::from(job);
                match order {
                    Order::Enter(..) => self.log_lane(id, now),
                    Order::Go => self.member(id, |member| member.state = State::Next),
                    // The memory of scripts does not move, and they end by themselves.
                    Order::Leave | Order::Stop => {}
                }
            }
        }
        let next: Vec<u64> = self.in_state(State::Next).collect();
        next.into_iter().for_each(|id| self.grant(id, now));
        if let Some(id) = self.alone
            && self.members.get(&id).is_some_and(|member| member.state == State::Waits)
            && self.in_state(State::Next).next().is_none()
            && self.in_state(State::Runs).next().is_none()
        {
            self.grant(id, now);
        }
        self.ask_back();
        let hidden: Vec<u64> = self.in_state(State::Waits).collect();
        hidden.into_iter().for_each(|id| self.hides(id, now, None));
    }

    fn in_state(&self, state: State) -> impl Iterator<Item = u64> {
        self.members.iter().filter(move |(_, member)| member.state == state).map(|(id, _)| *id)
    }

    /// Asks for tokens that are kept until then, where another script may be next.
    fn ask_back(&mut self) {
        let (alone, several) = (self.alone, self.members.len() > 1);
        let whole = self.runs_whole();
        for (&id, member) in &mut self.members {
            let wanted = if alone.is_some() { alone != Some(id) } else { several && !whole };
            if wanted && member.state == State::Runs && member.kept && !member.asked_back {
                member.asked_back = true;
                self.next.say.push((id, Say::Back));
            }
        }
    }

    /// Whether a script that runs goes on to its end, though others come.
    fn runs_whole(&self) -> bool {
        matches!(self.style, Style::One | Style::All)
    }

    /// Gives the token to a script, once its bytes are there.
    fn grant(&mut self, id: u64, now: Nanos) {
        let Some(member) = self.members.get(&id) else { return };
        if self.members.values().any(|member| member.gives.is_some()) {
            return;
        }
        let alone = self.alone == Some(id);
        let mine = if alone && member.needs.is_none() { self.budget } else { member.most() };
        let others = || self.members.iter().filter(|(other, _)| **other != id);
        let counted = others().map(|(_, member)| u128::from(member.counts().0)).sum::<u128>();
        let total = u128::from(mine.max(member.holds).0) + counted;
        let mut missing = saturated(total.saturating_sub(u128::from(self.budget.0)));
        let mut giving: Vec<(Bytes, u64)> =
            others().map(|(&id, m)| (m.spare(), id)).filter(|one| one.0 > Bytes::ZERO).collect();
        giving.sort_unstable_by(|a, b| b.cmp(a));
        let asks = missing > 0 && !giving.is_empty();
        for (spare, other) in giving {
            if missing == 0 {
                break;
            }
            missing = missing.saturating_sub(spare.0);
            self.member(other, |member| member.gives = Some(now));
            self.next.say.push((other, Say::GiveBack));
        }
        if asks {
            return;
        }
        let rest = Bytes(saturated(u128::from(self.budget.0).saturating_sub(counted)));
        let kept = alone || self.runs_whole() || self.members.len() == 1;
        let Some(member) = self.members.get_mut(&id) else { return };
        let most_bytes = member.needs.is_none().then_some(rest.max(Bytes(1)));
        (member.state, member.since) = (State::Runs, now);
        (member.kept, member.asked_back, member.gave) = (kept, false, false);
        let shown = std::mem::replace(&mut member.shown, true);
        self.next.say.push((id, Say::Go { kept, most_bytes }));
        if !shown {
            self.log(now, What::Token { script: id });
        }
    }

    /// The log says that a script has the token no more.
    fn hides(&mut self, id: u64, now: Nanos, why: Option<String>) {
        let mut shown = false;
        self.member(id, |member| shown = std::mem::take(&mut member.shown));
        if shown {
            self.log(now, What::Passed { script: id, why });
        }
    }

    fn member(&mut self, id: u64, change: impl FnOnce(&mut Member)) {
        if let Some(member) = self.members.get_mut(&id) {
            change(member);
        }
    }

    fn log(&mut self, at_ns: Nanos, what: What) {
        self.next.log.push(Event { at_ns, what });
    }

    fn log_needs(&mut self, id: u64, now: Nanos) {
        let needs = self.members.get(&id).and_then(|member| member.needs);
        let Some((persistent_bytes, ephemeral_bytes)) = needs else { return };
        self.log(now, What::Needs { script: id, persistent_bytes, ephemeral_bytes });
    }

    fn log_lane(&mut self, id: u64, now: Nanos) {
        if let Some(lane) = self.scheduler.lane(job(id)) {
            self.log(now, What::Admitted { script: id, lane });
        }
    }

    fn note(&mut self, line: String) {
        self.next.notes.push(line);
    }
}

/// The scheduler's number of a script. Connections are counted from 1, and no server has 2^32.
fn job(id: u64) -> u32 {
    u32::try_from(id).unwrap_or(u32::MAX)
}

fn bytes((persistent, ephemeral): Need) -> Needs {
    Needs { persistent, ephemeral, ..Needs::default() }
}

fn lies(what: &str) -> String {
    format!("what it says can't be true: it {what}")
}
