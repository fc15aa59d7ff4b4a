//! How scripts that share one GPU divide its memory.
//!
//! All scripts whose iterations are known are planned together ([`together::make`]), by
//! swapping alone. A script's share is its part of that plan's arena, with the bytes that are left
//! over divided in proportion. The script itself fills its share: only it knows what PyTorch can
//! carry out, and what can be computed again. A script that runs by a plan made before has the
//! share that it was made for.
//!
//! Nothing is promised twice: a script that has to give bytes up holds them until it says that it
//! has, and only then another one gets them.

use std::collections::BTreeMap;
use std::sync::Arc;

use neap::contract::Latency;
use neap::device::{Profile, latency};
use neap::job::Graph;
use neap::job::json::sha256;
use neap::job::liveness::Liveness;
use neap::plan::neap::Options;
use neap::plan::together::{self, Job, Jobs, Memo};
use neap::plan::{Method, PlanError, Planned, Share};
use neap::report::plain;
use neap::units::Bytes;
use serde::{Deserialize, Serialize};

use crate::output::note;

/// What a script needs.
pub enum Need {
    /// As many bytes as its iteration is worth.
    Iteration(Arc<Iteration>),
    /// These bytes, because its plan was made for them.
    Fixed(Bytes),
}

/// Limits on a script's swaps in the plan of all, in thousandths: the share of its tensors that may
/// be swapped, and the part of all scripts' swaps that may be its own.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(from = "(u32, u32)")]
pub struct Limits(Share, Share);

impl From<(u32, u32)> for Limits {
    fn from((share, part): (u32, u32)) -> Self {
        Self(Share::of_thousandths(share), Share::of_thousandths(part))
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self(Share::ALL, Share::ALL)
    }
}

/// An iteration, as a script that joins describes it.
pub struct Iteration {
    limits: Limits,
    graph: Graph,
    hash: String,
    latencies: Vec<Latency>,
    /// The peak without a plan.
    peak: u64,
}

impl Need {
    /// The need of a script with this iteration.
    pub fn new(graph: Graph, device: &Profile, limits: Limits) -> Self {
        let latencies = latency::latencies(&graph, device, None);
        let (hash, peak) = (sha256(&graph), Liveness::new(&graph).peak.0.max(1));
        Self::Iteration(Arc::new(Iteration { limits, graph, hash, latencies, peak }))
    }
}

/// What a script is sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Offer {
    /// What its allocator may reserve.
    pub share_bytes: Bytes,
    /// How many scripts share the GPU.
    pub scripts: usize,
    /// The part of the link to plan for, in thousandths.
    pub link_per_mille: u64,
    /// Why shares have changed.
    pub why: String,
}

struct Member {
    name: String,
    need: Need,
    /// What it may have reserved, by the offers that it got and took.
    holds: Bytes,
    /// What it shall have.
    target: Bytes,
    /// The share of the last offer that it was sent.
    sent: Option<Bytes>,
}

/// The scripts that share a GPU, by the number of their connection.
pub struct Shares {
    budget: Bytes,
    device: Arc<Profile>,
    members: BTreeMap<u64, Member>,
    memo: Arc<Memo>,
    why: String,
    /// The number of the last change of who shares.
    change: u64,
    /// The number of the last change of the scripts whose share is not fixed.
    iterations_changed: u64,
    /// The change by whose plan the budget was divided last.
    divided: u64,
}

/// Offers to scripts.
pub type Offers = Vec<(u64, Offer)>;

/// What follows a change of who shares: offers, and perhaps a plan of all, which may take long;
/// [`Shares::planned`] takes it.
pub struct Next {
    pub offers: Offers,
    pub plan: Option<Planning>,
}

/// Everything that a plan of all scripts needs.
pub struct Planning {
    /// The change that it is for.
    pub change: u64,
    iterations: Vec<Arc<Iteration>>,
    device: Arc<Profile>,
    memo: Arc<Memo>,
    free: Bytes,
}

