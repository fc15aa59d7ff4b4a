//! The picture: memory over the first iterations by category.

use std::collections::HashMap;
use std::path::Path;

use neap::report::curve::Across;
use neap::report::memory::{Instant, LAYERS, Stack};
use neap::sim::allocator::Config;
use neap::sim::allocator::replay::{LARGEST_DEVICE, Replay};
use neap::sim::requests::Request;
use neap::units::Nanos;

use super::events::{Allocations, Event};
use super::found::Process;
use crate::output::note;

/// Iterations that are drawn.
const ITERATIONS: u64 = 3;
/// The allocator's unit of what it gives out.
const GRANULE: u64 = 512;

/// Draws the first iterations on the device that reserved most.
///
/// # Errors
/// When the file can't be written.
pub fn plot(
    title: &str,
    process: &Process,
    (events, allocations): (&[Event], &Allocations),
    config: &Config,
    to: &Path,
) -> anyhow::Result<()> {
    let device = process.main_device();
    let end = process.marks.iter().find(|m| m.step >= ITERATIONS).map(|m| m.event as usize);
    let drawn = &events[..end.unwrap_or(events.len()).min(events.len())];
    let mut stack = Stack::over(Across::Events, Nanos(drawn.len() as u64));
    let mut replay = Replay::new(config, LARGEST_DEVICE, None);
    let mut layers = [0; LAYERS];
    let mut sizes = HashMap::new();
    for (index, event) in drawn.iter().enumerate() {
        match event.request {
            _ if event.device != device => {}
            Request::Allocate { id, bytes, .. } => {
                let layer = allocations.category(id).unwrap_or(LAYERS).min(LAYERS - 1);
                let size = bytes.0.div_ceil(GRANULE) * GRANULE;
                sizes.insert(id, (layer, size));
                layers[layer] += size;
            }
            Request::Free { id } => {
                if let Some((layer, size)) = sizes.remove(&id) {
                    layers[layer] -= size;
                }
            }
            Request::EmptyCache => {}
        }
        if event.device == device || event.request == Request::EmptyCache {
            replay.step(event.request);
        }
        let reserved = replay.allocator().stats().reserved.0;
        stack.add(Instant { time: Nanos(index as u64 + 1), layers, reserved });
    }
    let mut starts: Vec<(u64, Nanos)> = Vec::new();
    for mark in process.marks.iter().filter(|m| m.phase == "forward" && m.step < ITERATIONS) {
        if starts.last().is_none_or(|(step, _)| *step != mark.step) {
            starts.push((mark.step, Nanos(mark.event)));
        }
    }
    let starts: Vec<Nanos> = starts.into_iter().map(|(_, at)| at).collect();
    let names: Vec<String> = allocations.categories.iter().map(|c| c.replace('_', " ")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let picture = stack.svg(title, &names, &[], &starts)?;
    neap::files::write(to, |file| file.write_all(picture.as_bytes()))?;
    note(&format!("written: {}", to.display()));
    Ok(())
}
