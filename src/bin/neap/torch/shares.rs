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
use neap::units::Bytes;
use serde::Serialize;

use crate::output::note;

/// What a script needs.
pub enum Need {
    /// As many bytes as its iteration is worth.
    Graph { graph: Box<Graph>, hash: String, latencies: Vec<Latency> },
    /// These bytes, because its plan was made for them.
    Fixed(Bytes),
}

impl Need {
    /// The need of a script with this iteration.
    pub fn of(graph: Graph, device: &Profile) -> Self {
        let latencies = latency::latencies(&graph, device, None);
        Self::Graph { hash: sha256(&graph), graph: Box::new(graph), latencies }
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
    device: Profile,
    members: BTreeMap<u64, Member>,
    memo: Memo,
    why: String,
}

/// Offers to scripts.
pub type Offers = Vec<(u64, Offer)>;

impl Shares {
    /// No script yet.
    pub fn new(budget: Bytes, device: Profile) -> Self {
        Self { budget, device, members: BTreeMap::new(), memo: Memo::default(), why: String::new() }
    }

    /// The GPU's profile.
    pub fn device(&self) -> &Profile {
        &self.device
    }

    /// How many scripts there are.
    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// A script has come.
    pub fn join(&mut self, id: u64, name: String, need: Need) -> Offers {
        self.why = format!("{name} has come");
        let (holds, target, sent) = (Bytes::ZERO, Bytes::ZERO, None);
        self.members.insert(id, Member { name, need, holds, target, sent });
        self.divide();
        self.offers()
    }

    /// A script keeps to an offer.
    pub fn took(&mut self, id: u64, bytes: Bytes) -> Offers {
        if let Some(member) = self.members.get_mut(&id).filter(|m| m.sent == Some(bytes)) {
            member.holds = bytes;
        }
        self.offers()
    }

    /// A script has gone.
    pub fn left(&mut self, id: u64) -> Offers {
        let Some(member) = self.members.remove(&id) else { return Vec::new() };
        self.why = format!("{} has gone", member.name);
        self.divide();
        self.offers()
    }

    /// Who is sent what: bytes go to a script only when all others have let go of them.
    fn offers(&mut self) -> Offers {
        let scripts = self.members.len();
        let mut all = Vec::new();
        // What scripts give up comes first; it makes no room before they say so.
        let mut held: u64 = self.members.values().map(|m| m.holds.0).sum();
        for (&id, member) in &mut self.members {
            if member.sent == Some(member.target) {
                continue;
            }
            let fixed = matches!(member.need, Need::Fixed(_));
            if member.target > member.holds {
                let then = held - member.holds.0 + member.target.0;
                // A plan that was made before has to run, whether there is room or not.
                if then > self.budget.0 && !fixed {
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

    fn divide(&mut self) {
        let made_before: u64 = self.members.values().map(|m| fixed(m).0).sum();
        let free = Bytes(self.budget.0.saturating_sub(made_before));
        let weights = self.weights(free);
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
        let shares: Vec<String> =
            self.members.values().map(|m| format!("{} {}", m.name, m.target)).collect();
        match shares.is_empty() {
            true => note(&format!("neap: {}; no script is left", self.why)),
            false => note(&format!("neap: {}; shares: {}", self.why, shares.join(", "))),
        }
    }

    /// The arena of each script in the plan of all; where there is none, its unplanned peak.
    fn weights(&mut self, free: Bytes) -> BTreeMap<u64, u64> {
        let mut jobs = Vec::new();
        let mut ids = Vec::new();
        let mut peaks = Vec::new();
        for (&id, member) in &self.members {
            let Need::Graph { graph, hash, latencies } = &member.need else { continue };
            peaks.push(Liveness::of(graph).peak.0.max(1));
            ids.push(id);
            jobs.push(Job {
                graph,
                file: (String::new(), hash.clone()),
                latencies,
                method: Method::Neap(Options { recompute: false, ..Options::default() }),
                priority: 1000,
                swap_limit: Share::ALL,
            });
        }
        let mut weights = peaks;
        if jobs.len() > 1 {
            let recorded_options = BTreeMap::new();
            let asked = Jobs { jobs, device: &self.device, budget: free, recorded_options };
            match together::make(&asked, &self.memo) {
                Ok(made) => {
                    let arena = |part: &Arc<Planned>| part.plan.figures.arena_bytes.0.max(1);
                    weights = made.parts.iter().map(arena).collect();
                }
                Err(PlanError::Infeasible(no)) => note(&format!(
                    "neap: by swapping alone the scripts need {} together, more than {free}; \
                     divided by their unplanned peaks",
                    no.lowest
                )),
                Err(defect) => note(&format!("neap: {defect}; divided by the unplanned peaks")),
            }
        }
        ids.into_iter().zip(weights).collect()
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
        Shares::new(Bytes(budget), neap::device::builtin::find("a6000").expect("built in"))
    }

    fn come(all: &mut Shares, id: u64) -> Vec<(u64, u64)> {
        let need = Need::of(graph(), all.device());
        bytes(all.join(id, format!("script {id}"), need))
    }

    fn bytes(offers: Offers) -> Vec<(u64, u64)> {
        offers.into_iter().map(|(id, offer)| (id, offer.share_bytes.0)).collect()
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
        assert_eq!(bytes(all.left(1)), [(2, budget)]);
        assert_eq!((bytes(all.left(1)), all.count()), (vec![], 1));
    }

    #[test]
    fn one_that_dies_before_it_gave_bytes_up_makes_room_too() {
        let mut all = shares(800 << 20);
        come(&mut all, 1);
        assert_eq!(come(&mut all, 2).len(), 1);
        assert_eq!(bytes(all.left(1)), [(2, 800 << 20)]);
    }

    #[test]
    fn a_plan_made_before_keeps_its_share() {
        let mut all = shares(1000);
        come(&mut all, 1);
        all.took(1, Bytes(1000));
        let offers = bytes(all.join(2, "planned".to_owned(), Need::Fixed(Bytes(300))));
        assert_eq!(offers, [(1, 700), (2, 300)]);
        assert_eq!(bytes(all.left(2)), [(1, 1000)]);
    }
}