impl Planning {
    /// The arena of each script in the plan of all, in bytes.
    ///
    /// # Errors
    /// Why there is none.
    pub fn make(&self) -> Result<Vec<u64>, String> {
        let method = Method::Neap(Options { recompute: false, ..Options::default() });
        let jobs = self.iterations.iter().map(|one| {
            let Limits(share, swap_limit) = one.limits;
            Job {
                graph: &one.graph,
                file: (String::new(), one.hash.clone()),
                latencies: &one.latencies,
                method: method.limited(share).unwrap_or_else(|| method.clone()),
                priority: share.priority(),
                swap_limit,
            }
        });
        let asked = Jobs {
            jobs: jobs.collect(),
            device: &self.device,
            budget: self.free,
            recorded_options: BTreeMap::new(),
        };
        match together::make(&asked, &self.memo) {
            Ok(made) => {
                let arena = |part: &Arc<Planned>| part.plan.figures.arena_bytes.0.max(1);
                Ok(made.parts.iter().map(arena).collect())
            }
            Err(PlanError::Infeasible(no)) => Err(format!(
                "by swapping alone the scripts need {} together, more than {}",
                no.lowest, self.free
            )),
            Err(defect) => Err(defect.to_string()),
        }
    }
}

/// The longest name of a script that others are shown, in characters.
const LONGEST_NAME: usize = 100;

impl Shares {
    /// No script yet.
    pub fn new(budget: Bytes, device: Arc<Profile>) -> Self {
        Self {
            budget,
            device,
            members: BTreeMap::new(),
            memo: Arc::default(),
            why: String::new(),
            change: 0,
            iterations_changed: 0,
            divided: 0,
        }
    }

    /// How many scripts there are.
    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// The scripts that are there, each by its connection and name, with the bytes that it holds.
    pub fn holding(&self) -> impl Iterator<Item = (u64, &str, Bytes)> {
        self.members.iter().map(|(&id, member)| (id, &*member.name, member.holds))
    }

    /// A script has come.
    ///
    /// # Errors
    /// Why it gets no share: all that is promised to plans made before stays within the budget.
    pub fn join(&mut self, id: u64, name: &str, need: Need) -> Result<Next, String> {
        let name: String = plain(name).chars().take(LONGEST_NAME).collect();
        if self.members.contains_key(&id) {
            return Err(format!("{name} has joined already"));
        }
        if let Need::Fixed(bytes) = need {
            let left = self.free();
            if bytes == Bytes::ZERO || bytes > left {
                return Err(format!(
                    "the plan of {name} is for {bytes}, and plans made before can have {left} of \
                     the {} here",
                    self.budget
                ));
            }
        }
        self.why = format!("{name} has come");
        let is_fixed = matches!(need, Need::Fixed(_));
        let mut member = Member { name, need, holds: Bytes::ZERO, target: Bytes::ZERO, sent: None };
        // Its plan was made before: it waits for no plan of all.
        member.target = fixed(&member);
        self.members.insert(id, member);
        Ok(self.changed(is_fixed))
    }

    /// A script keeps to an offer.
    pub fn took(&mut self, id: u64, bytes: Bytes) -> Offers {
        if let Some(member) = self.members.get_mut(&id).filter(|m| m.sent == Some(bytes)) {
            member.holds = bytes;
        }
        self.offers()
    }

    /// A script has gone.
    pub fn left(&mut self, id: u64) -> Next {
        let Some(member) = self.members.remove(&id) else {
            return Next { offers: Vec::new(), plan: None };
        };
        self.why = format!("{} has gone", member.name);
        self.changed(matches!(member.need, Need::Fixed(_)))
    }

    /// The plan of all for a change, or why there is none. One that came too late changes nothing:
    /// other scripts share by now, or a newer plan was there before.
    pub fn planned(&mut self, change: u64, arenas: Result<Vec<u64>, String>) -> Offers {
        if change < self.iterations_changed || change <= self.divided {
            return Vec::new();
        }
        self.divided = change;
        match arenas {
            Ok(arenas) => self.divide(&arenas),
            Err(why) => {
                note(&format!("neap: {why}; divided by the unplanned peaks"));
                self.divide(&self.peaks());
            }
        }
        self.offers()
    }

