//! Plans a recorded iteration to 60 % of its peak, has the plan proved, and simulates it.
//!
//! ```sh
//! cargo run --example plan_graph
//! ```

use std::error::Error;
use std::path::Path;

use neap::contract::check::check;
use neap::device::{builtin, latency};
use neap::job::liveness::Liveness;
use neap::job::{chakra, json};
use neap::plan::{Request, make};
use neap::sim::engine;
use neap::units::Bytes;

fn main() -> Result<(), Box<dyn Error>> {
    let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/resnet18-adam.et.json.gz");
    let graph = chakra::import(&trace, &chakra::Options::default())?.graph;
    let peak = Liveness::new(&graph).peak;

    // A device gives the link's rates and, by its roofline, a time for each operator.
    let device = builtin::find("rtx4090").expect("built in");
    let latencies = latency::latencies(&graph, &device, None);
    let planned = make(&Request {
        file: ("resnet18.graph.json".to_owned(), json::sha256(&graph)),
        ..Request::new(&graph, &device, &latencies, Bytes(peak.0 * 6 / 10))
    })?;

    // The checker shares no code with the planner.
    let proof = check(&planned.plan, std::slice::from_ref(&graph)).map_err(|refused| {
        refused.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    })?;
    let run = engine::nominal(&planned.program, &device.link)?;
    println!("without a plan: peak {peak}");
    println!(
        "with it:        peak {}, arena {}",
        proof.figures.peak_bytes, proof.figures.arena_bytes
    );
    println!("an iteration:   {}", run.iteration);
    Ok(())
}
