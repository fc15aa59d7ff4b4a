//! A planner of one's own, and what the checker says of its plan: it swaps every tensor of at
//! least 256 KiB out between two uses that stand at least twenty operators apart.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use neap::contract::check::check;
use neap::device::{builtin, latency};
use neap::job::{chakra, json};
use neap::plan::planner::{Decision, Given, Planner};
use neap::plan::residency::{Gap, Residencies};
use neap::plan::{Method, Request, written};
use neap::units::Bytes;

#[derive(Clone)]
struct Distant;

impl Planner for Distant {
    fn decide(&self, given: &Given<'_>) -> Decision {
        let mut residencies = Residencies::new(given.graph);
        let gaps: Vec<_> = residencies.decisions().map(|(tensor, gap, _)| (tensor, gap)).collect();
        for (tensor, gap) in gaps {
            let (from, to, next_iteration) = residencies.operators(tensor, gap);
            let large = residencies.lifetime(tensor).bytes >= 256 << 10;
            if large && !next_iteration && to - from >= 20 {
                residencies.decide(tensor, gap, Gap::Swap(residencies.tightest(tensor, gap)));
            }
        }
        Decision::new(&residencies, given.target)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/resnet18-adam.et.json.gz");
    let graph = &chakra::import(&trace, &chakra::Options::default())?.graph;
    let device = &builtin::find("rtx4090").expect("built in");
    let latencies = &latency::latencies(graph, device, None);
    let (link, pinned) = (&device.link, device.pinned_bytes);
    let decision = Distant.decide(&Given { graph, latencies, link, pinned, target: 0 });
    let file = ("resnet18.graph.json".to_owned(), json::sha256(graph));
    let (method, recorded_options) = (Method::default(), BTreeMap::new());
    let budget = Bytes::ZERO; // `written` takes what the arena needs.
    let request = Request {
        graph,
        file,
        device,
        latencies,
        whole: BTreeMap::new(),
        budget,
        method,
        recorded_options,
    };
    let plan = written(&request, decision.emitted)?.plan;
    match check(&plan, std::slice::from_ref(graph)) {
        Ok(proof) => println!("safe: {:?}", proof.figures),
        Err(refused) => refused.iter().for_each(|refusal| println!("refused: {refusal}")),
    }
    Ok(())
}