    /// One has come or gone.
    fn changed(&mut self, is_fixed: bool) -> Next {
        // Scripts that come and go more often than a plan of all takes would leave the others
        // without a share.
        let waits = self.divided < self.change;
        self.change += 1;
        if !is_fixed {
            self.iterations_changed = self.change;
        }
        let iterations: Vec<_> = self.iterations().map(|(_, one)| Arc::clone(one)).collect();
        let many = iterations.len() > 1;
        let plan = many.then(|| Planning {
            change: self.change,
            iterations,
            device: Arc::clone(&self.device),
            memo: Arc::clone(&self.memo),
            free: self.free(),
        });
        let targets = self.targets();
        if many && is_fixed && !targets.contains(&0) {
            // What it takes is taken from the others at once, in proportion.
            self.divide(&targets);
        } else if !many || waits {
            self.divide(&self.peaks());
        }
        if !many {
            self.divided = self.change;
        }
        Next { offers: self.offers(), plan }
    }

    /// The scripts whose share is not fixed.
    fn iterations(&self) -> impl Iterator<Item = (u64, &Arc<Iteration>)> {
        self.members.iter().filter_map(|(&id, member)| match &member.need {
            Need::Iteration(one) => Some((id, one)),
            Need::Fixed(_) => None,
        })
    }

    fn peaks(&self) -> Vec<u64> {
        self.iterations().map(|(_, one)| one.peak).collect()
    }

    /// What the scripts whose share is not fixed have so far.
    fn targets(&self) -> Vec<u64> {
        self.iterations().map(|(id, _)| self.members[&id].target.0).collect()
    }

    /// What plans that were made before leave of the budget.
    fn free(&self) -> Bytes {
        let fixed = self.members.values().map(fixed);
        fixed.fold(self.budget, |left, bytes| Bytes(left.0.saturating_sub(bytes.0)))
    }

    /// Who is sent what: bytes go to a script only when all others have let go of them.
    fn offers(&mut self) -> Offers {
        let scripts = self.members.len();
        let mut all = Vec::new();
        // What scripts give up comes first; it makes no room before they say so.
        let mut held: u128 = self.members.values().map(|m| u128::from(m.holds.0)).sum();
        for (&id, member) in &mut self.members {
            // A script that has come has no target before the budget is divided.
            if member.sent == Some(member.target) || member.target == Bytes::ZERO {
                continue;
            }
            let fixed = matches!(member.need, Need::Fixed(_));
            if member.target > member.holds {
                let then = held - u128::from(member.holds.0) + u128::from(member.target.0);
                // A plan that was made before has to run, whether there is room or not.
                if then > u128::from(self.budget.0) && !fixed {
                    continue;
                }
                (held, member.holds) = (then, member.target);
            }
            member.sent = Some(member.target);
            let offer = Offer {
                share_bytes: member.target,
                scripts,
                link_per_mille: (1000 / scripts.max(1) as u64).max(1),
                why: self.why.clone(),
            };
            all.push((id, offer));
        }
        all
    }

    /// Divides what is free in proportion to these weights of the scripts that share it.
    fn divide(&mut self, weights: &[u64]) {
        let free = self.free();
        let weights: BTreeMap<u64, u64> =
            self.iterations().map(|(id, _)| id).zip(weights.iter().copied()).collect();
        let all = weights.values().map(|w| u128::from(*w)).sum::<u128>().max(1);
        for (id, member) in &mut self.members {
            member.target = match weights.get(id) {
                Some(weight) => {
                    let part = u128::from(free.0) * u128::from(*weight) / all;
                    // A share of 0 is no budget.
                    Bytes(u64::try_from(part).unwrap_or(free.0).max(1))
                }
                None => fixed(member),
            };
        }
        if free == Bytes::ZERO && !weights.is_empty() {
            let text = "plans made before take the whole budget; other scripts get nothing of it";
            note(&format!("neap: {text}"));
            self.why = format!("{}; {text}", self.why);
        }
        let shares: Vec<String> =
            self.members.values().map(|m| format!("{} {}", m.name, m.target)).collect();
        match shares.is_empty() {
            true => note(&format!("neap: {}; no script is left", self.why)),
            false => note(&format!("neap: {}; shares: {}", self.why, shares.join(", "))),
        }
    }
}

