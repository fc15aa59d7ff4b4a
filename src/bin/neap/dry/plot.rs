//! The picture: memory over the first iterations by category.

use std::path::Path;

use neap::report::categories::{self, Mark, Sample};
use neap::sim::requests::Request;

use super::events::{Allocations, Event};
use super::found::Process;
use crate::output::note;

/// Iterations that are drawn.
const ITERATIONS: u64 = 3;
/// The allocator's unit of what it gives out.
const GRANULE: u64 = 512;

/// Draws the first iterations on the device of the peak.
///
/// # Errors
/// When the file can't be written.
pub fn plot(
    title: &str,
    process: &Process,
    events: &[Event],
    allocations: &Allocations,
    to: &Path,
) -> anyhow::Result<()> {
    let device = process.peak.as_ref().map_or(0, |p| p.device);
    let end = process.marks.iter().find(|m| m.step >= ITERATIONS).map(|m| m.event);
    let mut now: Sample = vec![0; allocations.categories.len()];
    let mut sizes = std::collections::HashMap::new();
    let mut samples = Vec::new();
    for event in events.iter().take(end.unwrap_or(u64::MAX) as usize) {
        match event.request {
            Request::Allocate { id, bytes, .. } if event.device == device => {
                let category = allocations.category(id).unwrap_or(0);
                let size = bytes.0.div_ceil(GRANULE) * GRANULE;
                sizes.insert(id, (category, size));
                if let Some(sum) = now.get_mut(category) {
                    *sum += size;
                }
            }
            Request::Free { id } => {
                if let Some((category, size)) = sizes.remove(&id)
                    && let Some(sum) = now.get_mut(category)
                {
                    *sum -= size;
                }
            }
            _ => {}
        }
        samples.push(now.clone());
    }
    let mut marks: Vec<Mark> = Vec::new();
    for mark in process.marks.iter().filter(|m| m.phase == "forward" && m.step < ITERATIONS) {
        let name = format!("step {}", mark.step + 1);
        if marks.last().is_none_or(|m| m.name != name) {
            marks.push(Mark { event: mark.event, name });
        }
    }
    let names: Vec<String> = allocations.categories.iter().map(|c| c.replace('_', " ")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let picture = categories::svg(title, &names, &samples, &marks)?;
    neap::files::write(to, |file| file.write_all(picture.as_bytes()))?;
    note(&format!("written: {}", to.display()));
    Ok(())
}
