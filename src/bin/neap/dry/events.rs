//! The allocator's events of one process, and what each allocation is.

use std::collections::HashMap;
use std::path::Path;

use anyhow::Context;
use neap::sim::requests::Request;
use neap::units::Bytes;
use serde::Deserialize;

/// No file of a run is larger.
pub const LARGEST: u64 = 8 << 30;

/// One event on a device. A request's id is the number of its allocation in the process.
#[derive(Clone, Copy)]
pub struct Event {
    pub device: u32,
    pub request: Request,
}

/// Reads the events that the Python side wrote: `op,id,bytes,stream,device`.
///
/// # Errors
/// When the file can't be read, or is cut off.
pub fn read(path: &Path) -> anyhow::Result<Vec<Event>> {
    let bytes = neap::files::read(path, LARGEST)?;
    let text = std::str::from_utf8(&bytes).context("the events are not text")?;
    let mut streams: HashMap<&str, u32> = HashMap::new();
    let mut all = Vec::new();
    for row in text.lines().skip(1) {
        let event = event(row, &mut streams);
        all.push(event.with_context(|| format!("the row `{row}` is no event"))?);
    }
    Ok(all)
}

fn event<'a>(row: &'a str, streams: &mut HashMap<&'a str, u32>) -> Option<Event> {
    let mut cells = row.split(',');
    let mut next = || cells.next();
    let (op, id, bytes, stream, device) = (next()?, next()?, next()?, next()?, next()?);
    let request = match op {
        "a" => {
            let count = streams.len() as u32;
            let stream = *streams.entry(stream).or_insert(count);
            Request::Allocate { id: id.parse().ok()?, bytes: Bytes(bytes.parse().ok()?), stream }
        }
        "f" => Request::Free { id: id.parse().ok()? },
        "e" => Request::EmptyCache,
        _ => return None,
    };
    Some(Event { device: device.parse().ok()?, request })
}

/// The requests of one device. Emptying the cache empties that of all devices.
pub fn of_device(events: &[Event], device: u32) -> Vec<Request> {
    let wanted = |e: &&Event| e.device == device || e.request == Request::EmptyCache;
    events.iter().filter(wanted).map(|e| e.request).collect()
}

/// What each allocation of a process is, by its number.
#[derive(Default, Deserialize)]
pub struct Allocations {
    pub categories: Vec<String>,
    category_of: String,
    places: Vec<Place>,
    place_of: Vec<Option<u32>>,
    #[serde(default)]
    names: HashMap<u32, String>,
}

/// Where allocations come from.
#[derive(Clone, Debug, Deserialize)]
pub struct Place {
    pub step: u64,
    pub phase: String,
    pub module: Option<String>,
    pub line: Option<String>,
}

impl Allocations {
    /// Reads what the Python side wrote.
    ///
    /// # Errors
    /// When the file can't be read, or is cut off.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let bytes = neap::files::read(path, LARGEST)?;
        serde_json::from_slice(&bytes).context("the list of allocations is cut off")
    }

    /// The category of an allocation, as an index of `categories`.
    pub fn category(&self, number: u32) -> Option<usize> {
        let digit = self.category_of.as_bytes().get(number as usize)?;
        Some(usize::from(digit.checked_sub(b'0')?))
    }

    /// The name of what an allocation holds, such as a parameter's.
    pub fn name(&self, number: u32) -> Option<&str> {
        self.names.get(&number).map(String::as_str)
    }

    /// Where an allocation comes from.
    pub fn place(&self, number: u32) -> Option<&Place> {
        self.places.get((*self.place_of.get(number as usize)?)? as usize)
    }
}