/// The bytes of a script whose share is fixed.
fn fixed(member: &Member) -> Bytes {
    if let Need::Fixed(bytes) = member.need { bytes } else { Bytes::ZERO }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph() -> Graph {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/mlp.graph.json");
        neap::job::json::read(&path).expect("a fixture")
    }

    fn shares(budget: u64) -> Shares {
        let device = neap::device::builtin::find("a6000").expect("built in");
        Shares::new(Bytes(budget), Arc::new(device))
    }

    fn come(all: &mut Shares, id: u64) -> Vec<(u64, u64)> {
        let need = Need::new(graph(), &all.device.clone(), Limits::default());
        let next = all.join(id, &format!("script {id}"), need).unwrap();
        settle(all, next)
    }

    fn settle(all: &mut Shares, next: Next) -> Vec<(u64, u64)> {
        let mut offers = next.offers;
        if let Some(planning) = next.plan {
            offers.extend(all.planned(planning.change, planning.make()));
        }
        bytes(offers)
    }

    fn gone(all: &mut Shares, id: u64) -> Vec<(u64, u64)> {
        let next = all.left(id);
        settle(all, next)
    }

    fn fixed(all: &mut Shares, id: u64, size: u64) -> Result<Vec<(u64, u64)>, String> {
        let next = all.join(id, "planned", Need::Fixed(Bytes(size)))?;
        Ok(settle(all, next))
    }

    fn bytes(offers: Offers) -> Vec<(u64, u64)> {
        offers.into_iter().map(|(id, offer)| (id, offer.share_bytes.0)).collect()
    }

    #[test]
    fn a_script_that_may_swap_less_gets_more() {
        let budget = 672 << 20;
        let mut all = shares(budget);
        come(&mut all, 1);
        all.took(1, Bytes(budget));
        let need = Need::new(graph(), &all.device.clone(), Limits::from((100, 1000)));
        let next = all.join(2, "second", need).unwrap();
        let offers = settle(&mut all, next);
        let [(1, first)] = offers[..] else { panic!("{offers:?}") };
        assert!(first < budget * 45 / 100, "{first} of {budget}");
    }

    #[test]
    fn bytes_are_given_up_before_another_script_gets_them() {
        let budget = 800 << 20;
        let mut all = shares(budget);
        assert_eq!(come(&mut all, 1), [(1, budget)]);
        assert_eq!(bytes(all.took(1, Bytes(budget))), []);
        // The second waits for the first.
        let offers = come(&mut all, 2);
        let [(1, less)] = offers[..] else { panic!("{offers:?}") };
        assert!(less > budget / 3 && less < budget * 2 / 3, "{less}");
        assert_eq!(bytes(all.took(1, Bytes(budget))), [], "an older answer");
        let offers = bytes(all.took(1, Bytes(less)));
        let [(2, rest)] = offers[..] else { panic!("{offers:?}") };
        assert!((budget - 1..=budget).contains(&(less + rest)), "{less} and {rest}");
        assert_eq!(bytes(all.took(2, Bytes(rest))), []);
        // One that dies leaves its bytes to the others at once.
        assert_eq!(gone(&mut all, 1), [(2, budget)]);
        assert_eq!((gone(&mut all, 1), all.count()), (vec![], 1));
    }

    #[test]
    fn one_that_dies_before_it_gave_bytes_up_makes_room_too() {
        let mut all = shares(800 << 20);
        come(&mut all, 1);
        assert_eq!(come(&mut all, 2).len(), 1);
        assert_eq!(gone(&mut all, 1), [(2, 800 << 20)]);
    }

    #[test]
    fn a_plan_made_before_keeps_its_share() {
        let mut all = shares(1000);
        come(&mut all, 1);
        all.took(1, Bytes(1000));
        assert_eq!(fixed(&mut all, 2, 300).unwrap(), [(1, 700), (2, 300)]);
        assert_eq!(gone(&mut all, 2), [(1, 1000)]);
    }

    #[test]
    fn a_plan_that_is_larger_than_what_there_is_is_not_granted() {
        let mut all = shares(1000);
        for size in [0, 1001, 4 << 30, u64::MAX] {
            let why = fixed(&mut all, 1, size).unwrap_err();
            assert!(why.contains("the plan of planned is for"), "{why}");
        }
        assert_eq!(fixed(&mut all, 1, 600).unwrap(), [(1, 600)]);
        // Their sum counts, and does not wrap.
        for size in [401, u64::MAX - 599, u64::MAX] {
            fixed(&mut all, 2, size).unwrap_err();
        }
        assert_eq!(fixed(&mut all, 2, 400).unwrap(), [(2, 400)]);
        // Where nothing is left the others learn why.
        let next = all
            .join(3, "late", Need::new(graph(), &all.device.clone(), Limits::default()))
            .unwrap();
        assert!(next.plan.is_none(), "one script needs no plan of all");
        assert_eq!(next.offers, [], "nothing is free before a script goes");
        assert!(all.why.contains("take the whole budget"), "{}", all.why);
        assert_eq!(gone(&mut all, 1), [(3, 600)]);
    }

    #[test]
    fn a_script_that_joins_twice_holds_what_it_held() {
        let mut all = shares(1000);
        come(&mut all, 1);
        all.took(1, Bytes(1000));
        fixed(&mut all, 1, 10).unwrap_err();
        assert_eq!(all.members[&1].holds, Bytes(1000));
    }

    #[test]
    fn a_plan_of_all_that_comes_too_late_changes_nothing() {
        let mut all = shares(800 << 20);
        come(&mut all, 1);
        let need = Need::new(graph(), &all.device.clone(), Limits::default());
        let planning = all.join(2, "second", need).unwrap().plan.expect("two are planned together");
        assert_eq!(gone(&mut all, 2), []);
        assert_eq!(all.planned(planning.change, planning.make()), []);
        // Where it takes too long, the unplanned peaks decide.
        let need = Need::new(graph(), &all.device.clone(), Limits::default());
        let planning = all.join(3, "third", need).unwrap().plan.expect("two are planned together");
        let offers = bytes(all.planned(planning.change, Err("it takes too long".to_owned())));
        assert_eq!(offers, [(1, 400 << 20)]);
    }

    #[test]
    fn a_plan_made_before_waits_for_no_plan_of_all() {
        let mut all = shares(1000 << 20);
        come(&mut all, 1);
        all.took(1, Bytes(1000 << 20));
        let need = Need::new(graph(), &all.device.clone(), Limits::default());
        let slow = all.join(2, "second", need).unwrap().plan.expect("two are planned together");
        let next = all.join(3, "planned", Need::Fixed(Bytes(300 << 20))).unwrap();
        assert!(bytes(next.offers).contains(&(3, 300 << 20)));
        // Others have come and gone since, but none that the plan divides among.
        all.planned(slow.change, slow.make());
        assert_eq!(all.divided, slow.change);
    }

    #[test]
    fn scripts_that_come_and_go_leave_the_others_with_shares() {
        let mut all = shares(1000 << 20);
        come(&mut all, 1);
        all.took(1, Bytes(1000 << 20));
        let need = || Need::new(graph(), &shares(1).device, Limits::default());
        let waiting = all.join(2, "second", need()).unwrap();
        assert_eq!(waiting.offers, []);
        // No plan of all ends before the next change.
        let offers = bytes(all.join(3, "third", need()).unwrap().offers);
        let [(1, less)] = offers[..] else { panic!("{offers:?}") };
        let offers = bytes(all.took(1, Bytes(less)));
        assert!(offers.iter().any(|one| one.0 == 2), "{offers:?}");
    }
}
